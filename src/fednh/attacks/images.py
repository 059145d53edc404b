"""The samples themselves, reconstructed from the update of the first linear layer of a body.

layers.py gives that layer's inputs. In an MLP they are the samples. Behind convolutions they are features, and a sample
is found whose features they are, by L-BFGS from the public samples with the nearest ones. Inputs that few units confirm
(noise, more samples than the layer can tell apart), and samples outside of the range of public ones, are replaced by
the best public guess: the mean of a class that the client has.

A reconstruction is compared with the sample that it is nearest to, one to one, by the peak signal-to-noise ratio; the
peak is the range of public samples. What it is held against is the best public guess: of the mean of all public
samples, the mean of the sample's class and the public sample nearest to it, whichever is best. Somebody who does not
have the truth could not even choose it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fednh.attacks import layers
from fednh.attacks.labels import Labels
from fednh.attacks.target import Target
from fednh.data.partitions import Indices
from fednh.methods.fit import Sgd
from fednh.seeding import numpy_rng

NEAREST = 3  # public samples from which the search for a sample begins
OUTSIDE = 0.1  # how far beyond the range of public samples a pixel may lie, as a share of it
SAME = 1e-10  # mean square; below, two samples are the same: 100 dB


@dataclass(frozen=True)
class Images:
    """Reconstructions beside the truth; every row is a sample, its numbers from 0 to 1."""

    true: Tensor  # (n, d)
    made: Tensor
    guess: Tensor  # the best public one
    from_update: Tensor  # (n,) whether `made` is of the update; otherwise it is a public guess

    @property
    def psnr(self) -> Tensor:  # (n,)
        return psnr(self.made, self.true)

    @property
    def guess_psnr(self) -> Tensor:  # (n,)
        return psnr(self.guess, self.true)


def psnr(a: Tensor, b: Tensor) -> Tensor:  # (..., d) -> (...)
    """Decibels, of a peak of 1."""
    return -10 * (a - b).square().mean(-1).clamp(min=SAME).log10()


def reconstruct(target: Target, labels: Labels, known: Indices, seed: int, tries: int) -> Images | str:
    """The client's samples, or a sentence why there is nothing to reconstruct them from."""
    layer = first_linear(target)
    if layer is None:
        return "no linear layer with a bias is trained and uploaded, so there is no update to solve for its inputs"
    if not isinstance(target.config.fit_settings(target.before.round), Sgd):
        return "Adam scales every weight by itself, so the update of a layer is no longer a sum over samples"
    rng = numpy_rng(seed, "attack images", target.client)
    number = len(target.part)
    update = _update(target, layer)
    solved = layers.inputs(update, number, rng, tries)
    data, y = target.fed.train, target.fed.train.y.numpy(force=True)
    public = flat(target, data.floats(data.x[torch.from_numpy(known)]))
    low, high = float(public.min()), float(public.max())
    classes = torch.from_numpy(np.repeat(np.arange(len(labels.counts)), labels.counts))
    means = torch.stack([_mean(public, y[known] == c) for c in range(data.num_classes)])
    made, sure = means[classes], torch.zeros(number, dtype=torch.bool)
    if solved is not None:
        rows, votes = solved
        if not (is_direct := _is_direct(target, layer)):
            rows = _inverted(target, layer, rows, known)
        wide = OUTSIDE * (high - low)
        sure = (votes > 2) & (rows > low - wide).all(1) & (rows < high + wide).all(1)
        if not is_direct:
            sure = (votes > 2) & rows.isfinite().all(1)
        made = torch.where(sure[:, None], rows.clamp(low, high).nan_to_num(), made)
    own = torch.from_numpy(target.part)
    true = flat(target, data.floats(data.x[own]))
    nearest = public[torch.cdist(true, public).argmin(1)]
    guesses = torch.stack([means[data.y[own]], public.mean(0).expand_as(true), nearest])

    def unit(values: Tensor) -> Tensor:
        return (values - low) / (high - low)

    better = psnr(unit(guesses), unit(true)).argmax(0)
    guess = guesses[better, torch.arange(number)]
    order = linear_sum_assignment(-psnr(unit(made)[:, None], unit(true)[None]).numpy())
    place = np.empty(number, np.int64)
    place[order[1]] = order[0]
    return Images(unit(true), unit(made[place]), unit(guess), sure[place])


