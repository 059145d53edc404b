"""Averages that a few broken or hostile clients cannot ruin, for every method that averages.

Each rule takes a round's uploads and gives one tree, as `tree.mean` does. What a method uploads by class (prototypes,
class gradients, ownership marks: `Method.by_class`) is zero for classes that a client lacks: there a row of zeros is
silence, not a vote. The robust value is taken over those who speak and scaled by their share of the round, which is
what the plain mean does with silence.

trimmed_mean and median: Yin, Chen, Ramchandran, Bartlett, "Byzantine-Robust Distributed Learning", ICML 2018.
norm_clip: Sun, Kairouz, Suresh, McMahan, "Can You Really Backdoor Federated Learning?", 2019; the bound is the
median norm of the round, so it needs no tuning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from fednh.core.tree import Tree, mean, stack

Rule = Callable[[Iterable[Tree]], Tree]


def rule(name: str, server: Tree, trim: float, by_class: tuple[str, ...] = ()) -> Rule:
    """The averaging rule called `name`; `server` is the state that the clients started from."""
    rules: dict[str, Rule] = {
        "mean": mean,
        "median": partial(trimmed, share=0.5, by_class=by_class),
        "trimmed_mean": partial(trimmed, share=trim, by_class=by_class),
        "norm_clip": partial(norm_clipped, server=server),
    }
    return rules[name]


def trimmed(trees: Iterable[Tree], share: float, by_class: tuple[str, ...] = ()) -> Tree:
    """Coordinate by coordinate, the mean without the `share` smallest and largest values; 0.5 is the median."""
    return {name: _trimmed(values, share, name in by_class) for name, values in stack(trees).items()}


def _trimmed(values: Tensor, share: float, by_class: bool) -> Tensor:  # (K, ...) -> (...)
    count = len(values)
    rows = values.reshape(count, values.shape[1], -1) if values.ndim > 1 else values.reshape(count, 1, 1)
    silent = (rows == 0).all(2, keepdim=True) & by_class  # (K, R, 1)
    speakers = (~silent).sum(0)  # (R, 1)
    ordered = rows.masked_fill(silent, torch.inf).sort(0).values  # silence goes last
    cut = torch.minimum((speakers * share).floor().long(), (speakers - 1).clamp(min=0) // 2)
    place = torch.arange(count, device=values.device)[:, None, None]
    inside = (place >= cut) & (place < speakers - cut)
    middle = ordered.masked_fill(~inside, 0).sum(0) / (speakers - 2 * cut).clamp(min=1)
    return (middle * speakers / count).reshape(values.shape[1:])


def norm_clipped(trees: Iterable[Tree], server: Tree) -> Tree:
    """The mean after no client may move the model, or any other part of its upload, by more than the median does."""
    uploads = list(trees)
    moves = [{n: v - server[n] for n, v in tree.items() if n in server} for tree in uploads]
    others = sorted(uploads[0].keys() - moves[0].keys())
    shrink = _shrink(torch.stack([_norm(move) for move in moves]))
    total = mean({n: server[n] + s * v for n, v in move.items()} for move, s in zip(moves, shrink, strict=True))
    for name in others:
        factors = _shrink(torch.stack([_norm({name: tree[name]}) for tree in uploads]))
        total |= mean({name: tree[name] * s} for tree, s in zip(uploads, factors, strict=True))
    return {name: total[name] for name in uploads[0]}


def _norm(tree: Tree) -> Tensor:
    return torch.stack([v.double().square().sum() for v in tree.values()] or [torch.zeros(())]).sum().sqrt()


def _shrink(norms: Tensor) -> Tensor:  # (K,) -> (K,)
    """Factors that bring every norm down to the median of those that are not zero."""
    spoken = norms[norms > 0]
    if len(spoken) == 0:
        return torch.ones_like(norms)
    return (spoken.median() / norms.clamp(min=1e-30)).clamp(max=1.0).to(torch.float32)
