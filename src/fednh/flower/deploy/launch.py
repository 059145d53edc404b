"""Start the server of a federation, one of its sites, or on one machine all of them (a trial), and keep them running.

A trial has the same programs with the same options as several machines (processes.py), and talks over the loopback. It
keeps its sites' states below trial/, so that the folders that will be handed over stay as they are.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
import tomllib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import tomli_w

from fednh.callbacks import Callback
from fednh.config import Config
from fednh.errors import RunError, UserError
from fednh.flower import layout
from fednh.flower.deploy import certificates, scaffold
from fednh.flower.deploy.processes import (
    LOOPBACK,
    PATIENCE,
    RESTARTS,
    AppExecutor,
    ExecutorTarget,
    Processes,
    SuperNodes,
    answers,
    end,
    free_ports,
    marked,
    new_secret,
    register_command,
    run_command,
    superlink_command,
    supernode_command,
)
from fednh.flower.deploy.scaffold import PORT, connection, connections
from fednh.flower.layout import WAITING, FederationFolder, SiteFolder
from fednh.io.files import private_folder, write_bytes
from fednh.runs.run_folder import RunFolder

# --- on several machines --------------------------------------------------------------------------------------------


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
    address = f"{LOOPBACK}:{port}"
    with Processes(folder, home.path, None) as processes:
        executor, secret = AppExecutor(processes), new_secret(home)

        def start() -> None:
            command = superlink_command(fed, port, fed.database_file, secret, config.federation.site_bytes)
            link = processes.start_server("superlink", "the SuperLink", command, port, stop.wait)
            executor.serve(ExecutorTarget(address, str(folder), link.pid, str(secret), root=str(fed.ca)))

        def again() -> str:
            if problem := processes.full_disk(folder):
                raise RunError(problem)
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
        executor, secret = AppExecutor(processes), new_secret(site.home)

        def start() -> None:
            command = supernode_command(server, site.node_config, port, site.ca, site.key, secret)
            node = processes.start("supernode", command)
            own = {"approved": str(site.approved_file), "site_toml": str(site.node_config)}
            executor.serve(ExecutorTarget(f"{LOOPBACK}:{port}", str(folder), node.pid, str(secret), **own))

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
    for file, origin in {
        site.node_config: "it says where the site's data lies",
        site.ca: "the server's owner has it",
        site.key: "it is made by `fednh federation certs` or by the site itself",
    }.items():
        if not file.is_file():
            raise UserError(f"{file} does not exist: {origin}; a site's folder is what `federation init` wrote")
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
        process = processes.start("run", run_command(folder, "server"), folder)
        running, deadline = False, time.monotonic() + PATIENCE
        while process.poll() is None and not stop.wait(0.2):
            running = running or bool(marked(folder, "flwr-serverapp"))
            if not running and time.monotonic() > deadline:
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
        if executor.processes.running[name].poll() is not None and (sentence := again()):
            say(f"{what} {sentence}")


# --- a trial on one machine -----------------------------------------------------------------------------------------


GIVE_UP = 30.0  # seconds to wait before the first round after a site cannot take part
ALL_HERE = 300.0  # seconds in which one more site must appear while the server waits for sites


def check_platform() -> None:
    """Raise where programs cannot be forked after PyTorch was loaded, which all but a ServerApp need."""
    if sys.platform != "linux":
        raise UserError(
            f"federations run on Linux: their programs are forked, which is not safe on {sys.platform} once PyTorch is "
            "loaded; simulate here with `fednh run`, or use a Linux machine, a virtual one or a container"
        )


class Stopped(Exception):
    """Somebody asked to stop."""


class LocalFederation:
    """One federation on this machine: start it, watch it, restart what was killed, until the run is finished."""

    newest: tuple[float, str] = (0.0, "")  # since when the server's newest note has been the newest, and the note

    def __init__(
        self,
        folder: Path,
        config: Config,
        sites: list[SiteFolder],
        display: Callback,
        stop: threading.Event,
        behind_proxy: bool = False,
    ):
        self.folder, self.config, self.sites = folder, config, sites
        self.run_folder, self.needs = RunFolder(Path(str(config.federation.folder))), config.federation
        self.display, self.stop, self.fed = display, stop, FederationFolder(folder)
        self.home = self.fed.local_home
        self.secret = self.home.secret_file
        self.proxy = self.home.proxy if behind_proxy else None
        self.port, self.front, *self.ports = free_ports(2 + len(sites))
        self.address = f"{LOOPBACK}:{self.port}"
        # Where sites connect to.
        self.site_address = f"{LOOPBACK}:{self.front}" if behind_proxy else self.address
        self.lines_shown: dict[Path, int] = {}  # run folder file -> number of lines shown
        for file in (self.run_folder.log_file, self.run_folder.metrics_file):
            self._new(file)
        self.fatal_problem: tuple[float, str] | None = None  # when and why a site could not take part

    def run(self) -> None:
        """Run the federation to its end; raises RunError if it cannot finish, Stopped if asked to stop."""
        connection = {"address": self.address, "root-certificates": str(self.fed.ca)}
        private_folder(self.home.path)
        write_bytes(self.home.connections_file, connections("local", connection).encode())
        with Processes(self.folder, self.home.path, self.fed.logs) as self.processes:
            self.executor, self.supernodes = AppExecutor(self.processes), SuperNodes(self.processes)
            new_secret(self.home)
            self.executor.start()
            self.supernodes.load()
            self._start_anew()
            self._start_proxy()
            self.approved = self.home.approved_file  # whoever starts a trial approves its app
            self.approved.unlink(missing_ok=True)
            scaffold.approve(self.approved, scaffold.app_of(self.folder).hash)
            for number, _ in enumerate(self.sites):
                self._start_supernode(number)
            self._start_run()
            self._watch()

    # --- starting ----------------------------------------------------------------------------------------------

    def _start_anew(self) -> None:
        """Start a SuperLink without a past, and register the sites' keys; again if it is killed meanwhile."""
        while True:
            for old in self.home.path.glob(f"{self.home.database_file.name}*"):
                old.unlink()
            self._start_superlink()
            try:
                return self._register()
            except RunError:
                if not self.processes.was_killed("superlink") or not self.processes.may_restart("superlink"):
                    raise
            self.display.on_note("the SuperLink was killed; starting it again")

    def _start_superlink(self) -> None:
        database, limit = self.home.database_file, self.needs.site_bytes
        command = superlink_command(self.fed, self.port, database, self.secret, limit)
        process = self.processes.start_server("superlink", "the SuperLink", command, self.port, self._pause)
        log = str(self.processes.log("superlink"))
        self.executor.serve(
            ExecutorTarget(self.address, str(self.folder), process.pid, str(self.secret), log, str(self.fed.ca))
        )

    def _start_proxy(self) -> None:
        if self.proxy is not None:
            scaffold.write_proxy_config(self.proxy, self.fed, self.site_address, self.port)
            self.processes.start_server("proxy", "nginx", scaffold.proxy_command(self.proxy), self.front, self._pause)

    def _register(self) -> None:
        """Register the sites' public keys with the SuperLink, which refuses all others."""
        keys = {f"register-{site.name}": site.public_key for site in self.sites}
        started = {name: self.processes.start(name, register_command(key, "local")) for name, key in keys.items()}
        while any(process.poll() is None for process in started.values()):
            self._pause(0.05)
        for name, process in started.items():
            if process.returncode:
                raise RunError(f"the SuperLink does not accept the key {keys[name]}: {self.processes.tail(name)}")
            self.processes.log(name).unlink()
            del self.processes.running[name]

    def _start_supernode(self, number: int) -> None:
        site, port = self.sites[number], self.ports[number]
        node_config = self._node_config(site)
        command = supernode_command(self.site_address, node_config, port, site.ca, site.key, self.secret)
        process = self.supernodes.start(site.name, command[3:], site.path)
        address, log = f"{LOOPBACK}:{port}", str(self.processes.log(site.name))
        own = {"approved": str(self.approved), "site_toml": str(node_config)}
        self.executor.serve(ExecutorTarget(address, str(site.path), process.pid, str(self.secret), log, **own))

    def _node_config(self, site: SiteFolder) -> Path:
        """Write a copy of the site's site.toml with the trial's folder for its state."""
        settings = tomllib.loads(site.node_config.read_text(encoding="utf-8"))
        settings["state"] = str(self.fed.trial_site(site.name).state)
        path = self.fed.trial_site(site.name).node_config
        private_folder(path.parent)
        write_bytes(path, tomli_w.dumps(settings).encode())
        return path

    def _start_run(self) -> None:
        self.server_seen, self.run_started = False, time.monotonic()
        self.server_gone = self.run_started
        self.processes.log("run").unlink(missing_ok=True)
        self.processes.start("run", run_command(self.folder, "local"))

    # --- watching ----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Show every round; restart processes that were killed; return when the run is finished."""
        while not self.run_folder.ended(self.config):
            self._show()
            self.executor.check()
            self._look_after_supernodes()
            self._look_after_superlink()
            self._look_after_server()
            self._give_up()
            self._pause(0.1)
        self._show()
        layout.check_end(self.run_folder.path)

    def _look_after_supernodes(self) -> None:
        """Restart a SuperNode that was killed; go on without one that exited with an error."""
        for number, site in enumerate(self.sites):
            process = self.processes.running.get(site.name)
            if process is None or process.poll() is None:
                continue
            try:
                if sentence := self.processes.restart_supernode(site.name, partial(self._start_supernode, number)):
                    self.display.on_note(f"the SuperNode of {site.name} {sentence}")
                continue
            except RunError:
                pass
            del self.processes.running[site.name]
            what = f"the SuperNode of {site.name} ended: {self._why(site.name)} (see {self.processes.log(site.name)})"
            left = sum(each.name in self.processes.running for each in self.sites)
            key, number_needed = "min_clients", self.needs.min_clients
            if not self.run_folder.started and self.needs.enough > number_needed:
                key, number_needed = "start", self.needs.enough
            if left < number_needed:
                raise RunError(f"{what}; {left} sites are left, and federation.{key} = {number_needed}")
            self.display.on_note(f"{what}; going on without it")

    def _look_after_superlink(self) -> None:
        """Restart a SuperLink that was killed, with its database, and then the run, from its checkpoint."""
        link = self.processes.running["superlink"]
        if link.poll() is None:
            return
        self._check_disk()
        if link.returncode > 0:
            self.processes.check("superlink", "the SuperLink")
        if not self.processes.may_restart("superlink"):
            raise RunError(f"the SuperLink ended {1 + RESTARTS} times; {self.processes.where('superlink')}")
        self.display.on_note("the SuperLink was killed; starting it again, and the ServerApp with it")
        end([self.processes.running["run"]])
        for process in marked(self.folder, "flwr-serverapp"):
            with suppress(psutil.Error):
                process.kill()
        self._start_superlink()
        self._start_run()

    def _look_after_server(self) -> None:
        """Restart a killed ServerApp, which continues from its checkpoint; raise the error of one that failed."""
        run, now = self.processes.running["run"], time.monotonic()
        if self.proxy is not None:
            self.processes.check("proxy", "nginx")
        alive = bool(marked(self.folder, "flwr-serverapp"))
        self.server_seen = self.server_seen or alive
        starting = not self.server_seen and run.poll() is None and now - self.run_started < PATIENCE
        if alive or starting:
            self.server_gone = now
            return
        if now - self.server_gone < 2 or self.run_folder.ended(self.config):
            return  # it may still be finishing
        self._check_disk()
        if reason := self._reason():
            raise RunError(f"{reason} (see {self.processes.log('run')})")
        if not self.processes.may_restart("run"):
            raise RunError(f"the ServerApp ended {1 + RESTARTS} times before its last round; see {self.processes.logs}")
        what = "ended before its last round" if self.server_seen else f"did not start in {PATIENCE:g} s"
        self.display.on_note(f"the ServerApp {what}; starting it again")
        end([run])
        self._start_run()

    def _check_disk(self) -> None:
        if problem := self.processes.full_disk(self.home.path, "superlink", "run"):
            raise RunError(problem)

    def _give_up(self) -> None:
        """Give up if a site cannot take part before the first round, or does not come: nobody repairs it in a trial."""
        since, note = self.newest
        if note.startswith(WAITING) and time.monotonic() - since > ALL_HERE:
            raise RunError(f"{note}, and no other came in {ALL_HERE:g} s; see {self.processes.logs}")
        if self.fatal_problem and time.monotonic() - self.fatal_problem[0] > GIVE_UP:
            if not self.run_folder.started:
                raise RunError(f"the federation cannot begin: {self.fatal_problem[1]}")
            self.fatal_problem = None

    def _why(self, site: str) -> str:
        """Why a SuperNode ended: its last lines, from Flower's exit code on."""
        text = self.processes.log(site).read_text(errors="replace")
        _, code, rest = text.rpartition("Exit Code: ")
        return " ".join(f"{code}{rest}".partition("For more information")[0].split())[:300] or "it did not say why"

    def _reason(self) -> str:
        """The error message of a ServerApp or `flwr run` that failed; empty if it was killed."""
        text = self.processes.log("run").read_text(errors="replace")
        errors = re.findall(r"^(?:fednh\.errors\.\w+: |Error: )(.+)$", text, re.MULTILINE)
        if errors or "raised an exception" in text:
            return str(errors[-1]) if errors else self.processes.tail("run")
        return ""

    def _show(self) -> None:
        """Show what the server has written since the last call: notes and rounds."""
        for line in self._new(self.run_folder.log_file):
            note = layout.note_text(line)
            self.display.on_note(note)
            if note != self.newest[1]:
                self.newest = (time.monotonic(), note)
            # "Unavailable" means that a slow site has not answered a query yet; it is asked again.
            if "cannot take part" in note and "Unavailable" not in note and not self.run_folder.started:
                self.fatal_problem = self.fatal_problem or (time.monotonic(), note)
        for line in self._new(self.run_folder.metrics_file):
            self.display.on_round(json.loads(line))

    def _new(self, file: Path) -> list[bytes]:
        """Complete lines that were added to a file of the run folder since the last call."""
        lines = (file.read_bytes() if file.exists() else b"").split(b"\n")[:-1]
        before, self.lines_shown[file] = self.lines_shown.get(file, 0), max(self.lines_shown.get(file, 0), len(lines))
        return lines[before:]

    def _pause(self, seconds: float) -> None:
        if self.stop.wait(seconds):
            raise Stopped
