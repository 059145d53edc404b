"""Pretrained weights from a safetensors file, by the names of our Trees or of the module's own state_dict."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from fednh.core.tree import Tree, finite, select
from fednh.errors import Notice, UserError
from fednh.storage.files import read_tree


def read_weights(file: str, module: nn.Module, head: str | None) -> Tree:
    """The file's tensors by the names of `module` (which has .body and .head; `head` is the layer's own name).

    A head of another size is left out with a note; anything else that does not fit is refused.
    """
    try:
        tree = read_tree(Path(file))
        with safe_open(file, "pt") as opened:
            ours = "fednh" in (opened.metadata() or {})
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(f"model.weights = {file!r} cannot be read as safetensors: {error}") from error
    wanted: dict[str, Tensor] = module.state_dict()
    tree = max([tree, _translated(tree, head)], key=lambda t: len(t.keys() & wanted.keys()))
    if ours:  # leaves out what a method stores beside the network, such as a scale
        tree = select(tree, "body", "head")
    tree = _without_other_head(file, tree, wanted)
    strange = sorted(tree.keys() - wanted.keys())
    missing = sorted(n for n in wanted.keys() - tree.keys() if not n.startswith("head.") and not _counter(n))
    other = sorted(n for n in tree.keys() & wanted.keys() if tree[n].shape != wanted[n].shape)
    for problem, names in (("holds what the model lacks", strange), ("lacks", missing), ("has other shapes", other)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise UserError(
                f"model.weights = {file!r} does not fit the model: it {problem}: {', '.join(names[:3])}{more}"
            )
    if not finite(tree):
        raise UserError(f"model.weights = {file!r} holds values that are not finite")
    return {name: value.to(wanted[name].dtype) for name, value in tree.items()}


def _translated(tree: Tree, head: str | None) -> Tree:
    """A state_dict of the whole module, under the names that it has after the split."""
    if head is None:
        return tree
    cut = head + "."
    return {f"head.{n.removeprefix(cut)}" if n.startswith(cut) else f"body.{n}": value for n, value in tree.items()}


def _without_other_head(file: str, tree: Tree, wanted: dict[str, Tensor]) -> Tree:
    def form(part: dict[str, Tensor]) -> dict[str, torch.Size]:
        return {name: value.shape for name, value in select(part, "head").items()}

    if form(tree) == form(wanted):
        return tree
    what = "has no head" if not form(tree) else "has a head of another size, which is left out"
    warnings.warn(f"model.weights = {file!r} {what}; the head starts afresh", Notice, stacklevel=4)
    return select(tree, *{name.partition(".")[0] for name in tree} - {"head"})


def _counter(name: str) -> bool:
    """Batch normalisation counts batches, which older files do not hold; nothing depends on it."""
    return name.endswith("num_batches_tracked")
