"""One client's part of a run, as functions of what it was sent, what it kept, and its own data.

Every engine calls these same functions, so it cannot matter to a method where a client lives.
"""

from __future__ import annotations

from dataclasses import dataclass

from fednh.data.batches import ClientData
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


def update(method: Method, net: Net, kept: Tree, received: Tree, data: ClientData, sgd: Sgd) -> Update:
    """Train: what the client keeps and what it uploads."""
    fit = LocalFit(data, sgd)
    keep, upload = method.client_update(net, {**kept, **received}, data, fit)
    return Update(keep, upload, fit.samples, fit.loss_sum)


def personal_model(method: Method, net: Net, kept: Tree, received: Tree, data: ClientData, sgd: Sgd) -> Tree:
    """The client's own model, as `method.logits` takes it."""
    return method.personal_model(net, {**received, **kept}, data, LocalFit(data, sgd))
