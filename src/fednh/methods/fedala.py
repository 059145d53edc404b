"""FedALA: Zhang, Hua, Wang, Song, Xue, Ma, Guan, "FedALA: Adaptive Local Aggregation for Personalized Federated
Learning", AAAI 2023, Algorithm 1.

Before it trains, a client mixes the model that it received, G, with its own of its last round, L, element by element:

    start = L + (G - L) * W  in the p highest layers,  start = G  below them
    W <- clip(W - eta * grad_W loss(start), 0, 1)      on a random share s of the client's samples, batch by batch

W is one everywhere at first, and stays with the client. It is learned when the client mixes for the first time, until
the losses of the last passes differ little, and then by one pass a round. In its first round a client has no
model of its own and W is one: it starts from G. What it trains afterwards is averaged as in FedAvg.
Deviations: p counts layers that hold parameters (the paper's layers; the authors' code counts tensors); a pass's loss
is its mean (authors' code: the last mini-batch's); the first learning takes `mix_epochs` at most; samples are drawn
singly, not as one stretch, and not augmented; only clients that train mix, and the personal model is the latest local
one (authors' code has all clients mix in every round, and measures the mixture before it trains); averages are
uniform, not by size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor
from torch.func import grad_and_value

from fednh.methods.base import (
    MODEL,
    ClientData,
    Fit,
    Method,
    Net,
    Tree,
    cross_entropy,
    prefix,
    select,
    strip_prefix,
    unvmap_any,
)

WINDOW = 10  # passes whose losses are compared (authors' code)


@dataclass(frozen=True)
class FedALA(Method):
    """FedAvg in which a client learns, for every weight of the top layers, how much of the global model it takes."""

    cite = "Zhang et al., FedALA: Adaptive Local Aggregation for Personalized Federated Learning, AAAI 2023"
    look = ("#7030e0", 19)

    layers: Annotated[int, Field(ge=1)] = 1  # p, the highest layers, which are mixed; the head is one
    share: Annotated[float, Field(gt=0, le=1)] = 0.8  # s, of the client's samples to learn W on
    eta: Annotated[float, Field(gt=0)] = 1.0  # learning rate of W
    batch: Annotated[int, Field(ge=1)] = 10  # samples in a step of W
    threshold: Annotated[float, Field(ge=0)] = 0.1  # W is learned once ten passes' losses deviate less than this
    mix_epochs: Annotated[int, Field(ge=1)] = 30  # the most passes when W is learned for the first time

    def init(self, net: Net, rng: torch.Generator) -> Tree:
        model = net.init(rng)
        mixed = [name for layer in net.layers[-self.layers :] for name in layer]
        ones = {name: torch.ones_like(model[name]) for name in mixed}
        return {**model, **prefix("mix", ones), "rounds": torch.zeros(())}

    def enroll(self, initial: Tree) -> Tree:
        return initial  # W = 1, no rounds, and the form of a model

    def broadcast(self, server: Tree) -> Tree:
        return select(server, *MODEL)

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        w = self.learned(net, kept, received, data)
        model = fit({**received, **mixed(w, kept, received)}, cross_entropy(net.logits), only=MODEL)
        return {**model, **prefix("mix", w), "rounds": kept["rounds"] + 1}, model

    def learned(self, net: Net, kept: Tree, received: Tree, data: ClientData) -> Tree:
        """W after this round's passes: none in the client's first round, until convergence in its second, then one."""
        w, losses = strip_prefix(kept, "mix"), list[Tensor]()
        active = kept["rounds"] > 0
        while len(losses) < self.mix_epochs and unvmap_any(active):
            w, loss = self.one_pass(w, active, net, kept, received, data)
            losses.append(loss)
            active = active & (kept["rounds"] == 1)
            if len(losses) > WINDOW:
                active = active & (torch.stack(losses[-WINDOW:]).std(unbiased=False) >= self.threshold)
        return w

    def one_pass(
        self, w: Tree, active: Tensor, net: Net, kept: Tree, received: Tree, data: ClientData
    ) -> tuple[Tree, Tensor]:
        """W after one pass over the drawn samples, unchanged where a client is not active; and the mean loss."""
        loss = cross_entropy(net.logits)
        total = count = torch.zeros_like(kept["rounds"])

        def objective(w: Tree, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
            return (loss({**received, **mixed(w, kept, received)}, x, y) * weight).sum() / weight.sum().clamp(min=1)

        for x, y, weight in data.drawn(self.share, self.batch):
            slope, value = grad_and_value(objective)(w, x, y, weight)
            w = {name: torch.where(active, (old - self.eta * slope[name]).clamp(0, 1), old) for name, old in w.items()}
            total, count = total + value * weight.sum(), count + weight.sum()
        return w, total / count


def mixed(w: Tree, kept: Tree, received: Tree) -> Tree:
    """L + (G - L) * W for the names of W."""
    return {name: kept[name] + (received[name] - kept[name]) * value for name, value in w.items()}
