"""A registered site says that it is another one, speaks for it, changes what others said, or gives itself a number."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict

from fednh.config import Config
from fednh.flower import signing
from fednh.flower.protocol import NOTICE
from tests.helpers.callbacks import Recorder
from tests.helpers.federation import RUN, Wire, deployed, serve, server_identity, write_site_key
from tests.helpers.hostile import config_of

THREE = {"partition.clients": 3, "participation.rate": 1.0, "federation.min_clients": 1}


def sites(folder: Path, *names: str) -> Wire:
    """Node 11 has part 0 and the first name, and so on."""
    nodes = {11 + k: {"site": n, "partition-id": k, "num-partitions": 3} for k, n in enumerate(names)}
    return deployed(folder, nodes)


def with_key_of(wire: Wire, node: int, folder: Path, name: str) -> None:
    if not (folder / "sites" / name / "key").exists():
        write_site_key(folder / "sites" / name)
    wire.nodes[node]["key"] = str(folder / "sites" / name / "key")


def run(folder: Path, wire: Wire, enough: int = 2, known: bool = True, config: Config | None = None) -> Recorder:
    identity = server_identity(folder)
    identity.folder = identity.folder if known else None
    return serve(config or config_of(**THREE), wire, folder / "run", enough=enough, identity=identity)


def told(wire: Wire) -> dict[int, str]:
    """What the server told which node."""
    seen = [q for q, _ in wire.seen if q.metadata.message_type == NOTICE]
    return {q.metadata.dst_node_id: str(q.content["notice"]["text"]) for q in seen}  # type: ignore[index, call-overload]


def members(folder: Path) -> list[str]:
    return [row["site"] for row in json.loads((folder / "run" / "summary.json").read_text())["sites"]]


# --- names -----------------------------------------------------------------------------------------------------------


def test_a_site_cannot_speak_for_another_whose_key_is_known(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It comes first, and it has a good key: that of site c."""
    wire = sites(tmp_path, "b", "a", "b")
    with_key_of(wire, 11, tmp_path, "c")
    watcher = run(tmp_path, wire)
    words = "a node with another key than that of site b says that it is site b; it is left out"
    assert watcher.notes.count(words) == 1
    assert members(tmp_path) == ["a", "b"]
    asked = {q.metadata.dst_node_id for q, _ in wire.seen if q.metadata.message_type == "train"}
    assert asked == {12, 13}, "the impostor was never given the model"
    assert told(wire)[11] == words
    assert f"the server says: {words}" in caplog.text


def test_both_are_told(tmp_path: Path) -> None:
    wire = sites(tmp_path, "a", "b", "b")
    with_key_of(wire, 13, tmp_path, "c")
    run(tmp_path, wire)
    assert set(told(wire)) == {12, 13}


def test_without_a_known_key_the_first_use_counts_and_lasts(tmp_path: Path) -> None:
    """Also for a server that starts again: the binding is in the checkpoint."""
    config = config_of(**THREE, **{"checkpoint.every": 1})
    wire = sites(tmp_path, "a", "b", "b")
    with_key_of(wire, 13, tmp_path, "c")

    class Killed(BaseException):
        pass

    def kill(node: int, request: Message, reply: Message) -> Message:
        if request.metadata.group_id == "2":
            raise Killed
        return reply

    wire.tamper = kill
    with pytest.raises(Killed):
        run(tmp_path, wire, known=False, config=config)
    wire.tamper = None
    del wire.nodes[12]  # the real b is away when the server comes back
    wire.seen.clear()
    watcher = run(tmp_path, wire, enough=1, known=False, config=config)
    assert "going on after round 1" in watcher.notes
    assert any("another key than that of site b" in note for note in watcher.notes)
    assert {q.metadata.dst_node_id for q, _ in wire.seen if q.metadata.message_type == "train"} == {11}


@pytest.mark.parametrize("first", [True, False])
def test_a_key_speaks_for_one_site(first: bool, tmp_path: Path) -> None:
    """One site would count as many, and outvote the others."""
    wire = sites(tmp_path, *(("z", "a", "b") if first else ("a", "b", "z")))
    (tmp_path / "sites" / "z" / "key.pub").unlink()
    with_key_of(wire, 11 if first else 13, tmp_path, "a")
    watcher = run(tmp_path, wire)
    assert "a node with the key of site a says that it is site z; it is left out" in watcher.notes
    assert members(tmp_path) == ["a", "b"]


# --- answers ---------------------------------------------------------------------------------------------------------


