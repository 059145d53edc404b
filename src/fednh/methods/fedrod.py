"""FedROD: Chen, Chao, "On Bridging Generic and Personalized Federated Learning for Image Classification", ICLR 2022.

Two heads on one body: the generic one learns with the balanced softmax, so that class imbalance does not bias it; the
logits of the personal one are added to fit the client's own class distribution. With `hypernetwork` the personal head
is produced from that distribution by a small shared network (C -> D -> C*D, ReLU between), which is what travels;
without it, the personal head is a linear layer that the client keeps. Order of training as in the FedNH paper's
appendix: body and generic head first, then the personal part with the body fixed, its loss detached from the generic
logits. `personal_sgd = "plain"` trains the personal part without momentum, weight decay and clipping, as the FedNH
authors' code does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fednh.methods.base import MODEL, ClientData, Fit, Method, Net, Tree, balanced_softmax, select, uniform_weights

LARGEST_DIM = 256  # a hyper-network has C*D^2 weights: fine for the CNN (D = 192), too many for the ResNet (D = 512)


@dataclass(frozen=True)
class FedROD(Method):
    """A generic head trained with balanced softmax, and a personal head on top of it for the client's own classes."""

    cite = "Chen & Chao, On Bridging Generic and Personalized Federated Learning for Image Classification, ICLR 2022"
    look = ("#8a63c9", 4)

    hypernetwork: Literal["auto", "on", "off"] = "auto"  # auto: on while D <= 256, the paper's choice for its models
    personal_sgd: Literal["train", "plain"] = "train"  # of the personal part: as [train] says, or the FedNH authors'

    def has_hypernetwork(self, dim: int) -> bool:
        return self.hypernetwork == "on" or (self.hypernetwork == "auto" and dim <= LARGEST_DIM)

    def numbers(self, classes: int, dim: int) -> int:
        return classes * dim * (dim if self.has_hypernetwork(dim) else 1)

    def init(self, net: Net, rng: torch.Generator) -> Tree:
        server = net.init(rng)
        classes, dim = net.num_classes, net.dim
        if not self.has_hypernetwork(dim):
            return {**server, "personal.weight": uniform_weights((classes, dim), dim, rng)}
        return {
            **server,
            "hyper.in.weight": uniform_weights((dim, classes), classes, rng),
            "hyper.in.bias": uniform_weights((dim,), classes, rng),
            "hyper.out.weight": uniform_weights((classes * dim, dim), dim, rng),
            "hyper.out.bias": uniform_weights((classes * dim,), dim, rng),
        }

    def enroll(self, initial: Tree) -> Tree:
        return select(initial, "personal")

    def broadcast(self, server: Tree) -> Tree:
        return select(server, *MODEL, "hyper")

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        model = {**kept, **received}  # the personal head kept, if it is a layer; all else as received
        model = fit(model, balanced_softmax(net.logits, data.share), only=MODEL)

        def personal_loss(params: Tree, x: Tensor, y: Tensor) -> Tensor:
            with torch.no_grad():  # the body and the generic head are fixed here
                h = net.features(params, x)
                generic = net.classify(params, h)
            return F.cross_entropy(generic + h @ personal_head(params, data.share).T, y, reduction="none")

        model = fit(model, personal_loss, only=("personal", "hyper"), plain=self.personal_sgd == "plain")
        return model, select(model, *MODEL, "hyper")

    def personal_model(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> Tree:
        model = {**received, **kept}  # the client's latest local one
        return {**select(model, *MODEL), "personal.weight": personal_head(model, data.share)}

    def logits(self, net: Net, params: Tree, x: Tensor) -> Tensor:
        h = net.features(params, x)
        generic = net.classify(params, h)
        return generic + h @ params["personal.weight"].T if "personal.weight" in params else generic


def personal_head(params: Tree, share: Tensor) -> Tensor:  # (C,) -> (C, D)
    """The client's own linear layer, or what the hyper-network makes of its class distribution."""
    if "personal.weight" in params:
        return params["personal.weight"]
    hidden = F.relu(F.linear(share, params["hyper.in.weight"], params["hyper.in.bias"]))
    return F.linear(hidden, params["hyper.out.weight"], params["hyper.out.bias"]).view(len(share), -1)
