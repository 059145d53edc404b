"""What runs apps: killed processes are noticed and forked again, and a killed worker costs a sentence, not a minute."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Message, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.proto.runtime_pb2 import AcquireTaskRequest, AcquireTaskResponse
from flwr.proto.task_pb2 import Task

from fednh.flower.deploy import forking
from fednh.flower.deploy.forking import (
    ENDS,
    WITHIN,
    ChildKilled,
    ForkingExecutor,
    Served,
    TaskRegistry,
    again,
    in_child,
)
from fednh.flower.deploy.processes import ExecutorTarget, alive
from fednh.io import chain


def until(condition: Callable[[], Any], seconds: float = 20) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def job(pid: int, site: bool = True) -> ExecutorTarget:
    own = {"approved": "approved", "site_toml": "site.toml"} if site else {}
    return ExecutorTarget("127.0.0.1:1", "/", pid, "secret", **own)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """Stands for a SuperNode, or for an app."""
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


# --- the worker ------------------------------------------------------------------------------------------------------


def test_a_childs_result_and_its_error() -> None:
    assert in_child(lambda: (os.getpid() != os.getppid(), b"x" * 3_000_000)) == (True, b"x" * 3_000_000)

    def wrong() -> None:
        raise ValueError("the data are wrong")

    with pytest.raises(ValueError, match="the data are wrong"):
        in_child(wrong)


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "ended by signal 9, perhaps out of memory"),
        (lambda: os.kill(os.getpid(), signal.SIGUSR1), "ended by signal 10$"),
        (lambda: os._exit(3), "ended with code 3 and without a result"),
    ],
)
def test_a_child_that_is_killed(work: Callable[[], None], words: str) -> None:
    began = time.monotonic()
    with pytest.raises(ChildKilled, match=words):
        in_child(work)
    assert time.monotonic() - began < 5


def test_what_a_killed_child_started_does_not_keep_its_parent_waiting() -> None:
    def work() -> None:
        if os.fork() == 0:
            time.sleep(5)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    began = time.monotonic()
    with pytest.raises(ChildKilled):
        in_child(work)
    assert time.monotonic() - began < 4


def test_a_worker_ends_with_its_parent(tmp_path: Path) -> None:
    def work() -> None:
        (tmp_path / "pid").write_text(str(os.getpid()))
        time.sleep(60)

    parent = os.fork()
    if parent == 0:
        forking._exit_after(lambda: in_child(work))
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    until(lambda: not alive(int((tmp_path / "pid").read_text())), 5)


def test_a_killed_worker_is_an_answer_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forking, "read_site_config", lambda _: type("Place", (), {"home": tmp_path, "site": "site-1"}))
    (tmp_path / "site.toml").write_text("")

    def app(message: Message, context: Context) -> Message:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    served = ExecutorTarget("127.0.0.1:1", "/", 1, "secret", approved="x", site_toml=str(tmp_path / "site.toml"))
    load = forking._load_in_child(lambda *_: app, served)
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, SUPERLINK_NODE_ID
    order = Message(RecordDict(), 7, "train")
    reply = load()(message=order, context=Context(1, 7, {}, RecordDict(), {}))
    assert reply.has_error()
    assert reply.error.reason == "the work was ended by signal 9, perhaps out of memory"
    (line,) = chain.read(tmp_path / "audit/site-1.jsonl").lines
    assert (line["event"], line["own"], line["why"]) == ("refused", "site-1", reply.error.reason)


# --- tasks in hand ---------------------------------------------------------------------------------------------------


def ended_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_a_clientapp_without_a_reply_ends_its_supernode(sleeper: subprocess.Popen[bytes]) -> None:
    registry = TaskRegistry()
    served = ForkingExecutor(job(sleeper.pid), registry)
    served.reconcile()
    registry.add(gone := ended_pid(), "token")
    registry.finish(gone)
    served.reconcile()
    assert registry.read() == (False, {})
    assert sleeper.poll() is None, "that one had sent its reply"
    registry.add(ended_pid(), "token")
    served.reconcile()
    assert sleeper.wait(5) == -signal.SIGTERM


def test_a_clientapp_that_works_is_left_alone(sleeper: subprocess.Popen[bytes]) -> None:
    registry = TaskRegistry()
    registry.add(os.getpid(), "token")
    ForkingExecutor(job(sleeper.pid), registry).reconcile()
    assert registry.read() == (False, {os.getpid(): "token"})
    assert sleeper.poll() is None


def test_a_task_that_a_killed_superexec_may_have_taken_ends_the_supernode(sleeper: subprocess.Popen[bytes]) -> None:
    registry = TaskRegistry()
    first = ForkingExecutor(job(sleeper.pid), registry)
    first.reconcile()
    registry.write(True, {})
    first.reconcile()
    assert sleeper.poll() is None, "it asked itself, and knows that nothing was handed out"
    registry.write(True, {os.getpid(): "token"})
    ForkingExecutor(job(sleeper.pid), registry).reconcile()
    assert sleeper.poll() is None, "there is no other task while one is at work"
    registry.write(True, {})
    ForkingExecutor(job(sleeper.pid), registry).reconcile()
    assert sleeper.wait(5) == -signal.SIGTERM


@pytest.mark.parametrize("task", [None, Task(task_id=1)])
def test_while_a_superexec_asks_its_hands_say_so(task: Task | None) -> None:
    registry, during = TaskRegistry(), []

    class Client:
        def AcquireTask(self, request: AcquireTaskRequest) -> AcquireTaskResponse:
            during.append(registry.read()[0])
            return AcquireTaskResponse(task=task)

    registry.add(os.getpid(), "token")
    forking.recording_client(Client, registry)().AcquireTask(AcquireTaskRequest())  # type: ignore[arg-type, call-arg]
    assert during == [True]
    assert registry.read() == (task is not None, {os.getpid(): "token"})


def test_the_run_of_an_ended_serverapp_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens: list[str] = []
    monkeypatch.setattr(ForkingExecutor, "_end_run", lambda _, token: tokens.append(token))
    registry = TaskRegistry()
    registry.add(ended_pid(), "first")
    registry.add(os.getpid(), "second")
    ForkingExecutor(job(os.getpid(), site=False), registry).reconcile()
    assert tokens == ["first"]
    assert registry.read() == (False, {os.getpid(): "second"})


# --- the process that watches ----------------------------------------------------------------------------------------


def test_a_killed_superexec_is_forked_again_while_its_job_lives(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve(job: ExecutorTarget, registry: TaskRegistry) -> None:
        (tmp_path / str(os.getpid())).write_text(job.address)
        parent = os.getppid()
        while os.getppid() == parent:
            time.sleep(0.05)

    monkeypatch.setattr(forking, "_serve", serve)
    reading, writing = os.pipe()
    watcher = os.fork()
    if watcher == 0:
        os.close(writing)
        os.dup2(reading, 0)
        forking._exit_after(forking.main)
    os.close(reading)
    os.write(writing, json.dumps(asdict(job(sleeper.pid))).encode() + b"\n")

    def forks(number: int) -> list[Path]:
        return until(lambda: len(found := sorted(tmp_path.iterdir(), key=os.path.getmtime)) == number and found)

    first = forks(1)[0]
    os.kill(int(first.name), signal.SIGKILL)
    second = forks(2)[-1]
    assert second.read_text() == "127.0.0.1:1"
    sleeper.kill()
    sleeper.wait()
    os.kill(int(second.name), signal.SIGKILL)
    time.sleep(0.6)
    assert len(list(tmp_path.iterdir())) == 2, "its SuperNode has ended"
    os.close(writing)
    assert os.waitpid(watcher, 0)[1] == 0


def test_one_that_keeps_ending_is_given_up() -> None:
    served = Served(job(1), TaskRegistry())
    for then in range(ENDS - 1):
        served = again(served, float(then))
    with pytest.raises(SystemExit, match=rf"127.0.0.1:1 ended {ENDS} times"):
        again(served, float(ENDS))
    assert again(served, WITHIN + ENDS).ends == [WITHIN + ENDS], "earlier ends are forgotten"
