"""A frozen body in a federation: every site computes the features of its own images, with the agreed weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, RecordDict
from safetensors.torch import save_file

from fednh.config import Config, dump, load
from fednh.errors import Refused
from fednh.flower import protocol
from fednh.flower.admission import disagreement
from fednh.flower.protocol import Order, Task
from fednh.flower.site_config import for_sites
from fednh.inference.model import load_model
from fednh.models import build_net, features
from fednh.seeding import torch_rng
from tests.helpers.compare import identical
from tests.helpers.federation import Wire, deployed, serve, server_identity
from tests.helpers.hostile import Scene, everything, problem, question
from tests.helpers.simulator import simulate

SITES = ("a", "b", "c")
SIDE = 8  # pixels to which images are brought


def images(number: int, seed: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Three classes, which differ in which third of the image is bright."""
    rng, y = np.random.default_rng(seed), np.arange(number) % 3
    x = rng.integers(0, 90, (number, 12, 12, 3), dtype=np.uint8)
    for row, label in enumerate(y):
        x[row, 4 * label : 4 * label + 4] += 120
    return x, y


def body_file(folder: Path, seed: int = 1) -> Path:
    """The weights of a small network."""
    net = build_net("mlp", (3, SIDE, SIDE), 3, {"hidden": [16]})
    save_file(net.init(torch_rng(seed, "body")), folder / f"body-{seed}.safetensors", {"format": "pt"})
    return folder / f"body-{seed}.safetensors"


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "method.name": "fednh",
        "data.name": "own",
        "rounds": 2,
        "train.epochs": 1,
        "eval.every": 1,
        "data.holdout": 0.3,
        "partition.name": "site",
        "participation.rate": 1.0,
        "model.name": "mlp",
        "model.args": {"hidden": [16]},
        "model.weights": str(body_file(folder)),
        "model.frozen": "body",
        "model.adapter": "linear",
        "model.width": 8,
        "features.size": SIDE,
        **more,
    }


def site_files(folder: Path) -> dict[int, dict[str, Any]]:
    """A file of each site, all of them in one for the simulator, and a test set."""
    parts = [images(30 + 6 * k, k) for k in range(len(SITES))]
    nodes = {}
    for k, (name, (x, y)) in enumerate(zip(SITES, parts, strict=True)):
        np.savez(folder / f"{name}.npz", x_train=x, y_train=y)
        nodes[7 + k] = {"data": f"npz:{folder}/{name}.npz", "site": name, "test": f"npz:{folder}/test.npz"}
    x, y = (np.concatenate(column) for column in zip(*parts, strict=True))
    site = np.repeat(SITES, [len(labels) for _, labels in parts])
    x_test, y_test = images(30, 9)
    np.savez(folder / "test.npz", x_train=x_test, y_train=y_test)
    np.savez(folder / "all.npz", x_train=x, y_train=y, site_train=site, x_test=x_test, y_test=y_test)
    return nodes


def federation(
    folder: Path, nodes: dict[int, dict[str, Any]], enough: int | None = None, **more: Any
) -> tuple[Wire, list[str]]:
    """The sites on a wire, run to their end; returns the notes, too."""
    config = load(None, settings(folder, **{"federation.test": f"npz:{folder}/test.npz", **more}))
    wire = deployed(folder / "fed", nodes)
    notes = serve(config, wire, folder / "run", identity=server_identity(folder / "fed"), enough=enough).notes
    return wire, notes


def queries(wire: Wire) -> list[tuple[set[str], str]]:
    """The records of every query, and what the site said that it could not do."""
    return [
        (set(request.content), problem(reply))
        for request, reply in wire.seen
        if request.metadata.message_type == "query" and reply is not None
    ]


OWN_FILE: dict[str, Callable[[Path], dict[str, Any]]] = {
    "a file at the site": lambda folder: {"weights": str(folder / "body-1.safetensors")},
    "sent by the server": lambda folder: {"allow.weights": (folder / "body-1.safetensors").stat().st_size},
}


@pytest.mark.parametrize("views", [1, 3])
@pytest.mark.parametrize("origin", OWN_FILE)
def test_same_models_as_the_simulator_to_the_bit(origin: str, views: int, tmp_path: Path) -> None:
    nodes, more = site_files(tmp_path), {"features.views": views}
    body_file(tmp_path)
    for node in nodes.values():
        node |= OWN_FILE[origin](tmp_path)
    simulate(load(None, settings(tmp_path, **more, **{"data.name": f"npz:{tmp_path}/all.npz"})), tmp_path / "simulated")
    federation(tmp_path, nodes, **more)
    one, other = (tmp_path / name / "models/global.safetensors" for name in ("simulated", "run"))
    pairs = [(one, other)]
    for client, site in enumerate(SITES):
        personal = tmp_path / f"simulated/models/personal/client-{client:06d}.safetensors"
        pairs.append((personal, tmp_path / f"fed/state/fednh/{site}/personal.safetensors"))
    x = images(6, 20)[0]
    for left, right in pairs:
        ours, theirs = load_model(left), load_model(right)
        identical(ours.params, theirs.params)
        assert np.array_equal(ours.predict(x), theirs.predict(x)), "images go in, whoever has the model"
    rows = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("simulated", "run")]
    assert rows[0]["gm"] == rows[1]["gm"]
    assert rows[0]["pm_v"] == rows[1]["pm_v"]
