"""`fednh watch`: real runs that finish, fail, are killed, stopped or under way, seen through their folders alone."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fednh.cli.watch import SHOWN, fitted, overview
from fednh.runs.layout import RunLayout
from fednh.runs.run_status import RunStates
from tests.helpers.process import Process, fednh
from tests.helpers.synthetic import fake_run, record

# A method that fails in its second round as long as a file says so.
MOODY = """
from dataclasses import dataclass
from pathlib import Path

from fednh.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Moody(FedAvg):
    def aggregate(self, server, uploads):
        new = super().aggregate(server, uploads)
        if Path("second").exists() and Path("moody").exists():
            raise ValueError("a bad [red]mood[/red]")
        Path("second").touch()
        return new
"""


def command(out: Path, *more: str) -> list[str]:
    small = ["--set", "partition.clients=4", "--set", "eval.every=1", "--set", "checkpoint.every=1", "--epochs", "1"]
    return ["run", "digits", *small, "--workers", "1", "--quiet", "--out", str(out), *more]


def until(out: Path, rounds: int, process: Process) -> None:
    file, deadline = out / "metrics.jsonl", time.monotonic() + 120
    while not file.exists() or file.read_bytes().count(b"\n") < rounds:
        assert not process.ended()
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One run of each state; `deep/running` is at work until the last test is done, but pauses where nobody looks."""
    place = tmp_path_factory.mktemp("watched")
    before = Path.cwd()
    os.chdir(place)
    (place / "moody.py").write_text(MOODY)
    (place / "moody").touch()
    out, io = place / "runs", place / "io"
    assert fednh(command(out / "finished", "--rounds", "2"), io).code == 0
    assert fednh(command(out / "failed", "--rounds", "3", "--method", "moody:Moody"), io).code == 1
    ends = {"killed": signal.SIGKILL, "stopped": signal.SIGTERM}
    for name, number in ends.items():
        process = Process(command(out / name, "--rounds", "100000"), place / name)
        until(out / name, 2, process)
        process.kill(number)
        process.wait()
    running = Process(command(out / "deep/running", "--rounds", "100000"), place / "io-running")
    until(out / "deep/running", 2, running)
    (place / "running.pid").write_text(str(running.pid))
    os.kill(running.pid, signal.SIGSTOP)
    yield out
    running.kill()
    running.wait()
    os.chdir(before)


@pytest.fixture
def going(runs: Path) -> Iterator[Path]:
    """The same while the running one makes progress."""
    running = int((runs.parent / "running.pid").read_text())
    os.kill(running, signal.SIGCONT)
    yield runs
    os.kill(running, signal.SIGSTOP)


def seen(folder: Path, io: Path) -> dict[str, dict[str, Any]]:
    ended = fednh(["watch", str(folder), "--json"], io)
    assert ended.code == 0, ended.stderr
    return {Path(run["run"]).name: run for run in json.loads(ended.stdout)}


def test_every_state_is_told_apart(runs: Path, tmp_path: Path) -> None:
    found = seen(runs, tmp_path)
    states = {name: run["state"] for name, run in found.items()}
    ended = {"finished": "finished", "failed": "failed", "killed": "stopped", "stopped": "stopped"}
    assert states == {**ended, "running": "running"}
    notes = {name: run["note"] for name, run in found.items()}
    assert notes["killed"] == "it was killed"
    assert (notes["finished"], notes["stopped"], notes["running"]) == ("", "", "")
    assert "the server failed in round 2: ValueError: a bad [red]mood[/red]" in notes["failed"]


def test_rounds_metrics_and_times_are_those_of_the_folder(runs: Path, tmp_path: Path) -> None:
    found = seen(runs, tmp_path)
    records = [json.loads(line) for line in (runs / "finished/metrics.jsonl").read_text().splitlines()]
    done = found["finished"]
    assert (done["round"], done["rounds"], found["failed"]["round"]) == (2, 2, 1)
    assert done["metrics"]["gm"] == records[-1]["gm"]
    assert done["metrics"]["train_loss"] == records[-1]["train_loss"]
    assert done["seconds_taken"] == json.loads((runs / "finished/summary.json").read_text())["seconds"]
    assert found["running"]["rounds"] == 100_000
    assert found["running"]["round"] >= 2
    assert found["running"]["seconds_left"] > 100
    assert found["stopped"]["seconds_left"] is None
    assert 0 <= found["running"]["seconds_since"] < 60


