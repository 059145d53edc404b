"""One client's part of a run, as functions of what it was sent, what it kept, and its own data.

Every engine calls these same functions, so it cannot matter to a method where a client lives.
"""

from __future__ import annotations

from dataclasses import dataclass

from fednh.data.batches import ClientData
from fednh.diagnostics import GradientNorm
from fednh.fit import LocalFit, Sgd
from fednh.methods.base import Method
from fednh.models.net import Net
from fednh.tree import Tree


@dataclass(frozen=True)
class Update:
    """What comes out of a client's round."""

    keep: Tree
    upload: Tree
    samples: int  # training samples processed
    loss_sum: float  # their summed loss
    gradient_norm: float | None = None  # squared, of the body at the received model, where it was asked for


def update(
    method: Method, net: Net, kept: Tree, received: Tree, data: ClientData, sgd: Sgd, gradient_norm: bool = False
) -> Update:
    """Train: what the client keeps and what it uploads."""
    probe = GradientNorm(data, received) if gradient_norm else None
    fit = LocalFit(data, sgd, probe)
    keep, upload = method.client_update(net, {**kept, **received}, data, fit)
    return Update(keep, upload, fit.samples, fit.loss_sum, probe.value if probe else None)


def personal_model(method: Method, net: Net, kept: Tree, received: Tree, data: ClientData, sgd: Sgd) -> Tree:
    """The client's own model, as `method.logits` takes it."""
    return method.personal_model(net, {**received, **kept}, data, LocalFit(data, sgd))
