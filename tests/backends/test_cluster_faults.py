"""What goes wrong on clusters of real Ray processes: the run ends with the pool's bits, or says why and goes on later.

Every machine is a process in a folder of its own; what a run has on disk is closed to nobody but never theirs to open.
"""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from fednh.methods import METHODS
from tests.helpers.compare import lines, same_runs
from tests.helpers.counts import count
from tests.helpers.ray_nodes import SMALL, SOME, ended, left_behind, nodes, on_pool, rounds_of, start, until

pytestmark = pytest.mark.soak
FAST = ["--set", "method.match_steps=5", "--set", "method.retrain_epochs=5"]  # of creff; told and ignored elsewhere
LONG = ["--method", "ditto", "--clients", "8", "--rounds", "5", "--epochs", "40", "--set", "eval.every=1"]
LONG += ["--set", "checkpoint.every=1", "--set", "engine='loop'", *SOME]


def test_every_method_has_the_pools_bits(tmp_path: Path) -> None:
    with nodes({}, {}) as cluster:
        for method in METHODS:
            args = ["--method", method, *SMALL, *SOME, *FAST]
            code, _, err = ended(start(["run", *args, "--out", f"ray-{method}"], tmp_path, cluster))
            assert code == 0, f"{method}: {err}"
            on_pool(args, tmp_path / f"pool-{method}")
            same_runs(tmp_path / f"pool-{method}", tmp_path / f"ray-{method}")


def test_blocks_have_the_pools_bits(tmp_path: Path) -> None:
    """`engine = auto` chooses vmap here as on the pool, and blocks are the same, however they are packed."""
    args = ["--method", "ditto", "--clients", "60", "--rounds", "3", "--epochs", "1", "--set", "participation.rate=0.7"]
    args += ["--set", "partition.min_samples=2", "--quiet"]
    with nodes({}, {}) as cluster:
        code, _, err = ended(start(["run", *args, "--out", "ray"], tmp_path, cluster))
    assert code == 0, err
    on_pool(args, tmp_path / "pool")
    same_runs(tmp_path / "pool", tmp_path / "ray")


def test_a_machine_that_dies_in_mid_round_costs_time_and_nothing_else(tmp_path: Path) -> None:
    """With results that are too large for Ray to send with an answer: they are lost with the machine's store."""
    large = [*LONG, "--set", "model.args={hidden=[512,256]}"]
    with nodes({}, {}) as cluster:
        process = start(["run", *large, "--out", "ray"], tmp_path, cluster)
        until(lambda: rounds_of(tmp_path / "ray") >= 1 and len(cluster.busy()) == 2)
        cluster.do("kill", 1)
        code, out, err = ended(process)
    assert (code, out) == (0, "ray\n"), err
    assert "a worker or its machine was lost; " in err
    assert " computed again elsewhere" in err
    assert lines(tmp_path / "ray")[-1]["ray"]["computed_again"] >= 1
    on_pool(large, tmp_path / "pool")
    same_runs(tmp_path / "pool", tmp_path / "ray")
    count("kills survived")


def test_a_process_that_dies_costs_time_and_nothing_else(tmp_path: Path) -> None:
    with nodes({}, {}) as cluster:
        process = start(["run", *LONG, "--out", "ray"], tmp_path, cluster)
        until(lambda: rounds_of(tmp_path / "ray") >= 1 and len(cluster.busy()) == 2)
        os.kill(cluster.busy()[0], signal.SIGKILL)
        code, out, err = ended(process)
    assert (code, out) == (0, "ray\n"), err
    assert "a worker or its machine was lost; 1 client computed again elsewhere" in err
    assert lines(tmp_path / "ray")[-1]["ray"] == {"machines": 2, "computed_again": 1}
    on_pool(LONG, tmp_path / "pool")
    same_runs(tmp_path / "pool", tmp_path / "ray")
    count("kills survived")


def test_a_client_that_ends_its_process_stops_the_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(METHOD.replace("raise ValueError", "import os; os._exit(9); raise ValueError"))
    args = ["run", "--method", "mine:Halving", "--set", "method.fails=3", *SMALL, *SOME]
    (tmp_path / "helper.py").write_text(HELPER)
    with nodes({}, {}) as cluster:
        code, out, err = ended(start([*args, "--out", "ray"], tmp_path, cluster))
    assert (code, out) == (1, "")
    assert " was lost 4 times with the process that computed it; is memory short there? (" in err


def test_a_machine_that_joins_later_is_used(tmp_path: Path) -> None:
    with nodes({}) as cluster:
        process = start(["run", *LONG[:-3], "--quiet", "--out", "ray"], tmp_path, cluster)
        until(lambda: rounds_of(tmp_path / "ray") >= 1)
        cluster.do("add", {})
        code, _, err = ended(process)
    assert code == 0, err
    assert lines(tmp_path / "ray")[-1]["ray"] == {"machines": 2, "computed_again": 0}