def resigned(wire: Wire, node: int, request: Message, reply: Message, key: str, **other: Any) -> None:
    """The reply with a new seal, by any key and for any envelope."""
    seal, meta = request.content["seal"], request.metadata
    assert isinstance(seal, ConfigRecord)
    facts = {
        "federation": seal["federation"],
        "run": RUN,
        "kind": meta.message_type,
        "round": meta.group_id,
        "node": node,
        "site": wire.nodes[node]["site"],
        "counter": seal["counter"],
        **other,
    }
    private = signing.read_site_private(Path(key))
    reply.content = signing.sign_reply(signing.without_signature(reply.content), private, signing.Envelope(**facts))  # type: ignore[arg-type]


Change = Callable[[Wire, Message, Message, Path], None]


def a_larger_upload(wire: Wire, request: Message, reply: Message, folder: Path) -> None:
    array = next(iter(reply.content["upload"].values()))
    array.data = array.data[:-4] + b"\x00\x00\x80\x3f"  # type: ignore[union-attr]


def more_samples(wire: Wire, request: Message, reply: Message, folder: Path) -> None:
    facts = reply.content["facts"]
    assert isinstance(facts, MetricRecord)
    facts["samples"] = 10**6


def no_signature(wire: Wire, request: Message, reply: Message, folder: Path) -> None:
    del reply.content["seal"]


def by_another_key(wire: Wire, request: Message, reply: Message, folder: Path) -> None:
    write_site_key(folder / "rogue")
    resigned(wire, 12, request, reply, str(folder / "rogue" / "key"))


def by_another_site(wire: Wire, request: Message, reply: Message, folder: Path) -> None:
    resigned(wire, 12, request, reply, wire.nodes[11]["key"], site="a")


def of_an_earlier_round(wire: Wire, request: Message, reply: Message, folder: Path) -> None:
    (old,) = [
        r
        for q, r in wire.seen
        if q.metadata.dst_node_id == 12 and q.metadata.group_id == "1" and q.metadata.message_type == "train"
    ]
    assert old is not None
    reply.content = RecordDict(dict(old.content))


def of_an_earlier_order(wire: Wire, request: Message, reply: Message, folder: Path) -> None:
    resigned(wire, 12, request, reply, wire.nodes[12]["key"], counter=5)


CHANGED: dict[Change, str] = {
    a_larger_upload: "its signature does not match",
    more_samples: "its signature does not match",
    no_signature: "it is not signed",
    by_another_key: "it is signed by another key than the site's",
    by_another_site: "it is signed for another site",
    of_an_earlier_round: "its signature does not match",
    of_an_earlier_order: "its signature does not match",
}


def test_answers_that_are_not_the_sites_are_refused(tmp_path: Path) -> None:
    """One of them in each round from the second on; the site is taken again whenever it is itself."""
    wire, changes = sites(tmp_path, "a", "b"), dict(enumerate(CHANGED, 2))

    def tamper(node: int, request: Message, reply: Message) -> Message:
        meta = request.metadata
        if (node, meta.message_type) == (12, "train") and (change := changes.get(int(meta.group_id))):
            change(wire, request, reply, tmp_path)
        return reply

    wire.tamper, last = tamper, len(CHANGED) + 2
    watcher = run(tmp_path, wire, config=config_of(**THREE, rounds=last))
    assert [row["clients"] for row in watcher.records] == [[0, 1], *[[0]] * len(CHANGED), [0, 1]]
    assert [row["refused"] for row in watcher.records] == [[], *[[1]] * len(CHANGED), []]
    assert [note for note in watcher.notes if "refused" in note] == [
        f"round {round_}: the answer of site b (client 1) was refused: {CHANGED[change]}"
        for round_, change in changes.items()
    ]


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [2**62, 3])
def test_a_number_lies_within_the_partition(number: int, tmp_path: Path) -> None:
    wire = sites(tmp_path, "a", "b", "c")

    def tamper(node: int, request: Message, reply: Message) -> Message:
        if node == 13 and request.metadata.message_type == "query":
            said = reply.content["said"]
            assert isinstance(said, ConfigRecord)
            said["number"] = number
            resigned(wire, 13, request, reply, wire.nodes[13]["key"])
        return reply

    wire.tamper = tamper
    watcher = run(tmp_path, wire)
    assert members(tmp_path) == ["a", "b"]
    assert [note for note in watcher.notes if "cannot take part" in note], "it is told"


def test_a_site_with_data_of_its_own_gives_itself_no_number() -> None:
    from fednh.flower.admission import number_problem
    from fednh.flower.protocol import Hello, Task

    task = Task(
        data="x", divided=False, shape=(4,), classes=("0", "1"), scale=1.0, mean=(0.0,), std=(1.0,), preprocessing="{}"
    )
    assert number_problem(Hello(site="a", task=task, number=-1), 3) is None
    for number in (0, 10**9):
        assert "gives itself a number" in str(number_problem(Hello(site="a", task=task, number=number), 3))
