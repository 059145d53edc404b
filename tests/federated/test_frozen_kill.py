"""Runs with a frozen body: killed and resumed, with other weights, and on Ray."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.helpers.compare import assert_same, outcome, same_runs
from tests.helpers.counts import count
from tests.helpers.pictures import TOY, paint, toy_weights
from tests.helpers.process import Process
from tests.helpers.process import fednh as command
from tests.helpers.ray_nodes import ended, nodes, on_pool, rounds_of, start

FROZEN = ["--set", f"model.name={TOY}", "--set", "model.frozen=body", "--set", "features.size=8"]


@pytest.fixture
def args(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A frozen body on the images of two sites, in a folder with a cache of its own."""
    monkeypatch.setenv("FEDNH_CACHE", str(tmp_path / "cache"))
    data = f"folder:{paint(tmp_path / 'photos')}"
    weights = ["--set", f"model.weights={toy_weights(tmp_path / 'toy.safetensors')}"]
    small = ["--set", "partition.min_samples=2", "--epochs", "1", "--quiet"]
    return ["--data", data, "--partition", "site", *FROZEN, *weights, *small]


def killed(args: list[str], out: Path) -> None:
    """A run that SIGKILL ends after a few of its rounds."""
    process = Process(["run", *args, "--out", str(out)], out.parent / "io")
    while rounds_of(out) < 3:
        assert not process.ended(), process.wait().stderr
        time.sleep(0.002)
    process.kill()
    assert process.wait().code < 0


def test_a_killed_run_with_a_frozen_body_ends_with_the_same_bytes(args: list[str], tmp_path: Path) -> None:
    """Resumed with other weights it is refused; with its own it ends as if nothing had happened."""
    more = [*args, "--rounds", "60", "--set", "checkpoint.every=1", "--set", "eval.every=20"]
    whole, out, weights = tmp_path / "whole", tmp_path / "killed", tmp_path / "toy.safetensors"
    on_pool(more, whole)
    killed(more, out)
    toy_weights(weights, seed=1)
    done = command(["resume", str(out), "--quiet"], tmp_path / "io")
    assert done.code == 2
    assert f"the weights in {weights} are not those that the run in {out} began with; restore them" in done.stderr
    assert done.stderr.count("\n") == 1
    toy_weights(weights)
    done = command(["resume", str(out), "--quiet"], tmp_path / "io")
    assert done.code == 0, done.stderr
    assert_same(out, outcome(whole))
    count("kills survived")


@pytest.mark.soak
def test_on_ray_a_frozen_body_has_the_pools_bits(args: list[str], tmp_path: Path) -> None:
    with nodes({}, {}) as cluster:
        for method in ("fednh", "fedncm", "afl"):
            more = ["--method", method, *args, *(["--rounds", "2"] if method == "fednh" else [])]
            code, _, err = ended(start(["run", *more, "--out", f"ray-{method}"], tmp_path, cluster))
            assert code == 0, f"{method}: {err}"
            on_pool(more, tmp_path / f"pool-{method}")
            same_runs(tmp_path / f"pool-{method}", tmp_path / f"ray-{method}")