def test_the_head_dies_and_the_run_goes_on_later(tmp_path: Path) -> None:
    with nodes({}, {}) as cluster:
        process = start(["run", *LONG, "--out", "ray"], tmp_path, cluster)
        until(lambda: rounds_of(tmp_path / "ray") >= 2)
        cluster.do("kill", 0)
        code, out, err = ended(process)
    assert (code, out) == (1, ""), err
    told = err.splitlines()[-1]
    # Where Ray itself ends the process at this moment, the sentence comes from outside of it.
    assert told.startswith(("fednh: the Ray cluster is lost (", "fednh: Ray has ended this run, as it does when ")), err
    assert told.endswith("continue with `fednh resume ray --backend ray`, or on this machine with `fednh resume ray`")
    code, _, err = ended(start(["resume", "ray", "--quiet"], tmp_path))
    assert code == 0, err
    assert "going on after round" in err
    on_pool(LONG, tmp_path / "pool")
    same_runs(tmp_path / "pool", tmp_path / "ray")
    count("kills survived")


def test_the_driver_is_killed_and_the_run_ends_on_the_plain_pool(tmp_path: Path) -> None:
    with nodes({}, {}) as cluster:
        process = start(["run", *LONG, "--out", "ray"], tmp_path, cluster)
        until(lambda: rounds_of(tmp_path / "ray") >= 2)
        process.kill()
        process.wait(30)
        code, _, err = ended(start(["resume", "ray", "--quiet"], tmp_path))
        assert code == 0, err
        on_pool(LONG, tmp_path / "pool")
        same_runs(tmp_path / "pool", tmp_path / "ray")
        # Its workers are gone, too: the same cluster takes the next run.
        args = ["--method", "fedavg", *SMALL, *SOME]
        code, _, err = ended(start(["run", *args, "--out", "next"], tmp_path, cluster))
        assert code == 0, err
    count("kills survived")


def test_ctrl_c_saves_and_leaves_no_process_behind(tmp_path: Path) -> None:
    """Ray on this machine, started by the run; the signal reaches the whole group, as from a terminal."""
    process = start(["run", *LONG, "--backend", "ray", "--out", "ray"], tmp_path)
    until(lambda: rounds_of(tmp_path / "ray") >= 2)
    os.killpg(process.pid, signal.SIGINT)
    code, out, err = ended(process)
    assert (code, out) == (130, ""), err
    assert err.splitlines()[-1].endswith("continue with: fednh resume ray --backend ray")
    until(lambda: not left_behind(tmp_path), 30)
    code, _, err = ended(start(["resume", "ray", "--backend", "ray", "--quiet"], tmp_path))
    assert code == 0, err
    on_pool(LONG, tmp_path / "pool")
    same_runs(tmp_path / "pool", tmp_path / "ray")
    until(lambda: not left_behind(tmp_path), 30)
    count("kills survived")


def test_a_cluster_that_was_joined_stays_without_our_workers(tmp_path: Path) -> None:
    with nodes({}, {}) as cluster:
        process = start(["run", *LONG, "--out", "ray"], tmp_path, cluster)
        until(lambda: rounds_of(tmp_path / "ray") >= 1)
        os.kill(process.pid, signal.SIGTERM)
        code, _, err = ended(process)
        assert code == 130, err
        args = ["--method", "ditto", *SMALL, *SOME]
        began = time.monotonic()
        code, _, err = ended(start(["run", *args, "--out", "next"], tmp_path, cluster))
        assert code == 0, err
        assert lines(tmp_path / "next")[-1]["ray"]["machines"] == 2
        assert time.monotonic() - began < 120


def test_a_store_that_is_far_too_small(tmp_path: Path) -> None:
    """75 MiB, the least that Ray takes, for a model of 26 MiB that Ditto keeps twice: Ray puts the rest on its disk."""
    little = {"object_store_memory": 75 << 20}
    args = ["--method", "ditto", "--clients", "6", "--rounds", "2", "--epochs", "1", "--set", "participation.rate=1"]
    args += ["--set", "model.args={hidden=[2048,3072]}", "--set", "engine='loop'", "--workers", "2", "--quiet"]
    with nodes(little, little) as cluster:
        code, _, err = ended(start(["run", *args, "--out", "ray"], tmp_path, cluster))
    assert code == 0, err
    on_pool(args, tmp_path / "pool")
    same_runs(tmp_path / "pool", tmp_path / "ray")


def test_slots_follow_from_resources_of_ones_own(tmp_path: Path) -> None:
    """Only the second machine has a board; there are two clients at once on it."""
    args = ["--method", "fedavg", *SMALL, *SOME]
    boards = ["--set", "ray.cpus_per_client=0.5", "--set", "ray.resources={board=0.5}"]
    with nodes({}, {"resources": {"board": 1}}) as cluster:
        code, _, err = ended(start(["run", *args, *boards, "--out", "ray"], tmp_path, cluster))
        assert code == 0, err
        assert lines(tmp_path / "ray")[-1]["ray"]["machines"] == 1
        none = ["--set", "ray.resources={nothing=1}"]
        code, _, err = ended(start(["run", *args, *none, "--out", "none"], tmp_path, cluster))
    assert code == 2
    assert err == "fednh: no machine of the Ray cluster has room for a client, which needs 1 CPU, 1 nothing\n"
    assert not (tmp_path / "none").exists()
    on_pool(args, tmp_path / "pool")
    same_runs(tmp_path / "pool", tmp_path / "ray")


