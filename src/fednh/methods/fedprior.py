"""FedPrior: FedNH with the client's class prior taken out of the local loss and put back into its personal model.

A client sees its classes in shares pi_k. Cross-entropy makes the body learn these shares along with the classes; then
bodies of clients with other shares disagree, and their average suits nobody. Here a client trains with the balanced
softmax (Ren et al., "Balanced Meta-Softmax for Long-Tailed Visual Recognition", NeurIPS 2020)

    loss(x, y) = -log softmax(s * W f(x) + log pi_k)[y]                                       -> client_update

so that s * W f(x), shared by all clients, need not model the shares. The client knows its own, and by Bayes' rule adds
them back without training (logit adjustment: Menon et al., "Long-Tail Learning via Logit Adjustment", ICLR 2021):

    personal logits = s * W f(x) + tau * log pi_k                                             -> prior

Body, prototypes and scale of a personal model are the global model's: newer and of more clients than what the client
trained last. The prior is that of `personal.prior` (tau, here 1 where it is not set) and `personal.smoothing`, which
any method can have: tau = 1 is right on the client's own class distribution, tau = 0 treats all classes equally. Shares
never leave the client. With `ema` above 0 the global model is a moving average of the server's states, each weighted by
`ema` to the power of its age in rounds; training goes on from the newest state. Body and scale are averaged, and not
the prototypes, which are a moving average already.

Prototypes, scale and server are FedNH's (fednh.py). FedETF and FedROD train with the balanced softmax too, but learn
the personal part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from fednh.methods.base import (
    ClientData,
    Fit,
    Method,
    Net,
    Tree,
    Uploads,
    UploadSpec,
    balanced_softmax,
    prefix,
    scaled_cosine,
    select,
    strip_prefix,
)
from fednh.methods.fednh import FedNH

MOVING = ("body", "scale")  # what clients train


@dataclass(frozen=True)
class FedPrior(Method):
    """FedNH without the client's class shares in the body; its personal model adds them back as a prior."""

    cite = "this library; stands on FedNH (AAAI 2023), Ren et al. (NeurIPS 2020) and Menon et al. (ICLR 2021)"
    look = ("#c2189b", 17)
    patents = FedNH.patents
    model = FedNH.model
    cosine = True
    by_architecture = ("body", "scale", "average")
    prior: ClassVar[float] = 1.0

    ema: Annotated[float, Field(ge=0, lt=1)] = 0.0  # of the global model: the weight of the average in the next one
    rho: Annotated[float, Field(gt=0, lt=1)] = 0.9  # FedNH's, Eq. (4)
    aggregation: Literal["uniform", "count", "sum"] = "uniform"  # FedNH's alpha in Eq. (4)
    scale: Annotated[float, Field(gt=0)] = 20.0  # s at the start
    train_scale: bool = True  # s moves with the body; false keeps it constant
    head_init: Literal["separated", "orthogonal", "means"] = "separated"  # FedNH's, Eq. (1) or class means

    @property
    def fednh(self) -> FedNH:
        """FedNH with the same settings, for prototypes, scale and server."""
        return FedNH(self.rho, self.aggregation, self.scale, self.train_scale, self.head_init)

    @property
    def upload(self) -> UploadSpec:
        return self.fednh.upload

    @property
    def kept_is_trained(self) -> bool:
        return False

    def init(self, net: Net, rng: torch.Generator) -> Tree:
        start = self.fednh.init(net, rng)
        average = {**prefix("average", select(start, *MOVING)), "average.weight": torch.zeros(())}
        return {**start, **(average if self.ema else {})}

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        newest = select(received, *self.model, "started")
        loss = balanced_softmax(scaled_cosine(net), data.share)
        _, upload = self.fednh.trained(net, newest, data, fit, loss)
        return {}, upload

    def aggregate(self, server: Tree, uploads: Uploads) -> Tree:
        newest = self.fednh.aggregate(server, uploads)
        return {**newest, **self._averaged(newest)} if self.ema else newest

    def _averaged(self, newest: Tree) -> Tree:
        """avg <- avg + (newest - avg) / n with n <- ema * n + 1: a moving average without the initial state."""
        weight = self.ema * newest["average.weight"] + 1
        average = strip_prefix(newest, "average")
        moved = {name: average[name] + (newest[name] - average[name]) / weight for name in select(average, *MOVING)}
        return {**prefix("average", moved), "average.weight": weight}

    def global_model(self, server: Tree) -> Tree:
        return {**select(server, *self.model), **select(strip_prefix(server, "average"), *MOVING)}

    def personal_model(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> Tree:
        return self.global_model(received)
