"""Packed uploads of real sites: the same bytes when asked again, a remainder by the state that an order names, and a
server that believes nothing of what it is sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, Message

from fednh.config import Config
from fednh.federated import compress
from fednh.flower.protocol import PACKED, TREE, Order, from_packed, to_arrays
from fednh.io.files import read_tree
from tests.flower.test_paid_answers import private, scene
from tests.helpers.compare import lines
from tests.helpers.federation import divided, serve, server_identity
from tests.helpers.hostile import Scene, config_of, problem

INT8 = {"federation.compress": "int8"}
FIRST = Order(client=0, round=1)


def sent(reply: Message) -> bytes:
    assert problem(reply) == ""
    record = reply.content["upload"]
    assert isinstance(record, ArrayRecord)
    assert record[TREE].stype == PACKED
    return record[TREE].data


@pytest.mark.parametrize("level", ["none", "sample"])
def test_who_asks_again_gets_the_same_bytes(level: str, tmp_path: Path) -> None:
    place = scene(tmp_path) if level == "sample" else Scene(tmp_path)
    config = private(**INT8) if level == "sample" else config_of(**INT8)
    first = sent(place.ordered(config, FIRST))
    assert first == sent(place.ordered(config, FIRST))
    second = Order(client=0, round=2, last=1)
    assert sent(place.ordered(config, second)) == sent(place.ordered(config, second))


def test_an_upload_that_was_lost_is_not_owed(tmp_path: Path) -> None:
    """The second order starts from nothing (last = 0): what the first round owes is not added to it."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    one, other = Scene(tmp_path / "a"), Scene(tmp_path / "b")
    config, again = config_of(**INT8), Order(client=0, round=2)
    sent(one.ordered(config, FIRST))
    assert sent(one.ordered(config, again)) == sent(other.ordered(config, again))
    taken = sent(one.ordered(config, Order(client=0, round=2, last=1)))
    assert taken != sent(other.ordered(config, again)), "what is owed is sent"
    (state,) = (tmp_path / "a/state").rglob("state.round-000001.*")
    assert any(name.startswith("unsent.") for name in read_tree(state))


def packed(data: bytes) -> ArrayRecord:
    return ArrayRecord({TREE: Array(dtype="uint8", shape=(len(data),), stype=PACKED, data=data)})


def spoiled(record: ArrayRecord, how: str) -> ArrayRecord:
    data = record[TREE].data
    plain = read_tree_of(data)
    if how == "not packed":
        return to_arrays(plain)
    if how == "truncated":
        return packed(data[:-5])
    if how == "bomb":
        return packed(compress.zlib.compress(bytes(60_000_000), 9))
    name = next(each for each in plain if each.startswith("scales."))
    if how == "scale":
        return packed(compress.written({**plain, name: torch.full_like(plain[name], float("nan"))}))
    assert how == "form"
    return packed(compress.written({each: value for each, value in plain.items() if each != name}))


def read_tree_of(data: bytes) -> dict[str, torch.Tensor]:
    plain = compress.safetensors.numpy.load(compress.read(data, 1 << 30))
    return {name: torch.from_numpy(array) for name, array in plain.items()}


WORDS = {
    "not packed": "they are not packed as federation.compress asks",
    "truncated": "it cannot be decompressed",
    "bomb": "decompressed it has more than the",
    "scale": "a scale is negative or not finite",
    "form": "is missing",
}


@pytest.mark.parametrize("how", WORDS)
def test_a_packed_upload_that_is_none_is_refused_and_the_rounds_go_on(how: str, tmp_path: Path) -> None:
    config: Config = config_of(
        **{**INT8, "partition.clients": 3, "participation.rate": 1.0, "federation.min_clients": 1}
    )

    def hostile(node: int, request: Message, reply: Message) -> Message:
        if node == 1001 and "upload" in reply.content:
            reply.content["upload"] = spoiled(reply.content["upload"], how)  # type: ignore[arg-type]
        return reply

    wire = divided(config, tmp_path / "run", hostile=hostile)
    told = serve(config, wire, tmp_path / "run", server_identity(tmp_path / "run/fed"))
    rows = lines(tmp_path / "run")[:-1]
    assert [row["refused"] for row in rows] == [[1], [1]]
    assert all(0 < row["bytes_up"] < 0.5 * row["bytes_down"] for row in rows)
    assert WORDS[how] in "\n".join(told.notes)


def test_a_packed_upload_is_not_larger_than_its_form(tmp_path: Path) -> None:
    place: Any = Scene(tmp_path)
    record = place.ordered(config_of(**INT8), FIRST).content["upload"]
    tree = read_tree_of(record[TREE].data)
    form = compress.form_of(tree)
    read, size = from_packed(record, form)
    assert size == len(record[TREE].data)
    assert read.keys() == tree.keys()
    with pytest.raises(ValueError, match="is missing"):
        from_packed(record, {**form, "codes.more": ((3,), torch.int8)})
