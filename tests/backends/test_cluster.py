"""`--backend ray`: the bits of this machine's thread pool, on several machines that are real Ray processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kept_or_received
import pytest
from ray_nodes import Nodes, nodes

from forked import fednh

SMALL = ["--clients", "8", "--rounds", "2", "--epochs", "1", "--set", "eval.every=1"]
SOME = ["--set", "participation.rate=0.5", "--workers", "2", "--quiet"]
FAST = ["--set", "method.match_steps=5", "--set", "method.retrain_epochs=5"]  # of creff; told and ignored elsewhere
TIMING = {"seconds", "client_seconds", "eval_seconds", "samples_per_second", "ray"}


@pytest.fixture(scope="module")
def two() -> Iterator[Nodes]:
    """Two machines of one CPU each."""
    with nodes({}, {}) as cluster:
        yield cluster


def start(args: list[str], folder: Path, cluster: Nodes | None = None, **more: str) -> subprocess.Popen[str]:
    """`fednh ARGS` as a process of its own in `folder`, with the cluster's address."""
    around = {**os.environ, "FEDNH_TEST_MARK": str(folder), **(cluster.environment if cluster else {}), **more}
    command = [sys.executable, "-m", "fednh", *args]
    command += ["--backend", "ray", "--address", cluster.address] if cluster else []
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=folder, env=around, start_new_session=True, **pipes)


def ended(process: subprocess.Popen[str], seconds: float = 240) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return process.returncode, out, err


def on_pool(args: list[str], folder: Path) -> None:
    done = fednh(["run", *args, "--out", str(folder)], folder.parent / "log")
    assert done.code == 0, done.stderr


def same(one: Path, other: Path) -> None:
    """All models byte for byte, all metrics."""
    files = sorted(path.relative_to(one) for path in (one / "models").rglob("*.safetensors"))
    assert files == sorted(path.relative_to(other) for path in (other / "models").rglob("*.safetensors"))
    assert len(files) > 2
    for path in files:
        assert (one / path).read_bytes() == (other / path).read_bytes(), path
    for left, right in zip(lines(one), lines(other), strict=True):
        assert {k: v for k, v in left.items() if k not in TIMING} == {k: v for k, v in right.items() if k not in TIMING}


def lines(run: Path) -> list[dict[str, Any]]:
    texts = [*(run / "metrics.jsonl").read_text().splitlines(), (run / "summary.json").read_text()]
    return [json.loads(text) for text in texts]


def until(met: Any, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def rounds_of(run: Path) -> int:
    file = run / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def left_behind(folder: Path) -> list[str]:
    """Processes that a run in `folder` started and that are still there."""
    mark, found = f"FEDNH_TEST_MARK={folder}".encode(), []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (path / "environ").read_bytes().split(b"\0"):
                found.append((path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    ("engine", "choice"),
    [("vmap", kept_or_received.FEW[0]), pytest.param("loop", kept_or_received.FEW[1], marks=pytest.mark.soak)],
)
def test_what_a_client_kept_reaches_its_method(engine: str, choice: dict[str, Any], two: Nodes, tmp_path: Path) -> None:
    """Also under names that are broadcast; see test_kept_and_received.py."""
    shutil.copy(kept_or_received.__file__, tmp_path)
    settings = {"engine": engine, **{f"method.{key}": value for key, value in choice.items()}}
    args = ["--method", "kept_or_received:KeptOrReceived", *SMALL, *SOME]
    args += [word for key, value in settings.items() for word in ("--set", f"{key}={str(value).lower()}")]
    process = start(["run", *args, "--out", "ray"], tmp_path, two)
    on_pool(args, tmp_path / "pool")
    code, _, err = ended(process)
    assert (code, err) == (0, "")
    same(tmp_path / "pool", tmp_path / "ray")


def test_two_machines_give_the_pools_bits(two: Nodes, tmp_path: Path) -> None:
    """Ditto keeps a personal model at each client: it travels to the machine that computes, and back."""
    args = ["--method", "ditto", *SMALL, *SOME]
    process = start(["run", *args, "--out", "ray"], tmp_path, two)
    on_pool(args, tmp_path / "pool")
    code, out, err = ended(process)
    assert code == 0, err
    assert out == "ray\n"
    assert err == ""
    assert lines(tmp_path / "ray")[-1]["ray"] == {"machines": 2, "computed_again": 0}
    same(tmp_path / "pool", tmp_path / "ray")
    assert json.loads((tmp_path / "ray" / "environment.json").read_text())["backend"] == "ray"
