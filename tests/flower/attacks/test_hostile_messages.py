"""One site sends what should never be sent: the server names it, counts it, and ends with the honest sites."""

from __future__ import annotations

import inspect
import json
import os
import re
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectUnavailableError

from fednh.config import dump
from fednh.flower.client_app import Site
from fednh.flower.deploy import forking
from fednh.flower.protocol import FORMAT, Answer, Task, form_of, to_arrays, to_tree
from fednh.flower.site_config import read_site_config
from fednh.flower.transport import BoundedFetch, FetchError, Limit, take_order
from tests.helpers.config import small
from tests.helpers.federation import deployed, federate, part_of, serve, server_identity, travelled
from tests.helpers.store import Store, forged, forged_reply, grid_of, packed

FORM = {"body.0.weight": ((16, 64), torch.float32)}


def tensors(rows: Any, numbers: int, length: int | None = None) -> bytes:
    """A tree in bytes as safetensors has it, with any header whatever and so many bytes after it."""
    text = rows if isinstance(rows, bytes) else json.dumps(rows).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + b"\0" * numbers


def described(name: str = "body.0.weight", **wrong: Any) -> dict[str, Any]:
    return {name: {"dtype": "F32", "shape": [16, 64], "data_offsets": [0, 4096], **wrong}}


TWICE = json.dumps(described())[:-1] + ", " + json.dumps(described(shape=[8, 64], data_offsets=[0, 2048]))[1:]
TREES: dict[str, tuple[bytes, str]] = {
    "2^40 floats": (tensors(described(shape=[2**28, 2**12]), 64), "declares 4398046511104 bytes, and 64 follow"),
    "a huge axis": (
        tensors(described(shape=[2**40]), 64),
        "is 1099511627776, not a whole number from 0 to 268435456",
    ),
    "many axes": (tensors(described(shape=[1] * 4000), 4), "shape has 4000 entries, not a list of 0 to 16"),
    "a negative axis": (tensors(described(shape=[-16, -64]), 4096), "not a whole number from 0"),
    "an axis that is true": (tensors(described(shape=[True]), 4), "not a whole number from 0"),
    "half an axis": (tensors(described(shape=[16.0, 64]), 4096), "not a whole number from 0"),
    "a shape of text": (tensors(described(shape="16"), 4096), "shape is '16', not a list"),
    "another type": (tensors(described(dtype="F64"), 8192), "not (16, 64)"),
    "an unknown type": (tensors(described(dtype="F4"), 512), "dtype is 'F4', not one of F16, F32"),
    "a type that is a list": (tensors(described(dtype=["F32"]), 4096), "dtype is ['F32'], not one of"),
    "another name": (tensors(described("body.1"), 4096), "body.0.weight is missing"),
    "a name more": (tensors(described() | described("b", shape=[0]), 4096), "b does not belong there"),
    "a name twice": (tensors(TWICE.encode(), 2048), "not (16, 64)"),
    "offsets that overlap": (tensors(described(data_offsets=[0, 2048]), 4096), "cannot be read"),
    "offsets outside": (tensors(described(data_offsets=[2**60, 2**60 + 4096]), 4096), "cannot be read"),
    "offsets that are text": (tensors(described(data_offsets="all"), 4096), "cannot be read"),
    "no offsets": (tensors({"body.0.weight": {"dtype": "F32", "shape": [16, 64]}}, 4096), "data_offsets is missing"),
    "a word more": (tensors(described(more=1), 4096), "more is not known"),
    "metadata": (tensors(described() | {"__metadata__": {"a": "b"}}, 4096), "__metadata__.dtype is missing"),
    "too few numbers": (tensors(described(), 100), "declares 4096 bytes, and 100 follow"),
    "too many numbers": (tensors(described(), 5000), "declares 4096 bytes, and 5000 follow"),
    "a list": (tensors([1, 2], 0), "is not a table"),
    "a number": (tensors(b"7", 0), "is not a table"),
    "an infinite number": (tensors(described(shape=[float("inf")]), 0), "shape[0] is inf, not a whole number"),
    "a nested header": (tensors(b"[" * 100_000, 0), "recursion limit exceeded"),
    "no JSON": (tensors(b"{", 0), "cannot be read"),
    "no text": (tensors(b"\xff\xfe", 0), "cannot be read"),
    "a header longer than its bytes": (tensors(b"{}", 0, length=2**63), "cannot hold a header of 9223372036854775808"),
    "a long header": (tensors(b" " * (5 << 20), 0), "cannot hold a header of 5242880"),
    "a zip": (b"PK\x03\x04" + b"\0" * 60, "cannot hold a header"),
    "seven bytes": (b"\0" * 7, "cannot hold a header"),
    "nothing": (b"", "cannot hold a header"),
}


