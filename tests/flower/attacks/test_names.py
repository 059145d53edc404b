"""Names and sentences of sites that would forge a line of a log, or make a terminal obey."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from cryptography.hazmat.primitives import serialization
from flwr.app import ConfigRecord, Message
from flwr.proto.node_pb2 import NodeInfo

from fednh.errors import UserError
from fednh.flower import layout
from fednh.flower.deploy import scaffold
from fednh.flower.deploy.launch import LocalFederation
from fednh.flower.protocol import FORMAT, Hello, Task
from fednh.flower.site_config import read_site_config
from fednh.runs.layout import RunLayout
from tests.helpers.config import small
from tests.helpers.federation import Wire, deployed, divided, serve, server_identity
from tests.helpers.process import fednh

FORGED = {
    "a new line": "site-1\n2026-11-16 10:00:00 round 9: site-2 was removed",
    "an escape code": "site-1\x1b[2J\x1b[31m",
    "another end of line": "site-1\u2028forged",
    "a written-backwards mark": "site-\u202e1",
    "an invisible character": "site-1\u200b",
    "no name": "",
    "a long name": "x" * 201,
    "blanks": " site-1 ",
}


@pytest.mark.parametrize("name", FORGED.values(), ids=FORGED)
def test_a_site_refuses_such_a_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be the site's name"):
        read_site_config({"site": name, "data": "npz:x.npz", "state": str(tmp_path)})


@pytest.mark.parametrize("name", ["Köln", "St. Mary's (north)", "病院 1", "site-1", "[red]x[/red]"])
def test_ordinary_names_are_taken(name: str, tmp_path: Path) -> None:
    assert read_site_config({"site": name, "data": "npz:x.npz", "state": str(tmp_path)}).site == name


@pytest.mark.parametrize("name", FORGED.values(), ids=FORGED)
def test_a_greeting_with_such_a_name_is_refused(name: str) -> None:
    greeting = Hello(
        site="x",
        task=Task(
            data="x",
            divided=True,
            shape=(4,),
            classes=("a", "b"),
            scale=1.0,
            mean=(0.0,) * 4,
            std=(1.0,) * 4,
            preprocessing="{}",
        ),
    ).write()
    assert Hello.read(greeting).site == "x"
    cast(ConfigRecord, greeting["said"])["site"] = name
    with pytest.raises(ValueError, match="its name cannot be used") as error:
        Hello.read(greeting)
    assert str(error.value).isprintable()


def test_the_server_refuses_a_forger_and_goes_on(tmp_path: Path) -> None:
    """A site that has another program says it all the same; the log holds nothing but sentences of the server's."""
    config = small("fedavg", rounds=1, **{"partition.clients": 3, "participation.rate": 1.0})

    def tamper(node: int, request: Message, reply: Message) -> Message:
        if node == 1002 and request.metadata.message_type == "query":
            cast(ConfigRecord, reply.content["said"])["site"] = FORGED["a new line"]
        return reply

    wire = divided(config, tmp_path, hostile=tamper)
    watcher = serve(config, wire, tmp_path / "run", server_identity(tmp_path / "fed"), enough=2)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [row["site"] for row in summary["sites"]] == ["client-000000", "client-000001"]
    assert any("its name cannot be used" in note for note in watcher.notes)
    check_log(tmp_path / "run", watcher.notes)


def test_what_a_site_says_does_not_end_a_line(tmp_path: Path) -> None:
    settings = {"partition.clients": 2, "participation.rate": 1.0, "federation.min_clients": 1}
    config = small("fedavg", rounds=2, **settings)
    words = "the disk is full\n2026-11-16 10:00:00 round 2: all is well\x1b[1A\u2028x"

    def tamper(node: int, request: Message, reply: Message) -> Message:
        if node == 1001 and request.metadata.message_type == "train":
            said = {"format": FORMAT, "problem": words}
            reply.content.clear()
            reply.content["said"] = ConfigRecord(cast(dict[str, Any], said))
        return reply

    wire = divided(config, tmp_path, hostile=tamper)
    watcher = serve(config, wire, tmp_path / "run", server_identity(tmp_path / "fed"), enough=2)
    assert any(r"round 2: all is well\x1b[1A x" in note for note in watcher.notes)
    check_log(tmp_path / "run", watcher.notes)


def check_log(run: Path, told: list[str]) -> None:
    """A JSON line for every sentence, in which nothing is left that a terminal obeys."""
    content = RunLayout(run).log_file.read_bytes()
    rows = [json.loads(line) for line in content.decode().split("\n")[:-1]]
    assert [row["text"] for row in rows] == told
    assert all(set(row) == {"time", "text"} and row["text"].isprintable() for row in rows)
    assert content.count(b"\n") == len(told)


