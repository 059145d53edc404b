"""A SuperExec that has imported everything already: it forks for every message instead of starting Python anew.

Flower starts a new process for every message that a site receives. Most of its time goes into importing PyTorch, and
sites that share a machine all do so at once. This process serves the SuperLink and all SuperNodes that were started
with `--isolation process`, which makes them leave the starting of apps to others. Flower's protocol is unchanged.

- It signs its requests with the secret that it shares with each of them, so nobody else can get a task.
- A task's token is never on a command line, where every user of the machine could read it.
- A site unpacks and runs only apps that are on its list.

Processes, each a fork of the one before it:

    main        reads one line of JSON (processes.ExecutorTarget) for each SuperLink or SuperNode from standard input,
                forks a SuperExec for it, forks again what was killed, and stops at the end of the input
    SuperExec   asks its SuperLink or SuperNode for tasks
    ClientApp   fetches an order and sends the reply; small, because it does not compute
    worker      computes the reply; if it is killed, the ClientApp says so in the reply

A ClientApp that ends without a reply leaves its SuperNode waiting for it for ever. So the SuperExec ends the SuperNode,
and whoever started it starts it again. A killed ServerApp is reported to the SuperLink, which then ends its run.
"""

from __future__ import annotations

import json
import mmap
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import httpx
from flwr.app import Context, Error, Message

import fednh.flower.client_app  # noqa: F401  imported before the fork, for ClientApps
from fednh.config import flat
from fednh.errors import UserError
from fednh.flower import audit, compat
from fednh.flower.compat import (
    ExecutionSpec,
    LaunchResult,
    RuntimeHttpClient,
    SubprocessExecutor,
    TaskType,
    clientapp,
    superexec,
)
from fednh.flower.deploy import scaffold
from fednh.flower.deploy.processes import ExecutorTarget, alive
from fednh.flower.site_config import read_site_config
from fednh.flower.transport import take_order

ENDS, WITHIN = 5, 60.0  # a SuperExec that ends this often in so many seconds is not started again


class TaskRegistry:
    """The tasks that a SuperExec has in hand, in memory that outlives it: another follows it if it is killed."""

    def __init__(self) -> None:
        self._held = mmap.mmap(-1, 1 << 14)  # written by the SuperExec alone
        self._finished = mmap.mmap(-1, 1 << 12)  # one byte a ClientApp, by its process id; written by itself

    def read(self) -> tuple[bool, dict[int, str]]:
        """Whether a task may have been handed out that nobody has started, and the tokens of tasks by process id."""
        text = self._held[:].rstrip(b"\0")
        try:
            asking, tasks = json.loads(text) if text else (False, {})
        except ValueError:  # killed while it wrote
            return True, {}
        return asking, {int(pid): token for pid, token in tasks.items()}

    def write(self, asking: bool, tasks: dict[int, str]) -> None:
        self._held[:] = json.dumps([asking, tasks]).encode().ljust(len(self._held), b"\0")

    def add(self, pid: int, token: str) -> None:
        self._finished[pid % len(self._finished)] = 0
        self.write(False, {**self.read()[1], pid: token})

    def finish(self, pid: int) -> None:
        self._finished[pid % len(self._finished)] = 1

    def finished(self, pid: int) -> bool:
        return bool(self._finished[pid % len(self._finished)])


class ForkingExecutor(SubprocessExecutor):
    """Runs a ClientApp in a fork of this process, and a ServerApp as a new process; there are no other tasks."""

    def __init__(self, target: ExecutorTarget, registry: TaskRegistry):
        self.target, self.registry, self.parent = target, registry, os.getppid()
        self.kinds = {TaskType.CLIENT_APP} if target.approved is not None else {TaskType.SERVER_APP}
        self.first = True

    def reconcile(self) -> None:
        """Look after the tasks in hand; Flower calls this before it asks for a task."""
        if os.getppid() != self.parent:
            raise SystemExit("the process that watches this one has ended")
        asking, tasks = self.registry.read()
        ended = {pid: token for pid, token in tasks.items() if not alive(pid)}
        going = {pid: token for pid, token in tasks.items() if pid not in ended}
        lost = asking and self.first and not going  # the SuperExec before this one was killed while it asked
        self.first = False
        self.registry.write(False, going)
        if self.target.approved is None:
            for token in ended.values():
                self._end_run(token)
        elif lost or not all(map(self.registry.finished, ended)):
            print("a ClientApp ended before it had sent its reply; its SuperNode is started again", flush=True)
            with suppress(ProcessLookupError):
                os.kill(self.target.pid, signal.SIGTERM)

    def get_eligible_capacity(self, *_: Any, **__: Any) -> tuple[set[TaskType], set[str]]:
        return self.kinds, set()

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        if spec.task_type not in self.kinds:
            return LaunchResult.failed(f"{spec.task_type} is not run here")
        if spec.task_type == TaskType.SERVER_APP:
            if not hasattr(os, "memfd_create"):  # only Linux has it
                return super().launch(spec)
            pid = _server_app(spec, self.target)
        elif (pid := os.fork()) == 0:
            _exit_after(lambda: _client_app(spec, self.target, self.registry))
        self.registry.add(pid, spec.token)
        return LaunchResult.accepted()

    def _end_run(self, token: str) -> None:
        """Tell the SuperLink that a ServerApp has ended: else its run, and sites that work for it, wait for a minute.

        If the ServerApp has ended its run itself, its token is no longer valid and nothing changes.
        """
        client = RuntimeHttpClient.from_server_address(
            server_address=self.target.address,
            insecure=self.target.root is None,
            root_certificates=None if self.target.root is None else Path(self.target.root).read_bytes(),
            interceptors=[
                compat.RuntimeVersionHttpInterceptor(component_name="SuperExec"),
                compat.RuntimeTokenHttpInterceptor(token),
            ],
        )
        with suppress(httpx.HTTPError):
            failed = compat.SubStatus.FAILED
            client.PushTaskOutput(compat.PushTaskOutputRequest(sub_status=failed, details="the ServerApp ended"))
        client.close()