def record_of(data: bytes, name: str = "tree", **wrong: Any) -> ArrayRecord:
    facts: dict[str, Any] = {"dtype": "uint8", "shape": (len(data),), "stype": "safetensors", **wrong}
    return ArrayRecord({name: Array(**facts, data=data)})


HONEST = tensors(described(), 4096)
RECORDS: dict[str, tuple[ArrayRecord, str]] = {
    **{name: (record_of(data), words) for name, (data, words) in TREES.items()},
    "an array of numpy": (record_of(HONEST, stype="numpy.ndarray"), "is an unsupported array type"),
    "other numbers": (record_of(HONEST, dtype="float32"), "is an unsupported array type"),
    "another length": (record_of(HONEST, shape=(2**50,)), "is an unsupported array type"),
    "another array": (record_of(HONEST, "body.0.weight"), "where one array 'tree' belongs"),
    "two arrays": (ArrayRecord({**record_of(HONEST), **record_of(HONEST, "more")}), "where one array 'tree' belongs"),
    "no array": (ArrayRecord(), "body.0.weight is missing"),
}


@pytest.mark.parametrize("wrong", RECORDS)
def test_a_tree_that_is_not_what_it_says(wrong: str) -> None:
    """Refused as a ValueError of one line, without ever holding much more than the message itself does."""
    record, words = RECORDS[wrong]
    tracemalloc.start()
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        to_tree(record, form=FORM)
    assert tracemalloc.get_traced_memory()[1] < 12_000_000
    tracemalloc.stop()
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300


def test_a_header_that_the_library_reads_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """We read the header ourselves before the library does; should they differ, nothing is taken."""
    monkeypatch.setattr(safetensors.numpy, "load", lambda data: {"body.0.weight": np.zeros((64, 16), np.float32)})
    with pytest.raises(ValueError, match="the header can be understood in two ways"):
        to_tree(record_of(HONEST), form=FORM)


def test_a_tree_as_it_should_be() -> None:
    """The table's honest neighbour; and what we send is the same bytes, which take one array whatever they hold."""
    assert torch.equal(to_tree(record_of(HONEST), form=FORM)["body.0.weight"], torch.zeros(16, 64))
    many = {f"layer.{k}": torch.full((k, 2), float(k)) for k in range(40)}
    content = RecordDict({"said": ConfigRecord({"format": FORMAT}), "upload": to_arrays(many)})
    _, parts = packed(content, "r")
    assert len(parts) == 6  # message, its records, `said`, `upload`, one array, one chunk
    assert len(parts) <= Limit.of(form_of(content["upload"])).parts  # type: ignore[arg-type]


def task_with(**wrong: Any) -> str:
    honest = {
        "data": "digits",
        "divided": True,
        "shape": [64],
        "classes": ["0", "1"],
        "scale": 16.0,
        "mean": [0.5],
        "std": [0.5],
        "preprocessing": "{}",
    }
    return json.dumps({**honest, **wrong})


NESTED = "[" * 100_000
GREETINGS: dict[str, str] = {
    "an infinite shape": task_with(shape=[float("inf")]),
    "a shape of text": task_with(shape="64"),
    "a huge shape": task_with(shape=[2**62]),
    "many axes": task_with(shape=[1] * 64),
    "nested JSON": NESTED,
    "nested preprocessing": task_with(preprocessing=NESTED),
    "no classes": task_with(classes=[]),
    "a million classes": task_with(classes=[str(k) for k in range(100_000)]),
    "NaN as a mean": task_with(mean=[float("nan")]),
    "an infinite mean": task_with(mean=[1]).replace('"mean": [1]', '"mean": [1e999]'),
    "a negative deviation": task_with(std=[-1.0]),
    "no deviation": task_with(std=[0.0]),
    "means of another number": task_with(mean=[0.5, 0.5], std=[0.5, 0.5]),
    "a number of many digits": task_with(scale=1).replace('"scale": 1', '"scale": 1' + "0" * 6000),
    "a list": "[1, 2]",
    "a field less": json.dumps({"data": "digits"}),
}