def test_time_left_is_computed_by_hand(tmp_path: Path) -> None:
    """Four of ten rounds, three seconds each with their evaluation, the last one a second ago: 6 x 3 - 1."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text("rounds = 10\n")
    (run / "environment.json").write_text("{}")
    (run / ".lock").write_text(f"process {os.getpid()} on {os.uname().nodename} (fednh run)")
    lines = [{"round": r, "seconds": 2.0, "eval_seconds": 1.0, "train_loss": 0.5} for r in range(1, 5)]
    half = '{"round": 5, "sec'  # being written at this moment
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + half)
    os.utime(run / "metrics.jsonl", (time.time() - 1, time.time() - 1))
    os.utime(run / "config.toml", (0, 0))
    (state,) = RunStates([tmp_path]).look()
    assert (state.state, state.round) == ("running", 4)
    assert state.seconds_left == pytest.approx(17, abs=0.5)


def test_a_lock_whose_process_is_gone_or_another_one_does_not_run(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    run, host = tmp_path / "run", os.uname().nodename
    run.mkdir()
    (run / "config.toml").write_text("rounds = 10\n")
    (run / "environment.json").write_text("{}")
    told = []
    for words, written in [
        (f"process {child} on {host} (fednh run)", time.time()),
        (f"process {os.getpid()} on {host} (fednh run)", time.time() - 1e6),  # the number came round again
        (f"process {os.getpid()} on {host} (fednh run)", time.time()),
        ("process 1 on another-machine (fednh run)", time.time()),
    ]:
        (run / ".lock").write_text(words)
        os.utime(run / ".lock", (written, written))
        told.append(RunStates([run]).look()[0].state)
    assert told == ["stopped", "stopped", "running", "running"]


def test_the_table_once(runs: Path, tmp_path: Path) -> None:
    """There is no terminal, so the option changes nothing."""
    for args in (["watch", str(runs)], ["watch", str(runs), "--once"]):
        ended = fednh(args, tmp_path)
        assert ended.code == 0, ended.stderr
        lines = ended.stdout.splitlines()
        assert lines[0].strip() == "1 running, 2 stopped, 1 failed, 1 finished"
        assert any(re.search(r"deep/running .* running .* \d+/100000 .* left", line) for line in lines)
        assert any(re.search(r"finished .* finished .* 2/2 .* took 0m", line) for line in lines)
        assert "[red]" in ended.stdout
        assert "\x1b" not in ended.stdout
        assert "fednh resume" in lines[-1]


@pytest.mark.parametrize("width", [80, 120])
def test_names_numbers_and_reasons_are_whole_on_a_narrow_terminal(tmp_path: Path, width: int) -> None:
    name, reason = "photos-fednh-dirichlet0.3-rho0.7-seed0", "client 3 failed in round 2: " + "a long reason " * 15
    run = tmp_path / name
    run.mkdir()
    (run / "config.toml").write_text("rounds = 200\n")
    (run / "environment.json").write_text("{}")
    (run / "failure.json").write_text(json.dumps({"error": reason}))
    values = {key: 10.0 + at for at, key in enumerate(SHOWN)}
    (run / "metrics.jsonl").write_text(json.dumps({"round": 100, **values}) + "\n")
    out = StringIO()
    Console(file=out, width=width).print(overview(RunStates([tmp_path]), width))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    first = lines[: next(at for at, line in enumerate(lines) if line.startswith("└"))]  # names are whole in each table
    assert "".join(line.strip("│ ").partition("│")[0].strip() for line in first if line.startswith("│")) == name
    numbers = ["10.000", *(f"{10 + at}.0" for at in range(1, len(SHOWN))), "100/200"]
    assert all(re.search(rf"[ │]{number}[ │]", out.getvalue()) for number in numbers)
    assert " ".join(reason.split()) in " ".join(out.getvalue().split())


def test_the_table_lives_on_a_terminal_until_it_is_interrupted(going: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        import sys

        os.environ |= {"TERM": "xterm", "COLUMNS": "140", "LINES": "40"}
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        sys.argv = ["fednh", "watch", str(going), "--every", "0.1"]
        from fednh.cli import main

        try:
            main()
            os._exit(0)
        except SystemExit as exit_:
            os._exit(int(exit_.code or 0))
    text, deadline = "", time.monotonic() + 60
    rounds: set[str] = set()
    while len(rounds) < 3:  # it is read again: the running one is seen in several rounds
        assert time.monotonic() < deadline, text
        if select.select([terminal], [], [], 1)[0]:
            text += os.read(terminal, 65536).decode(errors="replace")
        rounds = set(re.findall(r"(\d+)/100000", text))
    os.kill(pid, signal.SIGINT)
    with suppress(OSError):  # so a terminal says that nobody writes to it any more
        while more := os.read(terminal, 65536) if select.select([terminal], [], [], 60)[0] else b"":
            text += more.decode(errors="replace")
    os.close(terminal)  # which ends a child that hangs
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert "interrupted" not in text


def test_what_failed_goes_on_and_is_not_called_failed_any_more(runs: Path, tmp_path: Path) -> None:
    assert "a bad [red]mood" in json.loads((runs / "failed/failure.json").read_text())["error"]
    assert fednh(["resume", str(runs / "failed"), "--quiet"], tmp_path).code == 1
    assert seen(runs, tmp_path)["failed"]["state"] == "failed"
    Path("moody").unlink()
    assert fednh(["resume", str(runs / "failed"), "--quiet"], tmp_path).code == 0
    assert not (runs / "failed/failure.json").exists()
    assert seen(runs, tmp_path)["failed"]["state"] == "finished"
    Path("moody").touch()


@pytest.mark.soak
def test_a_sweep_with_a_run_that_fails(runs: Path, tmp_path: Path) -> None:
    Path("second").touch()
    small = ["--rounds", "1", "--epochs", "1", "--clients", "4", "--out", str(tmp_path / "sweep")]
    assert fednh(["sweep", "--method", "fedavg,moody:Moody", *small], tmp_path / "io").code == 1
    told = {state.path.name.partition("-dirichlet")[0]: state for state in RunStates([tmp_path]).look()}
    states = {name: state.state for name, state in told.items()}
    assert states == {"digits-fedavg": "finished", "digits-moody_Moody": "failed"}
    assert "a bad" in told["digits-moody_Moody"].note


def test_runs_of_a_sweep_that_have_no_folder_yet(tmp_path: Path) -> None:
    notes = tmp_path / "sweep/.sweep"
    notes.mkdir(parents=True)
    (notes / "lost.toml").touch()
    (notes / "lost.log").write_text("a note\nfednh: photos is not a folder\n")
    (notes / "next.toml").touch()
    lost, next_ = RunStates([tmp_path]).look()
    assert (lost.state, lost.note) == ("failed", "photos is not a folder")
    assert (next_.state, next_.note) == ("stopped", "it has not begun")
    (notes / "lock").write_text(f"process {os.getpid()} on {os.uname().nodename} (fednh sweep)")
    assert [state.state for state in RunStates([tmp_path]).look()] == ["failed", "running"]


def test_nothing_there_and_no_folder(tmp_path: Path) -> None:
    ended = fednh(["watch", str(tmp_path)], tmp_path / "io")
    assert (ended.code, ended.stdout.strip().startswith("no run below")) == (0, True)
    assert json.loads(fednh(["watch", str(tmp_path), "--json"], tmp_path / "io").stdout) == []
    ended = fednh(["watch", str(tmp_path / "none")], tmp_path / "io")
    assert ended.code == 2
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 60)])
def test_fifty_runs_fit_the_screen_and_finished_ones_give_way_first(width: int, height: int, tmp_path: Path) -> None:
    first = fake_run(tmp_path / "first", {"rounds": 9}, [record(r, gm=50.0, pm_v=60.0) for r in (1, 2)]).path
    for at in range(60):
        run = RunLayout(shutil.copytree(first, tmp_path / "runs" / f"run-{at:02}"))
        if at >= 56:
            run.summary_file.unlink()
        for file in (run.metrics_file, run.config_file):
            os.utime(file, (1000 + at, 1000 + at))
    console = Console(width=width, height=height, file=StringIO(), force_terminal=True, color_system=None)
    console.print(fitted(RunStates([tmp_path / "runs"]), console))
    assert isinstance(console.file, StringIO)
    text = console.file.getvalue()
    assert len(text.splitlines()) <= height
    shown = sorted(set(re.findall(r"run-\d\d", text)))
    assert shown[-4:] == ["run-56", "run-57", "run-58", "run-59"], "those that are not finished"
    assert shown[:-4] == [f"run-{at:02}" for at in range(60 - len(shown), 56)], "and the finished ones that ended last"
    assert f"Not shown: {60 - len(shown)} finished" in text
