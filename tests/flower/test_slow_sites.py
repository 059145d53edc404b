"""Sites that answer late: how long a round waits, and what a late upload does. Lines that are slow are in
test_slow_lines.py."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message

from fednh.config import load
from fednh.errors import ConfigError
from fednh.flower.admission import MemberRow, Membership
from fednh.flower.pace import Pace, aged, weight_of
from fednh.flower.protocol import Order, to_tree
from fednh.flower.server_app import Transport, make_run
from fednh.io.files import read_tree
from fednh.methods.base import UploadSpec
from fednh.runs.run_folder import RunFolder
from fednh.tree import Tree, mean
from tests.helpers.callbacks import Recorder
from tests.helpers.compare import lines, same
from tests.helpers.federation import Wire, divided, server_identity

SLOW = 1002  # the node of client 2


class SlowLine(Wire):
    """A wire on which the first answer of one site to an order arrives while the second round is at work."""

    held: Message | None = None

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        asked = list(messages)
        names = list(super().push_messages(asked))
        rounds = {int(each.content["order"]["round"]) for each in asked if "order" in each.content}  # type: ignore[call-overload,arg-type]
        for reply in [each for each in self._replies if each.metadata.src_node_id == SLOW]:
            if 1 in rounds and reply.metadata.message_type == "train":
                self.held = reply
                self._replies.remove(reply)
        if 2 in rounds and self.held is not None:
            self._replies.append(self.held)
            self.held = None
        return names


def settings(**more: Any) -> dict[str, Any]:
    base = {"partition.clients": 3, "participation.rate": 1.0, "rounds": 3, "train.epochs": 1, "eval.every": 3}
    return {**base, "method.name": "fedavg", "model.args": {"hidden": [8]}, "federation.min_clients": 2, **more}


def federated(folder: Path, **more: Any) -> tuple[SlowLine, Recorder]:
    """Rounds end when twice as long has passed as the wire needs, which answers all at once: in milliseconds."""
    config = load("digits", settings(**{"federation.slack": 2.0, **more}))
    wire, told = SlowLine(divided(config, folder).nodes), Recorder()
    with RunFolder(folder) as run:
        transport = Transport(30.0, 3, 0.001, 2, 60.0)
        make_run(config, wire, run, told, transport, server_identity(folder / "fed")).run()
    return wire, told


def orders(wire: Wire, node: int) -> list[tuple[Order, Tree, Tree | None]]:
    """What a node was asked to train, what it received, and what it uploaded."""
    found = []
    for request, reply in wire.seen:
        if request.metadata.dst_node_id == node and "order" in request.content and reply is not None:
            order = Order.read(request.content)
            upload = to_tree(reply.content["upload"]) if "upload" in reply.content else None  # type: ignore[arg-type]
            found.append((order, to_tree(request.content["down"]), upload))  # type: ignore[arg-type]
    return [each for each in found if each[0].round]


def test_a_late_upload_is_used_in_the_next_round_by_its_age(tmp_path: Path) -> None:
    """The model after round 2 is the mean of two uploads and of the state with 0.71 of what the third one trained."""
    wire, told = federated(tmp_path / "run", **{"federation.late": "use"})
    rows = lines(tmp_path / "run")[:-1]
    assert [(sorted(row["clients"]), row["dropped"], row.get("late")) for row in rows] == [
        ([0, 1], [2], None),
        ([0, 1, 2], [], {"2": 1}),
        ([0, 1, 2], [], None),
    ]
    (first, second, third) = (orders(wire, node) for node in (1000, 1001, SLOW))
    assert [(order.round, order.last) for order, *_ in third] == [(1, 0), (3, 1)], "it is not asked while it is late"
    down, late = third[0][1:]
    now = first[1][1]
    assert late is not None
    moved = {name: now[name] + 2**-0.5 * (value - down[name]) for name, value in late.items()}
    uploads = [upload for _, _, upload in (first[1], second[1]) if upload is not None]
    expected = mean([*uploads, moved])
    same({name: first[2][1][name] for name in expected}, expected, atol=1e-6, rtol=0)
    assert any("round 2 uses it with the weight 0.71" in note for note in told.notes)


def test_a_late_upload_is_dropped_and_counted(tmp_path: Path) -> None:
    wire, told = federated(tmp_path / "run", **{"federation.late": "drop"})
    rows = lines(tmp_path / "run")[:-1]
    assert [(sorted(row["clients"]), row["dropped"]) for row in rows] == [([0, 1], [2]), ([0, 1], []), ([0, 1, 2], [])]
    assert [(order.round, order.last) for order, *_ in orders(wire, SLOW)] == [(1, 0), (3, 0)]
    assert json.loads((tmp_path / "run/summary.json").read_text())["late"] == {"dropped": 1}
    assert "round 1: site client-000002 (client 2) answered too late; refused" in told.notes


def test_a_round_does_not_wait_for_a_site_that_is_slower_than_the_others(tmp_path: Path) -> None:
    """The timeout is 30 s."""
    _, told = federated(tmp_path / "run", **{"rounds": 1, "eval.every": 1})
    (note,) = [each for each in told.notes if "did not answer" in each]
    assert "2 times what the usual site takes" in note
    assert float(note.partition("did not answer in ")[2].partition(" s")[0]) < 15


@pytest.mark.parametrize("kind", ["int8", "top-k"])
def test_a_late_upload_can_be_compressed(kind: str, tmp_path: Path) -> None:
    """It is unpacked by what its site had received, and what it owes is kept: the state it starts from has it."""
    wire, _ = federated(tmp_path / "run", **{"federation.late": "use", "federation.compress": kind})
    row = lines(tmp_path / "run")[1]
    assert (sorted(row["clients"]), row["refused"], row["late"]) == ([0, 1, 2], [], {"2": 1})
    states = tmp_path / "run/fed/state/fednh/client-000002"
    assert any(name.startswith("unsent.") for name in read_tree(states / "state.round-000001.safetensors"))
    del wire


def test_a_restored_server_knows_from_which_state_a_late_site_goes_on() -> None:
    rows = [MemberRow(number=k, site=f"s{k}", key="") for k in range(2)]
    records = [{"round": 1, "clients": [0]}, {"round": 4, "clients": [0, 1], "late": {"1": 3}}]
    assert [member.last for member in Membership(rows, records)] == [4, 1]


def test_how_long_a_round_waits_by_hand() -> None:
    pace = Pace(3.0)
    asked = [0, 1, 2, 3]
    assert pace.limit(asked, {}, 2) == math.inf, "nobody is known"
    assert pace.limit(asked, {0: 2.0}, 2) == math.inf, "two are needed"
    assert pace.limit(asked, {0: 2.0, 1: 4.0}, 2) == 12.0, "3 x the lower median of 2, 4, inf, inf"
    for seconds in (5.0, 6.0, 100.0):
        pace.heard(2, seconds)
    pace.heard(3, 50.0)
    assert pace.limit(asked, {0: 2.0, 1: 4.0}, 2) == 12.0, "of 2, 4, 6, 50"
    assert pace.limit([2, 3], {2: 1.0}, 1) == 3.0
    assert Pace(None).limit(asked, {0: 2.0, 1: 4.0}, 2) == math.inf
    for _ in range(5):
        pace.heard(2, 1.0)
    assert pace.limit([0, 2], {0: 9.0}, 1) == 3.0, "what a site took long ago is forgotten"


def test_what_a_late_upload_becomes_by_hand() -> None:
    one = torch.ones(2, 2)
    upload = {"body.w": 5 * one, "prototypes": 4 * one, "marks": one[0], "sums": one, "other": one, "scale": one[0]}
    spec = UploadSpec(by_class=("prototypes",), summed=("sums",))
    sent, now = {"body.w": 3 * one, "scale": one[0]}, {"body.w": 10 * one, "scale": torch.tensor(1.0)}
    made = aged(upload, sent, now, 3, spec)
    assert weight_of(3) == 0.5
    assert made["body.w"].equal(11 * one)
    assert made["prototypes"].equal(2 * one)
    for name in ("marks", "sums", "other", "scale"):
        assert made[name].equal(upload[name]), name
    marked = aged(upload, sent, now, 3, UploadSpec(by_class=("prototypes",), marks=("marks",)))
    assert marked["prototypes"].equal(4 * one)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"federation.secure": True}, "can no longer be unmasked"),
        ({"method.name": "fedpac"}, "is not supported by method fedpac"),
    ],
)
def test_late_uploads_that_cannot_be_used_are_refused(more: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        federated(tmp_path / "run", **{"federation.late": "use", **more})
