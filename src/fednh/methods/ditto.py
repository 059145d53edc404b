"""Ditto: Li, Hu, Beirami, Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021.

Algorithm 1 with FedAvg as its global solver. Beside the shared model w every client keeps a personal model v and trains
it on F_k(v) + lambda/2 ||v - w||^2, Eq. (2), where w is the model *received* in the round, as the paper has it. The
FedNH authors' code pulls towards the locally trained one (`pull = "trained"`), and trains v by SGD without momentum and
weight decay (`personal_sgd = "plain"`). It clips the gradient of F_k alone, at 10; here nothing is clipped then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from fednh.methods.base import (
    MODEL,
    ClientData,
    Fit,
    Method,
    Net,
    Tree,
    cross_entropy,
    prefix,
    squared_distance,
    strip_prefix,
)


@dataclass(frozen=True)
class Ditto(Method):
    """FedAvg beside a personal model of every client, which a proximal term ties to the global one."""

    cite = "Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021"
    look = ("#d55e00", 5)

    lam: Annotated[float, Field(ge=0)] = 0.75  # lambda, the strength of the tie, Eq. (2)
    pull: Literal["received", "trained"] = "received"  # w: the model received, or the FedNH authors': locally trained
    personal_sgd: Literal["train", "plain"] = "train"  # of the personal model: as [train] says, or the FedNH authors'

    def enroll(self, initial: Tree) -> Tree:
        return prefix("personal", initial)

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        loss = cross_entropy(net.logits)

        shared = fit(received, loss, only=MODEL)  # first, so that it draws the same batches as in FedAvg
        w = shared if self.pull == "trained" else received

        def proximal(v: Tree, x: Tensor, y: Tensor) -> Tensor:
            return loss(v, x, y) + self.lam / 2 * squared_distance(v, w)

        personal = fit(strip_prefix(kept, "personal"), proximal, only=MODEL, plain=self.personal_sgd == "plain")
        return prefix("personal", personal), shared

    def personal_model(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> Tree:
        return strip_prefix(kept, "personal")
