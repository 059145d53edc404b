"""A whole federation on this machine: SuperLink and SuperNodes as child processes that speak over the loopback.

They are the same plain Flower commands that run on several machines. Whatever happens, all that was started is ended:
the processes are sessions of their own, and carry the federation's folder in their environment, by which those that
Flower starts in turn are found, and those that a killed `up` has left behind.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from fednh.config import Config
from fednh.errors import RunError, UserError
from fednh.flower import notes
from fednh.flower.deploy import certificates
from fednh.flower.deploy.scaffold import Site, connections
from fednh.storage.files import write_bytes

MARK = "FEDNH_FEDERATION"  # in the environment of every process of a federation: its folder
# Nothing calls home, nothing is installed on the way, one thread a site, and no waiting where Flower lets one choose.
ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}
RESTARTS = 3  # of a SuperNode or a ServerApp that ended by itself
GIVE_UP = 30.0  # seconds after which a federation does not begin any more when a site cannot take part
FORGET = 120.0  # seconds in which Flower's server has surely missed the heartbeats of a SuperNode: twice its 2 x 30
PATIENCE = 60.0  # seconds in which a server must answer


Process = subprocess.Popen[bytes]


class Told(Protocol):
    """Who is told about the progress."""

    def round_done(self, record: dict[str, Any]) -> None: ...
    def note(self, text: str) -> None: ...


class Stopped(Exception):
    """Somebody asked to stop."""


class Processes:
    """The child processes of one federation; leaving the context ends them and all that they started."""

    def __init__(self, folder: Path, home: Path):
        self.folder, self.logs = folder, folder / "logs"
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        own = {MARK: str(folder), "FLWR_HOME": str(home), "PATH": path}
        self.environment = {**ENVIRONMENT, **os.environ, **own}
        self.running: dict[str, Process] = {}

    def __enter__(self) -> Processes:
        self.logs.mkdir(parents=True, exist_ok=True)
        end_marked(self.folder)  # what an earlier `up` left that was killed
        return self

    def __exit__(self, *_: object) -> None:
        end(list(self.running.values()))
        end_marked(self.folder)

    def start(self, name: str, command: list[str], cwd: Path | None = None, talk: bool = False) -> Process:
        """Start a command; what it says is appended to its log."""
        program = shutil.which(command[0], path=self.environment["PATH"])
        if program is None:
            raise UserError(f"{command[0]} is not installed here: pip install 'fednh[flower]'")
        with self.log(name).open("ab") as log:
            self.running[name] = subprocess.Popen(
                [program, *command[1:]],
                cwd=cwd or self.folder,
                env=self.environment,
                stdin=subprocess.PIPE if talk else subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in the terminal is ours to pass on
            )
        return self.running[name]

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def tail(self, name: str) -> str:
        """The end of a log, for a sentence about what went wrong."""
        lines = [line.strip() for line in self.log(name).read_text(errors="replace").splitlines() if line.strip()]
        return " / ".join(lines[-3:])[-400:] or "it said nothing"


def end(processes: list[Process], grace: float = 3.0) -> None:
    """Ask, wait a little, then insist; each is the leader of a session of its own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        deadline = time.monotonic() + grace
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))


def marked(folder: Path) -> list[int]:
    """The processes of a federation, this one aside. Where there is no /proc the process groups must do."""
    mark, found = f"{MARK}={folder}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        pid = int(path.parent.name)
        with suppress(OSError):
            if pid != os.getpid() and mark in path.read_bytes().split(b"\0"):
                found.append(pid)
    return found