def recording_client(client: type[RuntimeHttpClient], registry: TaskRegistry) -> type[RuntimeHttpClient]:
    """Flower's client of a SuperExec; while it asks for a task, `registry` says so."""

    class RecordingClient(client):  # type: ignore[valid-type, misc]
        def AcquireTask(self, request: compat.AcquireTaskRequest) -> compat.AcquireTaskResponse:
            registry.write(True, registry.read()[1])
            answer: compat.AcquireTaskResponse = super().AcquireTask(request)
            if not answer.HasField("task"):
                registry.write(False, registry.read()[1])
            return answer

    return RecordingClient


def _client_app(spec: ExecutionSpec, target: ExecutorTarget, registry: TaskRegistry) -> None:
    """Run Flower's ClientApp program; the app itself is called in a child of this process."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    load = compat.original(clientapp, "get_load_client_app_fn")
    send = compat.original(clientapp, "push_message")
    settled: list[bool] = []  # not empty: the SuperNode does not wait for this ClientApp's reply

    def push(*args: Any, **options: Any) -> None:
        send(*args, **options)
        settled.append(True)

    def take(*args: Any, **options: Any) -> Message:
        try:
            return take_order(*args, **options)
        except ValueError:  # too large: the SuperNode has all of it
            raise
        except BaseException as error:  # the SuperNode has dropped it because its run has ended
            settled.extend([True] if "timeout" not in str(error) else [])
            raise

    compat.replace(clientapp, "pull_and_inflate_object_from_tree", take)
    compat.replace(clientapp, "get_load_client_app_fn", lambda **options: _load_in_child(load(**options), target))
    compat.replace(clientapp, "push_message", push)
    try:
        clientapp.run_clientapp(spec.runtime_api_address, spec.token, spec.insecure, parent_pid=target.pid)
    finally:  # Flower leaves with SystemExit
        if settled:
            registry.finish(os.getpid())


def _load_in_child(load: Callable[..., Any], target: ExecutorTarget) -> Callable[..., Any]:
    """Flower's function that loads a ClientApp; the loaded app computes in a child process."""

    def loaded(*args: Any) -> Callable[..., Message]:
        app = load(*args)

        def call(message: Message, context: Context) -> Message:
            def work() -> tuple[Message, Any]:
                return app(message=message, context=context), context.state

            reply: Message
            try:
                reply, context.state = in_child(work)
            except ChildKilled as error:
                assert target.site_toml is not None
                site_config = read_site_config(flat(tomllib.loads(Path(target.site_toml).read_text(encoding="utf-8"))))
                audit.log_refusal(site_config.home, site_config.site, "killed", "the server", str(error))
                reply = Message(Error(code=compat.ErrorCode.CLIENT_APP_CRASHED, reason=str(error)), reply_to=message)
            return reply

        return call

    return loaded


class ChildKilled(Exception):
    """A child process ended before it had a result."""


def in_child(work: Callable[[], Any]) -> Any:
    """Call `work` in a child process and return its result; ChildKilled if the child ends without one.

    The child ends with this process. What `work` raises is raised here.
    """
    reading, writing = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _exit_after(lambda: _answer(work, writing, parent))
    os.close(writing)
    result, status = _received(reading, child)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        perhaps = ", perhaps out of memory" if number == signal.SIGKILL else ""
        raise ChildKilled(f"the work was ended by signal {number}{perhaps}")
    if not result:
        raise ChildKilled(f"the work ended with code {os.waitstatus_to_exitcode(status)} and without a result")
    outcome = pickle.loads(result)  # by our own child
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _received(reading: int, child: int) -> tuple[bytes, int]:
    """What a child writes, and its exit status; processes that it has started may hold the pipe open after its end."""
    parts, ended = list[bytes](), 0
    with open(reading, "rb", buffering=0) as pipe:
        while True:
            if select.select([pipe], [], [], 0 if ended else 0.1)[0]:
                if not (more := pipe.read(1 << 20)):
                    break
                parts.append(more)
            elif ended:
                break
            if not ended:
                ended, status = os.waitpid(child, os.WNOHANG)
    if not ended:
        _, status = os.waitpid(child, 0)
    return b"".join(parts), status


