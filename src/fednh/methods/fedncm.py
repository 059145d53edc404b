"""FedNCM: Legate, Bernier, Page-Caccia, Oyallon, Belilovsky,
"Guiding the Last Layer in Federated Learning with Pre-Trained Models", NeurIPS 2023.

The body is pretrained and stays as it is. With unit features f(x) a client reports, of every class c that it owns,
    S_kc = sum of f(x) over its samples of c                        -> client_update
and the head has the directions of the class means,
    w_c = unit(sum_k S_kc)                                          -> aggregate
which are those of all samples in one place, for every division of the samples. Predictions are the nearest class
mean by cosine, s * W f(x) (`cosine`). Training afterwards from this head, the paper's second stage, is FedNH with
`head_init = "means"`.

Sums travel as float32, half the bytes: only their directions count, and rounding moves these by less than 1e-6.

Deviations: features have unit length before they are summed (the paper takes means of features as they are, and scales
the mean); a client sends sums, where the paper sends means and counts, which say the same about it. A class that nobody
has keeps a random unit row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

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
    added,
    select,
    sent_once,
    unit,
    unsent,
)


@dataclass(frozen=True)
class FedNCM(Method):
    """Nearest class mean on a fixed body: clients send class sums of their features once, nothing is trained."""

    cite = "Legate et al., Guiding the Last Layer in Federated Learning with Pre-Trained Models, NeurIPS 2023"
    doubles = True
    look = ("#fe0f05", 24)
    model = ("body", "head", "scale")
    cosine = True
    training_free = True
    kept_is_trained = False
    # the length of a sum of similar unit vectors is nearly their number
    upload = UploadSpec(by_class=("sums",), class_sums=("sums",), summed=("sums",), class_counts=True)

    scale: Annotated[float, Field(gt=0)] = 20.0  # s, of the cosines in the logits

    def init(self, net: Net, rng: torch.Generator) -> Tree:
        start = net.init(rng)
        head = {"head.weight": unit(start["head.weight"]), "scale": torch.tensor(self.scale)}
        return {**select(start, "body"), **head, "sums": torch.zeros(net.num_classes, net.dim, dtype=torch.float64)}

    def enroll(self, initial: Tree) -> Tree:
        return unsent(initial)

    def broadcast(self, server: Tree) -> Tree:
        return select(server, *self.model)

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        sums = data.class_sums(lambda x: unit(net.features(received, x)))
        return sent_once(kept, {"sums": sums.float()})

    def aggregate(self, server: Tree, uploads: Uploads) -> Tree:
        sums = added(server, uploads, "sums")
        known = sums["sums"].abs().sum(1, keepdim=True) > 0
        head = torch.where(known, unit(sums["sums"]).float(), server["head.weight"])
        return {**server, **sums, "head.weight": head}

    def personal_model(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> Tree:
        return select(received, *self.model)
