"""FedPAC: Xu, Tong, Huang, "Personalized Federated Learning with Feature Alignment and Classifier Collaboration",
ICLR 2023, Algorithm 1.

A client trains first its head for an epoch, with the body fixed, then the body, with the head fixed: there the loss is
cross-entropy + lambda * (1/D) ||f(x) - c_y||^2, where c_y is the global centroid of the label's class. Bodies are
averaged. The centroid of a class is the mean representation of all its samples in the round, each by its client's body.
The server gives client i the head sum_j alpha_ij phi_j, where alpha_i solves the quadratic program

    min  sum_j alpha_j^2 V_j + sum_c || sum_j alpha_j (h_ic - h_jc) ||^2   with  alpha >= 0, sum_j alpha_j = 1

over the round's clients j: the first term is the variance of the mixture, the second its bias for client i. They are
estimated before training, by the body received: with z = f(x), p_c the client's class shares and n its samples,
h_c = p_c E[z | c] and V = (E ||z||^2 - sum_c ||h_c||^2) / n.

Deviations. Bodies are averaged uniformly, as everywhere here; the authors' code weighs by sizes. The head trains at the
body's learning rate; the authors' code has 0.1 for it. A class that no client of the round has keeps its centroid, and
one never seen pulls nothing; in the authors' code it pulls to the client's own mean. The program is solved exactly; the
authors' code cuts off weights below 0.001 and, where rounding makes an eigenvalue negative, all those below 0.01. A
client that never took part receives the mean of the last round's heads, which is the global model's, too: the paper has
no global model, and its clients start with the initial head.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    Uploads,
    UploadSpec,
    class_means,
    cross_entropy,
    select,
)


def negative(upload: Tree) -> str | None:
    """Neither a count nor a variance is negative."""
    if (upload["sums"][:, -1] < 0).any():
        return "it counts fewer than 0 samples of a class"
    return "its variance is negative" if upload["statistics.variance"] < 0 else None


@dataclass(frozen=True)
class FedPAC(Method):
    """Features are pulled to global class centroids; the server mixes each client a head of its own from all heads."""

    cite = "Xu et al., Personalized Federated Learning with Feature Alignment and Classifier Collaboration, ICLR 2023"
    look = ("#2b5be0", 21)
    # The last column of `sums` has the class counts.
    upload = UploadSpec(by_class=("sums",), class_counts=True, recorded=("head", "statistics"), problem=negative)

    lam: Annotated[float, Field(ge=0)] = 1.0  # lambda, the pull towards the global centroids
    head_epochs: Annotated[int, Field(ge=0)] = 1  # epochs on the head, before train.epochs on the body

    def init(self, net: Net, rng: torch.Generator) -> Tree:
        return {
            **net.init(rng),
            "centroids": torch.zeros(net.num_classes, net.dim),
            "known": torch.zeros(net.num_classes),  # 1 for a class that somebody has owned so far
        }

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        centroids, known = received["centroids"], received["known"]  # (C, D), (C,)

        def aligned(params: Tree, x: Tensor, y: Tensor) -> Tensor:
            z = net.features(params, x)
            pull = (z - centroids[y]).square().mean(1) * known[y]
            return cross_entropy(net.classify)(params, z, y) + self.lam * pull

        mean, variance = self.statistics(net, received, data)
        model = fit(select(received, *MODEL), cross_entropy(net.logits), only=("head",), epochs=self.head_epochs)
        model = fit(model, aligned, only=("body",))
        means = class_means(lambda x: net.features(model, x), data.batches(), data.counts)
        sums = torch.cat([means, torch.ones_like(means[:, :1])], 1) * data.counts[:, None]
        return model, {**model, "sums": sums, "statistics.mean": mean, "statistics.variance": variance}

    def statistics(self, net: Net, params: Tree, data: ClientData) -> tuple[Tensor, Tensor]:  # (C, D), ()
        """h and V of the client's representations."""

        def moments(x: Tensor) -> Tensor:  # (B, ...) -> (B, D + 1)
            z = net.features(params, x)
            return torch.cat([z, z.square().sum(1, keepdim=True)], 1)

        h = class_means(moments, data.batches(), data.counts) * data.share[:, None]
        mean, length = h[:, :-1], h[:, -1].sum()
        return mean, (length - mean.square().sum()).clamp(min=0) / data.counts.sum()

    def aggregate(self, server: Tree, uploads: Uploads) -> Tree:
        average = uploads.mean()
        sums, count = average["sums"][:, :-1], average["sums"][:, -1:]  # (C, D), (C, 1)
        centroids = torch.where(count > 0, sums / count.clamp(min=1e-12), server["centroids"])
        known = torch.maximum(server["known"], (count[:, 0] > 0).to(count.dtype))
        return {**server, **select(average, *MODEL), "centroids": centroids, "known": known}

    def records(self, server: Tree, uploads: Sequence[Tree]) -> list[Tree]:
        heads = {name: torch.stack([u[name] for u in uploads]) for name in select(uploads[0], "head")}
        alpha = mixtures(
            torch.stack([u["statistics.variance"] for u in uploads]),
            torch.stack([u["statistics.mean"] for u in uploads]),
        )
        mixed = {name: torch.tensordot(alpha.to(rows), rows, 1) for name, rows in heads.items()}  # (K, ...)
        return [{name: rows[k].clone() for name, rows in mixed.items()} for k in range(len(uploads))]


def mixtures(variance: Tensor, mean: Tensor) -> Tensor:  # (K,), (K, C, D) -> (K, K)
    """Row i has the weights of all heads in that of client i: the quadratic program, solved for every client.

    It is a least-squares problem without a constant, min ||A alpha||^2 on the simplex. Then alpha is u / sum(u), where
    u >= 0 minimises ||A u||^2 + (sum(u) - 1)^2: for u = s alpha the best s leaves q / (1 + q), with q = ||A alpha||^2.
    """
    import numpy as np
    from scipy.optimize import nnls  # takes a while to import, and other methods do not need it

    v = variance.detach().cpu().double().clamp(min=0).numpy()
    h = torch.linalg.qr(mean.detach().cpu().double().flatten(1).T).R.numpy()  # (r, K): distances stay the same
    rows = []
    for i in range(len(v)):
        if v[i] == 0:  # nothing is better than a head without variance and bias
            rows.append(np.eye(len(v))[i])
            continue
        a = np.concatenate([np.diag(v) ** 0.5, h - h[:, i : i + 1]]) / v[i] ** 0.5
        u, _ = nnls(np.concatenate([a, np.ones((1, len(v)))]), np.append(np.zeros(len(a)), 1.0))
        rows.append(u / u.sum())
    return torch.from_numpy(np.stack(rows))
