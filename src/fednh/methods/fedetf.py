"""FedETF: Li, Shang, He, Lin, Wu, "No Fear of Classifier Biases: Neural Collapse Inspired Federated Learning with
Synthetic and Fixed Classifier", ICCV 2023.

The classifier V is a fixed simplex equiangular tight frame: unit vectors with pairwise cosine -1/(C-1). A linear
projection g brings the representation into its space, mu = unit(g(f(x))), and clients train with the balanced feature
loss, -log of n_y^gamma exp(beta v_y.mu) / sum_c n_c^gamma exp(beta v_c.mu), where n_c counts the client's samples of
class c and beta is learned. The personal model is the global one, trained as in a round and then, with plain
cross-entropy, classifier and projection in turn.
Deviations: a class with n_c = 0 is left out of the softmax (authors' code: n_c = 1 then); the space has as many
dimensions as the representation, or as there are classes if they are more (authors' code: a choice for each network);
all steps use the run's optimiser and learning rate; three turns of personalisation, where the authors' code has twenty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fednh.methods.base import (
    ClientData,
    Fit,
    Logits,
    Loss,
    Method,
    Net,
    Tree,
    balanced_softmax,
    cross_entropy,
    not_unit,
    projected_simplex,
    select,
    unit,
)

TRAINED = ("body", "projection", "beta")


@dataclass(frozen=True)
class FedETF(Method):
    """A fixed simplex as everyone's classifier, behind a learned projection, trained with a balanced loss."""

    cite = "Li et al., No Fear of Classifier Biases: Neural Collapse Inspired Federated Learning, ICCV 2023"
    look = ("#00808a", 16)
    model = ("body", "projection", "head", "beta")
    kept_is_trained = False

    beta: Annotated[float, Field(gt=0)] = 10.0  # the temperature at the start; it is trained
    gamma: Annotated[float, Field(ge=0)] = 1.0  # how strongly class counts enter the loss; 0: not at all
    turns: Annotated[int, Field(ge=0)] = 3  # of personalisation: classifier, then projection
    turn_epochs: Annotated[int, Field(ge=0)] = 3  # for each of the two

    def passes(self, epochs: float) -> dict[str, float]:
        return {"train.epochs": epochs, "2 * method.turns * method.turn_epochs": 2 * self.turns * self.turn_epochs}

    def numbers(self, classes: int, dim: int) -> int:
        return dim * max(classes, dim)  # the projection

    def init(self, net: Net, rng: torch.Generator) -> Tree:
        return {**projected_simplex(net, rng), "beta": torch.tensor(self.beta)}

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        model = fit(received, self.balanced(net, data), only=TRAINED)
        return {}, select(model, *TRAINED)

    def personal_model(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> Tree:
        model = fit(received, self.balanced(net, data), only=TRAINED)
        for _ in range(self.turns):
            for part in ("head", "projection"):
                model = fit(model, cross_entropy(on_simplex(net)), only=(part,), epochs=self.turn_epochs)
        return model

    def problem(self, server: Tree) -> str | None:
        return not_unit(server["head.weight"])

    def logits(self, net: Net, params: Tree, x: Tensor) -> Tensor:
        return on_simplex(net)(params, x)

    def balanced(self, net: Net, data: ClientData) -> Loss:
        """The balanced feature loss: counts enter as shares, whose common factor cancels in the softmax."""
        return balanced_softmax(on_simplex(net), data.share**self.gamma)


def on_simplex(net: Net) -> Logits:
    """beta * V mu with mu = unit(g(f(x)))."""

    def logits(params: Tree, x: Tensor) -> Tensor:
        mu = unit(F.linear(net.features(params, x), params["projection.weight"], params["projection.bias"]))
        return params["beta"] * (mu @ params["head.weight"].T)

    return logits