def test_greetings_that_cannot_be_true(tmp_path: Path) -> None:
    """Each is said by a site of its own: all are left out, in words, and the two honest ones begin and end."""
    config = small("fedavg", rounds=1, **{"partition.clients": 2, "participation.rate": 1.0, "eval.every": 0})
    lies = {5000 + k: text for k, text in enumerate(GREETINGS.values())}

    def tamper(node: int, request: Message, reply: Message) -> Message:
        if node in lies:
            said = reply.content["said"]
            assert isinstance(said, ConfigRecord)
            said["task"] = lies[node]
        return travelled(reply)

    nodes = {node: {**part_of(config, node % 2), "site": f"site-{node}"} for node in (1000, 1001, *lies)}
    wire = deployed(tmp_path / "fed", nodes, hostile=tamper)
    watcher = serve(config, wire, tmp_path / "run", server_identity(tmp_path / "fed"), enough=2)
    told = [note for note in watcher.notes if "the description of its data cannot be" in note]
    assert len(told) == len(set(told)) >= len(GREETINGS) - 2  # two sentences may be the same
    assert all("cannot take part" in note and len(note) < 700 for note in told)
    assert watcher.records[0]["clients"] == [0, 1]
    for text in GREETINGS.values():
        with pytest.raises(ValueError, match="the description of its data cannot be"):
            Task.read(text)


def with_data(data: bytes) -> Callable[[Message], None]:
    def change(reply: Message) -> None:
        upload = reply.content["upload"]
        assert isinstance(upload, ArrayRecord)
        upload["tree"] = record_of(data)["tree"]

    return change


def facts(**values: Any) -> Callable[[Message], None]:
    def change(reply: Message) -> None:
        record = reply.content["facts"]
        assert isinstance(record, MetricRecord)
        record.update(values)

    return change


def many_names(reply: Message) -> None:
    reply.content["upload"] = to_arrays({f"body.{k}": torch.zeros(1) for k in range(2000)})


def odd_name(reply: Message) -> None:
    tree = to_tree(reply.content["upload"])  # type: ignore[arg-type]
    reply.content["upload"] = to_arrays({**tree, "\x1b[2J\nround 1: all is well": torch.zeros(1)})


ANSWERS: dict[str, tuple[Callable[[Message], None], str]] = {
    "2^40 floats": (with_data(TREES["2^40 floats"][0]), "its arrays cannot be read"),
    "a zip": (with_data(TREES["a zip"][0]), "its arrays cannot be read"),
    "many names": (many_names, "body.0 does not belong there"),
    "an odd name": (odd_name, "\\x1b[2J round 1: all is well does not belong there"),
    "a loss that is no number": (facts(loss_sum=float("nan")), "not finite"),
}


def test_answers_that_should_never_be_sent(tmp_path: Path) -> None:
    """Client 1 sends another one in every round: each is named and counted, and the others train without it."""
    rounds = len(ANSWERS) + 1
    more = {"partition.clients": 3, "participation.rate": 1.0, "eval.every": 0, "checkpoint.every": 0}
    config = small("fednh", rounds=rounds, **more)

    def tamper(node: int, request: Message, reply: Message) -> Message:
        round_ = int(request.metadata.group_id or 0)
        if node == 1001 and request.metadata.message_type == "train" and round_ < rounds:
            list(ANSWERS.values())[round_ - 1][0](reply)
        return travelled(reply)

    _, watcher = federate(config, tmp_path, tamper)
    wrong, last = watcher.records[:-1], watcher.records[-1]
    assert [(r["clients"], r["refused"]) for r in wrong] == [([0, 2], [1])] * len(ANSWERS)
    assert last["clients"] == [0, 1, 2]
    told = [note for note in watcher.notes if "client 1" in note]
    for (name, (_, words)), note in zip(ANSWERS.items(), told, strict=True):
        assert words in note, name
        assert note.isprintable()
        assert len(note) < 700