def _answer(work: Callable[[], Any], writing: int, parent: int) -> None:
    """The child's part of `in_child`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)

    def end_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(0.1)
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        outcome: Any = work()
    except Exception as error:
        outcome = error
    try:
        result = pickle.dumps(outcome)
    except Exception as error:
        result = pickle.dumps(RuntimeError(f"{type(outcome).__name__} cannot be handed over: {type(error).__name__}"))
    with open(writing, "wb") as pipe:
        pipe.write(result)


def _server_app(spec: ExecutionSpec, target: ExecutorTarget) -> int:
    """Start a ServerApp; its token is in an anonymous file that only this user can open."""
    token = os.memfd_create("token")
    os.write(token, spec.token.encode())
    program, address = compat.TASK_TYPE_TO_COMMAND, compat.TASK_TYPE_TO_APPIO_API_ADDRESS_ARG
    command = [program[spec.task_type], address[spec.task_type]]
    command += [spec.runtime_api_address, "--token-file", f"/proc/self/fd/{token}"]
    command += ["--insecure"] if spec.insecure else ["--root-certificates", str(spec.root_certificates_path)]
    command += ["--parent-pid", str(target.pid)]
    process = subprocess.Popen(command, pass_fds=[token], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.close(token)
    return process.pid


def _serve(target: ExecutorTarget, registry: TaskRegistry) -> None:
    """Act as the SuperExec of one SuperLink or SuperNode until it ends."""
    os.setsid()
    os.chdir(target.folder)
    files = [(0, os.devnull, os.O_RDONLY)]
    files += [] if target.log is None else [(1, target.log, os.O_WRONLY | os.O_APPEND)]
    for number, path, flags in files:
        os.dup2(os.open(path, flags), number)
    os.dup2(1, 2)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps children that have ended
    compat.replace(superexec, "RuntimeHttpClient", recording_client(RuntimeHttpClient, registry))
    compat.replace(superexec, "get_executor", lambda *_, **__: ForkingExecutor(target, registry))
    if target.approved is not None:
        assert target.site_toml is not None
        compat.replace(clientapp, "install_from_fab", _only_approved(Path(target.approved), Path(target.site_toml)))
    superexec.run_superexec(
        target.address,
        insecure=target.root is None,
        root_certificates_path=target.root,
        superexec_auth_secret=Path(target.secret).read_bytes(),
        parent_pid=target.pid,
    )


def _only_approved(file: Path, site_toml: Path) -> Any:
    """Flower's installation of an app, for approved apps only; a refusal goes to the audit log."""

    def check_and_install(content: bytes, *args: Any, **kwargs: Any) -> Any:
        try:
            scaffold.check_approved(file, content)
        except UserError as error:
            site_config = read_site_config(flat(tomllib.loads(site_toml.read_text(encoding="utf-8"))))
            by = "whoever started an app at the server"
            audit.log_refusal(site_config.home, site_config.site, "app", by, str(error))
            raise
        return compat.install_from_fab(content, *args, **kwargs)

    return check_and_install


def _exit_after(work: Any) -> NoReturn:
    """Do the work of a forked child, then exit: the child must not return into the parent's code."""
    code = 1
    try:
        work()
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@dataclass
class Served:
    """A SuperExec that `main` has forked."""

    target: ExecutorTarget
    registry: TaskRegistry
    ends: list[float] = field(default_factory=list)  # when those before it ended


def main() -> None:
    served: dict[int, Served] = {}  # by process id
    server = TaskRegistry()  # a SuperLink that was started again still has the tasks that it handed out before

    def fork(each: Served) -> None:
        if (pid := os.fork()) == 0:
            _exit_after(lambda: _serve(each.target, each.registry))
        served[pid] = each

    waiting = b""
    while True:
        if select.select([0], [], [], 0.2)[0]:
            if not (more := os.read(0, 1 << 16)):
                return
            *lines, waiting = (waiting + more).split(b"\n")
            for target in [ExecutorTarget(**json.loads(line)) for line in lines]:
                fork(Served(target, server if target.approved is None else TaskRegistry()))
        for pid in list(served):
            if os.waitpid(pid, os.WNOHANG)[0] and alive((ended := served.pop(pid)).target.pid):
                fork(again(ended, time.monotonic()))


def again(ended: Served, now: float) -> Served:
    """The SuperExec that follows one that has ended; if they end too often, the program ends."""
    ends = [then for then in ended.ends if now - then < WITHIN] + [now]
    if len(ends) >= ENDS:
        sys.exit(f"what runs apps for {ended.target.address} ended {ENDS} times in {WITHIN:g} s; see above")
    return Served(ended.target, ended.registry, ends)


if __name__ == "__main__":
    main()
