"""The command lines of a federation's programs: the same on one machine and on many.

The server's SuperLink listens on the loopback only, because whoever reaches its port can start apps. SuperLink and
SuperNode hand their tasks only to our executor, which knows a secret that is new at every start.
"""

from __future__ import annotations

import json
import secrets
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from fednh.errors import RunError
from fednh.flower.deploy.processes import RESTARTS, Process, Processes, alive
from fednh.flower.layout import FederationFolder, FlowerHome
from fednh.storage.files import write_private

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Job:
    """A SuperLink or SuperNode for an executor to serve; sent as one line of JSON."""

    address: str
    folder: str
    pid: int  # the executor stops when this process ends
    secret: str
    log: str | None = None
    root: str | None = None  # the certificate authority for TLS; None: no TLS
    approved: str | None = None  # a site's list of apps that may run; None: at the server
    told: str | None = None  # a site's site.toml


def superlink(keys: FederationFolder | None, port: int, database: Path, secret: Path | None, limit: int) -> list[str]:
    """With keys: TLS, and only SuperNodes whose keys are registered. Without a secret it starts ServerApps itself.

    `limit`: bytes of replies that the SuperLink keeps for a site (superlink.py).
    """
    command = [sys.executable, "-m", "fednh.flower.deploy.superlink", str(limit)]
    command += ["--host", LOOPBACK, "--port", str(port), "--database", str(database)]
    command += ["--disable-runtime-dependency-installation"]
    if keys is not None:
        command += ["--ssl-ca-certfile", str(keys.ca), "--ssl-certfile", str(keys.server_certificate)]
        command += ["--ssl-keyfile", str(keys.server_key), "--enable-supernode-auth"]
    else:
        command += ["--insecure"]
    return command + _isolation(secret)


def supernode(
    server: str, node_config: Path, port: int, ca: Path | None, key: Path | None, secret: Path | None
) -> list[str]:
    """Without a secret it starts the ClientApps of any app itself."""
    command = [sys.executable, "-m", "fednh.flower.deploy.supernode"]
    command += ["--superlink", server, "--node-config", str(node_config)]
    command += ["--host", LOOPBACK, "--port", str(port)]
    if ca is not None and key is not None:
        command += ["--root-certificates", str(ca), "--auth-supernode-private-key", str(key)]
    else:
        command += ["--insecure"]
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


class Executor:
    """The process that runs the tasks of SuperLink and SuperNodes (forking.py)."""

    def __init__(self, processes: Processes):
        self.processes = processes
        self.jobs: dict[str, Job] = {}  # by address

    def start(self) -> Process:
        """Start it, if it does not run; its imports take a while."""
        running = self.processes.running.get("executor")
        if running is not None and running.poll() is None:
            return running
        return self.processes.start("executor", [sys.executable, "-m", "fednh.flower.deploy.forking"], talk=True)

    def serve(self, job: Job) -> None:
        """Let it run the tasks of a SuperLink or SuperNode, in place of an earlier one at the same address."""
        self.jobs[job.address] = job
        talk = self.start().stdin
        assert talk is not None
        with suppress(BrokenPipeError):  # it has just been killed: `check` will see
            talk.write(json.dumps(asdict(job)).encode() + b"\n")
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
        for job in list(self.jobs.values()):
            if alive(job.pid):
                self.serve(job)


def _isolation(secret: Path | None) -> list[str]:
    return [] if secret is None else ["--isolation", "process", "--superexec-auth-secret-file", str(secret)]
