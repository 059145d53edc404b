"""One client's part of a run, as functions of what it was sent, what it kept, and its own data.

Every engine calls these same functions, so it cannot matter to a method where a client lives.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fednh.data.batches import ClientData, blank_samples
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


Form = dict[str, tuple[tuple[int, ...], torch.dtype]]  # what a Tree looks like: name -> shape and type


def form_of(tree: Tree) -> Form:
    return {name: (tuple(value.shape), value.dtype) for name, value in tree.items()}


def declared_upload(method: Method, net: Net, initial: Tree) -> Form:
    """What an upload of this method looks like, found by a round without training on one blank sample a class."""
    samples = blank_samples(net.shape, net.num_classes, next(iter(initial.values())).device)
    data = ClientData(samples, np.arange(len(samples)))
    own = {**method.enroll(initial), **method.broadcast(initial)}
    return form_of(method.client_update(net, own, data, lambda params, loss, *, only, epochs=None: params)[1])


def personal_model(method: Method, net: Net, kept: Tree, received: Tree, data: ClientData, sgd: Sgd) -> Tree:
    """The client's own model, as `method.logits` takes it."""
    return method.personal_model(net, {**received, **kept}, data, LocalFit(data, sgd))