# --- Flower's store ------------------------------------------------------------------------------------------------

LIMIT = Limit.of(FORM)
FACTS = {"client": 0, "round": 1, "samples": 5, "loss_sum": 1.0}


def honest() -> RecordDict:
    tree = {"body.0.weight": torch.arange(1024.0).reshape(16, 64)}
    said = {"said": ConfigRecord({"format": FORMAT}), "facts": MetricRecord(dict(FACTS))}
    return RecordDict({**said, "upload": to_arrays(tree)})


def array(**wrong: Any) -> dict[str, Any]:
    return {"dtype": "uint8", "shape": [4096], "stype": "safetensors", "arraychunk_ids": [0], **wrong}


def many_parts() -> tuple[Any, dict[str, bytes]]:
    contents: dict[str, bytes] = {}
    leaves = [forged("ArrayChunk", [], b"%d" % k, contents) for k in range(LIMIT.parts)]
    return forged("Message", leaves, b"", contents), contents


def odd_family() -> tuple[Any, dict[str, bytes]]:
    contents: dict[str, bytes] = {}
    inner = forged("Message", [], b"", contents)
    return forged("Message", [inner], b"", contents), contents


STORED: dict[str, tuple[Any, dict[str, bytes]]] = {
    "600 MB of zeros": forged_reply(array(arraychunk_ids=[0] * 600), [b"\0" * 1_000_000], "bad"),
    "an infinite shape": forged_reply(array(shape=[float("inf")]), [b"x"], "bad"),
    "nested JSON": forged_reply(NESTED.encode(), [b"x"], "bad"),
    "chunks that are not there": forged_reply(array(arraychunk_ids=[7]), [b"x"], "bad"),
    "chunks that are no numbers": forged_reply(array(arraychunk_ids=[True, None]), [b"x"], "bad"),
    "a large chunk": forged_reply(array(), [b"x" * 3_000_000], "bad"),
    "no JSON": forged_reply(b"\xff\xfe", [b"x"], "bad"),
    "many parts": many_parts(),
    "a message in a message": odd_family(),
}


@pytest.mark.parametrize("wrong", STORED)
def test_a_reply_that_cannot_be_put_together(wrong: str) -> None:
    """It is broken by itself: the honest reply of the same look is read, and memory stays as small as that one."""
    store = Store()
    tree, contents = STORED[wrong]
    store.put("bad", tree, contents)
    store.put("good", *packed(honest(), "good"))
    tracemalloc.start()
    replies = dict(BoundedFetch(grid_of(store)).pull({"bad": LIMIT, "good": LIMIT}))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 12_000_000
    assert isinstance(replies["bad"], FetchError)
    good = replies["good"]
    assert isinstance(good, Message)
    upload = Answer.read(good.content, FORM).upload
    assert upload is not None
    assert upload["body.0.weight"][1, 1] == 65
    assert len(store.objects) == 0  # the store is told that it may forget both


def test_a_reply_on_its_way_holds_nobody_up() -> None:
    """Its array is missing: the others are read at once, and it when it is there; nothing is fetched twice."""
    store, (tree, contents) = Store(), packed(honest(), "slow")
    last = tree.object_id
    store.put("slow", tree, {name: each for name, each in contents.items() if name != last})
    store.put("good", *packed(RecordDict({"said": ConfigRecord({"format": FORMAT})}), "good"))
    parcels = BoundedFetch(grid_of(store))
    limits = {"slow": LIMIT, "good": LIMIT}
    assert [name for name, _ in parcels.pull(limits)] == ["good"]
    before = store.pulled
    assert list(parcels.pull({"slow": LIMIT})) == []
    assert store.pulled == before
    store.objects.put(last, contents[last])
    ((name, reply),) = parcels.pull({"slow": LIMIT})
    assert name == "slow"
    assert isinstance(reply, Message)


def test_a_part_that_never_came() -> None:
    store, (tree, contents) = Store(), packed(honest(), "lost")
    store.put("lost", tree, contents)
    store.objects.clear()
    ((_, reply),) = BoundedFetch(grid_of(store)).pull({"lost": LIMIT})
    assert isinstance(reply, FetchError)
    assert "was not sent in time" in str(reply.problem)


