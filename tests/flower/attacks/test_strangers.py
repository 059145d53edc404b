"""A federation on machines of their own, as far as one machine can have them: network namespaces, joined by a bridge.

Every command is taken from the README that `federation init` writes, to the letter, in its order, and from a path with
a blank. Then strangers, a registered site and the server's owner try what they should not.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from fednh.flower.deploy import scaffold
from tests.helpers.deployment import SMALL

pytestmark = pytest.mark.soak

SERVER, STRANGER, SITES = "server", "stranger", ("site-1", "site-2")
NETWORK = "10.213.77"
# An app whose code leaves a mark wherever it runs.
EVIL = """
import os, pathlib
pathlib.Path(os.environ["FEDNH_TEST_MARK"]).joinpath(f"ran-{os.getpid()}").write_text("")
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

client = ClientApp()
server = ServerApp()


@client.query()
def query(message, context):
    return Message(RecordDict(), reply_to=message)


@server.main()
def main(grid, context):
    nodes = list(grid.get_node_ids())
    print("EVIL ASKS", len(nodes))
    replies = grid.send_and_receive([Message(RecordDict(), node, "query") for node in nodes], timeout=60)
    for reply in replies:
        print("EVIL HEARS", reply.error.reason if reply.has_error() else "yes")
"""


def sh(*words: str) -> None:
    subprocess.run(words, check=True, timeout=60)


class World:
    """Machines, and what runs on them."""

    def __init__(self, folder: Path):
        self.folder, self.tag, self.running = folder, f"fednh{os.getpid()}", list[subprocess.Popen[str]]()
        self.machines = (SERVER, STRANGER, *SITES)
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
            self.ip(name, "link", "add", "out", "type", "veth", "peer", "name", there, "netns", self.ns(SERVER))
            self.ip(SERVER, "link", "set", there, "master", "bridge", "up")
            self.ip(name, "addr", "add", f"{NETWORK}.{number}/24", "dev", "out")
            self.ip(name, "link", "set", "out", "up")

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


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    if not has_namespaces():
        pytest.skip("needs root, ip and nginx")
    made = World(tmp_path)
    try:
        made.build()
        yield made
    finally:
        made.end()


def until(condition: Callable[[], object], log: Path, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, log.read_text()[-3000:] if log.exists() else "nothing was said"
        time.sleep(0.2)


def commands_of(readme: str) -> list[str]:
    return re.findall(r"^```sh\n(.*?)^```", readme, flags=re.MULTILINE | re.DOTALL)


def connect(folder: Path, address: str, ca: Path | None) -> Path:
    """An app, and a connection to try it through."""
    (folder / "home").mkdir(parents=True)
    about = {"address": address} | ({"root-certificates": str(ca)} if ca else {"insecure": True})
    (folder / "home/config.toml").write_text(scaffold.connections("there", about))
    app = folder / "evil"
    app.mkdir()
    (app / "evil.py").write_text(EVIL)
    (app / "pyproject.toml").write_text(
        '[project]\nname = "evil"\nversion = "1.0.0"\ndescription = ""\nlicense = { text = "" }\ndependencies = []\n'
        '[tool.flwr.app]\npublisher = "x"\n'
        '[tool.flwr.app.components]\nserverapp = "evil:server"\nclientapp = "evil:client"\n'
    )
    return app


ACQUIRE = """
import sys
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
root = open(sys.argv[2], "rb").read() if len(sys.argv) > 2 else None
version = RuntimeVersionHttpInterceptor(component_name="SuperExec")
client = RuntimeHttpClient.from_server_address(
    server_address=sys.argv[1], insecure=root is None, root_certificates=root, interceptors=[version]
)
print("TASK", client.AcquireTask(AcquireTaskRequest(supported_task_types=["flwr-serverapp", "flwr-clientapp"])))
"""


def test_the_readme_in_order_and_what_strangers_get(world: World) -> None:
    fed, safe = world.folder / "our hospitals" / "the fed", world.folder / "safe"
    fed.parent.mkdir()
    safe.mkdir()
    scaffold.write(fed, 2, [], {**SMALL, "rounds": 1})
    readme = (fed / "README.md").read_text().replace("/media/safe", f"'{safe}'")
    trial, install, keys, serve, nginx, register, join, train = commands_of(readme)
    assert install == "pip install 'fednh[flower]'\n"
    for script in (trial, keys):
        code, said = world.run(SERVER, script, fed)
        assert code == 0, said
    assert (fed / "trial/run/summary.json").exists()
    assert [path.name for path in safe.iterdir()] == ["the fed-authority"]

    logs = {name: world.folder / f"{name}.log" for name in (*world.machines, "nginx")}
    world.start(SERVER, serve, fed, logs[SERVER])
    until(lambda: "the server is ready" in logs[SERVER].read_text(), logs[SERVER])
    world.start(SERVER, nginx, fed, logs["nginx"])
    assert world.run(SERVER, register, fed)[0] == 0
    homes = {}
    for site in SITES:
        homes[site] = world.folder / f"disk of {site}" / site
        shutil.copytree(fed / "sites" / site, homes[site])
        assert not (homes[site] / "state").exists(), "the trial's state is not handed over"
        (fed / "sites" / site / "key").unlink()
        world.start(site, join, homes[site], logs[site])

    attempts(world, fed, homes, logs)

    code, said = world.run(SERVER, train, fed)
    assert code == 0, said + logs["site-1"].read_text()[-2000:]
    assert (fed / "run/summary.json").exists()
    assert all(list((homes[site] / "state").glob("*/*/personal.safetensors")) for site in SITES)
    kept = [fed / "run", fed / "superlink.db", *(homes[site] / "state" for site in SITES)]
    open_to_others = [path for each in kept for path in (each, *each.rglob("*")) if path.stat().st_mode & 0o077]
    assert open_to_others == []
    code, said = world.run(SERVER, train, fed)
    assert code == 2
    assert "holds a finished run" in " ".join(said.split())

    unapproved(world, fed, homes, logs)


def attempts(world: World, fed: Path, homes: dict[str, Path], logs: dict[str, Path]) -> None:
    """`flwr run` and questions for tasks, by whoever can reach something."""
    ca = homes["site-1"] / "ca.crt"
    tries = [
        (STRANGER, f"{NETWORK}.1:8000", ca),
        (STRANGER, f"{NETWORK}.1:8000", None),
        (STRANGER, "fl.example.org:8443", ca),
        ("site-1", "fl.example.org:8443", ca),  # a registered site is not the owner
    ]
    for number, (who, address, trust) in enumerate(tries):
        place = world.folder / f"try-{number}"
        app = connect(place, address, trust)
        script = f"export FLWR_HOME='{place}/home'; flwr run '{app}' there"
        code, said = world.run(who, script, place, 120)
        assert code != 0, said
        assert "Successfully started run" not in said
        assert "Invalid Flower App" not in said, "the owner can start this very app, see below"
        assert "403 Forbidden" in said or "is unavailable" in said, said
        script = f"export FLWR_HOME='{place}/home'; flwr supernode register '{homes['site-1']}/key.pub' there"
        assert world.run(who, script, place, 120)[0] != 0
    until(lambda: "Starting Flower SuperNode" in logs["site-1"].read_text(), logs["site-1"])
    for who, address, root in (
        (SERVER, "127.0.0.1:8000", [str(fed / "certs/ca.crt")]),
        ("site-1", local_port(world, "site-1"), []),
    ):
        (world.folder / "acquire.py").write_text(ACQUIRE)
        words = " ".join(f"'{word}'" for word in (sys.executable, world.folder / "acquire.py", address, *root))
        code, said = world.run(who, words, world.folder, 120)
        assert code != 0
        assert "401 Unauthorized" in said, said
    assert list(world.marks.iterdir()) == [], "code of a stranger has run"


def local_port(world: World, machine: str) -> str:
    """Where the SuperNode of a machine listens; `ps` tells everybody, and no token."""
    found = subprocess.run(["ip", "netns", "pids", world.ns(machine)], capture_output=True, text=True, check=True)
    lines = [Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode() for pid in found.stdout.split()]
    assert not any("--token" in line for line in lines)
    (port,) = {m[1] for line in lines if (m := re.search(r"deploy.supernode.*--host 127.0.0.1 --port (\d+)", line))}
    return f"127.0.0.1:{port}"


def unapproved(world: World, fed: Path, homes: dict[str, Path], logs: dict[str, Path]) -> None:
    """The server's owner, or whoever has become that, sends another app: the server runs it, the sites do not."""
    place = world.folder / "owner"
    app = connect(place, "127.0.0.1:8000", fed / "certs/ca.crt")
    _, said = world.run(SERVER, f"export FLWR_HOME='{place}/home'; flwr run '{app}' there --stream", place, 300)
    assert "EVIL ASKS 2" in said, said
    assert said.count("EVIL HEARS") == 2
    assert said.count(f"has not approved the app {scaffold.app_of(app).hash}") == 2, said
    assert len(list(world.marks.iterdir())) == 1, "the server itself, and no site"
    assert "has not approved the app" in logs["site-2"].read_text()
    for site, home in homes.items():
        code, said = world.run(site, "fednh federation audit .", home)
        assert code == 0, said
        assert "refused:" in said
        assert "has not approved the app" in " ".join(said.split())
