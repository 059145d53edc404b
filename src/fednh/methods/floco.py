"""Floco: Grinwald, Wiesner, Nakajima, "Federated Learning over Connected Modes", NeurIPS 2024, Algorithm 1.

The head is not one point but a simplex of M endpoints theta_1 .. theta_M, all of whose mixtures are to be good:

    head(alpha) = sum_m alpha_m theta_m,   alpha_m >= 0,  sum_m alpha_m = 1

In every step a client draws an alpha and trains body and endpoints through head(alpha). Until round tau it draws from
the whole simplex, uniformly. In round tau the server gives each client a place in it: clients whose endpoints moved
alike are to be near each other. It takes the first M principal components of the moves, kappa_k, and projects
kappa_k / z onto the simplex, Euclidean; z is that of a grid for which the places spread most (least Riesz energy, the
mean of 1/distance^2). From then on client k draws alpha within `rho` of its place beta_k, in the L1 norm. Bodies and
endpoints are averaged. The global model has the head of the simplex's centre, a personal one that of the client's
place.

Deviations. In round tau the paper has all clients train. Here those that the round has make components and z; any
other client gets its place by these when it next takes part, and draws from the whole simplex till then. A draw near
beta_k goes from it towards a uniform point of the simplex, by a uniform share of rho at most, and so stays in the
simplex; that of the authors' code may leave it. Endpoints start as the network's head does, each at random (authors'
code: Xavier). A client that takes more steps than it has samples begins with its first alpha again. A head's bias is
mixed like its weights (authors' code: one bias for all). The averages are uniform. The extension Floco+, which trains a
personal simplex beside the shared one, is not here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

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
    cross_entropy,
    prefix,
    select,
    strip_prefix,
)

SIZES = torch.linspace(1e-4, 1, 1000, dtype=torch.float64)  # of z (authors' code)
NEAREST = 1e-4  # a smaller distance counts as this in the Riesz energy (authors' code)


@dataclass(frozen=True)
class Floco(Method):
    """The head is a simplex of endpoints, in which clients whose endpoints move alike get places near each other."""

    cite = "Grinwald et al., Federated Learning over Connected Modes, NeurIPS 2024"
    look = ("#4b82dc", 35)
    upload = UploadSpec(marks=("placed",), recorded=("endpoints", "place", "placed"), single=True)

    endpoints: Annotated[int, Field(ge=2)] = 10  # M
    tau: Annotated[int, Field(ge=1)] = 100  # the round after which clients have places; the paper: after half of all
    rho: Annotated[float, Field(gt=0, le=2)] = 0.1  # how far from its place a client draws; the paper: 0.1 and 0.3

    def numbers(self, classes: int, dim: int) -> int:
        return self.endpoints**2 * classes * dim  # the components

    def init(self, net: Net, rng: torch.Generator) -> Tree:
        models = [net.init(rng) for _ in range(self.endpoints)]
        heads = {name: torch.stack([model[name] for model in models]) for name in select(models[0], "head")}
        numbers = sum(value.numel() for value in heads.values())
        return {
            **select(models[0], "body"),
            **prefix("endpoints", heads),  # (M, ...) each
            **prefix("before", heads),  # the endpoints from which the round's clients started
            "rounds": torch.zeros(()),
            "mean": torch.zeros(numbers),  # of the moves in round tau
            "components": torch.zeros(self.endpoints, numbers),
            "size": torch.ones(()),  # z
        }

    def broadcast(self, server: Tree) -> Tree:
        shared = select(server, "body", "endpoints")
        return {**shared, "place": self.centre(server), "placed": torch.zeros_like(server["size"])}

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        place, placed, number = received["place"], received["placed"], data.counts.sum()
        numbers = data.random(self.endpoints + 1)  # (M + 1, n): a column a step, again from the first after n steps

        def loss(params: Tree, x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tree]:
            column = (params["step"] % number).long()
            alpha = self.drawn(numbers.index_select(1, column[None])[:, 0], place, placed)
            return cross_entropy(net.logits)(mixed(params, alpha), x, y), {"step": params["step"] + 1}

        start = {**select(received, "body", "endpoints"), "step": torch.zeros_like(placed)}
        model = select(fit.batchwise(start, loss, only=("body", "endpoints")), "body", "endpoints")
        return model, {**model, "place": place, "placed": placed}

    def centre(self, params: Tree) -> Tensor:  # (M,)
        """The place of whoever has none of its own."""
        return next(iter(select(params, "endpoints").values())).new_full((self.endpoints,), 1 / self.endpoints)

    def drawn(self, numbers: Tensor, place: Tensor, placed: Tensor) -> Tensor:  # (M + 1,), (M,), () -> (M,)
        """alpha, from M + 1 uniform numbers: of the whole simplex, or from near the client's place."""
        anywhere = -torch.log1p(-numbers[:-1])
        anywhere = anywhere / anywhere.sum().clamp(min=1e-30)
        way = anywhere - place
        share = (self.rho / way.abs().sum().clamp(min=1e-12)).clamp(max=1)
        return torch.where(placed > 0, place + numbers[-1] * share * way, anywhere)

    def aggregate(self, server: Tree, uploads: Uploads) -> Tree:
        before, rounds = strip_prefix(server, "endpoints"), server["rounds"] + 1
        made = {**server, **select(uploads.mean(), "body", "endpoints"), **prefix("before", before), "rounds": rounds}
        if int(rounds) != self.tau:
            return made
        moves = torch.stack([moved(made, tree) for tree in uploads.trees])
        mean, components = principal(moves, self.endpoints)
        size = widest((moves - mean) @ components.T)
        found = {"mean": mean, "components": components, "size": size}
        return made | {name: value.to(server[name]) for name, value in found.items()}

    def records(self, server: Tree, uploads: Sequence[Tree]) -> list[Tree]:
        if int(server["rounds"]) < self.tau:
            return [{} for _ in uploads]
        mean, components, size = (server[name].double() for name in ("mean", "components", "size"))
        placed = torch.ones_like(server["size"])
        moves = torch.stack([moved(server, tree) for tree in uploads])
        found = onto_simplex((moves - mean) @ components.T / size).to(placed)
        return [
            {"place": upload["place"] if upload["placed"] > 0 else place, "placed": placed}
            for upload, place in zip(uploads, found, strict=True)
        ]

    def global_model(self, server: Tree) -> Tree:
        return mixed(server, self.centre(server))

    def personal_model(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> Tree:
        return mixed({**received, **kept}, received["place"])


def mixed(params: Tree, alpha: Tensor) -> Tree:  # (M,)
    """Body and head(alpha)."""
    heads = strip_prefix(params, "endpoints")
    return {**select(params, "body"), **{name: torch.tensordot(alpha, value, 1) for name, value in heads.items()}}


def moved(server: Tree, upload: Tree) -> Tensor:  # (P,), in double precision
    """How far a client's endpoints moved in the round, as one row of numbers."""
    before = strip_prefix(server, "before")
    rows = strip_prefix(upload, "endpoints")
    return torch.cat([(rows[name].double() - value.double()).flatten() for name, value in sorted(before.items())])


def principal(moves: Tensor, number: int) -> tuple[Tensor, Tensor]:  # (K, P) -> (P,), (number, P)
    """The mean of the moves, and their first principal components; zeros where there are no more."""
    mean = moves.mean(0)
    _, lengths, rows = torch.linalg.svd(moves - mean, full_matrices=False)
    rows = rows[lengths > 1e-9 * lengths.max()][:number] if lengths.max() > 0 else rows[:0]
    largest = rows.gather(1, rows.abs().argmax(1, keepdim=True))  # a component's sign is arbitrary: this is positive
    components = moves.new_zeros(number, moves.shape[1])
    components[: len(rows)] = rows * largest.sign()
    return mean, components


def widest(kappa: Tensor) -> Tensor:  # (K, M) -> ()
    """z: the size for which the projections of kappa / z are spread most; the least of equally good ones."""
    sizes = SIZES.to(kappa)
    if len(kappa) < 2:
        return sizes[-1]
    return sizes[int(torch.stack([energy(onto_simplex(kappa / size)) for size in sizes]).argmin())]


def energy(places: Tensor) -> Tensor:  # (K, M) -> ()
    """The Riesz energy of places: the mean of 1/distance^2 over pairs."""
    return torch.pdist(places).clamp(min=NEAREST).square().reciprocal().mean()


def onto_simplex(points: Tensor) -> Tensor:  # (K, M) -> (K, M)
    """The nearest point of the simplex to each: all coordinates lowered alike, and cut off at zero."""
    ordered = points.sort(1, descending=True).values
    place = torch.arange(1, points.shape[1] + 1, device=points.device)
    lower = (ordered.cumsum(1) - 1) / place  # if that many coordinates stay
    stay = (ordered > lower).sum(1, keepdim=True)
    return (points - lower.gather(1, stay - 1)).clamp(min=0)
