"""Many clients: what a round and its end cost does not depend on how many exist. Counted here; timed in benchmarks/."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fednh.backends import threads
from fednh.config import load
from fednh.data.batches import samples_of
from fednh.data.dataset import Dataset
from fednh.data.partitions.kinds import Dirichlet
from fednh.errors import UserError
from fednh.federated import setup
from fednh.federated.aggregate import RunningMean
from fednh.federated.setup import build_federation
from fednh.runs.run_folder import RunFolder
from fednh.seeding import numpy_rng
from fednh.tree import Tree
from tests.helpers.callbacks import Recorder
from tests.helpers.simulator import play
from tests.helpers.tiny import tiny_dataset

MANY = 20_000


def noise(samples: int) -> Dataset:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((samples, 4), np.float32), rng.integers(0, 3, samples)
    return Dataset("noise", x, y, x[:30], y[:30], ("a", "b", "c"), (0.0,), (1.0,), scale=1.0)


@pytest.mark.parametrize("name", ["iid", "dirichlet", "classes", "shards", "quantity"])
def test_counts_of_many_clients_agree_with_their_parts(name: str) -> None:
    clients = 500
    how = {"partition.name": name, "partition.clients": clients, "partition.min_samples": 1, "partition.beta": 20.0}
    data = noise(20 * clients)
    federation = build_federation(load("digits", {**how, "model.name": "mlp", "model.args": {}}), data)
    expected = [np.bincount(data.y_train[part], minlength=3).tolist() for part in federation.parts]
    assert federation.class_counts().tolist() == expected
    assert sorted(np.concatenate(federation.parts)) == list(range(len(data.y_train)))
    assert all((np.diff(part) > 0).all() for part in federation.parts), "in the order of the data"


def test_clients_that_hold_nothing_out_take_no_draw_each(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = list[str]()

    def counted(seed: int, purpose: str, *address: int) -> np.random.Generator:
        drawn.append(purpose)
        return numpy_rng(seed, purpose, *address)

    monkeypatch.setattr(setup, "numpy_rng", counted)
    how = {"partition.name": "iid", "partition.clients": 1000, "partition.min_samples": 1}
    parts, held = setup.divide(noise(2500), load("digits", how))
    assert drawn == ["partition"]
    assert [len(part) for part in parts] == [3] * 500 + [2] * 500
    assert not any(map(len, held))
    setup.divide(noise(2500), load("digits", {**how, "data.holdout": 0.5}))
    assert len(drawn) == 2 + 1000, "here each has a draw of its own"


def test_a_hopeless_draw_is_given_up_early(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = 0
    real = Dirichlet._owner

    def counted(*args: Any) -> Any:
        nonlocal draws
        draws += 1
        return real(*args)

    monkeypatch.setattr(Dirichlet, "_owner", counted)
    labels = np.arange(10 * MANY) % 3
    with pytest.raises(UserError, match=r"no Dirichlet\(0.3\) draw in 20 gave all 20000 clients"):
        Dirichlet(clients=MANY, beta=0.3, min_samples=5).draw(labels, numpy_rng(0, "partition"))
    assert draws == 20


def test_samples_are_shared_not_copied() -> None:
    data = tiny_dataset()
    assert samples_of(data, "train").x.data_ptr() == data.x_train.ctypes.data
    images = np.zeros((5, 4, 4, 3), np.uint8)
    images = Dataset("i", images, np.arange(5) % 2, images, np.arange(5) % 2, ("a", "b"), (0.0,) * 3, (1.0,) * 3)
    train = samples_of(images, "train")
    assert train.x.dtype == torch.uint8
    assert train.x.data_ptr() == images.x_train.ctypes.data


def test_many_clients_run_and_finish(tmp_path: Path) -> None:
    settings = {
        "rounds": 6,
        "partition.name": "iid",
        "partition.clients": MANY,
        "partition.min_samples": 1,
        "participation.rate": 20 / MANY,
        "model.name": "mlp",
        "train.epochs": 1,
        "eval.every": 3,
        "eval.clients": 5,
        "eval.final": 7,
        "checkpoint.every": 2,
        "store.memory": 0,
    }
    config = load("digits", settings)
    federation = build_federation(config, noise(2 * MANY))
    with RunFolder(tmp_path / "r") as folder:
        simulation = threads.make_run(config, federation, folder, Recorder())
        folder.begin(config, federation.dataset.classes, federation.class_counts())
        summary = simulation.run()
    members = simulation.executor.store.members
    assert 100 < len(members) <= 120
    assert len(summary["clients"]) == 7
    assert {p["client"] for p in summary["clients"]} <= set(members)
    manifest = tmp_path / "r" / "checkpoints" / "round-000006.json"
    assert manifest.stat().st_size < 2000, "no list of clients in it"
    assert len(json.loads((tmp_path / "r" / "partition.json").read_text())["counts"]) == MANY


def test_the_final_sample_bounds_evaluation_and_models(tmp_path: Path) -> None:
    def models(path: Path) -> set[int]:
        return {int(p.stem.removeprefix("client-")) for p in (path / "models" / "personal").iterdir()}

    _, whole, told = play(tmp_path / "all", participation__rate=0.5)
    _, part, told_part = play(tmp_path / "some", participation__rate=0.5, eval__final=2)
    assert told.records[-1]["pm_l"] == told_part.records[-1]["pm_l"], (
        "the last round's figures are those of its clients"
    )
    assert len(part["clients"]) == 2
    everyone = {person["client"]: person for person in whole["clients"]}
    assert all(everyone[person["client"]] == person for person in part["clients"])
    assert part["pm_l"] == pytest.approx(np.mean([p["pm_l"] for p in part["clients"]]))
    active = set(told_part.records[-1]["clients"])
    assert models(tmp_path / "some") == active | {p["client"] for p in part["clients"]}
    assert models(tmp_path / "all") == set(everyone)


ALIVE: list[int] = []


def test_aggregation_holds_no_more_uploads_than_it_must(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no memory for client state, which would share the uploads' tensors, each goes when it is added up."""
    ALIVE.clear()
    settings = {"rounds": 1, "partition.clients": 16, "participation.rate": 1.0, "store.memory": 0, "workers": 2}
    config = load("digits", {**settings, "method.name": "fedavg", "checkpoint.every": 0, "train.epochs": 1})
    federation = build_federation(config)
    alive: list[weakref.ref[torch.Tensor]] = []
    add = RunningMean.add

    def counting(self: RunningMean, upload: Tree, *more: float) -> None:
        """Count the uploads that are alive while one is added."""
        alive.append(weakref.ref(next(iter(upload.values()))))
        ALIVE.append(sum(ref() is not None for ref in alive))
        add(self, upload, *more)

    monkeypatch.setattr(RunningMean, "add", counting)
    with RunFolder(tmp_path / "r") as folder:
        folder.begin(config, federation.dataset.classes, federation.class_counts())
        threads.make_run(config, federation, folder, Recorder()).run()
    assert len(ALIVE) == 16
    assert max(ALIVE) <= 3
