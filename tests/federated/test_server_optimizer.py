"""The server's optimiser: its steps by hand, what it leaves alone, and that a resumed run has the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fednh
from fednh.config import load
from fednh.config.schema import ServerConfig
from fednh.errors import Interrupted
from fednh.federated.server_optimizer import ServerOptimizer, merge_moments, split_moments
from fednh.io.files import read_tree
from fednh.methods import METHODS
from fednh.methods.fedavg import FedAvg
from fednh.methods.fednh import FedNH
from fednh.methods.pfedfda import PFedFDA
from fednh.tree import Tree, Uploads
from tests.helpers.compare import identical
from tests.helpers.federation import federate

QUICK: dict[str, Any] = {
    "rounds": 4,
    "partition.clients": 6,
    "participation.rate": 0.5,
    "train.epochs": 1,
    "eval.every": 0,
    "eval.samples": 100,
    "model.args": {"hidden": [8]},
}
MOMENTUM: dict[str, Any] = {"server.optimizer": "momentum", "server.momentum": 0.5}
# Clients return w + 1, then w + 1 again, then w - 4: the steps are 1, 1 and -4. By hand, from w = 0, eta = 0.5 (mean
# and momentum) or 2 (adam, yogi), beta = 0.5, beta2 = 0.75, tau = 1.
STEPS = (1.0, 1.0, -4.0)
BY_HAND = {
    "mean": (0.5, 1.0, -1.0),
    "momentum": (0.5, 1.25, -0.375),  # m = 1, 1.5, -3.25
    # m = 0.5, 0.75, -1.625; v = 1, 1, 4.75 from v = 1
    "adam": (0.5, 1.25, 1.25 - 3.25 / (4.75**0.5 + 1)),
    # v - (1 - beta2) d^2 sign(v - d^2): 1 and 1 stay, since the sign is 0; then 1 + 0.25 * 16 = 5
    "yogi": (0.5, 1.25, 1.25 - 3.25 / (5**0.5 + 1)),
}


@pytest.mark.parametrize("rule", BY_HAND)
def test_steps_by_hand(rule: str) -> None:
    lr = 2.0 if rule in ("adam", "yogi") else 0.5
    config = ServerConfig(optimizer=rule, lr=lr, momentum=0.5, beta2=0.75, tau=1.0)  # type: ignore[arg-type]
    optimizer, server, moments = (
        ServerOptimizer(config, FedAvg()),
        {"head.weight": torch.zeros(1)},
        Tree(),
    )
    for step, expected in zip(STEPS, BY_HAND[rule], strict=True):
        uploads = Uploads({"head.weight": server["head.weight"] + step}, count=3)
        uploads, moments = optimizer.step(server, uploads, moments)
        server = FedAvg().aggregate(server, uploads)
        assert server["head.weight"].item() == pytest.approx(expected, abs=1e-6)


def test_momentum_is_torch_sgd_on_the_negative_step() -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    sgd = torch.optim.SGD([weight], lr=0.7, momentum=0.8)
    optimizer = ServerOptimizer(ServerConfig(optimizer="momentum", lr=0.7, momentum=0.8), FedAvg())
    server, moments = {"w": weight.detach().clone()}, dict[str, torch.Tensor]()
    for seed in range(5):
        move = torch.randn(3, generator=torch.Generator().manual_seed(seed))
        weight.grad = -move
        sgd.step()
        uploads, moments = optimizer.step(server, Uploads({"w": server["w"] + move}, 1), moments)
        server = FedAvg().aggregate(server, uploads)
        assert torch.allclose(server["w"], weight.detach(), atol=1e-6)


def test_prototypes_and_statistics_are_left_alone() -> None:
    momentum = ServerConfig(optimizer="momentum")
    server = {"body.weight": torch.zeros(2), "scale": torch.ones(()), "head.weight": torch.eye(2)}
    upload = {"body.weight": torch.ones(2), "scale": torch.ones(()), "prototypes": torch.eye(2)}
    assert ServerOptimizer(momentum, FedNH()).moved(server, upload) == ["body.weight", "scale"]
    gaussian = {"body.weight": torch.ones(2), "means": torch.eye(2), "covariance": torch.eye(2)}
    assert ServerOptimizer(momentum, PFedFDA()).moved(gaussian, gaussian) == ["body.weight"]


def test_moments_survive_a_checkpoint() -> None:
    server, moments = {"body.weight": torch.ones(2)}, {"body.weight.m": torch.zeros(2), "body.weight.v": torch.ones(2)}
    both = split_moments(merge_moments(server, moments))
    identical(both[0], server)
    identical(both[1], moments)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_with_momentum_or_says_why_not(method: str, tmp_path: Path) -> None:
    quick: dict[str, Any] = {
        "creff": {"method.retrain_epochs": 5, "method.match_steps": 5},
        "fedetf": {"method.turn_epochs": 1},
    }
    settings: dict[str, Any] = {**QUICK, **MOMENTUM, "method.name": method, "rounds": 2, **quick.get(method, {})}
    if method in ("local", "fedproto", "fedtgp") or METHODS[method].training_free:
        with pytest.raises(fednh.UserError, match=r"clients train and the server averages, and .* has none"):
            fednh.run("digits", out=tmp_path / "run", **settings)
        assert not (tmp_path / "run/metrics.jsonl").exists()
        return
    fednh.run("digits", out=tmp_path / "run", **settings)
    fednh.run("digits", out=tmp_path / "plain", **{**settings, "server.optimizer": "mean"})
    with_momentum, plain = (last_server(tmp_path / name) for name in ("run", "plain"))
    moved = [name for name in plain if not torch.equal(plain[name], with_momentum[name])]
    assert moved, "momentum changes the second round"
    assert bytes_down(tmp_path / "run") == bytes_down(tmp_path / "plain"), "moments are never sent"


def test_the_same_bits_on_every_executor(tmp_path: Path) -> None:
    settings: dict[str, Any] = {**QUICK, **MOMENTUM, "method.name": "fednh"}
    for engine in ("loop", "vmap"):
        fednh.run("digits", out=tmp_path / engine, **settings, engine=engine)
    federate(load("digits", settings), tmp_path / "flower")
    first = read_tree(tmp_path / "loop/models/global.safetensors")
    identical(read_tree(tmp_path / "flower/models/global.safetensors"), first)
    for name, value in read_tree(tmp_path / "vmap/models/global.safetensors").items():
        assert torch.allclose(value, first[name], atol=1e-4), name


@pytest.mark.parametrize("rule", ["momentum", "yogi"])
def test_a_resumed_run_has_the_same_bits(rule: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {**QUICK, "server.optimizer": rule, "method.name": "fedavg", "checkpoint.every": 1}

    class StopAfterTwo(fednh.Callback):
        def on_round(self, record: dict[str, Any]) -> bool:
            return bool(record["round"] == 2)

    fednh.run("digits", out=tmp_path / "whole", **settings)
    with pytest.raises((Interrupted, fednh.UserError)):
        fednh.run("digits", out=tmp_path / "cut", callbacks=[StopAfterTwo()], **settings)
    fednh.resume(tmp_path / "cut")
    identical(last_server(tmp_path / "cut"), last_server(tmp_path / "whole"))


def last_server(run: Path) -> Tree:
    """The server's state in the last checkpoint, without its moments."""
    files = sorted((run / "checkpoints").rglob("server*.safetensors"))
    return split_moments(read_tree(files[-1]))[0]


def bytes_down(run: Path) -> list[int]:
    return [json.loads(line)["bytes_down"] for line in (run / "metrics.jsonl").read_text().splitlines()]