def first_linear(target: Target) -> str | None:
    """The first linear layer of the body, if it has a bias and the upload has both."""
    for names in target.fed.net.layers:
        weight = next((name for name in names if name.endswith(".weight")), None)
        if weight is None or not weight.startswith("body."):
            continue
        shape = target.before.server[weight].shape if weight in target.before.server else ()
        if len(shape) == 2:
            layer = weight.removesuffix(".weight")
            both = {weight, f"{layer}.bias"}
            return layer if both <= target.upload.keys() & target.received.keys() else None
    return None


def _update(target: Target, layer: str) -> Tensor:  # (units, d + 1)
    """The change of [W, b], less weight decay, which is known."""

    def both(tree: dict[str, Tensor]) -> Tensor:
        return torch.cat([tree[f"{layer}.weight"], tree[f"{layer}.bias"][:, None]], 1).double()

    settings = target.config.fit_settings(target.before.round)
    kept = remains(settings, len(target.part)) if isinstance(settings, Sgd) else 1.0
    return both(target.upload) - kept * both(target.received)


def remains(sgd: Sgd, samples: int) -> float:
    """By what weight decay multiplies a parameter without a gradient in a client's round."""
    left, speed = 1.0, 0.0
    steps = sgd.steps or math.ceil(sgd.epochs * -(-samples // sgd.batch_size))
    for _ in range(steps):
        speed = sgd.momentum * speed + sgd.weight_decay * left
        left -= sgd.lr * speed
    return left


def flat(target: Target, x: Tensor) -> Tensor:  # (n, ...) -> (n, d)
    return x.reshape(len(x), -1).double()


def _mean(rows: Tensor, those: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Tensor:
    return rows[torch.from_numpy(those)].mean(0) if those.any() else rows.mean(0)


def _is_direct(target: Target, layer: str) -> bool:
    """Whether the layer is given the samples themselves."""
    data = target.fed.train
    x = data.floats(data.x[:2])
    given = target.fed.net.inputs_of(layer, target.received, x)
    return given.shape == (2, x[0].numel()) and torch.equal(given, x.reshape(2, -1))


def _inverted(target: Target, layer: str, wanted: Tensor, known: Indices) -> Tensor:  # (n, D) -> (n, d)
    """The samples for which the layer is given `wanted`; NaN where none comes near."""
    data, net = target.fed.train, target.fed.net
    public = data.floats(data.x[torch.from_numpy(known)])

    def given(x: Tensor) -> Tensor:
        return net.inputs_of(layer, target.received, x).double()

    with torch.no_grad():
        there = torch.cat([given(some) for some in torch.split(public, 256)])
    scale = wanted.square().mean(1)
    nearest = torch.cdist(wanted, there).topk(NEAREST, largest=False).indices  # (n, NEAREST)
    best, least = torch.full((len(wanted), public[0].numel()), torch.nan, dtype=torch.float64), scale * 0.05
    for start in nearest.T:
        x = public[start].clone().requires_grad_()
        search = torch.optim.LBFGS(
            [x],
            max_iter=400,
            tolerance_grad=1e-12,
            tolerance_change=1e-14,
            history_size=50,
            line_search_fn="strong_wolfe",
        )

        def closure(x: Tensor = x, search: torch.optim.LBFGS = search) -> Tensor:
            search.zero_grad()
            loss = ((given(x) - wanted).square().mean(1) / scale).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        search.step(closure)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            error = (given(x) - wanted).square().mean(1)
        better = error < least
        best[better], least = x.detach().reshape(len(x), -1).double()[better], torch.where(better, error, least)
    return best
