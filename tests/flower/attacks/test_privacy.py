"""Patients' names never leave a site: not in a message, and so not in the server's log, run folder or model."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message
from flwr.common.serde import message_to_proto

from fednh.config import load
from fednh.data.sources.builtin import digits
from tests.helpers.federation import Wire, deployed, serve, server_identity
from tests.helpers.hospitals import AGREED, NAMES, tables
from tests.helpers.process import fednh


class Enough(BaseException):
    """The server has heard every site and has begun to ask again."""


def federate(folder: Path, nodes: dict[int, dict[str, Any]], settings: dict[str, Any]) -> tuple[Wire, list[str]]:
    """The federation as far as it comes, and what the server had to say."""
    usual = {"rounds": 1, "model.name": "mlp", "participation.rate": 1.0, "eval.every": 1, "federation.name": "own"}
    config = load(None, {"data.name": "own", **usual, **settings})

    def tamper(node: int, request: Message, reply: Message) -> Message:
        asked = sum(q.metadata.message_type == "query" and q.metadata.dst_node_id == node for q, _ in wire.seen)
        if asked == 2:
            raise Enough
        return reply

    wire = deployed(folder, nodes, tamper)
    with suppress(Enough):
        serve(config, wire, folder / "run", identity=server_identity(folder, "own"))
    return wire, [path.read_text() for path in (folder / "run").glob("federation.log")]


def nothing_leaks(folder: Path, wire: Wire, *more: str) -> None:
    """Neither in what travelled to the server nor in what it keeps."""
    secrets = [word.encode() for word in (*NAMES, *more)]
    replies = [message_to_proto(reply).SerializeToString() for _, reply in wire.seen if reply is not None]
    kept = [path.read_bytes() for path in (folder / "run").rglob("*") if path.is_file()]
    assert len(replies) >= len(wire.nodes)
    assert kept
    for content in (*replies, *kept):
        assert not any(secret in content for secret in secrets)


def test_values_that_are_not_agreed_are_not_sent(tmp_path: Path) -> None:
    """Without data.columns every distinct value once was in the greeting, the server's log and the model's card."""
    nodes = tables(tmp_path)
    for place in nodes.values():
        del place["columns"]
    wire, (log,) = federate(tmp_path, nodes, {"data.label": "diagnosis"})
    nothing_leaks(tmp_path, wire, "healthy", "patient", "blood")
    assert "the values of its text columns are not agreed" in log
    assert "data.columns" in log
    assert "the names of its classes are not agreed" in log
    assert not (tmp_path / "run" / "config.toml").exists()


def test_what_is_agreed_trains_and_names_stay(tmp_path: Path) -> None:
    wire, _ = federate(tmp_path, tables(tmp_path), {"data.label": "diagnosis", **AGREED})
    nothing_leaks(tmp_path, wire, "note")
    assert (tmp_path / "run" / "summary.json").exists()
    model = (tmp_path / "run" / "models" / "global.safetensors").read_bytes()
    assert b"healthy" in model  # what is agreed is in the card


ASKED: dict[str, dict[str, Any]] = {
    "the label": {**AGREED, "data.label": "patient"},
    "the label with guesses": {"data.columns": AGREED["data.columns"], "data.label": "patient", "data.classes": NAMES},
    "the column": {**AGREED, "data.columns": {"patient": ["x"]}},
    "the site": {**AGREED, "data.site": "patient"},
    "classes that lack one": {**AGREED, "data.classes": ["healthy", "well"]},
    "numbers of what is text": {**AGREED, "data.columns": {"age": "number", "blood": "number"}},
}


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_a_server_that_asks_for_names_gets_none(asked: dict[str, Any], tmp_path: Path) -> None:
    """By its settings alone, and by the words of the errors that they cause; its own guesses tell it nothing."""
    wire, _ = federate(tmp_path, tables(tmp_path), asked)
    for _, reply in wire.seen:
        assert reply is not None
        content = message_to_proto(reply).SerializeToString()
        assert not any(name.encode() in content for name in NAMES)
    log = (tmp_path / "run" / "federation.log").read_text() if (tmp_path / "run" / "federation.log").exists() else ""
    assert not any(name in log for name in NAMES)
    assert ("cannot take part" in log) != (tmp_path / "run" / "summary.json").exists()


def test_image_folders_have_class_names_too(tmp_path: Path) -> None:
    from PIL import Image

    data, nodes = digits(), {}
    for k, site in enumerate(("north", "south")):
        for i in range(20):
            path = tmp_path / site / NAMES[i % 2] / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((data.x_train[i, ..., 0] * 15).astype(np.uint8)).save(path)
        nodes[k + 1] = {"data": f"folder:{tmp_path}/{site}", "site": site}
    wire, (log,) = federate(tmp_path, nodes, {})
    nothing_leaks(tmp_path, wire)
    assert "the names of its classes are not agreed: list all classes in data.classes" in log


def test_parts_of_public_sets_are_no_secret(tmp_path: Path) -> None:
    nodes: dict[int, dict[str, Any]] = {
        k + 1: {"partition-id": k, "num-partitions": 2, "site": f"s{k}"} for k in range(2)
    }
    federate(tmp_path, nodes, {"data.name": "digits", "partition.clients": 2})
    assert (tmp_path / "run" / "summary.json").exists()


def test_init_says_what_must_be_agreed(tmp_path: Path) -> None:
    words = ["federation", "init", str(tmp_path / "fed"), "--data", "csv:/srv/a.csv", "--data", "csv:/srv/b.csv"]
    ended = fednh(words, tmp_path / "io")
    assert ended.code == 0, ended.stderr
    assert "list classes with names in data.classes, text columns in data.columns" in ended.stdout
