"""FedBABU: Oh, Kim, Yun, "FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR 2022.

The head is frozen at its random initial values during the whole federation; only bodies are trained and averaged.
A client's personal model is the global one, fine-tuned as a whole. The FedNH authors fine-tune the client's latest
local model instead (`finetuned = "local"`); a client that has none starts from the global one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from fednh.methods.base import MODEL, ClientData, Fit, Method, Net, Tree, cross_entropy, select


@dataclass(frozen=True)
class FedBABU(Method):
    """Only the body is trained, against a frozen random head; fine-tuning of both makes the personal model."""

    cite = "Oh et al., FedBABU: Toward Enhanced Representation for Federated Image Classification, ICLR 2022"
    look = ("#cc6699", 1)
    headless = True

    finetune_epochs: Annotated[int, Field(ge=0)] = 5  # tau, epochs of fine-tuning
    finetuned: Literal["global", "local"] = "global"  # what is fine-tuned; the FedNH authors: the latest local model

    @property
    def kept_is_trained(self) -> bool:
        return self.finetuned == "local"  # the head kept is the initial one

    def enroll(self, initial: Tree) -> Tree:
        return select(initial, "head")

    def broadcast(self, server: Tree) -> Tree:
        return select(server, "body")

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        model = fit({**kept, **received}, cross_entropy(net.logits), only=("body",))  # the head is the one kept
        return model if self.finetuned == "local" else kept, select(model, "body")

    def personal_model(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> Tree:
        start = {**received, **kept}  # the body received, unless the client kept its own
        return fit(start, cross_entropy(net.logits), only=MODEL, epochs=self.finetune_epochs)
