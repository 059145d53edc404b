"""FedGELA: Fan, Zhang, Yao, Han, Zhang, Wang, "Federated Learning with Bilateral Curation for Partially Class-Disjoint
Data", NeurIPS 2023.

The global classifier W is a fixed simplex equiangular tight frame: unit vectors with pairwise cosine -1/(C-1). A client
k makes it its own by the classes that it has: it scales row c by phi_c = C * n_kc / n_k, which is zero for a class that
it lacks and one for all where classes are balanced. With h = unit(g(f(x))), where g is a linear projection,

    local logits  = scale * phi_c * w_c.h       trained, and the personal model's       -> client_update, personal_model
    global logits = scale * w_c.h                                                       -> logits

Body and projection are averaged. phi stays at the client.
Deviations: h has unit length and g is one linear layer (authors' code: two layers and batch normalisation, whose
statistics this library does not average); its space has as many dimensions as the representation, or as there are
classes if they are more; scale, the product of the lengths that the paper gives to W and h (1/temperature in the
authors' code), is 20 as in FedNH; averages are uniform, not by size.
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
    Method,
    Net,
    Tree,
    cross_entropy,
    not_unit,
    projected_simplex,
    select,
    unit,
)

TRAINED = ("body", "projection")


@dataclass(frozen=True)
class FedGELA(Method):
    """A fixed simplex as everyone's classifier; each client scales its vectors by its own class shares."""

    cite = "Fan et al., Federated Learning with Bilateral Curation for Partially Class-Disjoint Data, NeurIPS 2023"
    look = ("#d040e8", 23)
    model = ("body", "projection", "head")

    scale: Annotated[float, Field(gt=0)] = 20.0  # of the logits: the lengths of W's and h's vectors, multiplied

    def numbers(self, classes: int, dim: int) -> int:
        return dim * max(classes, dim)  # the projection

    def init(self, net: Net, rng: torch.Generator) -> Tree:
        return projected_simplex(net, rng)

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        phi = local_scale(data)

        def local_logits(params: Tree, x: Tensor) -> Tensor:
            return self.logits(net, {**params, "phi": phi}, x)

        model = select(fit(received, cross_entropy(local_logits), only=TRAINED), *TRAINED)
        return model, model

    def personal_model(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> Tree:
        return {**select({**received, **kept}, *self.model), "phi": local_scale(data)}

    def problem(self, server: Tree) -> str | None:
        return not_unit(server["head.weight"])

    def logits(self, net: Net, params: Tree, x: Tensor) -> Tensor:
        h = unit(F.linear(net.features(params, x), params["projection.weight"], params["projection.bias"]))
        scores = self.scale * (h @ params["head.weight"].T)
        return params["phi"] * scores if "phi" in params else scores


def local_scale(data: ClientData) -> Tensor:  # (C,)
    """phi: each class's share of the client's samples, relative to balanced classes."""
    return len(data.counts) * data.share
