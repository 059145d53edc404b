"""The processes of a federation are found by what they carry in their environment, ended, and started again."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from fednh.errors import RunError, UserError
from fednh.flower.deploy import processes as module
from fednh.flower.deploy import supernode
from fednh.flower.deploy.processes import (
    MARK,
    RESTARTS,
    AppExecutor,
    ExecutorTarget,
    Processes,
    SuperNodes,
    answers,
    end_marked,
    free_ports,
    marked,
)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with Processes(tmp_path, tmp_path / "home", tmp_path / "logs") as made:
        yield made


def ended(processes: Processes, name: str, code: int) -> None:
    """A program that has ended with this code, or by this signal if it is negative."""
    process = processes.start(name, ["sh", "-c", f"kill {code} $$" if code < 0 else f"exit {code}"])
    assert process.wait(10) == code


def test_a_supernode_is_started_again_so_often(processes: Processes) -> None:
    starts: list[int] = []
    for code in (-9, 0, -15):
        ended(processes, "site-1", code)
        assert "starting it again" in processes.restart_supernode("site-1", lambda: starts.append(1))
    ended(processes, "site-1", -9)
    processes._refused_until.clear()
    with pytest.raises(RunError, match="ended with code -9"):
        processes.restart_supernode("site-1", lambda: starts.append(1))
    assert len(starts) == RESTARTS


def test_a_supernode_that_exits_with_an_error_is_not(processes: Processes) -> None:
    ended(processes, "site-1", 1)
    with pytest.raises(RunError, match="ended with code 1"):
        processes.restart_supernode("site-1", lambda: pytest.fail("it has a reason"))


def test_a_start_is_repeated_while_the_server_refuses_it(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[int] = []
    now = time.monotonic()
    ended(processes, "site-1", -9)
    assert "within a minute" in processes.restart_supernode("site-1", lambda: starts.append(1))
    ended(processes, "site-1", 1)
    for later, number in ((1, 1), (6, 2), (7, 2), (12, 3)):
        monkeypatch.setattr(module.time, "monotonic", lambda later=later: now + later)
        assert processes.restart_supernode("site-1", lambda: starts.append(1)) == ""
        assert len(starts) == number
    monkeypatch.setattr(module.time, "monotonic", lambda: now + module.FORGET + 1)
    with pytest.raises(RunError, match="ended with code 1"):
        processes.restart_supernode("site-1", lambda: starts.append(1))


def test_restarts_long_ago_do_not_count(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    assert [processes.may_restart("x") for _ in range(RESTARTS + 1)] == [True] * RESTARTS + [False]
    monkeypatch.setattr(module.time, "monotonic", lambda: now + module.RECENT + 60)
    assert processes.may_restart("x")


def test_a_full_disk_is_said(processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert processes.full_disk(tmp_path, "superlink") == ""
    processes.log("superlink").write_text("sqlite3.OperationalError: database or disk is full")
    assert processes.full_disk(tmp_path, "run") == ""
    assert f"the disk of {tmp_path} is full" in processes.full_disk(tmp_path, "run", "superlink")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    assert f"the disk of {tmp_path} is full" in processes.full_disk(tmp_path)


def test_a_killed_executor_gets_its_jobs_again(processes: Processes, tmp_path: Path) -> None:
    """A stand-in that writes down what it is told."""
    executor = AppExecutor(processes)
    heard = tmp_path / "heard"
    stand_in = [sys.executable, "-c", f"import sys\nfor line in sys.stdin: open({str(heard)!r}, 'a').write(line)"]
    start = processes.start
    processes.start = lambda name, command, **more: start(name, stand_in, **more)  # type: ignore[method-assign]
    executor.serve(ExecutorTarget("127.0.0.1:1", "/", os.getpid(), "secret"))
    executor.serve(ExecutorTarget("127.0.0.1:2", "/", 2**22 + 1, "secret"))  # its program has ended
    processes.running["executor"].send_signal(signal.SIGKILL)
    processes.running["executor"].wait()
    heard.unlink(missing_ok=True)
    executor.check()
    deadline = time.monotonic() + 10
    while not (heard.exists() and heard.read_text().endswith("\n")) and time.monotonic() < deadline:
        stdin = processes.running["executor"].stdin
        if stdin is not None and not stdin.closed:
            stdin.close()  # so that the stand-in writes and ends
        time.sleep(0.02)
    assert [line for line in heard.read_text().splitlines() if "127.0.0.1:1" in line] == heard.read_text().splitlines()
    processes.running["executor"].wait()
    with pytest.raises(RunError, match="what runs apps ended with code 0"):
        executor.check()


def test_processes_are_found_by_their_folder_and_ended(tmp_path: Path) -> None:
    mine, other = tmp_path / "fed", tmp_path / "fed-2"
    started = [
        subprocess.Popen(["sleep", seconds], env={**os.environ, MARK: str(folder)}, start_new_session=True)
        for folder, seconds in ((mine, "61"), (mine, "62"), (other, "63"))
    ]
    try:
        assert {process.pid for process in marked(mine)} == {started[0].pid, started[1].pid}
        assert [process.pid for process in marked(mine, "62")] == [started[1].pid]
        end_marked(mine)
        assert marked(mine) == []
        assert [process.pid for process in marked(other)] == [started[2].pid]
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_a_supernode_waits_shorter_than_flowers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Soon after an order it looks often, later every 3 s as Flower does; a missing part is asked for soon."""
    now, slept = [100.0], list[float]()
    monkeypatch.setattr(supernode, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=slept.append))
    flower: Any = supernode.compat.supernode_loop
    for name in ("time", "pull_objects"):
        monkeypatch.setattr(flower, name, getattr(flower, name))  # put back afterwards
    supernode.shorten_waits()
    flower.time.sleep(0.5)
    for later in (0.0, 5.0, 60.0):
        now[0] = 100.0 + later
        flower.time.sleep(3)
    assert slept == [0.05, 0.25, 1.0, 3.0]
    assert flower.pull_objects.keywords == {"initial_backoff": 0.05}
    assert module.supernode_command("s:1", Path("site.toml"), 1, Path("ca"), Path("key"), Path("s"))[1:3] == [
        "-m",
        supernode.__name__,
    ]


