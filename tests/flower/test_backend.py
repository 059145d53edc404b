"""`fednh run --backend flower`: real Ray processes on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_parity import compare

from fednh.methods import METHODS
from forked import fednh

SMALL = [
    "--clients",
    "4",
    "--rounds",
    "2",
    "--epochs",
    "1",
    "--workers",
    "1",
    "--set",
    "participation.rate=0.5",
    "--quiet",
]
FAST = ["--set", "method.match_steps=5", "--set", "method.retrain_epochs=5"]  # of creff; told and ignored elsewhere


def start(args: list[str], folder: Path) -> subprocess.Popen[str]:
    """`fednh ARGS` as a process in a session of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "FEDNH_TEST_MARK": str(folder)}
    command = [sys.executable, "-m", "fednh", *args]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=folder, process_group=0
    )


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


def gone(folder: Path, seconds: float = 30) -> bool:
    deadline = time.monotonic() + seconds
    while left_behind(folder) and time.monotonic() < deadline:
        time.sleep(0.2)
    return not left_behind(folder)


def same_as_simulator(method: str, folder: Path) -> None:
    process = start(["run", "--method", method, *SMALL, *FAST, "--backend", "flower", "--out", "ray"], folder)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert out == "ray\n"
    simulated = fednh(["run", "--method", method, *SMALL, *FAST, "--out", str(folder / "simulator")], folder / "log")
    assert simulated.code == 0, simulated.stderr
    compare(folder / "simulator", folder / "ray")
    assert gone(folder)


@pytest.mark.soak
def test_ray_gives_the_simulators_numbers_and_leaves_nothing_running(tmp_path: Path) -> None:
    same_as_simulator("fednh", tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("method", [name for name in METHODS if name != "fednh"])
def test_every_method_on_ray(method: str, tmp_path: Path) -> None:
    same_as_simulator(method, tmp_path)


@pytest.mark.soak
def test_ctrl_c_saves_cleans_up_and_resume_goes_on(tmp_path: Path) -> None:
    args = [*SMALL[:-1], "--rounds", "6", "--set", "checkpoint.every=1"]
    process = start(["run", *args, "--backend", "flower", "--out", "ray"], tmp_path)
    deadline = time.monotonic() + 200
    lines = tmp_path / "ray" / "metrics.jsonl"
    while not (lines.exists() and lines.read_text().count("\n") >= 2) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 130, err
    assert "continue with: fednh resume ray" in err
    assert gone(tmp_path)
    again = start(["resume", "ray", "--quiet"], tmp_path)
    _, err = again.communicate(timeout=300)
    assert again.returncode == 0, err
    assert fednh(["run", *args, "--quiet", "--out", str(tmp_path / "simulator")], tmp_path / "log").code == 0
    compare(tmp_path / "simulator", tmp_path / "ray")


def test_a_missing_extra_and_an_unknown_backend_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = fednh(["run", "--backend", "flour", "--out", str(tmp_path / "x")], tmp_path / "a")
    assert ended.code == 2
    assert ended.stderr == "fednh: --backend 'flour' is not known; did you mean 'flower'?\n"
    monkeypatch.setattr("fednh.extras.find_spec", lambda name: None)
    ended = fednh(["run", "--backend", "flower", "--out", str(tmp_path / "x")], tmp_path / "b")
    assert ended.code == 2
    assert ended.stderr == "fednh: --backend flower needs the extra `flower`: pip install 'fednh[flower]'\n"
    assert not (tmp_path / "x").exists()
