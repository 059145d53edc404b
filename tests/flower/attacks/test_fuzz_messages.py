"""Honest messages with some bytes changed, in both directions: read, or refused in words; nothing else happens."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fednh.flower import protocol
from fednh.flower.protocol import Answer, Hello, Order, SiteProblem, Task, to_arrays
from fednh.flower.transport import GREETING, BoundedFetch, FetchError, Limit
from tests.helpers.counts import count
from tests.helpers.store import Store, grid_of, packed

TREE = {"body.0.weight": torch.arange(12.0).reshape(3, 4), "scale": torch.tensor(20.0)}
FORM = {name: (tuple(value.shape), value.dtype) for name, value in TREE.items()}
TASK = Task(
    data="digits",
    divided=True,
    shape=(64,),
    classes=("0", "1"),
    scale=16.0,
    mean=(0.5,),
    std=(0.5,),
    preprocessing='{"kind": "vector"}',
)
ANSWER = Answer(0, 1, TREE, 5, 1.0, metrics={"pm_l": 50.0, "per_class": [1.0, 2.0]}).write()
HELLO = Hello(site="site-1", task=TASK, number=0).write()
ORDER = Order(client=0, round=1).write("rounds = 3", TASK, to_arrays(TREE), to_arrays({"scale": TREE["scale"]}))

# Where in the message, what to do there, and with which bytes.
BYTES = st.one_of(st.binary(max_size=6), st.sampled_from([b"Infinity", b"[" * 5000, b"9" * 5000, b"\0", b"PK\x03\x04"]))
CHANGES = st.lists(
    st.tuples(st.integers(0, 10**6), st.sampled_from(["put", "add", "cut", "swap"]), BYTES), min_size=1, max_size=4
)


def changed(contents: dict[str, bytes], changes: list[tuple[int, str, bytes]]) -> dict[str, bytes]:
    """The objects of a message after these changes, under their old names."""
    found = dict(contents)
    for place, how, new in changes:
        name = sorted(found)[place % len(found)]
        old = found[name]
        at = (place // 7) % (len(old) + 1)
        if how == "put":
            found[name] = old[:at] + new + old[at + len(new) :]
        elif how == "add":
            found[name] = old[:at] + new + old[at:]
        elif how == "cut":
            found[name] = old[:at]
        else:
            found[name] = found[sorted(found)[(place // 3) % len(found)]]
    return found


def look(content: RecordDict, *readers: Callable[[RecordDict], object]) -> None:
    for read in readers:
        words = ""
        try:
            read(content)
        except (ValueError, SiteProblem) as error:
            words = str(error)
        assert len(words) < 1000


def through_the_server(content: RecordDict, changes: list[tuple[int, str, bytes]], limit: Limit) -> None:
    """What the server does with a reply; only what it foresees may be raised."""
    store, (tree, contents) = Store(verify=False), packed(content, "letter")
    store.put("letter", tree, changed(contents, changes))
    for _, reply in BoundedFetch(grid_of(store)).pull({"letter": limit}):
        if isinstance(reply, FetchError) or not reply.has_content():
            continue
        look(reply.content, Hello.read, lambda each: Answer.read(each, FORM), lambda each: Answer.read(each, None))
    count("bad inputs tried")


def through_a_site(changes: list[tuple[int, str, bytes]]) -> None:
    """What a site does with an order, after Flower has put it together."""
    tree, contents = packed(ORDER, "letter")
    try:
        order = inflate_object_from_contents(tree.object_id, changed(contents, changes))
    except Exception:
        return  # Flower's own process for one order ends: the site does not see it
    content: Any = order.content if isinstance(order, Message) and order.has_content() else RecordDict()
    down, more = (lambda each, name=name: protocol.read_tree(each, name, "cpu", FORM) for name in ("down", "global"))
    look(content, protocol.read_config, Order.read, down, more)
    count("bad inputs tried")


QUICK = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
LONG = settings(max_examples=5000, deadline=None, suppress_health_check=list(HealthCheck))


@QUICK
@given(CHANGES)
def test_changed_messages(changes: list[tuple[int, str, bytes]]) -> None:
    through_the_server(ANSWER, changes, Limit.of(FORM))
    through_the_server(HELLO, changes, GREETING)
    through_a_site(changes)


@pytest.mark.soak
@LONG
@given(CHANGES)
def test_many_changed_answers(changes: list[tuple[int, str, bytes]]) -> None:
    through_the_server(ANSWER, changes, Limit.of(FORM))


@pytest.mark.soak
@LONG
@given(CHANGES)
def test_many_changed_greetings(changes: list[tuple[int, str, bytes]]) -> None:
    through_the_server(HELLO, changes, GREETING)


@pytest.mark.soak
@LONG
@given(CHANGES)
def test_many_changed_orders(changes: list[tuple[int, str, bytes]]) -> None:
    through_a_site(changes)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
)


@settings(max_examples=25, deadline=None)
@given(st.dictionaries(st.sampled_from([*Task.model_fields]), JSON))
def test_any_description_of_data(wrong: dict[str, Any]) -> None:
    """Every field replaced by anything that JSON can hold: a task within its ranges, or a ValueError."""
    said = ConfigRecord({"format": protocol.FORMAT, "site": "s", "number": 0})
    said["task"] = json.dumps({**TASK.model_dump(), **wrong})
    try:
        task = Hello.read(RecordDict({"said": said})).task
    except ValueError:
        return
    assert all(value > 0 for value in (*task.std, *task.shape, task.scale, len(task.classes)))
    assert all(abs(value) < 1e30 for value in (*task.mean, *task.std))