def test_orders_to_the_server_are_left_alone() -> None:
    """Flower hands a ServerApp messages that are no replies; they are not even looked into."""
    store = Store()
    store.put("unasked", *STORED["nested JSON"])
    assert list(BoundedFetch(grid_of(store)).pull({"good": LIMIT})) == []
    assert store.pulled == 0


# --- a site --------------------------------------------------------------------------------------------------------


def test_an_order_that_never_comes_whole_is_given_up() -> None:
    """Its server ended while it sent it: one part is announced and never there. Flower alone waits for over an hour."""
    tree, contents = packed(honest(), "order")
    confirmed: list[str] = []

    def pull(name: str) -> bytes:
        if name == tree.object_id:
            raise ObjectUnavailableError(name)
        return contents[name]

    started = time.monotonic()
    with pytest.raises(ObjectPullError, match="timeout"):
        take_order(tree, pull, confirmed.append, patience=0.5)
    assert time.monotonic() - started < 30
    assert confirmed == []
    order = take_order(tree, contents.__getitem__, confirmed.append, return_type=Message)
    assert set(order.content) == {"said", "facts", "upload"}
    assert confirmed == [tree.object_id]


def test_a_part_that_is_not_there_yet_is_asked_for_soon() -> None:
    """An order is announced before its parts are there; Flower alone waits a second for each of them."""
    tree, contents = packed(honest(), "order")
    asked: list[str] = []

    def pull(name: str) -> bytes:
        asked.append(name)
        if asked.count(name) == 1:
            raise ObjectUnavailableError(name)
        return contents[name]

    started = time.monotonic()
    take_order(tree, pull, lambda name: None)
    assert time.monotonic() - started < 0.75  # with a second at first it is 0.8 or more
    assert len(asked) == 2 * len(contents)


def test_an_order_larger_than_the_machine() -> None:
    """A chunk of 1 MB, listed often enough for a quarter of any memory: refused before the chunks are joined."""
    listed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4_000_000 + 1
    tree, contents = forged_reply(array(arraychunk_ids=[0] * listed), [b"\0" * 1_000_000], "order")
    with pytest.raises(ValueError, match="a quarter of this machine's memory"):
        take_order(tree, contents.__getitem__, lambda name: None)


def test_the_process_of_an_order_takes_our_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """When Flower's part of it begins, what fetches the order is ours; it waits ten minutes unless told otherwise."""
    used: list[object] = []
    fetch = "pull_and_inflate_object_from_tree"
    for name in (fetch, "get_load_client_app_fn", "push_message"):
        monkeypatch.setattr(forking.clientapp, name, getattr(forking.clientapp, name))  # put back afterwards
    monkeypatch.setattr(forking, "take_order", lambda *args: used.append(args))
    monkeypatch.setattr(forking.signal, "signal", lambda *_: None)
    note = lambda *_, **__: getattr(forking.clientapp, fetch)("an order")  # noqa: E731
    monkeypatch.setattr(forking.clientapp, "run_clientapp", note)
    spec = SimpleNamespace(runtime_api_address="", token="", insecure=True, parent_pid=0)
    served = forking.ExecutorTarget("127.0.0.1:1", "/", 0, "secret")
    forking._client_app(spec, served, forking.TaskRegistry())  # type: ignore[arg-type]
    assert used == [("an order",)]
    assert inspect.signature(take_order).parameters["patience"].default == 600


@pytest.mark.parametrize("name", ["down", "global"])
def test_what_the_server_sends_is_read_without_trust_too(name: str, tmp_path: Path) -> None:
    """A site says in words that it cannot do it; nothing is kept."""
    config = small("fedavg", rounds=1, **{"partition.clients": 2, "participation.rate": 1.0})
    place = read_site_config({"partition-id": 0, "num-partitions": 2, "state": str(tmp_path)})
    site = Site(place, dump(config), None)
    for wrong in ("2^40 floats", "a zip", "too few numbers", "two arrays"):
        content = RecordDict({name: RECORDS[wrong][0]})
        with pytest.raises(ValueError, match="its arrays cannot be read"):
            site.read(content)
    with pytest.raises(ValueError, match=r"does not belong there|is missing"):
        site.read(RecordDict({name: to_arrays({"extra": torch.zeros(2)})}))
