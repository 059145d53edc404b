"""A federation on machines of their own, as far as one machine can have them: network namespaces, joined by a bridge.

Every command is taken from the README that `federation init` writes, to the letter, in its order, and from a path with
a blank. Then strangers, a registered site and the server's owner try what they should not.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fednh.flower.deploy import scaffold
from tests.helpers.deployment import SMALL
from tests.helpers.namespaces import NETWORK, SERVER, World, commands_of, has_namespaces, until

pytestmark = pytest.mark.soak

STRANGER, SITES = "stranger", ("site-1", "site-2")
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


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    if not has_namespaces():
        pytest.skip("needs root, ip and nginx")
    made = World(tmp_path, (STRANGER, *SITES))
    try:
        made.build()
        yield made
    finally:
        made.end()


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
