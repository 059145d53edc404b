"""Many small runs: forks of one process. One that crashes takes nobody with it; results are those of `fednh run`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fednh.experiments.run_processes import RunProcesses
from fednh.process import ALLOCATIONS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a run is a process of its own")
SMALL = ("--clients", "4", "--epochs", "1", "--quiet")
ENDLESS = ("run", "digits", "--rounds", "100000", *SMALL)


@pytest.fixture
def processes() -> Iterator[RunProcesses]:
    made = RunProcesses()
    yield made
    made.close()


def start(processes: RunProcesses, folder: Path, name: str, *words: str) -> int:
    return processes.start([*words, "--out", str(folder / name)], folder / f"{name}.log", {})


def code(processes: RunProcesses, number: int, seconds: float = 120) -> int:
    end = time.monotonic() + seconds
    while (ended := processes.poll(number)) is None:
        assert time.monotonic() < end, "the run did not end in time"
        time.sleep(0.02)
    return ended


def pid_of(folder: Path, seconds: float = 120) -> int:
    """The process that works on a run folder, when it has begun to."""
    end = time.monotonic() + seconds
    while not (folder / "metrics.jsonl").exists():
        assert time.monotonic() < end, "the run did not begin in time"
        time.sleep(0.02)
    return int((folder / ".lock").read_text().split()[1])  # process N on ...


def test_a_forked_run_has_the_bits_of_a_process_of_its_own_and_no_unfinished_end(
    processes: RunProcesses, tmp_path: Path
) -> None:
    words = ("run", "digits", "--rounds", "2", *SMALL)
    first, second, wrong = (
        start(processes, tmp_path, "a", *words),
        start(processes, tmp_path, "b", *words),
        start(processes, tmp_path, "c", "run", "digits", "--set", "train.lr=fast"),
    )
    alone = subprocess.run(
        [sys.executable, "-m", "fednh", *words, "--out", str(tmp_path / "alone")], capture_output=True, text=True
    )
    assert (alone.returncode, alone.stderr) == (0, "")
    assert alone.stdout == f"{tmp_path / 'alone'}\n"
    assert [code(processes, each) for each in (first, second, wrong)] == [0, 0, 2]
    assert "train.lr" in (tmp_path / "c.log").read_text()
    for name in ("a", "b"):
        assert (tmp_path / f"{name}.log").read_text() == f"{tmp_path / name}\n"
        for file in ("models/global.safetensors", "partition.json"):
            assert (tmp_path / name / file).read_bytes() == (tmp_path / "alone" / file).read_bytes(), file


def test_a_run_that_is_killed_takes_nobody_with_it(processes: RunProcesses, tmp_path: Path) -> None:
    killed = start(processes, tmp_path, "killed", *ENDLESS)
    stopped = start(processes, tmp_path, "stopped", *ENDLESS)
    os.kill(pid_of(tmp_path / "killed"), signal.SIGKILL)
    assert code(processes, killed) == -signal.SIGKILL
    pid_of(tmp_path / "stopped")
    assert processes.poll(stopped) is None
    processes.terminate(stopped)
    assert code(processes, stopped) == 130
    assert "fednh resume" in (tmp_path / "stopped.log").read_text()
    assert list((tmp_path / "stopped").glob("checkpoints/round-*.json"))


def test_when_the_forking_process_is_killed_its_runs_end_and_the_next_has_another_one(
    processes: RunProcesses, tmp_path: Path
) -> None:
    lost = start(processes, tmp_path, "lost", *ENDLESS)
    worker = pid_of(tmp_path / "lost")
    assert processes._server is not None
    os.kill(processes._server.pid, signal.SIGKILL)
    assert code(processes, lost) == -signal.SIGKILL
    end = time.monotonic() + 60
    while Path(f"/proc/{worker}").exists() and time.monotonic() < end:
        time.sleep(0.02)
    assert not Path(f"/proc/{worker}").exists(), "a run went on without a sweep"
    assert code(processes, start(processes, tmp_path, "next", "--version")) == 2  # --version takes no --out


# --- the process of one command ----------------------------------------------------------------------------------

ENDS = f"""
import atexit, gc, sys
from fednh.process import exit_at_once, fewer_collections

fewer_collections()
assert gc.get_threshold()[0] == {ALLOCATIONS}

class Told:
    def __del__(self): print("freed one by one", flush=True)

with exit_at_once():
    atexit.register(print, "registered later")
    told = Told()
    print("not flushed", end=" ")
    sys.exit(int(sys.argv[1]))
"""


def test_a_process_ends_with_its_code_and_what_it_said_and_frees_nothing() -> None:
    for number in (0, 2, 130):
        done = subprocess.run([sys.executable, "-c", ENDS, str(number)], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (number, "not flushed registered later\n"), done.stderr


def test_an_error_and_a_full_disk_are_told_as_always() -> None:
    broken = ENDS.replace("sys.exit(int(sys.argv[1]))", "raise KeyError('x')")
    done = subprocess.run([sys.executable, "-c", broken], capture_output=True, text=True)
    assert done.returncode == 1
    assert "KeyError: 'x'" in done.stderr
    buffered = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", ENDS, "0"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=buffered)
    assert done.returncode == 120
    assert "No space left" in done.stderr
