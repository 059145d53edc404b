"""The motivating example: its geometry by hand, its verdict in both directions, and the command from end to end."""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from fednh.cli import app
from fednh.experiments.spiral import (
    CENTRAL,
    FEDERATED,
    Example,
    View,
    angle,
    claims,
    disagreement,
    plan,
    smallest_gap,
    verdict,
)


def _circle(*degrees: float) -> np.ndarray[Any, Any]:
    turn = np.radians(degrees)
    return np.stack([np.cos(turn), np.sin(turn)], 1)


def test_angles() -> None:
    assert angle(np.array([1.0, 0]), np.array([0, 5.0])) == pytest.approx(90)
    assert angle(np.array([1.0, 1]), np.array([-2.0, -2])) == pytest.approx(180)
    assert smallest_gap(_circle(0, 60, 120, 180, 240, 300)) == pytest.approx(60)
    assert smallest_gap(_circle(10, 100, 190, 350, 200, 280) * 3) == pytest.approx(10)  # 190 to 200
    assert smallest_gap(_circle(355, 90, 180, 3, 270, 220)) == pytest.approx(8)  # across zero


def test_disagreement_is_measured_on_classes_that_both_clients_own() -> None:
    y = np.repeat(np.arange(6), 2)
    places, heads = [60 * c + d for c in range(6) for d in (-5, 5)], _circle(*range(0, 360, 60))
    moved = [place + 30 * (c == 2) for place, c in zip(places, y, strict=True)]
    here, turned = View("a", _circle(*places), heads, [100.0] * 6), View("b", _circle(*moved), heads, [0.0] * 6)
    owned = np.array([[1, 0, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0]], bool)
    example = Example(here.features, y, y, {}, {"run": {0: here, 1: turned}}, y, owned)
    assert disagreement(example, "run", (0, 1)) == pytest.approx([0, 30], abs=1e-4)  # classes 0 and 2


def test_the_settings_are_the_papers() -> None:
    runs = plan(seed=4, epochs=9, rounds=7)
    assert list(runs) == [*CENTRAL, *FEDERATED]
    for name, config in runs.items():
        t = config.train
        assert (t.lr, t.momentum, t.weight_decay, t.lr_decay) == (0.1, 0.9, 1e-5, 0.99)
        assert (config.seed, config.rounds) == (4, 7 if name in FEDERATED else 9)
        assert config.model.args == {"hidden": [16, 8, 4, 2], "linear_output": True}
        clients = (config.partition.clients, config.participation.rate, t.epochs)
        assert clients == ((100, 0.1, 5) if name in FEDERATED else (1, 1.0, 1))
        many = name in FEDERATED
        assert (t.batch_size, t.clip) == ((64, 10.0) if many else (5000, 0.0)), "one client: the authors' notebook"
        if config.method["name"] == "feduh" and not many:
            assert (config.method["scale"], config.method["train_scale"]) == (1.0, False)
    assert [config.rounds for config in plan().values()] == [201] * 4 + [100] * 2
    assert [runs[name].data.name for name in CENTRAL] == ["spiral"] * 2 + ["spiral_imbalanced"] * 2
    assert runs["clients-feduh"].partition.name == "dirichlet"
    assert runs["clients-feduh"].partition.beta == 0.3


PERFECT: dict[str, Any] = {
    "central": {
        "balanced-free": {"accuracy": 99.0, "minority_accuracy": 99.0, "norm_ratio": 1.1, "smallest_gap_degrees": 55},
        "balanced-uniform": {"accuracy": 98.5, "minority_accuracy": 98, "norm_ratio": 1, "smallest_gap_degrees": 60},
        "imbalanced-free": {"accuracy": 60.0, "minority_accuracy": 20.0, "norm_ratio": 3, "smallest_gap_degrees": 10},
        "imbalanced-uniform": {"accuracy": 90.0, "minority_accuracy": 80, "norm_ratio": 1, "smallest_gap_degrees": 60},
    },
    "clients": {"clients-fedavg": {"angle_over_all_pairs": 40.0}, "clients-feduh": {"angle_over_all_pairs": 5.0}},
}


def test_the_verdict_goes_either_way() -> None:
    judged = claims(PERFECT)
    assert all(claim["seen"] for claim in judged)
    assert verdict(judged).startswith("The numbers show 8 of the 8 claims")
    other = copy.deepcopy(PERFECT)
    other["central"]["imbalanced-uniform"]["minority_accuracy"] = 20.5
    other["clients"]["clients-feduh"]["angle_over_all_pairs"] = 39.0
    judged = claims(other)
    assert [claim["seen"] for claim in judged] == [True] * 5 + [False, True, False]
    text = verdict(judged)
    assert "6 of the 8" in text
    assert "NOT seen: A uniform head helps the minority classes" in text
    assert "minority accuracy 20.0 free, 20.5 uniform" in text


@pytest.mark.soak
def test_the_command_leaves_figures_numbers_and_run_folders(tmp_path: Path) -> None:
    out = tmp_path / "spiral"
    words = ["spiral", "--out", str(out), "--epochs", "2", "--rounds", "2"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "of the 8 claims" in done.output
    found = json.loads((out / "spiral.json").read_text())
    assert found["text"] in done.output
    assert set(found["central"]) == set(CENTRAL)
    assert all(len(view["prototype_norms"]) == 6 for view in found["central"].values())
    assert found["central"]["imbalanced-uniform"]["prototype_norms"] == pytest.approx([1] * 6)
    assert found["central"]["imbalanced-uniform"]["smallest_gap_degrees"] == pytest.approx(60, abs=1e-3)
    assert 0 <= found["clients"]["clients-fedavg"]["angle_over_all_pairs"] <= 180
    for name in ("figure1", "figure2"):
        assert (out / f"{name}.svg").read_text().count("<svg") == 1
        with Image.open(out / f"{name}.png") as picture:
            assert picture.width > 1000
    assert all((out / name / "summary.json").exists() for name in (*CENTRAL, *FEDERATED))
    started = (out / "clients-feduh" / "summary.json").stat().st_mtime_ns
    assert CliRunner().invoke(app, words).exit_code == 0  # finished runs are looked at, not made again
    assert (out / "clients-feduh" / "summary.json").stat().st_mtime_ns == started


@pytest.mark.soak
def test_the_whole_example_takes_under_two_minutes_of_work_and_learns(tmp_path: Path) -> None:
    started = time.process_time()  # of all threads: others may be at work on this machine
    assert CliRunner().invoke(app, ["spiral", "--out", str(tmp_path / "s")]).exit_code == 0
    assert time.process_time() - started < 120
    central = json.loads((tmp_path / "s" / "spiral.json").read_text())["central"]
    assert all(central[name]["accuracy"] > 95 for name in ("balanced-free", "balanced-uniform"))
