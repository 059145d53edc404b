"""Normalisation that stays with the client, for every method (the FedBN way: Li et al., ICLR 2021).

With model.norm = "local" no method sees the parameters and running statistics of normalisation layers: they are in no
server state, upload or average. A client keeps them beside what its method keeps, under NORM, and binds them to the
network while it works. Where a method trains the body, `fit` here trains the client's normalisation with it, on batch
statistics; everything else, and a batch of one sample, is computed with the client's running statistics.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fednh.methods.fit import Fit
from fednh.methods.losses import BatchLoss, Loss, of_batch
from fednh.models.net import Net
from fednh.tree import Tree, has_prefix, prefix, select, strip_prefix

NORM = "normalisation"  # the name of a client's normalisation in its kept Tree

Watch = Callable[[Tree, Loss, tuple[str, ...]], None]


class LocalNorm:
    """One client's normalisation while it is at work; `with` binds it to the network in this thread."""

    def __init__(self, net: Net, kept: Tree, device: torch.device):
        start = (strip_prefix(kept, NORM) or net.norm) if net.stateful else {}
        self.net, self.state = net, {name: value.to(device, copy=True) for name, value in start.items()}

    def __enter__(self) -> LocalNorm:
        if self.state:
            self.net.bind_norm(self.state)
        return self

    def __exit__(self, *_: object) -> None:
        if self.state:
            self.net.bind_norm(None)

    def kept(self) -> Tree:
        """The Tree that the client keeps: parameters and running statistics."""
        return prefix(NORM, self.state)

    def fit(self, inner: Fit) -> Fit:
        """`inner`, with the client's normalisation trained beside the body."""
        return _Fit(self, inner) if self.state else inner

    def undisturbed(self, watch: Watch | None) -> Watch | None:
        """`watch`, with the running statistics restored after it: measuring changes nothing."""
        if watch is None or not self.state:
            return watch

        def look(params: Tree, loss: Loss, only: tuple[str, ...]) -> None:
            before = {name: value.clone() for name, value in self.state.items()}
            watch(params, loss, only)
            self.state.update(before)
            self.net.bind_norm(self.state)

        return look


def without_norm(kept: Tree) -> Tree:
    """The method's own part of what the client kept."""
    return select(kept, *{name.partition(".")[0] for name in kept} - {NORM})


class _Fit:
    def __init__(self, norm: LocalNorm, inner: Fit):
        self.norm, self.inner = norm, inner

    def __call__(
        self, params: Tree, loss: Loss, *, only: tuple[str, ...], epochs: int | None = None, plain: bool = False
    ) -> Tree:
        return self.batchwise(params, of_batch(loss), only=only, epochs=epochs, plain=plain)

    def batchwise(
        self, params: Tree, loss: BatchLoss, *, only: tuple[str, ...], epochs: int | None = None, plain: bool = False
    ) -> Tree:
        norm, net = self.norm, self.norm.net
        mine = {name: norm.state[name] for name in net.trained_norms if has_prefix(name, only)}

        def with_bound_norm(working: Tree, x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tree]:
            net.bind_norm({**norm.state, **{name: working[name] for name in mine}}, training=len(x) > 1)
            try:
                return loss({name: value for name, value in working.items() if name not in mine}, x, y, weight)
            finally:
                net.bind_norm(norm.state)

        if not any(has_prefix(name, only) for name in norm.state):
            return self.inner.batchwise(params, loss, only=only, epochs=epochs, plain=plain)
        out = self.inner.batchwise({**params, **mine}, with_bound_norm, only=only, epochs=epochs, plain=plain)
        norm.state.update({name: out[name] for name in mine})
        return {name: value for name, value in out.items() if name not in mine}

    def reach(self, epochs: int | None = None) -> float | Tensor:
        return self.inner.reach(epochs)
