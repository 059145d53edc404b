"""FedCOF: Goswami, Magistri, Wang, Twardowski, Bagdanov, van de Weijer,
"Covariances for Free: Exploiting Mean Distributions for Training-free Federated Learning", NeurIPS 2025.

Clients send class means mu_kc of fixed features and counts n_kc, as in FedNCM          -> client_update
The mean of n samples scatters by Sigma_c / n around mu_c. So with N_c samples of class c at K_c clients
    Sigma_c = sum_k n_kc (mu_kc - mu_c)(mu_kc - mu_c)' / (K_c - 1) + gamma I
estimates the covariance without bias (but for the shrinkage), from means alone. In place of the Gram matrix the ridge
solution takes
    G = sum_c (N_c - 1) Sigma_c + N mu mu'     (the scatter between class means is left out)
    w_c = unit(G^-1 N_c mu_c)                                                           -> aggregate
Logits are s * W f(x) with unit f(x), which orders classes as W h does.

From the authors' code: mu is the mean of all samples; a class of a single client has Sigma_c = gamma I; the inverse is
the pseudo-inverse.
Deviations: clients send sums n_kc mu_kc. Means that arrive in several rounds give the same result, for which the server
keeps sum_k n_kc mu_kc mu_kc' of every class, C * D * D numbers of 8 bytes (`covariance = "class"`). "shared" is ours:
all classes have one covariance, their scatter by the sum of their K_c - 1, and the server keeps D * D numbers.
Estimates depend on how samples are divided, other than AFL's and FedCGS's sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
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
    scaled_cosine,
    select,
    sent_once,
    unit,
    unsent,
)


@dataclass(frozen=True)
class FedCOF(Method):
    """Covariances estimated from class means that clients send once, and the ridge solution that they give."""

    cite = "Goswami et al., Covariances for Free: Exploiting Mean Distributions for Training-free FL, NeurIPS 2025"
    doubles = True
    look = ("#fc018a", 26)
    model = ("body", "head", "scale")
    training_free = True
    kept_is_trained = False
    upload = UploadSpec(by_class=("sums",), summed=("sums", "counts"), class_counts=True, single=True)

    gamma: Annotated[float, Field(gt=0)] = 1.0  # shrinkage, added to the diagonal of a covariance
    covariance: Literal["class", "shared"] = "class"  # one for every class, as in the paper, or one for all
    scale: Annotated[float, Field(gt=0)] = 20.0  # s, of the cosines in the logits

    def numbers(self, classes: int, dim: int) -> int:
        return dim * dim * (classes if self.covariance == "class" else 1)

    def init(self, net: Net, rng: torch.Generator) -> Tree:
        classes, dim, exact = net.num_classes, net.dim, torch.float64
        scatter = torch.zeros(*([classes] if self.covariance == "class" else []), dim, dim, dtype=exact)
        return {
            **select(net.init(rng), "body"),
            "head.weight": torch.zeros(classes, dim),
            "scale": torch.tensor(self.scale),
            "sums": torch.zeros(classes, dim, dtype=exact),  # N_c mu_c
            "counts": torch.zeros(classes, dtype=exact),  # N_c
            "owners": torch.zeros(classes, dtype=exact),  # K_c
            "scatter": scatter,  # sum_k n_kc mu_kc mu_kc', of every class or of all
        }

    def enroll(self, initial: Tree) -> Tree:
        return unsent(initial)

    def broadcast(self, server: Tree) -> Tree:
        return select(server, *self.model)

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        sums = feature_sums(lambda x: net.features(received, x), data.batches(), net.num_classes)
        return sent_once(kept, sums)

    def aggregate(self, server: Tree, uploads: Uploads) -> Tree:
        total = added(server, uploads, "sums", "counts")
        owners, scatter = server["owners"], server["scatter"].clone()
        for tree in uploads.trees:
            rows = tree["sums"] / tree["counts"].clamp(min=1).sqrt()[:, None]  # sqrt(n_kc) mu_kc; zero without samples
            scatter += outer(rows) if self.covariance == "class" else rows.T @ rows
            owners = owners + (tree["counts"] > 0).to(owners)
        total = {**total, "owners": owners, "scatter": scatter}
        weight = torch.linalg.pinv(self.gram(total), hermitian=True) @ total["sums"].T  # (D, C)
        return {**server, **total, "head.weight": unit(weight.T).float().contiguous()}

    def gram(self, total: Tree) -> Tensor:  # (D, D)
        """G, from the server's sums."""
        counts, owners, sums = total["counts"], total["owners"], total["sums"]
        rows, mean = sums / counts.clamp(min=1).sqrt()[:, None], sums.sum(0)
        identity = torch.eye(sums.shape[1]).to(sums)
        free, spread = (counts - 1).clamp(min=0), (owners - 1).clamp(min=0)  # N_c - 1, K_c - 1
        if self.covariance == "class":
            around = total["scatter"] - outer(rows)  # (C, D, D)
            within = ((free / spread.clamp(min=1))[:, None, None] * around).sum(0)
        else:
            within = free.sum() / spread.sum().clamp(min=1) * (total["scatter"] - rows.T @ rows)
        return within + free.sum() * self.gamma * identity + torch.outer(mean, mean) / counts.sum().clamp(min=1)

    def personal_model(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> Tree:
        return select(received, *self.model)

    def logits(self, net: Net, params: Tree, x: Tensor) -> Tensor:
        return scaled_cosine(net)(params, x)


def outer(rows: Tensor) -> Tensor:  # (C, D) -> (C, D, D)
    """Every row times itself."""
    return rows[:, :, None] * rows[:, None, :]