def test_forked_supernodes_are_supervised_like_programs(processes: Processes, tmp_path: Path) -> None:
    """They share one parent's memory, end with a code or by a signal, and outlive the parent."""
    nodes = SuperNodes(processes)
    (tmp_path / "a").mkdir()
    bad = nodes.start("bad", ["--no-such-option"], tmp_path)
    assert bad.wait(60) == 2
    assert "--no-such-option" in processes.log("bad").read_text()
    nowhere = ["--insecure", "--superlink", "127.0.0.1:1", "--isolation", "process", "--host", "127.0.0.1", "--port"]
    ports = map(str, module.free_ports(3))
    good = nodes.start("good", [*nowhere, next(ports)], tmp_path / "a")
    assert good.poll() is None
    assert os.getpgid(good.pid) == good.pid
    assert psutil.Process(good.pid).cwd() == str(tmp_path / "a")
    assert psutil.Process(good.pid).ppid() == processes.running[nodes.NAME].pid
    assert good in processes.running.values(), "it is ended with all others"
    with pytest.raises(subprocess.TimeoutExpired):
        good.wait(0.1)
    os.kill(good.pid, signal.SIGKILL)
    assert good.wait(60) == -9
    orphan = nodes.start("orphan", [*nowhere, next(ports)], tmp_path)
    os.kill(processes.running[nodes.NAME].pid, signal.SIGKILL)
    processes.running[nodes.NAME].wait()
    assert orphan.poll() is None
    another = nodes.start("another", [*nowhere, next(ports)], tmp_path)
    assert another.poll() is None
    assert psutil.Process(another.pid).ppid() == processes.running[nodes.NAME].pid
    os.kill(orphan.pid, signal.SIGTERM)
    assert orphan.wait(60) == -9, "its code is unknown: it counts as killed"
    assert another.poll() is None
    module.end([another])
    assert another.returncode is not None


def test_a_supernode_does_without_pytorch() -> None:
    """Twenty of them run on one machine in a trial."""
    code = "import sys, fednh.flower.deploy.supernode; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_a_trial_does_not_wait_for_a_site_that_never_comes(tmp_path: Path) -> None:
    """Nobody will start it; a new site, or a round, is news."""
    from fednh.flower.deploy import launch, scaffold
    from tests.helpers.callbacks import Recorder
    from tests.helpers.deployment import Trial

    config, sites = scaffold.read(Trial(tmp_path).init(2).folder)
    fed = launch.LocalFederation(tmp_path / "fed", config, sites, Recorder(), threading.Event())
    with Processes(tmp_path, tmp_path / "home", tmp_path / "logs") as fed.processes:
        words = "waiting for sites: 1 of 2 are here (site-1)"
        for note, since in ((words, launch.ALL_HERE - 5), ("going on after round 1", launch.ALL_HERE + 5)):
            fed.newest = (time.monotonic() - since, note)
            fed._give_up()
        fed.newest = (time.monotonic() - launch.ALL_HERE - 5, words)
        with pytest.raises(RunError, match=r"1 of 2 are here \(site-1\), and no other came in 300 s; see .*logs"):
            fed._give_up()


