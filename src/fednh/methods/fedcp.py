"""FedCP: Zhang, Hua, Wang, Song, Xue, Ma, Guan, "FedCP: Separating Feature Information for Personalized Federated
Learning via Conditional Policy", KDD 2023, Algorithm 1.

A small network, the conditional policy network (CPN), divides the features h = f(x) of each sample into a part for the
global head and one for the client's own. With v_i the client's own head summed over classes, scaled to unit length:

    {r, s} = CPN(h * v_i),  r + s = 1 in every dimension
    out = global head(r * h) + own head(s * h)
    loss = cross-entropy(out) + lambda * MMD^2(h, h of the body received)                           -> client_update

The CPN is linear (D -> 2D), LayerNorm, ReLU, and a softmax over each dimension's pair. While a client trains, its
global head and v_i stay as they are; body, own head and CPN move. Body and CPN are averaged, and as global head the
mean of (global head + own head) / 2, as the authors' code has it. A client whose own head is the global one predicts
with head(r * h + s * h) = head(h): so predicts the global model here, of which the paper has none.
The maximum mean discrepancy is that of a mini-batch, by Gaussian kernels exp(-d^2 / 2a), a = 10, 15, 20, 50, summed.
Deviations: the authors' code adds Gumbel noise before the softmax, while training and while predicting: here a
sample has one policy. It sets v_i at random before the first round, here it is that of the initial head. A personal
model is the client's latest local one, with the global head that it was trained beside (authors' code: measured with
what it has just received); averages are uniform, not by size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fednh.methods.base import (
    MODEL,
    ClientData,
    Fit,
    Method,
    Net,
    Tree,
    prefix,
    select,
    strip_prefix,
    uniform_weights,
    unit,
)

KERNELS = (10.0, 15.0, 20.0, 50.0)  # a of the Gaussian kernels (authors' code)


@dataclass(frozen=True)
class FedCP(Method):
    """A shared policy network divides each sample's features between the global head and the client's own."""

    cite = "Zhang et al., FedCP: Separating Feature Information via Conditional Policy, KDD 2023"
    look = ("#be2dbe", 32)
    model = (*MODEL, "personal", "policy")

    lam: Annotated[float, Field(ge=0)] = 5.0  # lambda, how near features stay to those of the body received

    def numbers(self, classes: int, dim: int) -> int:
        return 2 * dim * dim

    def init(self, net: Net, rng: torch.Generator) -> Tree:
        model, dim = net.init(rng), net.dim
        return {
            **model,
            **prefix("personal", select(model, "head")),
            "policy.weight": uniform_weights((2 * dim, dim), dim, rng),
            "policy.bias": uniform_weights((2 * dim,), dim, rng),
            "policy.gain": torch.ones(2 * dim),  # of the LayerNorm
            "policy.shift": torch.zeros(2 * dim),
        }

    def enroll(self, initial: Tree) -> Tree:
        return select(initial, "personal")

    def broadcast(self, server: Tree) -> Tree:
        return select(server, *MODEL, "policy")

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        v = condition(kept)

        def loss(params: Tree, x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tree]:
            h = net.features(params, x)
            with torch.no_grad():
                before = net.features(received, x)
            out = routed(net, params, h, v)
            return F.cross_entropy(out, y, reduction="none") + self.lam * discrepancy(h, before, weight), {}

        start = {**received, **select(kept, "personal")}
        model = fit.batchwise(start, loss, only=("body", "personal", "policy"))
        head = {name: (model[name] + model[f"personal.{name}"]) / 2 for name in select(model, "head")}
        return model, {**select(model, "body", "policy"), **head}

    def global_model(self, server: Tree) -> Tree:
        return select(server, *MODEL)

    def logits(self, net: Net, params: Tree, x: Tensor) -> Tensor:
        h = net.features(params, x)
        return routed(net, params, h, condition(params)) if select(params, "policy") else net.classify(params, h)


def condition(params: Tree) -> Tensor:  # (D,)
    """v_i: the client's own head summed over classes, of unit length."""
    return unit(params["personal.head.weight"].sum(0))


def routed(net: Net, params: Tree, h: Tensor, v: Tensor) -> Tensor:  # (B, D), (D,) -> (B, C)
    """What both heads make of their parts of the features, summed."""
    policy = strip_prefix(params, "policy")
    a = F.linear(h * v, policy["weight"], policy["bias"])  # (B, 2D)
    a = F.layer_norm(a, a.shape[1:], policy["gain"], policy["shift"]).relu()
    s, r = a.view(len(h), 2, -1).softmax(1).unbind(1)  # (B, D) each
    return net.classify(params, r * h) + net.classify(strip_prefix(params, "personal"), s * h)


def discrepancy(h: Tensor, other: Tensor, weight: Tensor) -> Tensor:  # (B, D), (B, D), (B,) -> ()
    """MMD^2 of two sets of features; of a batch's samples those of weight zero do not count."""

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        squares = (a.square().sum(1)[:, None] + b.square().sum(1) - 2 * a @ b.T).clamp(min=0)  # (B, B)
        return torch.stack([(squares / (-2 * width)).exp() for width in KERNELS]).sum(0)

    return ((kernel(h, h) + kernel(other, other) - 2 * kernel(h, other)) * weight * weight[:, None]).sum()
