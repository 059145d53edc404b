"""Losses as functions (params, x, y) -> one value per sample, and class means.

One value *per sample*, not their mean: `fit` takes the mean, and so decides which samples count. A penalty on the
parameters is a scalar that is added to every sample; the mean leaves it as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fednh.core.tree import Tree
from fednh.models.net import Net

Logits = Callable[[Tree, Tensor], Tensor]  # (params, x (B, ...)) -> (B, C)
Loss = Callable[[Tree, Tensor, Tensor], Tensor]  # (params, x (B, ...), y (B,)) -> (B,)


@dataclass(frozen=True)
class BatchLoss:
    """A Loss in which a sample's value depends on its whole batch: `value` is also given the samples' weights.

    Weights sum to one. A sample of weight zero is padding and must not change the values of others; in a batch of
    padding alone all weights are zero, and values must be finite.
    """

    value: Callable[[Tree, Tensor, Tensor, Tensor], Tensor]  # (params, x (B, ...), y (B,), weight (B,)) -> (B,)

    def __call__(self, params: Tree, x: Tensor, y: Tensor) -> Tensor:
        """The values where no sample is padding."""
        return self.value(params, x, y, torch.full_like(y, 1 / len(y), dtype=torch.float32))


def cross_entropy(logits: Logits) -> Loss:
    """-log softmax(logits)[y]."""
    return lambda params, x, y: F.cross_entropy(logits(params, x), y, reduction="none")


def balanced_softmax(logits: Logits, share: Tensor) -> Loss:  # share: (C,)
    """Cross-entropy on logits + log(class share) (Ren et al. 2020); a class with share 0 is left out of the softmax."""
    prior = share.log()
    return lambda params, x, y: F.cross_entropy(logits(params, x) + prior, y, reduction="none")


def squared_distance(a: Tree, b: Tree) -> Tensor:
    """||a - b||^2 over the names of `a`."""
    return torch.stack([(value - b[name]).square().sum() for name, value in a.items()]).sum()


def unit(x: Tensor) -> Tensor:  # (..., D)
    """Rows scaled to unit length; a zero row stays zero."""
    return F.normalize(x, dim=-1)


def scaled_cosine(net: Net) -> Logits:
    """s * W f(x) with unit f(x), Eq. (2) of FedNH; the rows of W are unit prototypes."""
    return lambda params, x: params["scale"] * (unit(net.features(params, x)) @ params["head.weight"].T)


@torch.no_grad()
def class_means(
    features: Callable[[Tensor], Tensor], batches: Iterable[tuple[Tensor, Tensor, Tensor]], counts: Tensor
) -> Tensor:  # (C, D)
    """The mean feature of every class, Eq. (3) of FedNH; zero for a class without samples.

    `batches` yields (x, y, weight): a sample of weight zero is padding and does not count.
    """
    sums: Tensor | None = None
    for x, y, weight in batches:
        h = features(x)
        member = F.one_hot(y, len(counts)).to(h.dtype) * weight[:, None]  # (B, C)
        part = member.T @ h
        sums = part if sums is None else sums + part
    assert sums is not None, "a client has at least one sample"
    return sums / counts.clamp(min=1)[:, None]
