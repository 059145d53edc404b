"""Child processes, all of which are ended when their context ends, whatever happens.

Each is the leader of its own session. Its environment names a folder; by it we find the processes that Flower starts in
turn, and those that a killed parent left behind. Only their user can read the files they write.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import psutil

from fednh.errors import RunError, UserError
from fednh.io.files import private_folder

MARK = "FEDNH_FEDERATION"  # in the environment of every process: the folder of its federation or site
# No telemetry, no installing at run time, one thread per site, and frequent polling.
ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
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
        words = ("disk is full", os.strerror(errno.ENOSPC))
        told = any(word in log.read_text(errors="replace") for log in logs for word in words)
        if told or shutil.disk_usage(folder).free < FULL:
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
