"""Two of ten clients are hostile: the mean fails, the robust averages hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from fednh.config import load
from fednh.data.batches import ClientData
from fednh.federated.setup import Federation, build_federation
from fednh.methods import METHODS, Method
from fednh.methods.fit import Fit
from fednh.models import Net
from fednh.tree import Tree
from tests.helpers.counts import count
from tests.helpers.simulator import run_config

SETTINGS = {
    "rounds": 6,
    "train.epochs": 2,
    "eval.every": 0,
    "partition.name": "iid",
    "partition.clients": 10,
    "participation.rate": 1.0,
    "checkpoint.every": 0,
}


def sign_flip(received: Tree, upload: Tree) -> Tree:
    """Ten times the opposite of what was learned."""
    return {n: received[n] - 10 * (v - received[n]) if n in received else -10 * v for n, v in upload.items()}


def noise(received: Tree, upload: Tree) -> Tree:
    rng = torch.Generator().manual_seed(0)
    return {n: v + 10 * torch.randn(v.shape, generator=rng) for n, v in upload.items()}


def nan(received: Tree, upload: Tree) -> Tree:
    return {n: v * torch.nan for n, v in upload.items()}


def zeros(received: Tree, upload: Tree) -> Tree:
    return {n: torch.zeros_like(v) for n, v in upload.items()}


ATTACKS: dict[str, Callable[[Tree, Tree], Tree]] = {"sign_flip": sign_flip, "noise": noise, "nan": nan, "zeros": zeros}


def attacked(federation: Federation, attack: str) -> Federation:
    """The same federation, but clients 0 and 1 upload what the attack makes of their honest upload."""
    base = type(federation.method)

    @dataclass(frozen=True)
    class Attacked(base):  # type: ignore[valid-type,misc]
        def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
            keep, upload = super().client_update(net, kept, received, data, fit)
            hostile = data._address[2] in (0, 1)
            return keep, ATTACKS[attack](received, upload) if hostile else upload

    method: Method = Attacked()
    return federation.with_method(method)


def accuracy(method: str, aggregator: str, attack: str | None, path: Path) -> float:
    config = load("digits", {**SETTINGS, "method.name": method, "aggregator": aggregator})
    federation = build_federation(config)
    _, summary, _ = run_config(path, config, attacked(federation, attack) if attack else federation)
    count("faults injected", 2 * config.rounds if attack else 0)
    return float(summary["gm"])


@pytest.mark.soak
@pytest.mark.parametrize("method", ["fedavg", "fednh"])
def test_the_mean_fails(method: str, tmp_path: Path) -> None:
    honest = accuracy(method, "mean", None, tmp_path / "honest")
    assert honest > 85
    for attack in ("sign_flip", "noise"):
        assert accuracy(method, "mean", attack, tmp_path / attack) < honest - 25, attack


@pytest.mark.parametrize(
    "attack", [a if a == "sign_flip" else pytest.param(a, marks=pytest.mark.soak) for a in ATTACKS]
)
@pytest.mark.parametrize("aggregator", ["median", "trimmed_mean", "norm_clip"])
@pytest.mark.parametrize("method", [pytest.param("fedavg", marks=pytest.mark.soak), "fednh"])
def test_robust_averages_hold(method: str, aggregator: str, attack: str, tmp_path: Path) -> None:
    assert accuracy(method, aggregator, attack, tmp_path / "r") > 75


@dataclass(frozen=True)
class Turned(METHODS["fednh"]):  # type: ignore[misc]
    """FedNH with one hostile client of ten, which puts every class on the first axis, very far out."""

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        keep, upload = super().client_update(net, kept, received, data, fit)
        if data._address[2] == 9:
            upload = {**upload, "prototypes": torch.zeros_like(upload["prototypes"])}
            upload["prototypes"][:, 0] = 1e6
        return keep, upload


@pytest.mark.parametrize(
    "aggregator", ["trimmed_mean", *(pytest.param(a, marks=pytest.mark.soak) for a in ("mean", "median", "norm_clip"))]
)
def test_one_of_ten_does_not_turn_prototypes_of_classes_with_few_owners(aggregator: str, tmp_path: Path) -> None:
    """Two classes a client, so about two owners a class; FedNH moves its prototypes fast (rho = 0.5)."""
    few = {"partition.name": "classes", "partition.classes_per_client": 2, "method.rho": 0.5, "aggregator": aggregator}
    config = load("digits", {**SETTINGS, **few, "rounds": 4, "train.epochs": 1})
    federation = build_federation(config).with_method(Turned(rho=0.5))
    simulation, _, _ = run_config(tmp_path / "r", config, federation)
    count("faults injected", config.rounds)
    cosine = simulation.server["head.weight"][:, 0]  # of unit prototypes to the attacker's direction
    assert (cosine > 0.99).all() if aggregator == "mean" else (cosine < 0.75).all(), cosine


def test_nan_from_two_is_refused_whatever_the_average(tmp_path: Path) -> None:
    assert accuracy("fedavg", "mean", "nan", tmp_path / "r") > 85


@pytest.mark.soak
@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("aggregator", ["median", "trimmed_mean", "norm_clip"])
@pytest.mark.parametrize("method", [m for m in METHODS if m not in ("local", "fedproto", "fedrep", "fedavg", "fednh")])
def test_robust_averages_hold_for_every_method(method: str, aggregator: str, attack: str, tmp_path: Path) -> None:
    honest = accuracy(method, "mean", None, tmp_path / "honest")
    assert accuracy(method, aggregator, attack, tmp_path / "r") > honest - 20
