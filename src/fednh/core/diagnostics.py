"""Optional measurements of a run's own training; measuring changes no result and draws no random number."""

from __future__ import annotations

import torch

from fednh.core.losses import Loss
from fednh.core.tree import Tree, belongs, select
from fednh.data.batches import ClientData


class GradientNorm:
    """||grad_body F_k||^2 at the received model: the full gradient of the method's own loss on all the client's data.

    It is measured before the first step of `fit`. If a round has several fits, the one that starts from the received
    body and trains it counts (Ditto also trains a personal copy); where no body travels (Local, FedProto) it is the
    first fit that trains the client's own body. Samples are not augmented.
    """

    def __init__(self, data: ClientData, received: Tree):
        self.data, self.received = data, select(received, "body")
        self.value: float | None = None

    def __call__(self, params: Tree, loss: Loss, only: tuple[str, ...]) -> None:
        moves = any(belongs(name, only) for name in select(params, "body"))
        here = all(name in params and torch.equal(params[name], value) for name, value in self.received.items())
        if self.value is None and moves and here:
            self.value = self._measure(params, loss)

    def _measure(self, params: Tree, loss: Loss) -> float:
        body = {name: value.detach().clone().requires_grad_() for name, value in select(params, "body").items()}
        total = [torch.zeros_like(value) for value in body.values()]
        for x, y, _ in self.data.batches():
            value = loss({**params, **body}, x, y).sum()
            parts = torch.autograd.grad(value, list(body.values()), allow_unused=True)
            total = [sofar if part is None else sofar + part for sofar, part in zip(total, parts, strict=True)]
        return float(sum(part.square().sum() for part in total)) / len(self.data) ** 2
