"""The same numbers on Flower as in the simulator, from the same config, for every method."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from fednh.config import dump, load
from fednh.flower.client_app import Site
from fednh.flower.site_config import read_site_config
from fednh.methods import METHODS
from tests.helpers.compare import lines, same_runs
from tests.helpers.config import small
from tests.helpers.federation import federate
from tests.helpers.simulator import simulate


@pytest.mark.parametrize("method", METHODS)
def test_same_models_and_figures_as_the_simulator(method: str, tmp_path: Path) -> None:
    config = small(method)
    simulate(config, tmp_path / "simulator")
    federate(config, tmp_path / "flower")
    same_runs(tmp_path / "simulator", tmp_path / "flower")
    rows = json.loads((tmp_path / "flower" / "summary.json").read_text())["clients"]
    assert [row["site"] for row in rows] == [f"client-{row['client']:06d}" for row in rows], "names of sites"


def test_all_sites_are_measured_in_the_end_where_the_simulator_takes_a_sample(tmp_path: Path) -> None:
    config = small("fedper", **{"eval.final": 2, "participation.rate": 1.0})
    simulate(config, tmp_path / "simulator")
    federate(config, tmp_path / "flower")
    sampled, everybody = (lines(tmp_path / name)[-1]["clients"] for name in ("simulator", "flower"))
    assert [row["client"] for row in everybody] == [0, 1, 2, 3, 4]
    assert len(sampled) == 2
    assert all(row in everybody for row in sampled)


@pytest.mark.parametrize("method", ["fedrod", "ditto", "fedbabu"])
def test_same_models_with_the_fednh_authors_settings(method: str, tmp_path: Path) -> None:
    theirs = load("cifar10", {"method.name": method}).method
    config = small(method, **{f"method.{key}": value for key, value in theirs.items()})
    simulate(config, tmp_path / "simulator")
    federate(config, tmp_path / "flower")
    same_runs(tmp_path / "simulator", tmp_path / "flower")


def test_the_same_sample_is_looked_at_also_in_an_extended_run(tmp_path: Path) -> None:
    config = small("fedper", **{"eval.clients": 1, "eval.samples": 40})
    simulate(config, tmp_path / "simulator")
    federate(config.model_copy(update={"rounds": 1}), tmp_path / "flower")
    federate(config, tmp_path / "flower")
    same_runs(tmp_path / "simulator", tmp_path / "flower")


class Dropping(nn.Module):
    def __init__(self, num_classes: int):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Dropout(0.3))
        self.head = nn.Linear(8, num_classes)


def test_sites_draw_what_the_simulator_draws(tmp_path: Path) -> None:
    """Dropout, in FedBABU's rounds and in the fine-tuning of its personal models."""
    config = small("fedbabu", **{"model.name": f"{__name__}:Dropping", "model.args": {}, "rounds": 2})
    simulate(config, tmp_path / "simulator")
    federate(config, tmp_path / "flower")
    same_runs(tmp_path / "simulator", tmp_path / "flower")


def test_a_site_measures_on_all_of_its_own_test_part(tmp_path: Path) -> None:
    """eval.samples bounds a shared test set; what a site holds out, or has as its own test part, is used whole."""
    x, y = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32), np.arange(60) % 3
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x[:30], y_test=y[:30])
    settings = {"data.name": "own", "partition.name": "site", "eval.samples": 6, "model.name": "mlp"}
    place = read_site_config({"site": "a", "state": str(tmp_path / "state"), "data": f"npz:{tmp_path}/a.npz"})
    site = Site(place, dump(load("digits", settings)), None)
    assert (len(site.fed.test), len(site._held_out())) == (6, 30)