def named(folder: Path, word: str) -> list[int]:
    """Those of a federation's processes whose command line has this word."""
    found = []
    for pid in marked(folder):
        with suppress(OSError):
            if word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def end_marked(folder: Path, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while (left := marked(folder)) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


class Local:
    """One federation that runs here: start, watch, mend, until its run folder has a summary."""

    def __init__(
        self,
        folder: Path,
        config: Config,
        sites: list[Site],
        told: Told,
        stop: threading.Event,
        secure: bool,
        warm: bool,
    ):
        self.folder, self.sites, self.secure = folder, sites, secure
        self.warm = warm and sys.platform == "linux"  # elsewhere a fork of a process with PyTorch in it may not work
        self.run_folder, self.enough = Path(str(config.federation.folder)), config.federation.min_clients
        self.told, self.stop, self.keys = told, stop, certificates.Keys(folder)
        self.home = folder / ".flwr" / "local"
        self.ports = free_ports(1 + len(sites))
        self.address = f"127.0.0.1:{self.ports[0]}"
        self.seen: dict[str, int] = {}  # lines of files of the run folder that were shown
        for name in (notes.NAME, "metrics.jsonl"):
            self._new(name)
        self.restarts: dict[str, int] = {}
        self.forgotten: dict[str, float] = {}  # when the server will have forgotten a SuperNode that was killed
        self.retry: dict[str, float] = {}  # when to try again until then
        self.hopeless: tuple[float, str] | None = None  # since when a site says that it cannot take part

    def run(self) -> None:
        """Everything from start to end; raises RunError when the federation cannot finish, Stopped when asked to."""
        connection: dict[str, Any] = {"address": self.address}
        connection |= {"root-certificates": str(self.keys.ca)} if self.secure else {"insecure": True}
        write_bytes(self.home / "config.toml", connections("local", connection).encode())
        with Processes(self.folder, self.home) as self.processes:
            if self.warm:
                self._executor()  # its imports take a while
            self._start_superlink()
            self._register()
            for number, _ in enumerate(self.sites):
                self._start_supernode(number)
            self._start_run()
            self._watch()

    # --- starting ----------------------------------------------------------------------------------------------

    def _start_superlink(self) -> None:
        command = ["flower-superlink", "--host", "127.0.0.1", "--port", str(self.ports[0])]
        command += ["--disable-runtime-dependency-installation"]
        if self.secure:
            command += ["--ssl-ca-certfile", str(self.keys.ca), "--ssl-certfile", str(self.keys.server)]
            command += ["--ssl-keyfile", str(self.keys.server_key), "--enable-supernode-auth"]
        else:
            command += ["--insecure"]
        process = self.processes.start("superlink", command)
        deadline = time.monotonic() + PATIENCE
        while not answers(self.ports[0]):
            self._pause(0.05)
            if process.poll() is not None:
                raise RunError(
                    f"the SuperLink ended with code {process.returncode}: {self.processes.tail('superlink')}"
                )
            if time.monotonic() > deadline:
                raise RunError(
                    f"the SuperLink does not answer after {PATIENCE:g} s; see {self.processes.log('superlink')}"
                )

    def _register(self) -> None:
        """Tell the SuperLink the sites' public keys; others are refused."""
        if not self.secure:
            return
        keys = {f"register-{site.name}": self.keys.site_public(site.name) for site in self.sites}
        started = {
            name: self.processes.start(name, ["flwr", "supernode", "register", str(key), "local"])
            for name, key in keys.items()
        }
        while any(process.poll() is None for process in started.values()):
            self._pause(0.05)
        for name, process in started.items():
            if process.returncode:
                raise RunError(f"the SuperLink does not take the key {keys[name]}: {self.processes.tail(name)}")
            self.processes.log(name).unlink()
            del self.processes.running[name]

    def _start_supernode(self, number: int) -> None:
        site = self.sites[number]
        command = ["flower-supernode", "--superlink", self.address, "--node-config", str(site.node_config)]
        command += ["--host", "127.0.0.1", "--port", str(self.ports[1 + number])]
        if self.secure:
            command += ["--root-certificates", str(self.keys.site_ca(site.name))]
            command += ["--auth-supernode-private-key", str(self.keys.site_key(site.name))]
        else:
            command += ["--insecure"]
        if self.warm:
            command += ["--isolation", "process"]
        process = self.processes.start(site.name, command, site.folder)
        if self.warm:
            address, log = f"127.0.0.1:{self.ports[1 + number]}", self.processes.log(site.name)
            job = {"address": address, "folder": str(site.folder), "log": str(log), "pid": process.pid}
            talk = self._executor().stdin
            assert talk is not None
            talk.write(json.dumps(job).encode() + b"\n")
            talk.flush()

    def _executor(self) -> Process:
        """The process that runs the sites' ClientApps."""
        running = self.processes.running.get("executor")
        if running is not None and running.poll() is None:
            return running
        return self.processes.start("executor", [sys.executable, "-m", "fednh.flower.deploy.forking"], talk=True)

    def _start_run(self) -> None:
        self.server_seen, self.server_gone = False, time.monotonic()
        self.processes.log("run").write_bytes(b"")
        self.processes.start("run", ["flwr", "run", str(self.folder), "local", "--stream"])

    # --- watching ----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Show every round; start again what ended by itself; return when the run folder is finished."""
        while not (self.run_folder / "summary.json").exists():
            self._show()
            self._look_after_supernodes()
            self._look_after_server()
            self._give_up()
            self._pause(0.1)
        self._show()

    def _look_after_supernodes(self) -> None:
        """One that was killed is started again; one that ended by itself has a reason, and is given up.

        The server keeps the place of one that was killed until its heartbeats are missed, and refuses it so long.
        """
        for number, site in enumerate(self.sites):
            process, now = self.processes.running.get(site.name), time.monotonic()
            if process is None or process.poll() is None:
                continue
            if process.returncode < 0 and self._again(site.name):
                killed = f"the SuperNode of {site.name} was killed by signal {-process.returncode}"
                self.told.note(f"{killed}; starting it again, which the server allows after a minute")
                self.forgotten[site.name] = now + FORGET
                self.retry[site.name] = now
            if now < self.forgotten.get(site.name, 0.0):
                if now >= self.retry[site.name]:
                    self.retry[site.name] = now + 5
                    self._start_supernode(number)
                continue
            del self.processes.running[site.name]
            what = f"the SuperNode of {site.name} ended: {self._why(site.name)} (see {self.processes.log(site.name)})"
            left = sum(each.name in self.processes.running for each in self.sites)
            if left == 0 or (left < self.enough and not self._begun()):
                raise RunError(f"{what}; {left} sites are left, and federation.min_clients = {self.enough}")
            self.told.note(f"{what}; going on without it")

    def _look_after_server(self) -> None:
        """A ServerApp that was killed is started again, and goes on from its checkpoint; one that failed says why."""
        link, run = self.processes.running["superlink"], self.processes.running["run"]
        if link.poll() is not None:
            raise RunError(f"the SuperLink ended with code {link.returncode}: {self.processes.tail('superlink')}")
        alive = bool(named(self.folder, "flwr-serverapp"))
        self.server_seen = self.server_seen or alive
        if alive or (not self.server_seen and run.poll() is None):
            self.server_gone = time.monotonic()
            return
        if time.monotonic() - self.server_gone < 2 or (self.run_folder / "summary.json").exists():
            return  # it may be at its last words
        if reason := self._reason():
            raise RunError(f"{reason} (see {self.processes.log('run')})")
        if not self._again("run"):
            raise RunError(f"the ServerApp ended {1 + RESTARTS} times before its last round; see {self.processes.logs}")
        self.told.note("the ServerApp ended before its last round; starting it again")
        end([run])
        self._start_run()

    def _give_up(self) -> None:
        """A server waits for its sites; here nobody will come to mend one that cannot take part."""
        if self.hopeless and time.monotonic() - self.hopeless[0] > GIVE_UP:
            if not self._begun():
                raise RunError(f"the federation cannot begin: {self.hopeless[1]}")
            self.hopeless = None

    def _begun(self) -> bool:
        """Whether enough sites came, and the first round was begun."""
        return (self.run_folder / "config.toml").exists()

    def _again(self, name: str) -> bool:
        self.restarts[name] = self.restarts.get(name, 0) + 1
        return self.restarts[name] <= RESTARTS

    def _why(self, site: str) -> str:
        """What a SuperNode said at its end: the lines that begin with Flower's exit code."""
        text = self.processes.log(site).read_text(errors="replace")
        _, code, rest = text.rpartition("Exit Code: ")
        return " ".join(f"{code}{rest}".partition("For more information")[0].split())[:300] or "it did not say why"

    def _reason(self) -> str:
        """The sentence with which a ServerApp or `flwr run` failed, if it did by itself."""
        text = self.processes.log("run").read_text(errors="replace")
        found = re.findall(r"^(?:fednh\.errors\.\w+: |Error: )(.+)$", text, re.MULTILINE)
        if found or "raised an exception" in text:
            return str(found[-1]) if found else self.processes.tail("run")
        return ""

    def _show(self) -> None:
        """What the server has written since the last look: rounds, and what it had to say."""
        for line in self._new(notes.NAME):
            words = notes.sentence(line)
            self.told.note(words)
            # "Unavailable" is Flower's word for a question that a slow site has not answered yet: it is asked again.
            if "cannot take part" in words and "Unavailable" not in words and not self._begun():
                self.hopeless = self.hopeless or (time.monotonic(), words)
        for line in self._new("metrics.jsonl"):
            self.told.round_done(json.loads(line))

    def _new(self, name: str) -> list[bytes]:
        """Whole lines of a file of the run folder that were not there at the last look."""
        file = self.run_folder / name
        lines = (file.read_bytes() if file.exists() else b"").split(b"\n")[:-1]
        before, self.seen[name] = self.seen.get(name, 0), max(self.seen.get(name, 0), len(lines))
        return lines[before:]

    def _pause(self, seconds: float) -> None:
        if self.stop.wait(seconds):
            raise Stopped


def free_ports(count: int) -> list[int]:
    """Ports of the loopback that nobody listens on now."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(each.getsockname()[1]) for each in held]
    for each in held:
        each.close()
    return ports


def answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
