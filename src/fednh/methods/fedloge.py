"""FedLoGe: Xiao, Chen, Liu, Feng, Wu, Liu, Zhou, Yang, Liu,
"FedLoGe: Joint Local and Generic Federated Learning under Long-tailed Data", ICLR 2024.

Three linear classifiers read one body: the frame, which is fixed and the same for all; psi, which is averaged ("head");
and phi_k, the client's own ("local").

SSE-C  the frame is a static sparse equiangular tight frame: `sparsity` of its entries are zero, its rows have
       length `norm` and are as far apart as these zeros allow                            -> init
       the body trains against the frame; psi and phi_k train on its features, detached   -> client_update
GLA    the global model has psi with rows of unit length: a row's length grows with the number of samples of its class,
       which a generic model should not prefer                                            -> global_model
LGA    the personal model has psi with each row times the length of phi_k's, plus phi_k, on the averaged body; classes
       that the client lacks are never predicted (authors' code)                          -> personal_model

Deviations: every row of the frame has the same number of zeros (authors' code: random over the whole matrix), and its
other entries come from L-BFGS on an energy of all distances (authors' code: Adam on the smallest angles and the
lengths). The frame has no bias (authors' code: a random one, fixed). phi_k starts as psi does (authors' code: each at
random). The three losses are added and minimised together, and clipped together (authors' code: no clipping). Rows of
the global psi have length 1 (authors' code: 1.7), which matters for probabilities only, but for predictions too where
the head has a bias. Clients count alike in the average (authors' code: by size). Classes that a client lacks are those
of its training samples (authors' code: of its test distribution).

`norm` is that of the authors' code, for a ResNet with batch normalisation. A body without normalisation has to make its
features far longer before the frame's logits differ, and psi and phi_k overshoot on them: on the digits 1 is better.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

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
    cross_entropy,
    not_unit,
    prefix,
    select,
    sparse_head,
    strip_prefix,
    unit,
)


@dataclass(frozen=True)
class FedLoGe(Method):
    """A body trained against a fixed sparse simplex; a global and a local head whose row lengths are realigned."""

    cite = "Xiao et al., FedLoGe: Joint Local and Generic Federated Learning under Long-tailed Data, ICLR 2024"
    look = ("#5f4b8b", 11)

    sparsity: Annotated[float, Field(ge=0, lt=1)] = 0.6  # the share of zeros in each row of the frame
    norm: Annotated[float, Field(gt=0)] = 0.1  # the length of its rows

    def init(self, net: Net, rng: torch.Generator) -> Tree:
        model = net.init(rng)
        return {**model, "frame": self.norm * sparse_head(net.num_classes, net.dim, self.sparsity, rng)}  # SSE-C

    def enroll(self, initial: Tree) -> Tree:
        return prefix("local", strip_prefix(initial, "head"))

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        by_frame = cross_entropy(lambda params, h: h @ params["frame"].T)
        by_head = cross_entropy(net.classify)

        def loss(params: Tree, x: Tensor, y: Tensor) -> Tensor:
            h = net.features(params, x)
            local = prefix("head", strip_prefix(params, "local"))
            return by_frame(params, h, y) + by_head(params, h.detach(), y) + by_head(local, h.detach(), y)

        model = fit({**received, **kept}, loss, only=(*MODEL, "local"))
        return select(model, "local"), select(model, *MODEL)

    def global_model(self, server: Tree) -> Tree:
        return {**select(server, *MODEL), "head.weight": unit(server["head.weight"])}  # GLA

    def personal_model(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> Tree:
        psi, phi = strip_prefix(received, "head"), strip_prefix(kept, "local")
        aligned = {**psi, "weight": psi["weight"] * phi["weight"].norm(dim=1, keepdim=True)}  # LGA
        head = prefix("head", {name: aligned[name] + phi[name] for name in phi})  # the sum of two linear heads
        return {**select(received, "body"), **head, "owned": (data.counts > 0).to(psi["weight"].dtype)}

    def problem(self, server: Tree) -> str | None:
        return not_unit(server["frame"] / self.norm)

    def logits(self, net: Net, params: Tree, x: Tensor) -> Tensor:
        scores = net.logits(params, x)
        return scores.masked_fill(params["owned"] == 0, -torch.inf) if "owned" in params else scores
