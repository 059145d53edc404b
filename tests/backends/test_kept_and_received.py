"""Where a name is both kept and received, the method says which one counts: on every engine, backend and site."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from fednh.config import Config, load
from fednh.federated import client as clients
from fednh.federated.setup import build_federation
from fednh.tree import Tree
from tests.helpers import kept_or_received
from tests.helpers.kept_or_received import KeptOrReceived, Source
from tests.helpers.simulator import run_config

NAME = f"{kept_or_received.__name__}:{KeptOrReceived.__name__}"
SOURCES: tuple[str, ...] = get_args(Source)
CHOICES = [
    {"body": body, "head": head, "names": names, "enrolls": enrolls, "uploads": uploads}
    for body, head, names, enrolls, uploads in product(
        SOURCES, SOURCES, ("none", "same", "other", "both"), (False, True), ("all", "body")
    )
    if names != "none" or (body, head) == ("received", "received")
]
SOME = CHOICES[::15]  # of 194; every value of every choice occurs


def small(choice: dict[str, Any], **more: Any) -> Config:
    """Digits on twelve clients, of which seven train in each of three rounds: newcomers beside others."""
    settings = {f"method.{key}": value for key, value in choice.items()} | {
        "method.name": NAME,
        "partition.clients": 12,
        "participation.rate": 0.6,
        "rounds": 3,
        "train.epochs": 1,
        "model.args": {"hidden": [8]},
        "eval.every": 0,
        "workers": 1,
    }
    return load("digits", settings | more)


def called(choice: dict[str, Any]) -> str:
    return "-".join(map(str, choice.values()))


def kept_by_all(config: Config, path: Path) -> tuple[list[dict[str, Any]], list[Tree]]:
    """The rounds' records, the server's state, and what every client kept, after a run."""
    simulation, _, told = run_config(path, config, build_federation(config))
    store = simulation.executor.store
    assert simulation.executor.engine == config.engine
    return told.records, [simulation.server, *(store.get(client) for client in sorted(store.members))]


@pytest.mark.parametrize("choice", SOME, ids=called)
def test_blocks_use_what_the_method_says(
    choice: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks_and_loop(choice, tmp_path, monkeypatch)


@pytest.mark.soak
@pytest.mark.parametrize("choice", CHOICES, ids=called)
def test_blocks_use_what_every_method_says(
    choice: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks_and_loop(choice, tmp_path, monkeypatch)


def blocks_and_loop(choice: dict[str, Any], path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, update = list[Any](), clients.update
    monkeypatch.setattr(clients, "update", lambda *client: alone.append(client) or update(*client))
    records, blocks = kept_by_all(small(choice, engine="vmap"), path / "vmap")
    assert not alone, "a block was given up"
    _, loop = kept_by_all(small(choice, engine="loop"), path / "loop")
    first, second = (set(record["clients"]) for record in records[:2])
    assert first & second
    assert second - first, "newcomers"
    for one, other in zip(blocks, loop, strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            torch.testing.assert_close(one[name], value, atol=1e-5, rtol=1e-4)


def test_what_a_method_takes_from_what_it_kept_makes_a_difference(tmp_path: Path) -> None:
    """Otherwise the tests above would pass on an engine that throws it away."""
    (_, (server, *_)), (_, (averaged, *_)) = (
        kept_by_all(small(choice, engine="vmap"), tmp_path / called(choice))
        for choice in ({"head": "kept"}, {"head": "received"})
    )
    assert (server["head.weight"] - averaged["head.weight"]).abs().max() > 1e-2
