"""The server of a federation, or one of its sites, on a machine of its own; each runs until it is stopped."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

from fednh.config import Config
from fednh.errors import RunError, UserError
from fednh.flower import notes
from fednh.flower.deploy import approval, certificates, commands
from fednh.flower.deploy.commands import Job
from fednh.flower.deploy.processes import PATIENCE, Processes, answers, free_ports
from fednh.flower.deploy.scaffold import PORT, connection
from fednh.flower.layout import FederationFolder, SiteFolder
from fednh.storage.files import private_folder, write_bytes
from fednh.storage.run_folder import RunFolder

Say = Callable[[str], None]


def serve(folder: Path, stop: threading.Event, say: Say, port: int = PORT) -> None:
    """Run the SuperLink on the loopback, with TLS and the sites' keys, and the executor of its ServerApps."""
    fed = FederationFolder(folder)
    home = fed.home
    if not fed.server_certificate.exists():
        raise UserError(
            f"{fed.server_certificate} does not exist; make it: fednh federation certs {folder} --host NAME"
        )
    certificates.check_away(folder)
    if answers(port):
        raise UserError(f"something listens at 127.0.0.1:{port} already; stop it, or choose another --port")
    private_folder(home.path)
    write_bytes(home.connections_file, connection(folder, port).encode())
    with Processes(folder, home.path, None) as processes:
        secret = commands.new_secret(home)
        command = commands.superlink(fed, port, fed.database_file, secret)
        link = processes.start("superlink", command)
        _until(lambda: answers(port), processes, stop, "the SuperLink does not answer", PATIENCE)
        if not stop.is_set():
            address = f"{commands.LOOPBACK}:{port}"
            job = Job(address, str(folder), link.pid, str(secret), root=str(fed.ca))
            commands.execute(processes, job)
            say(f"the server is ready at {address}, for this machine only; sites come in through the proxy")
        _until(lambda: False, processes, stop)


def join(folder: Path, server: str, stop: threading.Event, say: Say) -> None:
    """Run a site's SuperNode, and the executor of the apps that the site has approved."""
    check_site(folder, server)
    site, (port,) = SiteFolder(folder), free_ports(1)
    for private in (folder, site.home.path):
        private_folder(private)
    with Processes(folder, site.home.path, None) as processes:
        secret = commands.new_secret(site.home)
        command = commands.supernode(server, site.node_config, port, site.ca, site.key, secret)
        node = processes.start("supernode", command)
        own = {"approved": str(site.approved_file), "told": str(site.node_config)}
        commands.execute(processes, Job(f"{commands.LOOPBACK}:{port}", str(folder), node.pid, str(secret), **own))
        say(f"the site connects to {server}; apps that may run here: {len(approval.approved(site.approved_file))}")
        _until(lambda: False, processes, stop)


def check_site(folder: Path, server: str) -> None:
    """Raise if the site's folder lacks something that it needs to take part."""
    if not re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^\s:/@]+):\d{1,5}", server):
        raise UserError(f"--server {server!r} is not NAME:PORT; no https:// before it, and a port after it")
    site = SiteFolder(folder)
    for file, words in {
        site.node_config: "it says where the site's data lies",
        site.ca: "the server's owner has it",
        site.key: "it is made by `fednh federation certs` or by the site itself",
    }.items():
        if not file.is_file():
            raise UserError(f"{file} does not exist: {words}; a site's folder is what `federation init` wrote")
    if not approval.approved(site.approved_file):
        raise UserError(
            f"{site.approved_file} names no app, so this site would do nothing: ask the server's owner for the "
            f"app's hash, then: fednh federation approve {folder} HASH"
        )
    if site.key.stat().st_mode & 0o077:
        site.key.chmod(0o600)


def train(folder: Path, config: Config, stop: threading.Event) -> None:
    """Execute `flwr run` and check the run folder: its exit code does not say how the run ended."""
    fed, run = FederationFolder(folder), RunFolder(Path(str(config.federation.folder)))
    if run.ended(config):
        raise UserError(
            f"{run.path} holds a finished run; raise rounds in {fed.app_file} to go on with it, or move it away, or "
            f"choose another federation.folder there, to train anew"
        )
    if not fed.home.connections_file.exists():
        raise UserError(f"{folder}: no server was started here; start it: fednh federation serve {folder}")
    with Processes(fed.home.path / f"run-{os.getpid()}", fed.home.path, None) as processes:
        process = processes.start("run", commands.run(folder, "server"), folder)
        while process.poll() is None and not stop.wait(0.2):
            pass
    if stop.is_set():
        return
    if not run.ended(config):
        raise RunError(f"the run ended before its last round; it goes on with: fednh federation run {folder}")
    notes.check_end(run.path)


def _until(
    done: Callable[[], bool], processes: Processes, stop: threading.Event, late: str = "", patience: float = 0
) -> None:
    """Wait until `done` or `stop`; raise if a program ends in the meantime."""
    deadline = time.monotonic() + patience
    while not done() and not stop.wait(0.2):
        for name in list(processes.running):
            processes.check(name, f"the {name}")
        if late and time.monotonic() > deadline:
            raise RunError(f"{late} after {patience:g} s; see above")
