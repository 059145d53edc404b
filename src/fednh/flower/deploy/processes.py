"""The programs of a federation as child processes, all of which are ended when their context ends, whatever happens.

Each is the leader of its own session. Its environment names a folder; by it we find the processes that Flower starts in
turn, and those that a killed parent left behind. Only their user can read the files they write.

Command lines are the same on one machine and on many. The server's SuperLink listens on the loopback only, because
whoever reaches its port can start apps. SuperLink and SuperNode hand their tasks only to our executor, which knows a
secret that is new at every start.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from fednh.errors import RunError, UserError
from fednh.flower.layout import FederationFolder, FlowerHome
from fednh.io.files import private_folder, write_private

MARK = "FEDNH_FEDERATION"  # in the environment of every process: the folder of its federation or site
# No telemetry, no installing at run time, one thread per site, and frequent polling.
ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
    # A part that a broken line has cut is sent again. Flower's 5 MB, two at a time, take 343 s over 256 kbit/s,
    # and its SuperLink forgets an upload of which nothing has arrived for 180 s
    "FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE": str(256 << 10),
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}
PATIENCE = 180.0  # seconds in which a server that runs must answer: a busy machine takes one minute to import it

RESTARTS, RECENT = 3, 3600.0  # a program is started again this often in so many seconds
FORGET = 120.0  # seconds until Flower has surely noticed that a SuperNode is gone: twice its 2 x 30
FULL = 4 << 20  # bytes; a disk with less room is full

Process = subprocess.Popen[bytes]


class Child(Protocol):
    """What a Popen and a forked SuperNode have in common."""

    pid: int

    @property
    def returncode(self) -> int | Any: ...  # None while it runs
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...


class Processes:
    """The child processes of one folder; leaving the context ends them and all that they started."""

    def __init__(self, folder: Path, home: Path, logs: Path | None):
        """`home` is Flower's folder. Without a folder for logs, the processes write to our own output."""
        self.folder, self.home, self.logs = folder, home, logs
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        own = {MARK: str(folder), "FLWR_HOME": str(home), "PATH": path}
        self.environment = {**ENVIRONMENT, **os.environ, **own}
        self.running: dict[str, Child] = {}
        self._restarts: dict[str, list[float]] = {}  # when each program was started again
        self._refused_until: dict[str, float] = {}  # how long a start of a SuperNode may be refused, and is repeated
        self._next: dict[str, float] = {}  # when it is repeated

    def __enter__(self) -> Processes:
        for each in (self.home, self.logs):
            if each is not None:
                private_folder(each)
        end_marked(self.folder)  # processes that a killed parent left behind
        return self

    def __exit__(self, *_: object) -> None:
        end(list(self.running.values()))
        end_marked(self.folder)

    def start(self, name: str, command: list[str], cwd: Path | None = None, stdin: int = subprocess.DEVNULL) -> Process:
        """Start a command; its output is appended to its log."""
        program = shutil.which(command[0], path=self.environment["PATH"])
        if program is None:
            raise UserError(f"{command[0]} is not installed here: pip install 'fednh[flower]'")
        log = None
        if self.logs is not None:
            log = os.open(self.log(name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self.running[name] = process = subprocess.Popen(
                [program, *command[1:]],
                cwd=cwd or self.folder,
                env=self.environment,
                stdin=stdin,
                stdout=log,
                stderr=subprocess.STDOUT if log is not None else None,
                start_new_session=True,  # Ctrl-C in the terminal reaches only us
                umask=0o077,
            )
        finally:
            if log is not None:
                os.close(log)
        return process

    def start_server(
        self, name: str, what: str, command: list[str], port: int, pause: Callable[[float], object]
    ) -> Process:
        """Start a program and wait until it answers at its port; one that is killed before that is started again.

        `pause` waits for seconds; it raises, or returns something true, when somebody asked to stop.
        """
        process, deadline = self.start(name, command), time.monotonic() + PATIENCE
        while not answers(port) and not pause(0.05):
            if self.was_killed(name) and self.may_restart(name):
                process = self.start(name, command)
            self.check(name, what)
            if time.monotonic() > deadline:
                raise RunError(f"{what} does not answer after {PATIENCE:g} s; {self.where(name)}")
        return process

    def was_killed(self, name: str) -> bool:
        """Whether a signal ended this process; an error is a reason not to start it again."""
        return (self.running[name].poll() or 0) < 0

    def log(self, name: str) -> Path:
        assert self.logs is not None
        return self.logs / f"{name}.log"

    def where(self, name: str) -> str:
        """Where to read the output of a process."""
        return "see above" if self.logs is None else f"see {self.log(name)}"

    def tail(self, name: str) -> str:
        """The last lines of a log, for an error message."""
        if self.logs is None:
            return "see above"
        lines = [line.strip() for line in self.log(name).read_text(errors="replace").splitlines() if line.strip()]
        return " / ".join(lines[-3:])[-400:] or "it wrote nothing"

    def check(self, name: str, what: str) -> None:
        """Raise if this process has ended."""
        process = self.running[name]
        if process.poll() is not None:
            raise RunError(f"{what} ended with code {process.returncode}: {self.tail(name)}")

    def may_restart(self, name: str) -> bool:
        """Count one more start of a program that ended; False if there were too many: it has a reason to end."""
        now = time.monotonic()
        recent = [then for then in self._restarts.get(name, []) if now - then < RECENT]
        self._restarts[name] = [*recent, now]
        return len(recent) < RESTARTS

    def restart_supernode(self, name: str, start: Callable[[], None]) -> str:
        """Start a SuperNode again that was killed or stopped; one that exited with an error has a reason.

        The server refuses the new one until it takes the killed one for gone; until then it is started again and
        again. Returns a sentence to show, empty if there is none; raises RunError if it is not started again.
        """
        code, now = self.running[name].returncode, time.monotonic()
        if code <= 0 and self.may_restart(name):
            self._refused_until[name], self._next[name] = now + FORGET, now + 5
            start()
            if code == 0:
                return "ended; starting it again"
            return f"was killed by signal {-code}; starting it again, which the server allows within a minute"
        if now >= self._refused_until.get(name, 0.0):
            raise RunError(f"ended with code {code}")
        if now >= self._next[name]:
            self._next[name] = now + 5
            start()
        return ""

    def full_disk(self, folder: Path, *names: str) -> str:
        """A sentence if the disk of a folder is full, or a program's log says so; else empty."""
        logs = [self.log(name) for name in names if self.logs is not None and self.log(name).exists()]
        signs = ("disk is full", os.strerror(errno.ENOSPC))
        logged = any(sign in log.read_text(errors="replace") for log in logs for sign in signs)
        if logged or shutil.disk_usage(folder).free < FULL:
            return f"the disk of {folder} is full: make room, then start the same command again"
        return ""


def alive(pid: int) -> bool:
    """Whether a process exists that has not ended; a zombie has."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def end(processes: list[Child], grace: float = 3.0) -> None:
    """Terminate process groups, wait a little, then kill those that are left."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        deadline = time.monotonic() + grace
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))


