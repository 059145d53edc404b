"""Machines of their own, as far as one machine can have them: network namespaces that a bridge joins."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

SERVER = "server"
NETWORK = "10.213.77"


def sh(*words: str) -> None:
    subprocess.run(words, check=True, timeout=60)


class World:
    """Machines, and what runs on them."""

    def __init__(self, folder: Path, others: Sequence[str], rates: Mapping[str, float] | None = None):
        """`rates`: those of the others whose line has so many bits a second, 300 ms there and back and 2% loss."""
        self.rates = rates or {}
        self.folder, self.tag, self.running = folder, f"fednh{os.getpid()}", list[subprocess.Popen[str]]()
        self.machines = (SERVER, *others)
        self.marks = folder / "marks"
        self.marks.mkdir()

    def build(self) -> None:
        for number, name in enumerate(self.machines, 1):
            sh("ip", "netns", "add", self.ns(name))
            hosts = Path("/etc/netns") / self.ns(name) / "hosts"
            hosts.parent.mkdir(parents=True)
            hosts.write_text(f"127.0.0.1 localhost\n{NETWORK}.1 fl.example.org\n")
            self.ip(name, "link", "set", "lo", "up")
            if name == SERVER:
                self.ip(SERVER, "link", "add", "bridge", "type", "bridge")
                self.ip(SERVER, "addr", "add", f"{NETWORK}.1/24", "dev", "bridge")
                self.ip(SERVER, "link", "set", "bridge", "up")
                continue
            there = f"to{number}"
            if name in self.rates:
                self.line(name, there)
            else:
                self.ip(name, "link", "add", "out", "type", "veth", "peer", "name", there, "netns", self.ns(SERVER))
            self.ip(SERVER, "link", "set", there, "master", "bridge", "up")
            self.ip(name, "addr", "add", f"{NETWORK}.{number}/24", "dev", "out")
            self.ip(name, "link", "set", "out", "up")

    def line(self, name: str, there: str) -> None:
        """A slow line to the server."""
        ends = [self.ns(name), "out", self.ns(SERVER), there]
        how = [f"{self.rates[name]:g}", "0.15", "0.02", str(self.cut(name))]
        log = self.folder / f"line-{name}.log"
        with log.open("w") as file:
            command = [sys.executable, "-m", "tests.helpers.line", *ends, *how]
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, text=True, start_new_session=True
            )
        self.running.append(process)
        until(lambda: "ready" in log.read_text(), log)

    def cut(self, name: str) -> Path:
        """The file whose presence cuts a line."""
        return self.folder / f"cut-{name}"

    def ns(self, machine: str) -> str:
        return f"{self.tag}-{machine}"

    def ip(self, machine: str, *words: str) -> None:
        sh("ip", "-n", self.ns(machine), *words)

    def start(self, machine: str, script: str, folder: Path, log: Path) -> subprocess.Popen[str]:
        """A shell on a machine, in a folder."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin"
        home = self.folder / f"home of {machine}"
        own = {"PATH": path, "HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
        with log.open("a") as file:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.ns(machine), "bash", "-euc", script],
                cwd=folder,
                env={**os.environ, **own, "FEDNH_TEST_MARK": str(self.marks)},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        self.running.append(process)
        return process

    def run(self, machine: str, script: str, folder: Path, seconds: float = 400) -> tuple[int, str]:
        log = self.folder / f"run-{time.monotonic_ns()}.log"
        process = self.start(machine, script, folder, log)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(f"{script}: not done in {seconds} s:\n{log.read_text()[-3000:]}")
        return code, log.read_text()

    def end(self) -> None:
        for process in self.running:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self.running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
        for name in self.machines:
            found = subprocess.run(["ip", "netns", "pids", self.ns(name)], capture_output=True, text=True, check=False)
            for pid in found.stdout.split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", self.ns(name)], check=False, capture_output=True)
            shutil.rmtree(Path("/etc/netns") / self.ns(name), ignore_errors=True)


def has_namespaces() -> bool:
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("nginx", path="/usr/sbin:/usr/bin") is None:
        return False
    name = f"fednh-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return made


def until(condition: Callable[[], object], log: Path, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, log.read_text()[-3000:] if log.exists() else "nothing was said"
        time.sleep(0.2)


def commands_of(readme: str) -> list[str]:
    return re.findall(r"^```sh\n(.*?)^```", readme, flags=re.MULTILINE | re.DOTALL)
