"""Losses as functions (params, x, y) -> one value per sample, and class means.

One value *per sample*, not their mean: `fit` takes the mean, and so decides which samples count. A penalty on the
parameters is a scalar that is added to every sample; the mean leaves it as it is. A loss that looks at a batch as a
whole, at the mean of its features for example, is a `BatchLoss`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fednh.models.net import Net
from fednh.tree import Tree, is_statistic

# --- anyone ---------------------------------------------------------------------------------------------------------
# Whether there is work to do for anybody: the only question on a tensor's value that a method may ask.
#
# An executor may compute many clients at once by `torch.func.vmap`, and then one Python `if` cannot serve them all.
# Work that only some of them need is done for all, and its result is used with `torch.where`. If nobody needs it, it
# can be left out: that saves time and changes no result.


def unvmap_any(flag: Tensor) -> bool:  # ()
    """Whether the flag is set, for the client or for one of those that are computed at once."""
    answers: list[bool] = []
    _Look.apply(flag, answers.append)  # type: ignore[no-untyped-call]
    return answers[0]


class _Look(torch.autograd.Function):
    """Calls `tell` with the answer. Inside a map `vmap` is given the flags of all clients as one tensor."""

    @staticmethod
    def forward(flag: Tensor, tell: Callable[[bool], None]) -> Tensor:
        tell(bool(flag.any()))
        return flag.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Nothing is kept: a flag has no gradient."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], flag: Tensor, tell: Callable[[bool], None]) -> tuple[Tensor, Any]:
        return _Look.forward(flag, tell), in_dims[0]


# --- losses ---------------------------------------------------------------------------------------------------------


FEW_CLASSES = 32  # two vectors of the widest processors
SMOOTHING = (
    0.1  # samples added to every class before a client's class shares become a prior, unless a setting says more
)

Logits = Callable[[Tree, Tensor], Tensor]  # (params, x (B, ...)) -> (B, C)
Loss = Callable[[Tree, Tensor, Tensor], Tensor]  # (params, x (B, ...), y (B,)) -> (B,)
# (params, x (B, ...), y (B,), weight (B,)) -> (B,), and names with the values that they have in the next step. The
# weights are those of the samples in the batch's mean: they sum to 1, and a sample of weight zero is padding, which
# must not change the values of others. In a batch of padding alone all weights are zero, and values must be finite.
BatchLoss = Callable[[Tree, Tensor, Tensor, Tensor], tuple[Tensor, Tree]]


def cross_entropy(logits: Logits) -> Loss:
    """-log softmax(logits)[y]."""
    return lambda params, x, y: _nll(logits(params, x), y)


def _nll(logits: Tensor, y: Tensor) -> Tensor:  # (B, C), (B,) -> (B,)
    """F.cross_entropy without its mean, in operations that vmap has rules for in C++.

    With few classes the processor's vectors go along the samples: a sixth of the time for ten of them.
    """
    if logits.shape[-1] < FEW_CLASSES:
        return -F.log_softmax(logits.mT, -2).gather(-2, y[None]).squeeze(-2)
    return -F.log_softmax(logits, -1).gather(-1, y[..., None]).squeeze(-1)


def of_batch(loss: Loss) -> BatchLoss:
    """A loss of single samples in the form of one of a batch."""
    return lambda params, x, y, weight: (loss(params, x, y), {})


def of_samples(loss: BatchLoss) -> Loss:
    """The values of one step alone, where all samples count alike."""
    return lambda params, x, y: loss(params, x, y, torch.full((len(x),), 1 / len(x), device=x.device))[0]


def balanced_softmax(logits: Logits, share: Tensor) -> Loss:  # share: (C,)
    """Cross-entropy on logits + log(class share) (Ren et al. 2020); a class with share 0 is left out of the softmax."""
    prior = share.log()
    return lambda params, x, y: _nll(logits(params, x) + prior, y)


def log_share(counts: Tensor, smoothing: float = SMOOTHING) -> Tensor:  # (..., C)
    """The logarithm of every class's share of `counts`; `smoothing` samples more of each class keep it finite."""
    more = counts + smoothing
    return (more / more.sum(-1, keepdim=True)).log()


def squared_distance(a: Tree, b: Tree) -> Tensor:
    """||a - b||^2 over the names of `a`, but running statistics."""
    return torch.stack([(v - b[n]).square().sum() for n, v in a.items() if not is_statistic(n)]).sum()


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
