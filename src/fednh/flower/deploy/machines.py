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
from fednh.flower import layout
from fednh.flower.deploy import certificates, commands, scaffold
from fednh.flower.deploy.commands import AppExecutor, ExecutorTarget
from fednh.flower.deploy.processes import PATIENCE, RESTARTS, Processes, answers, free_ports, marked
from fednh.flower.deploy.scaffold import PORT, connection
from fednh.flower.layout import FederationFolder, SiteFolder
from fednh.io.files import private_folder, write_bytes
from fednh.runs.run_folder import RunFolder

Say = Callable[[str], None]


def serve(folder: Path, config: Config, stop: threading.Event, say: Say, port: int = PORT) -> None:
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
    address = f"{commands.LOOPBACK}:{port}"
    with Processes(folder, home.path, None) as processes:
        executor, secret = AppExecutor(processes), commands.new_secret(home)

        def start() -> None:
            command = commands.superlink(fed, port, fed.database_file, secret, config.federation.site_bytes)
            link = processes.start_server("superlink", "the SuperLink", command, port, stop.wait)
            executor.serve(ExecutorTarget(address, str(folder), link.pid, str(secret), root=str(fed.ca)))

        def again() -> str:
            if words := processes.full_disk(folder):
                raise RunError(words)
            if processes.running["superlink"].returncode > 0:
                processes.check("superlink", "the SuperLink")
            if not processes.may_restart("superlink"):
                raise RunError(f"the SuperLink ended {1 + RESTARTS} times; see above")
            start()
            return "was killed; it was started again, and a run goes on with: fednh federation run"

        start()
        say(f"the server is ready at {address}, for this machine only; sites come in through the proxy")
        _keep("superlink", "the SuperLink", again, executor, stop, say)


def join(folder: Path, server: str, stop: threading.Event, say: Say) -> None:
    """Run a site's SuperNode, and the executor of the apps that the site has approved."""
    check_site(folder, server)
    site, (port,) = SiteFolder(folder), free_ports(1)
    for private in (folder, site.home.path):
        private_folder(private)
    with Processes(folder, site.home.path, None) as processes:
        executor, secret = AppExecutor(processes), commands.new_secret(site.home)

        def start() -> None:
            command = commands.supernode(server, site.node_config, port, site.ca, site.key, secret)
            node = processes.start("supernode", command)
            own = {"approved": str(site.approved_file), "site_toml": str(site.node_config)}
            executor.serve(ExecutorTarget(f"{commands.LOOPBACK}:{port}", str(folder), node.pid, str(secret), **own))

        def again() -> str:
            try:
                return processes.restart_supernode("supernode", start)
            except RunError as error:
                raise RunError(f"the SuperNode {error}; see above") from None

        start()
        say(f"the site connects to {server}; apps that may run here: {len(scaffold.approved(site.approved_file))}")
        _keep("supernode", "the SuperNode", again, executor, stop, say)


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
    if not scaffold.approved(site.approved_file):
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
        seen, deadline = False, time.monotonic() + PATIENCE
        while process.poll() is None and not stop.wait(0.2):
            seen = seen or bool(marked(folder, "flwr-serverapp"))
            if not seen and time.monotonic() > deadline:
                raise RunError(f"the ServerApp did not start in {PATIENCE:g} s; see what `serve` says")
    if stop.is_set():
        return
    if not run.ended(config):
        raise RunError(f"the run ended before its last round; it goes on with: fednh federation run {folder}")
    layout.check_end(run.path)


def _keep(
    name: str, what: str, again: Callable[[], str], executor: AppExecutor, stop: threading.Event, say: Say
) -> None:
    """Until `stop`, start a program and what runs its apps `again` when they were killed."""
    while not stop.wait(0.2):
        executor.check()
        if executor.processes.running[name].poll() is not None and (words := again()):
            say(f"{what} {words}")