def test_methods_and_models_of_ones_own_travel(tmp_path: Path) -> None:
    """They are files in the folder of the run, which the machines do not know; they import a helper there."""
    (tmp_path / "helper.py").write_text(HELPER)
    (tmp_path / "mine.py").write_text(METHOD)
    args = ["run", "--method", "mine:Halving", "--set", "model.name='mine:Tiny'", *SMALL, *SOME]
    with nodes({}, {}) as cluster:
        code, _, err = ended(start([*args, "--out", "ray"], tmp_path, cluster))
        assert code == 0, err
        failing = [*args, "--set", "method.fails=3", "--out", "failed"]
        code, _, err = ended(start(failing, tmp_path, cluster))
    assert code == 1
    told = err.splitlines()[-1]
    assert told.startswith("fednh: Halving: client ")
    assert " failed in round 1: ValueError: no luck (client_update, mine.py line " in told
    code, _, err = ended(start([*args, "--out", "pool"], tmp_path))
    assert code == 0, err
    same_runs(tmp_path / "pool", tmp_path / "ray")


HELPER = "def half(tree):\n    return {name: value / 2 for name, value in tree.items()}\n"
METHOD = """
from dataclasses import dataclass
import torch
from torch import nn
from helper import half
from fednh.methods.base import Method, MODEL
from fednh.methods.losses import cross_entropy

class Tiny(nn.Module):
    def __init__(self, shape, num_classes):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU())
        self.head = nn.Linear(8, num_classes)

@dataclass(frozen=True)
class Halving(Method):
    fails: int = 0

    def client_update(self, net, kept, received, data, fit):
        if self.fails and len(data) > 10:
            raise ValueError("no luck")
        model = fit(received, cross_entropy(net.logits), only=MODEL)
        return model, half(model)
"""


def test_machines_compute_with_the_drivers_source(tmp_path: Path) -> None:
    """Whatever they have installed: here a package of the same name that holds nothing else."""
    (tmp_path / "other" / "fednh").mkdir(parents=True)
    (tmp_path / "other" / "fednh" / "__init__.py").write_text("raise ImportError('the wrong one')")
    args = ["--method", "ditto", *SMALL, *SOME]
    with nodes({}, source=tmp_path / "other") as cluster:
        code, _, err = ended(start(["run", *args, "--out", "ray"], tmp_path, cluster))
    assert code == 0, err
    on_pool(args, tmp_path / "pool")
    same_runs(tmp_path / "pool", tmp_path / "ray")


def test_nothing_of_a_run_is_on_the_machines(tmp_path: Path) -> None:
    """All that is on disk of a run is its folder; what machines have is what Ray has, and that goes with the run."""
    args = ["--method", "ditto", *SMALL, *SOME]
    with nodes({}, {}) as cluster:
        code, _, err = ended(start(["run", *args, "--out", "ray"], tmp_path, cluster))
        assert code == 0, err
        found = [path for path in Path(cluster.home).rglob("*") if path.is_file()]
    names = {path.name for path in found}
    assert not [name for name in names if name.endswith((".safetensors", ".npz", ".jsonl")) or name == "config.toml"]
    assert json.loads((tmp_path / "ray" / "summary.json").read_text())["clients"]


@pytest.mark.parametrize("joined", [True, False], ids=["joined", "started"])
def test_a_sweep_shares_the_cluster(joined: bool, tmp_path: Path) -> None:
    """Runs side by side, in the folders that a sweep on this machine makes; the same command again does nothing."""
    args = ["sweep", "digits", "--method", "fedavg,ditto", "--seed", "0,1", "--clients", "8", "--rounds", "2"]
    args += ["--epochs", "1", "--set", "participation.rate=0.5", "--quiet"]
    with nodes({}, {}) if joined else nullcontext() as cluster:
        on_ray = [] if joined else ["--backend", "ray"]
        code, out, err = ended(start([*args, *on_ray, "--out", "ray"], tmp_path, cluster), 400)
        assert (code, out) == (0, "ray\n"), err
        began = {path: path.stat().st_mtime_ns for path in (tmp_path / "ray").glob("*/summary.json")}
        code, _, err = ended(start([*args, *on_ray, "--out", "ray"], tmp_path, cluster))
        assert code == 0, err
    assert len(began) == 4
    assert {path: path.stat().st_mtime_ns for path in began} == began
    code, _, err = ended(start([*args, "--out", "pool"], tmp_path))
    assert code == 0, err
    for path in began:
        same_runs(tmp_path / "pool" / path.parent.name, path.parent)
    until(lambda: not left_behind(tmp_path), 30)