def test_a_serverapp_that_nobody_starts_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`flwr run` waits for ever for a task that nobody takes."""
    from fednh.flower.deploy import launch, scaffold
    from tests.helpers.callbacks import Recorder
    from tests.helpers.deployment import Trial

    config, sites = scaffold.read(Trial(tmp_path).init(2).folder)
    fed = launch.LocalFederation(tmp_path / "fed", config, sites, Recorder(), threading.Event())
    monkeypatch.setattr(launch, "run_command", lambda *_: ["sleep", "60"])
    monkeypatch.setattr(launch, "PATIENCE", -1.0)
    with Processes(tmp_path / "fed", fed.home.path, tmp_path / "logs") as fed.processes:
        fed._start_run()
        for _ in range(RESTARTS):
            fed.server_gone -= 3
            fed._look_after_server()
        fed.server_gone -= 3
        with pytest.raises(RunError, match=f"the ServerApp ended {1 + RESTARTS} times"):
            fed._look_after_server()


# The first is killed while it starts; the second answers.
KILLED_ONCE = """
import os, pathlib, signal, socket, sys, time
mark = pathlib.Path(sys.argv[1])
if len(mark.read_text()) < int(sys.argv[3]):
    mark.write_text(mark.read_text() + "x")
    os.kill(os.getpid(), signal.SIGKILL)
held = socket.create_server(("127.0.0.1", int(sys.argv[2])))
time.sleep(60)
"""


@pytest.mark.parametrize("kills", [1, 4])
def test_a_server_that_is_killed_while_it_starts_is_started_again(kills: int, tmp_path: Path) -> None:
    """`up` once ended with exit code 1 then."""
    (port,) = free_ports(1)
    (tmp_path / "mark").write_text("")
    command = [sys.executable, "-c", KILLED_ONCE, str(tmp_path / "mark"), str(port), str(kills)]
    with Processes(tmp_path, tmp_path / "home", tmp_path / "logs") as processes:
        start = partial(processes.start_server, "superlink", "the SuperLink", command, port, time.sleep)
        if kills > RESTARTS:
            with pytest.raises(RunError, match="the SuperLink ended with code -9"):
                start()
        else:
            assert start().poll() is None
            assert answers(port)
    assert (tmp_path / "mark").read_text() == "x" * kills


def test_a_superlink_that_is_killed_while_keys_are_registered_is_started_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an empty database: it refuses keys that it has."""
    from fednh.flower.deploy import launch, scaffold
    from tests.helpers.callbacks import Recorder
    from tests.helpers.deployment import Trial

    class Notes(Recorder):
        notes: list[str]

        def on_note(self, text: str) -> None:
            self.notes = [*getattr(self, "notes", []), text]

    config, sites = scaffold.read(Trial(tmp_path).init(2).folder)
    told = Notes()
    fed = launch.LocalFederation(tmp_path / "fed", config, sites, told, threading.Event())
    fed.executor = cast(Any, SimpleNamespace(serve=lambda job: None))
    code = "import socket, sys, time; held = socket.create_server(('127.0.0.1', int(sys.argv[1]))); time.sleep(60)"
    database = fed.home.database_file
    seen = list[bool]()

    def register(key: Path, connection: str) -> list[str]:
        if not seen:
            os.kill(fed.processes.running["superlink"].pid, signal.SIGKILL)
            fed.processes.running["superlink"].wait(10)
        seen.append(database.with_name("superlink.db-old").exists())
        database.with_name("superlink.db-old").touch()
        return [sys.executable, "-c", f"raise SystemExit({int(len(seen) <= len(sites))})"]

    monkeypatch.setattr(launch, "superlink_command", lambda *_: [sys.executable, "-c", code, str(fed.port)])
    monkeypatch.setattr(launch, "register_command", register)
    with Processes(fed.folder, fed.home.path, fed.fed.logs) as fed.processes:
        fed._start_anew()
        assert fed.processes.running["superlink"].poll() is None
    assert told.notes == ["the SuperLink was killed; starting it again"]
    assert seen == [False, True, False, True], "the second time without what the first one left"


def test_other_systems_than_linux_are_told_so_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fednh.cli import federation
    from fednh.flower.deploy import scaffold

    scaffold.write(tmp_path / "fed", 2, [], {})
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(sys, "platform", "darwin")
    for start in (
        lambda: federation.up(tmp_path / "fed", local=True),
        lambda: federation.serve(tmp_path / "fed"),
        lambda: federation.join(tmp_path / "fed/sites/site-1", "server:8443"),
    ):
        with pytest.raises(UserError, match=r"federations run on Linux: .* not safe on darwin"):
            start()
    assert sorted(tmp_path.rglob("*")) == before