def test_class_names_too(tmp_path: Path) -> None:
    good = Task(
        data="x",
        divided=True,
        shape=(4,),
        classes=("a", "b"),
        scale=1.0,
        mean=(0.0,) * 4,
        std=(1.0,) * 4,
        preprocessing="{}",
    )
    assert Task.read(good.text()) == good
    with pytest.raises(ValueError, match="cannot be printed"):
        Task.read(good.text().replace('"b"', '"b\\u001b[2J"'))


def test_names_are_checked_at_init_and_when_a_folder_is_read(tmp_path: Path) -> None:
    ended = fednh(
        ["federation", "init", str(tmp_path / "fed"), "--set", 'federation.name="a\\nb"'],
        tmp_path / "io",
    )
    assert ended.code == 2
    assert "federation.name" in ended.stderr
    assert "a new line" in ended.stderr
    assert not (tmp_path / "fed").exists()
    scaffold.write(tmp_path / "fed", 2, [], {})
    (tmp_path / "fed/sites/site-1").rename(tmp_path / "fed/sites/site-1\nx")
    with pytest.raises(UserError, match=r"a new line") as error:
        scaffold.sites_of(tmp_path / "fed")
    assert "\n" not in str(error.value)


def test_natural_sites_of_a_table(tmp_path: Path) -> None:
    """Their names reach screens and reports as those of real sites do."""
    rows = [f"{k},{k % 2},{'a' if k < 20 else chr(34) + 'b' + chr(27) + '[2J' + chr(34)}" for k in range(40)]
    (tmp_path / "t.csv").write_text("\n".join(["x,label,site", *rows, ""]))
    ended = fednh(["run", "--data", f"csv:{tmp_path}/t.csv", "--partition", "site"], tmp_path / "io")
    assert ended.code == 2
    assert "names a site 'b\\x1b[2J'" in ended.stderr


def test_the_screen_shows_sentences(tmp_path: Path) -> None:
    """`up` reads the log as it grows."""
    shown: list[str] = []
    local = cast(Any, object.__new__(LocalFederation))
    local.run_folder, local.lines_shown, local.fatal_problem = RunLayout(tmp_path), {}, None
    local.display = SimpleNamespace(on_note=shown.append)
    layout.add_note(tmp_path, "going on after round 3")
    layout.add_note(tmp_path, 'site "Köln" cannot take part:\nno \x1b data')
    local._show()
    assert shown == ["going on after round 3", 'site "Köln" cannot take part: no \\x1b data']
    assert local.fatal_problem[1] == shown[1]


class Registered(Wire):
    """A Grid that knows the nodes' registered keys, as Flower's does."""

    keys: dict[int, bytes]

    def get_nodes(self) -> list[NodeInfo]:
        return [NodeInfo(node_id=node, public_key=self.keys.get(node, b"")) for node in self.nodes]


def test_who_cannot_take_part_is_named(tmp_path: Path) -> None:
    """By the registered key, else by the name that it gives itself, else by its node."""
    nodes: dict[int, dict[str, Any]] = {
        k: {"partition-id": 0, "num-partitions": 3, "site": f"s{k}", "set": "mnist"} for k in (1, 2, 3)
    }
    nodes[4] = {"partition-id": 0, "num-partitions": 3, "site": "s4"}

    def tamper(node: int, request: Message, reply: Message) -> Message:
        if node == 3:
            del cast(ConfigRecord, reply.content["said"])["site"]
        return reply

    deployed(tmp_path, nodes)
    wire = Registered(nodes, tamper)
    public = serialization.load_ssh_public_key((tmp_path / "sites/s1/key.pub").read_bytes())
    form = (serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    wire.keys = {1: public.public_bytes(*form)}
    config = small("fedavg", rounds=1, **{"partition.clients": 3, "participation.rate": 1.0})
    notes = serve(config, wire, tmp_path / "run", enough=1, identity=server_identity(tmp_path)).notes
    why = "cannot take part: refused: data.name = 'digits' is not read here"
    blob = base64.b64decode((tmp_path / "sites/s1/key.pub").read_text().split()[1])
    key = "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")  # as `ssh-keygen -l` has it
    starts = (
        f"site s1 (node 1, key {key}) {why}",
        f"a site that calls itself s2 (node 2) {why}",
        f"a site (node 3) {why}",
    )
    for start in starts:
        assert sum(note.startswith(start) for note in notes) == 1, notes
