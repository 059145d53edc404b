"""FedProto: Tan, Long, Liu, Zhou, Lu, Jiang, Zhang,
"FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI 2022.

Only class means of the representation travel. The local loss is Eq. (7), prediction is by the nearest prototype.
Deviation: the global prototype is the plain mean over the clients that own the class, as in the authors' code
(Eq. (6) of the text weights by sample counts): so no class count leaves a client.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fednh.methods.base import (
    MODEL,
    ClientData,
    Fit,
    Method,
    Net,
    Tree,
    Uploads,
    UploadSpec,
    class_means,
    cross_entropy,
    select,
)


@dataclass(frozen=True)
class FedProto(Method):
    """Clients share nothing but class means of their representations, and are pulled towards the global ones."""

    cite = "Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients, AAAI 2022"
    look = ("#b59f00", 14)
    model = ("body", "head", "prototypes", "known")
    by_architecture = MODEL
    upload = UploadSpec(by_class=("prototypes",), marks=("known",))

    lam: Annotated[float, Field(ge=0)] = 0.1  # lambda, the pull towards the global prototypes, Eq. (7)
    inference: Literal["prototype", "logits"] = "prototype"  # predict by nearest global prototype, or by the head

    def init(self, net: Net, rng: torch.Generator) -> Tree:
        return {
            **net.init(rng),
            "prototypes": torch.zeros(net.num_classes, net.dim),
            "known": torch.zeros(net.num_classes),  # 1 for a class that somebody has owned so far
        }

    def enroll(self, initial: Tree) -> Tree:
        return select(initial, *MODEL)

    def broadcast(self, server: Tree) -> Tree:
        return select(server, "prototypes", "known")

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        prototypes, known = received["prototypes"], received["known"]  # (C, D), (C,)

        def loss(params: Tree, x: Tensor, y: Tensor) -> Tensor:
            h = net.features(params, x)
            pull = (h - prototypes[y]).square().mean(1) * known[y]
            return cross_entropy(net.classify)(params, h, y) + self.lam * pull

        model = fit(kept, loss, only=MODEL)
        means = class_means(lambda x: net.features(model, x), data.batches(), data.counts)
        return model, {"prototypes": means, "known": (data.counts > 0).to(means.dtype)}

    def aggregate(self, server: Tree, uploads: Uploads) -> Tree:
        average = uploads.mean()
        owners = average["known"][:, None]  # share of the round's clients that own the class
        fresh = average["prototypes"] / owners.clamp(min=1e-12)
        prototypes = torch.where(owners > 0, fresh, server["prototypes"])
        known = torch.maximum(server["known"], (owners[:, 0] > 0).to(owners.dtype))
        return {**server, "prototypes": prototypes, "known": known}

    def global_model(self, server: Tree) -> None:
        return None

    def logits(self, net: Net, params: Tree, x: Tensor) -> Tensor:
        if self.inference == "logits":
            return net.logits(params, x)
        h, mm = net.features(params, x), "use_mm_for_euclid_dist"  # the same for every batch size, so that it exports
        distance = torch.cdist(h, params["prototypes"], compute_mode=mm)  # (B, C)
        return (-distance).masked_fill(params["known"] == 0, -torch.inf)
