"""AFL: He, Tong, Fang, Sun, Zeng, Li, Chen, Zhuang,
"AFL: A Single-Round Analytic Approach for Federated Learning with Pre-trained Models", CVPR 2025,
in the form of FED3R: Fani, Camoriano, Caputo, Ciccone, "Accelerating Heterogeneous Federated Learning with Closed-form
Classifiers", ICML 2024.

On fixed features h the head is ridge regression to one-hot labels, W = argmin sum ||W h - y||^2 + gamma ||W||^2. With
    G = sum h h'  (D, D),   B = sum y h'  (C, D)                    -> client_update
over a client's samples, and sums of these over clients,
    W = B (G + gamma I)^-1                                          -> aggregate
which is the solution of all samples in one place, for every division of the samples. Logits are s * W h (`scale`): W h
is near 1 for the right class and 0 for others, too flat for a softmax.

AFL lets clients send their own ridge solutions with regularised Gram matrices, merges these in pairs and takes the
clients' regularisation out again; FED3R sends G and B. Both come to the same W; sums need no order and no inverse at
clients. Deviations: the regularisation `gamma` counts once, for all samples (AFL ends with none, which needs G of full
rank; FED3R has one, its lambda). Rows of W keep their lengths, as in AFL; FED3R's scaling to length 1, against unequal
sizes of classes, is `unit_rows`. FED3R's random features are not here.
G, B and the solution are of float64; W is rounded to float32.
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
    Uploads,
    UploadSpec,
    added,
    feature_sums,
    not_gram,
    select,
    sent_once,
    unit,
    unsent,
)


@dataclass(frozen=True)
class AFL(Method):
    """Ridge regression on a fixed body, solved from sums that clients send once: the same head for every division."""

    cite = "He et al., AFL: A Single-Round Analytic Approach for Federated Learning, CVPR 2025; Fani et al., ICML 2024"
    doubles = True
    look = ("#fe0452", 25)
    model = ("body", "head", "scale")
    training_free = True
    kept_is_trained = False
    # a class's sum of features tells nearly how many samples are behind it
    upload = UploadSpec(by_class=("sums",), summed=("sums", "gram"), class_counts=True, problem=not_gram)

    gamma: Annotated[float, Field(gt=0)] = 1.0  # regularisation, added once to the diagonal of G
    scale: Annotated[float, Field(gt=0)] = 20.0  # s, of the regression's values in the logits
    unit_rows: bool = False  # rows of W are scaled to length 1, as in FED3R

    def init(self, net: Net, rng: torch.Generator) -> Tree:
        start, exact = net.init(rng), torch.float64
        head = {"head.weight": torch.zeros(net.num_classes, net.dim), "scale": torch.tensor(self.scale)}
        sums = {"sums": torch.zeros(net.num_classes, net.dim, dtype=exact)}
        return {**select(start, "body"), **head, **sums, "gram": torch.zeros(net.dim, net.dim, dtype=exact)}

    def enroll(self, initial: Tree) -> Tree:
        return unsent(initial)

    def broadcast(self, server: Tree) -> Tree:
        return select(server, *self.model)

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        sums = feature_sums(lambda x: net.features(received, x), data.batches(), net.num_classes, gram=True)
        return sent_once(kept, select(sums, "sums", "gram"))

    def aggregate(self, server: Tree, uploads: Uploads) -> Tree:
        total = added(server, uploads, "sums", "gram")
        regularised = total["gram"] + self.gamma * torch.eye(len(total["gram"])).to(total["gram"])
        head = torch.linalg.solve(regularised, total["sums"].T).T  # (C, D)
        return {**server, **total, "head.weight": (unit(head) if self.unit_rows else head).float().contiguous()}

    def personal_model(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> Tree:
        return select(received, *self.model)

    def logits(self, net: Net, params: Tree, x: Tensor) -> Tensor:
        return params["scale"] * F.linear(net.features(params, x), params["head.weight"])
