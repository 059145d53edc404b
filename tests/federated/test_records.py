"""Records: what the server keeps for single clients reaches them, on every executor, and is part of a checkpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from fednh.config import Config, load
from fednh.data.batches import ClientData
from fednh.errors import RunError
from fednh.federated.aggregate import merge_overrides, received, split_overrides
from fednh.federated.setup import build_federation
from fednh.io.files import read_tree
from fednh.methods.base import MODEL, UploadSpec
from fednh.methods.fedavg import FedAvg
from fednh.methods.fit import Fit
from fednh.models import Net
from fednh.tree import Tree, Uploads, select
from tests.helpers.compare import identical
from tests.helpers.federation import federate
from tests.helpers.simulator import run_config

every_executor = pytest.mark.parametrize("executor", ["loop", "vmap", "flower"])


@dataclass(frozen=True)
class Counting(FedAvg):
    """Only the server remembers how often a client took part: a client sends back what it received plus one.

    The second upload of clients with `spoiled` samples is never finite.
    """

    upload = UploadSpec(recorded=("times",))
    spoiled: int = -1

    def init(self, net: Net, rng: torch.Generator) -> Tree:
        return {**net.init(rng), "times": torch.zeros(2)}

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        model, _ = super().client_update(net, kept, select(received, *MODEL), data, fit)
        refused = (data.counts.sum() == self.spoiled) & (received["times"] == 1)
        return model, {**model, "times": received["times"] + torch.where(refused, torch.nan, 1.0)}

    def aggregate(self, server: Tree, uploads: Uploads) -> Tree:
        return {**super().aggregate(server, uploads), "times": server["times"]}  # whoever is new receives 0

    def records(self, server: Tree, uploads: list[Tree]) -> list[Tree]:  # type: ignore[override]
        assert all(set(upload) == {"times"} for upload in uploads), "nothing but what is recorded"
        return uploads

    def personal_model(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> Tree:
        return {**super().personal_model(net, kept, received, data, fit), "times": received["times"]}


def config(**settings: Any) -> Config:
    quick = {"partition.clients": 8, "participation.rate": 0.5, "train.epochs": 1, "train.batch_size": 2000}
    name = {"method.name": f"{__name__}:Counting"}
    return load(
        "digits",
        {**quick, **name, "rounds": 4, "eval.every": 0, "eval.samples": 20, "model.args": {"hidden": [4]}, **settings},
    )


def run(executor: str, path: Path, settings: Config) -> None:
    if executor == "flower":
        federate(settings, path)
    else:
        run_config(path, settings.model_copy(update={"engine": executor}))


def took_part(path: Path) -> dict[int, int]:
    """In how many rounds a client's upload was used."""
    rounds = [json.loads(line)["clients"] for line in (path / "metrics.jsonl").read_text().splitlines()]
    everybody = [client for clients in rounds for client in clients]
    return {client: everybody.count(client) for client in set(everybody)}


def remembered(path: Path) -> dict[int, float]:
    """What the clients received after the last round, by the personal models that they made of it."""
    files = sorted((path / "models" / "personal").glob("*.safetensors"))
    return {int(file.stem.split("-")[-1]): float(read_tree(file)["times"][0]) for file in files}


@every_executor
def test_a_client_receives_its_own_record(executor: str, tmp_path: Path) -> None:
    """Some clients drop out, and one's upload is refused: these keep the record that they had."""
    sizes = [len(part) for part in build_federation(config()).parts]
    found = config(**{"participation.dropout": 0.2, "rounds": 6, "method.spoiled": sizes[0]})
    assert sizes.count(sizes[0]) == 1
    run(executor, tmp_path, found)
    times = took_part(tmp_path)
    assert remembered(tmp_path) == times
    assert times[0] == 1, "refused from its second round on"
    assert len(set(times.values())) > 2
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert sum(0 in line["refused"] for line in lines) > 1
    assert any(line["dropped"] for line in lines)
    newcomer = read_tree(tmp_path / "models" / "broadcast.safetensors")
    assert newcomer["times"].tolist() == [0, 0], "what all receive"


@every_executor
def test_records_survive_an_interruption(executor: str, tmp_path: Path) -> None:
    run(executor, tmp_path, config(rounds=2))
    assert max(remembered(tmp_path).values()) == 2
    run(executor, tmp_path, config())
    assert remembered(tmp_path) == took_part(tmp_path)


def test_what_travels_down_counts_the_same_for_everybody(tmp_path: Path) -> None:
    simulation, _, told = run_config(tmp_path, config())
    down = sum(value.numel() * 4 for value in simulation.server.values())
    assert {record["bytes_down"] for record in told.records} == {4 * down}


def test_records_lie_beside_the_servers_state_in_a_checkpoint() -> None:
    server, down = {"body.w": torch.ones(2), "record": torch.zeros(1)}, {"body.w": torch.ones(2)}
    records = {3: {"body.w": torch.full((2,), 3.0)}, 12: {"body.w": torch.full((2,), 12.0)}}
    again, found = split_overrides(merge_overrides(server, records))
    identical(again, server)
    assert set(found) == {3, 12}
    identical(found[12], records[12])
    identical(received(down, found, 3), records[3])
    identical(received(down, found, 4), down)


@dataclass(frozen=True)
class Wrong(Counting):
    """Makes records that break a promise."""

    how: str = ""

    def records(self, server: Tree, uploads: list[Tree]) -> list[Tree]:  # type: ignore[override]
        wrong = {"fewer": uploads[1:], "name": [{"secret": torch.ones(2)}] * 4, "shape": [{"times": torch.ones(3)}] * 4}
        return wrong[self.how]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("fewer", "3 records are made of 4 uploads"),
        ("name", "secret does not belong there"),
        ("shape", r"times is \(3,\) torch.float32, not \(2,\) torch.float32"),
    ],
)
def test_a_record_replaces_what_is_broadcast_and_nothing_else(how: str, words: str, tmp_path: Path) -> None:
    found = config()
    federation = build_federation(found).with_method(Wrong(how=how))
    with pytest.raises(RunError, match=f"invariant broken by Wrong: the records of round 1: {words}"):
        run_config(tmp_path, found, federation)
