"""The command lines of a federation's programs: the same on one machine and on many.

The server's SuperLink listens on the loopback only, because whoever reaches its port can start apps. SuperLink and
SuperNode hand their tasks only to our executor, which knows a secret that is new at every start.
"""

from __future__ import annotations

import json
import os
import pwd
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from fednh.errors import RunError, UserError
from fednh.flower.deploy.processes import PATIENCE, RESTARTS, Child, Process, Processes, alive
from fednh.flower.layout import FederationFolder, FlowerHome
from fednh.io.files import private_folder, write_bytes, write_private


def fill_template(template: str, /, **words: str) -> str:
    """A file that `fednh federation init` writes, with its $words filled in."""
    text = resources.files("fednh.flower.deploy").joinpath("templates", template).read_text(encoding="utf-8")
    return Template(text).substitute(words)


# --- nginx in front of a SuperLink ----------------------------------------------------------------------------------


def write_proxy_config(folder: Path, fed: FederationFolder, listen: str, port: int) -> Path:
    """Write the configuration of a proxy that listens at `listen` for a SuperLink at a port of the loopback."""
    private_folder(folder)
    private_folder(folder / "temporary")
    paths = {"certificate": fed.server_certificate, "key": fed.server_key, "ca": fed.ca}
    quoted = {name: _quoted(path, folder) for name, path in paths.items()}
    # If root starts nginx, its workers run as another user, who could not write in this folder.
    user = f"user {pwd.getpwuid(0).pw_name};" if os.geteuid() == 0 else ""
    for name, words in {
        "fednh.conf": {**quoted, "listen": listen, "port": str(port)},
        "nginx.conf": {"user": user},
    }.items():
        write_bytes(folder / name, fill_template(name, **words).encode())
    return folder / "fednh.conf"


def proxy_command(folder: Path) -> list[str]:
    """The command that runs nginx in the foreground with this folder's configuration."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin", "/sbin"])
    program = shutil.which("nginx", path=path)
    if program is None:
        raise UserError("--proxy needs nginx, which is not installed here (Debian: apt install nginx-light)")
    return [program, "-p", f"{folder}{os.sep}", "-c", "nginx.conf", "-e", "stderr"]


def _quoted(path: Path, folder: Path) -> str:
    """A path for nginx's quotation marks, in which a dollar sign would begin a variable.

    A path with one is written relative to the configuration's folder; then only the nginx.conf there can include it.
    """
    text = str(path)
    if any(sign in text for sign in "$\n"):
        text = os.path.relpath(path, folder)
    return text.replace("\\", "\\\\").replace('"', '\\"')


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


def superlink(keys: FederationFolder, port: int, database: Path, secret: Path, limit: int) -> list[str]:
    """With TLS, and only for SuperNodes whose keys are registered.

    `limit`: bytes of replies that the SuperLink keeps for a site (superlink.py).
    """
    command = [sys.executable, "-m", "fednh.flower.deploy.superlink", str(limit)]
    command += ["--host", LOOPBACK, "--port", str(port), "--database", str(database)]
    command += ["--disable-runtime-dependency-installation"]
    command += ["--ssl-ca-certfile", str(keys.ca), "--ssl-certfile", str(keys.server_certificate)]
    command += ["--ssl-keyfile", str(keys.server_key), "--enable-supernode-auth"]
    return command + _isolation(secret)


def supernode(server: str, node_config: Path, port: int, ca: Path, key: Path, secret: Path) -> list[str]:
    command = [sys.executable, "-m", "fednh.flower.deploy.supernode"]
    command += ["--superlink", server, "--node-config", str(node_config)]
    command += ["--host", LOOPBACK, "--port", str(port)]
    command += ["--root-certificates", str(ca), "--auth-supernode-private-key", str(key)]
    return command + _isolation(secret)


def register(public: Path, connection: str) -> list[str]:
    return ["flwr", "supernode", "register", str(public), connection]


def run(folder: Path, connection: str) -> list[str]:
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