def marked(folder: Path, word: str = "") -> list[psutil.Process]:
    """The processes of a folder, except this one; with a `word`, only those that have it in their command line."""
    return [
        process
        for process in psutil.process_iter(["environ", "cmdline"])
        if (process.info["environ"] or {}).get(MARK) == str(folder)
        and word in "\0".join(process.info["cmdline"] or [])
        and process.pid != os.getpid()
    ]


def end_marked(folder: Path, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while (left := marked(folder)) and time.monotonic() < deadline:
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=0.02)


def free_ports(count: int) -> list[int]:
    """Ports of the loopback that are free now."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(each.getsockname()[1]) for each in held]
    for each in held:
        each.close()
    return ports


def answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


# --- Flower's programs ----------------------------------------------------------------------------------------------


LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class ExecutorTarget:
    """A SuperLink or SuperNode for an executor to serve; sent as one line of JSON."""

    address: str
    folder: str
    pid: int  # the executor stops when this process ends
    secret: str
    log: str | None = None
    root: str | None = None  # the certificate authority of a SuperLink's TLS; None: a SuperNode, which has none
    approved: str | None = None  # a site's list of apps that may run; None: at the server
    site_toml: str | None = None  # a site's site.toml


def superlink_command(keys: FederationFolder, port: int, database: Path, secret: Path, limit: int) -> list[str]:
    """With TLS, and only for SuperNodes whose keys are registered.

    `limit`: bytes of replies that the SuperLink keeps for a site (superlink.py).
    """
    command = [sys.executable, "-m", "fednh.flower.deploy.superlink", str(limit)]
    command += ["--host", LOOPBACK, "--port", str(port), "--database", str(database)]
    command += ["--disable-runtime-dependency-installation"]
    command += ["--ssl-ca-certfile", str(keys.ca), "--ssl-certfile", str(keys.server_certificate)]
    command += ["--ssl-keyfile", str(keys.server_key), "--enable-supernode-auth"]
    return command + _isolation(secret)


def supernode_command(server: str, node_config: Path, port: int, ca: Path, key: Path, secret: Path) -> list[str]:
    command = [sys.executable, "-m", "fednh.flower.deploy.supernode"]
    command += ["--superlink", server, "--node-config", str(node_config)]
    command += ["--host", LOOPBACK, "--port", str(port)]
    command += ["--root-certificates", str(ca), "--auth-supernode-private-key", str(key)]
    return command + _isolation(secret)


def register_command(public: Path, connection: str) -> list[str]:
    return ["flwr", "supernode", "register", str(public), connection]


def run_command(folder: Path, connection: str) -> list[str]:
    return ["flwr", "run", str(folder), connection, "--stream"]


def new_secret(home: FlowerHome) -> Path:
    """A secret that a program and its executor share; an earlier one is replaced."""
    home.secret_file.unlink(missing_ok=True)
    write_private(home.secret_file, secrets.token_bytes(32))
    return home.secret_file


class AppExecutor:
    """The process that runs the tasks of SuperLink and SuperNodes (forking.py)."""

    def __init__(self, processes: Processes):
        self.processes = processes
        self.targets: dict[str, ExecutorTarget] = {}  # by address

    def start(self) -> Process:
        """Start it, if it does not run; its imports take a while."""
        running = self.processes.running.get("executor")
        if isinstance(running, subprocess.Popen) and running.poll() is None:
            return running
        command = [sys.executable, "-m", "fednh.flower.deploy.forking"]
        return self.processes.start("executor", command, stdin=subprocess.PIPE)

    def serve(self, target: ExecutorTarget) -> None:
        """Let it run the tasks of a SuperLink or SuperNode, in place of an earlier one at the same address."""
        self.targets[target.address] = target
        talk = self.start().stdin
        assert talk is not None
        with suppress(BrokenPipeError):  # it has just been killed: `check` will see
            talk.write(json.dumps(asdict(target)).encode() + b"\n")
            talk.flush()

    def check(self) -> None:
        """Start it again if it was killed; raise if it gave up."""
        running = self.processes.running.get("executor")
        if running is None or running.poll() is None:
            return
        if running.returncode >= 0:
            self.processes.check("executor", "what runs apps")
        if not self.processes.may_restart("executor"):
            raise RunError(f"what runs apps was killed {1 + RESTARTS} times; {self.processes.where('executor')}")
        for target in list(self.targets.values()):
            if alive(target.pid):
                self.serve(target)


class SuperNodes:
    """The process that forks the SuperNodes of a trial (supernode.py), so that they share the memory of their imports.

    If it is killed, its SuperNodes go on, and the next start starts it again.
    """

    NAME = "supernodes"

    def __init__(self, processes: Processes):
        self.processes = processes
        self._talk: socket.socket | None = None
        self._ended: dict[int, int] = {}  # pid -> code
        self._started: list[int] = []  # pids that nobody has asked for yet

    def load(self) -> socket.socket:
        """Start it, if it does not run."""
        running = self.processes.running.get(self.NAME)
        if self._talk is None or running is None or running.poll() is not None:
            self._talk, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                command = [sys.executable, "-m", "fednh.flower.deploy.supernode"]
                self.processes.start(self.NAME, command, stdin=theirs.fileno())
        return self._talk

    def start(self, name: str, arguments: list[str], folder: Path) -> ForkedSuperNode:
        """Fork a SuperNode with Flower's arguments; its output is appended to its log."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                self.load().send(json.dumps([str(folder), str(self.processes.log(name)), *arguments]).encode())
                while not self._started and self.processes.running[self.NAME].poll() is None:
                    if time.monotonic() > deadline:
                        raise RunError(f"no SuperNode starts in {PATIENCE:g} s; {self.processes.where(self.NAME)}")
                    self.read(1.0)
            except (BrokenPipeError, ConnectionResetError):
                pass
            if self._started:
                break
            if not self.processes.may_restart(self.NAME):
                self.processes.check(self.NAME, "what starts SuperNodes")
        self.processes.running[name] = forked = ForkedSuperNode(
            self._started.pop(0), self, self.processes.running[self.NAME]
        )
        return forked

    def read(self, seconds: float) -> None:
        """Take in what it has written."""
        while self._talk is not None and select.select([self._talk], [], [], seconds)[0]:
            if not (packet := self._talk.recv(1 << 16)):
                return
            seconds = 0.0
            match json.loads(packet):
                case ["started", pid]:
                    self._started.append(pid)
                case ["ended", pid, code]:
                    self._ended[pid] = code

    def code(self, pid: int) -> int | None:
        """The exit code of a SuperNode as far as it is known."""
        with suppress(ConnectionResetError):
            self.read(0.0)
        return self._ended.get(pid)


class ForkedSuperNode:
    """A SuperNode that SuperNodes has started; used like a Popen."""

    def __init__(self, pid: int, starter: SuperNodes, parent: Child):
        self.pid, self._starter, self._parent = pid, starter, parent

    @property
    def returncode(self) -> int | Any:
        """None while it runs; that of one that outlived its parent is unknown, and counts as killed."""
        code = self._starter.code(self.pid)
        orphaned = code is None and self._parent.poll() is not None
        return -signal.SIGKILL if orphaned and not alive(self.pid) else code

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("flower-supernode", timeout or 0.0)
            time.sleep(0.02)
        return code


def _isolation(secret: Path) -> list[str]:
    """Apps are started by our executor only, which knows the secret."""
    return ["--isolation", "process", "--superexec-auth-secret-file", str(secret)]
