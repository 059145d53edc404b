"""One table of malformed messages and settings: each is refused in a sentence, and nothing else happens.

A row is a model, a change of a record that it accepts, and the sentence. GONE leaves a field out.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from flwr.app import ConfigRecord, Message, MetricRecord
from pydantic.fields import FieldInfo

from fednh.config import dump
from fednh.errors import UserError
from fednh.flower import protocol, signing
from fednh.flower.admission import MemberRow
from fednh.flower.layout import StateFolder
from fednh.flower.protocol import Facts, Hello, Metrics, Order, Said, SentConfig, SiteNotice, Task, TensorHeader
from fednh.flower.server_app import Sites
from fednh.flower.site_config import METRICS, Allow, Policy, SiteConfig, read_site_config
from fednh.flower.transport import StrictModel
from fednh.io import chain
from fednh.metric_names import HELD
from tests.helpers.config import small
from tests.helpers.federation import divided, federate, serve, server_identity, travelled
from tests.helpers.hostile import Scene, config_of, problem, question

GONE = object()
NAN = math.nan
HEAD = f"3:{'0' * 64}"
TASK = {"data": "d", "divided": True, "shape": [4], "classes": ["a", "b"], "scale": 1.0, "mean": [0.0], "std": [1.0]}
TASK["preprocessing"] = "{}"
NODE = {"site": "a", "state": "/state", "data": "npz:a.npz"}

HONEST: dict[type[StrictModel], dict[str, Any]] = {
    Task: TASK,
    TensorHeader: {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    Said: {"format": protocol.FORMAT, "audit": HEAD},
    Hello: {"format": protocol.FORMAT, "site": "a", "number": -1, "task": json.dumps(TASK), "audit": HEAD},
    SiteNotice: {"format": protocol.FORMAT, "text": "x"},
    SentConfig: {"format": protocol.FORMAT, "toml": "rounds = 1", "task": ""},
    Order: {"client": 0, "round": 1, "evaluate": 0, "last": 0, "since": 0, "final": False, "sites": 1},
    Facts: {"client": 0, "round": 1, "samples": 5, "loss_sum": 1.0, "gradient_norm": 0.5},
    Metrics: {"samples": 5, "pm_v": 50.0, "per_class": [-1.0, 100.0], "novelty": [0.5, 0.75]},
    signing.OrderSeal: {"federation": "f", "counter": 1, "signature": b"s"},
    signing.ReplySeal: {"site": "a", "key": "k", "signature": b"s"},
    signing.GuardState: {"counter": 5, "trained": 1, "evaluated": 1, "answered": ("a",), "repeated": 0},
    MemberRow: {"number": 0, "site": "a", "key": "k"},
}
ROUND = "not a whole number from 0 to 1000000000"
SAMPLES = "not a whole number from 1 to 1000000000000"
PERCENT = "not a number from 0 to 100.001"
TEXT = "not a text of up to 4194304 characters"
NUMBERS = ("client", "round", "evaluate", "last", "since", "sites")
DESCRIPTION = "the description of its data cannot be used: "

TABLE: list[tuple[type[StrictModel], dict[str, Any], str]] = [
    (Task, {"data": GONE}, "data is missing"),
    (Task, {"data": 7}, f"data is 7, {TEXT}"),
    (Task, {"data": "x" * (4 << 20) + "x"}, f"data is '{'x' * 79}..., {TEXT}"),
    (Task, {"data": "\x1b[2J"}, "a name in it holds a character that cannot be printed"),
    (Task, {"divided": GONE}, "divided is missing"),
    (Task, {"divided": 1}, "divided is 1, not true or false"),
    (Task, {"shape": GONE}, "shape is missing"),
    (Task, {"shape": "4"}, "shape is '4', not a list of 1 to 3"),
    (Task, {"shape": []}, "shape has 0 entries, not a list of 1 to 3"),
    (Task, {"shape": [1] * 64}, "shape has 64 entries, not a list of 1 to 3"),
    (Task, {"shape": [4, 4]}, "samples of shape (4, 4)"),
    (Task, {"shape": [2**14, 2**14, 2]}, "samples of shape (16384, 16384, 2)"),
    (Task, {"shape": [0]}, "shape[0] is 0, not a whole number from 1 to 268435456"),
    (Task, {"shape": [-4]}, "shape[0] is -4, not a whole number from 1 to 268435456"),
    (Task, {"shape": [2**62]}, "shape[0] is 4611686018427387904, not a whole number from 1 to 268435456"),
    (Task, {"shape": [NAN]}, "shape[0] is nan, not a whole number from 1 to 268435456"),
    (Task, {"classes": GONE}, "classes is missing"),
    (Task, {"classes": "ab"}, "classes is 'ab', not a list of 1 to 65536"),
    (Task, {"classes": []}, "classes has 0 entries, not a list of 1 to 65536"),
    (Task, {"classes": ["a"] * 70_000}, "not a list of 1 to 65536"),
    (Task, {"classes": ["a", 2]}, "classes[1] is 2, not a text of up to 1000 characters"),
    (Task, {"classes": ["a", "b" * 1001]}, "not a text of up to 1000 characters"),
    (Task, {"classes": ["a", "a"]}, "it has a class twice"),
    (Task, {"scale": GONE}, "scale is missing"),
    (Task, {"scale": "1"}, "scale is '1', not a number from 0 to 1e+30"),
    (Task, {"scale": 0}, "scale is 0, not a number from 0 to 1e+30"),
    (Task, {"scale": -1.0}, "scale is -1.0, not a number from 0 to 1e+30"),
    (Task, {"scale": NAN}, "scale is nan, not a number from 0 to 1e+30"),
    (Task, {"scale": 1e31}, "scale is 1e+31, not a number from 0 to 1e+30"),
    (Task, {"mean": GONE}, "mean is missing"),
    (Task, {"mean": 0.5}, "mean is 0.5, not a list of 1 to 65536"),
    (Task, {"mean": [], "std": []}, "mean has 0 entries, not a list of 1 to 65536"),
    (Task, {"mean": [0.0] * 70_000}, "not a list of 1 to 65536"),
    (Task, {"mean": ["0"]}, "mean[0] is '0', not a number from -1e+30 to 1e+30"),
    (Task, {"mean": [NAN]}, "mean[0] is nan, not a number from -1e+30 to 1e+30"),
    (Task, {"mean": [-1e31]}, "mean[0] is -1e+31, not a number from -1e+30 to 1e+30"),
    (Task, {"mean": [0.0] * 3}, "3 means and 1 deviations of 4 features or channels"),
    (Task, {"std": GONE}, "std is missing"),
    (Task, {"std": "1"}, "std is '1', not a list"),
    (Task, {"std": [True]}, "std[0] is True, not a number from -1e+30 to 1e+30"),
    (Task, {"std": [1e31]}, "std[0] is 1e+31, not a number from -1e+30 to 1e+30"),
    (Task, {"std": [-1.0]}, "the deviation -1.0 is not positive"),
    (Task, {"std": [-2.0], "divided": False}, "the deviation -2.0 is not positive"),
    (Task, {"preprocessing": GONE}, "preprocessing is missing"),
    (Task, {"preprocessing": {}}, f"preprocessing is [], {TEXT}"),
    (Task, {"preprocessing": "x" * (4 << 20) + "x"}, f"..., {TEXT}"),
    (Task, {"preprocessing": "[" * 100_000}, "it is nested too deeply"),
    (Task, {"preprocessing": "NaN"}, "it holds NaN"),
    (Task, {"more": 1}, "more is not known"),
    (TensorHeader, {"dtype": GONE}, "dtype is missing"),
    (TensorHeader, {"dtype": 5}, "dtype is 5, not one of F16, F32, F64, I8, I16, I32, I64, U8, BOOL"),
    (TensorHeader, {"dtype": "F4"}, "dtype is 'F4', not one of F16, F32"),
    (TensorHeader, {"shape": GONE}, "shape is missing"),
    (TensorHeader, {"shape": 2}, "shape is 2, not a list of 0 to 16"),
    (TensorHeader, {"shape": [1] * 17}, "shape has 17 entries, not a list of 0 to 16"),
    (TensorHeader, {"shape": [-1]}, "shape[0] is -1, not a whole number from 0 to 268435456"),
    (TensorHeader, {"shape": [2**40]}, "shape[0] is 1099511627776, not a whole number from 0 to 268435456"),
    (TensorHeader, {"shape": [NAN]}, "shape[0] is nan, not a whole number from 0 to 268435456"),
    (TensorHeader, {"data_offsets": GONE}, "data_offsets is missing"),
    (TensorHeader, {"more": 1}, "more is not known"),
    (Said, {"format": GONE}, "format is missing"),
    (Said, {"format": "3"}, "format is '3', not a whole number"),
    (Said, {"problem": 1}, f"problem is 1, {TEXT}"),
    (Said, {"problem": "x" * (4 << 20) + "x"}, f"..., {TEXT}"),
    (Said, {"site": 1}, "site is 1, not a text of up to 1000 characters"),
    (Said, {"site": "x" * 1001}, "not a text of up to 1000 characters"),
    (Said, {"audit": 7}, "audit is 7, not a text"),
    (Said, {"ledger": 7}, "ledger is 7, not a text"),
    (Said, {"epsilon": "x"}, "epsilon is 'x', not a number"),
    (Said, {"epsilon": -1.0}, "epsilon is -1.0, not a number"),
    (Said, {"delta": "x"}, "delta is 'x', not a number"),
    (Said, {"delta": -1.0}, "delta is -1.0, not a number"),
    (Said, {"delta": 2.0}, "delta is 2.0, not a number"),
    *((each, {"network": 7}, "network is 7, not a text") for each in (Hello, Order)),
    *((each, {"network": "x" * 1001}, "not a text of up to 1000 characters") for each in (Hello, Order, MemberRow)),
    (Order, {"ledger": 7}, "ledger is 7, not a text"),
    (MemberRow, {"network": 7}, "network is 7, not a text"),
    (MemberRow, {"ledger": 7}, "ledger is 7, not a text"),
    (Said, {"audit": "7:beef"}, "audit is '7:beef', not a text"),
    (Said, {"room": -1}, "room is -1, not a whole number from 0 to 1000000000000"),
    (Said, {"room": 10**12 + 1}, "room is 1000000000001, not a whole number from 0 to 1000000000000"),
    (Said, {"room": "1"}, "room is '1', not a whole number from 0 to 1000000000000"),
    (Said, {"more": 1}, "more is not known"),
    (Hello, {"format": 3.0}, "format is 3.0, not a whole number"),
    (Hello, {"site": GONE}, "site is missing"),
    (Hello, {"site": 7}, "site is 7, not a text of up to 1000 characters"),
    (Hello, {"site": "x" * 1001}, "not a text of up to 1000 characters"),
    (Hello, {"site": "x\nround 1: all is well"}, "its name cannot be used: it holds a new line"),
    (Hello, {"number": 0.5}, "number is 0.5, not a whole number from -1 to 1000000000"),
    (Hello, {"number": -2}, "number is -2, not a whole number from -1 to 1000000000"),
    (Hello, {"number": 10**9 + 1}, "number is 1000000001, not a whole number from -1 to 1000000000"),
    (Hello, {"task": GONE}, "task is missing"),
    (Hello, {"task": 7}, "task is 7, not a table"),
    (Hello, {"task": "{"}, f"{DESCRIPTION}it is not valid JSON: EOF"),
    (Hello, {"task": "[" * 100_000}, f"{DESCRIPTION}it is not valid JSON: recursion limit exceeded"),
    (Hello, {"task": "[]"}, f"{DESCRIPTION}[] is not a table"),
    (Hello, {"task": json.dumps({**TASK, "scale": -1})}, f"{DESCRIPTION}scale is -1, not a number"),
    (Hello, {"audit": 7}, "audit is 7, not a text"),
    (Hello, {"audit": "x"}, "audit is 'x', not a text"),
    (Hello, {"key": "k"}, "key is not known"),
    (SiteNotice, {"format": "x"}, "format is 'x', not a whole number"),
    (SiteNotice, {"text": GONE}, "text is missing"),
    (SiteNotice, {"text": 1}, f"text is 1, {TEXT}"),
    (SiteNotice, {"text": "x" * (4 << 20) + "x"}, f"..., {TEXT}"),
    (SiteNotice, {"more": 1}, "more is not known"),
    (SentConfig, {"format": GONE}, "format is missing"),
    (SentConfig, {"format": "x"}, "format is 'x', not a whole number"),
    (SentConfig, {"toml": GONE}, "toml is missing"),
    (SentConfig, {"toml": 1}, f"toml is 1, {TEXT}"),
    (SentConfig, {"toml": "#" * (4 << 20) + "#"}, f"..., {TEXT}"),
    (SentConfig, {"task": GONE}, "task is missing"),
    (SentConfig, {"task": 1}, f"task is 1, {TEXT}"),
    (SentConfig, {"task": "x" * (4 << 20) + "x"}, f"..., {TEXT}"),
    (SentConfig, {"more": 1}, "more is not known"),
    (Order, {"client": GONE}, "client is missing"),
    *((Order, {key: "1"}, f"{key} is '1', {ROUND}") for key in NUMBERS),
    *((Order, {key: -1}, f"{key} is -1, {ROUND}") for key in NUMBERS),
    *((Order, {key: 10**9 + 1}, f"{key} is 1000000001, {ROUND}") for key in NUMBERS),
    (Order, {"round": NAN}, f"round is nan, {ROUND}"),
    (Order, {"round": True}, f"round is True, {ROUND}"),
    (Order, {"final": 1}, "final is 1, not true or false"),
    (Order, {"more": 1}, "more is not known"),
    (Facts, {"client": GONE}, "client is missing"),
    (Facts, {"client": 0.0}, f"client is 0.0, {ROUND}"),
    (Facts, {"client": -1}, f"client is -1, {ROUND}"),
    (Facts, {"client": 10**9 + 1}, f"client is 1000000001, {ROUND}"),
    (Facts, {"round": GONE}, "round is missing"),
    (Facts, {"round": [1]}, f"round is [1], {ROUND}"),
    (Facts, {"round": -1}, f"round is -1, {ROUND}"),
    (Facts, {"round": 10**9 + 1}, f"round is 1000000001, {ROUND}"),
    (Facts, {"samples": [1.0] * 3}, f"samples is [1.0, 1.0, 1.0], {SAMPLES}"),
    (Facts, {"samples": 0}, f"samples is 0, {SAMPLES}"),
    (Facts, {"samples": 2**62}, f"samples is 4611686018427387904, {SAMPLES}"),
    (Facts, {"samples": NAN}, f"samples is nan, {SAMPLES}"),
    (Facts, {"loss_sum": [1.0]}, "loss_sum is [1.0], not a number from -1e+30 to 1e+30"),
    (Facts, {"loss_sum": -1e31}, "loss_sum is -1e+31, not a number from -1e+30 to 1e+30"),
    (Facts, {"loss_sum": 1e31}, "loss_sum is 1e+31, not a number from -1e+30 to 1e+30"),
    (Facts, {"gradient_norm": [1.0]}, "gradient_norm is [1.0], not a number from 0 to 1e+30"),
    (Facts, {"gradient_norm": -1.0}, "gradient_norm is -1.0, not a number from 0 to 1e+30"),
    (Facts, {"gradient_norm": 1e31}, "gradient_norm is 1e+31, not a number from 0 to 1e+30"),
    (Facts, {"more": 1}, "more is not known"),
    (Metrics, {"samples": 0.5}, f"samples is 0.5, {SAMPLES}"),
    (Metrics, {"samples": 0}, f"samples is 0, {SAMPLES}"),
    (Metrics, {"samples": 2**62}, f"samples is 4611686018427387904, {SAMPLES}"),
    *((Metrics, {key: [1.0]}, f"{key} is [1.0], {PERCENT}") for key in ("pm_v", "pm_l", *HELD)),
    *((Metrics, {key: -0.5}, f"{key} is -0.5, {PERCENT}") for key in ("pm_v", "pm_l", *HELD)),
    *((Metrics, {key: 101.0}, f"{key} is 101.0, {PERCENT}") for key in ("pm_v", "pm_l", *HELD)),
    (Metrics, {"pm_l": NAN}, f"pm_l is nan, {PERCENT}"),
    (Metrics, {"pm_l": math.inf}, f"pm_l is inf, {PERCENT}"),
    (Metrics, {"per_class": 50.0}, "per_class is 50.0, not a list of 0 to 65536"),
    (Metrics, {"per_class": [1.0] * 65_537}, "per_class has 65537 entries, not a list of 0 to 65536"),
    (Metrics, {"per_class": [-2.0]}, "per_class[0] is -2.0, not a number from -1 to 100.001"),
    (Metrics, {"per_class": [0.0, 101.0]}, "per_class[1] is 101.0, not a number from -1 to 100.001"),
    (Metrics, {"per_class": [NAN]}, "per_class[0] is nan, not a number from -1 to 100.001"),
    (Metrics, {"novelty": 0.5}, "novelty is 0.5, not a list of 0 to 65536"),
    (Metrics, {"novelty": [0.5] * 65_537}, "novelty has 65537 entries, not a list of 0 to 65536"),
    (Metrics, {"novelty": [-1.5]}, "novelty[0] is -1.5, not a number from -1.001 to 1.001"),
    (Metrics, {"novelty": [1.5]}, "novelty[0] is 1.5, not a number from -1.001 to 1.001"),
    (Metrics, {"accuracy": 1.0}, "accuracy is not known"),
    (signing.OrderSeal, {"federation": GONE}, "federation is missing"),
    (signing.OrderSeal, {"federation": 1}, "federation is 1, not a text of up to 1000 characters"),
    (signing.OrderSeal, {"federation": "x" * 1001}, "not a text of up to 1000 characters"),
    (signing.OrderSeal, {"counter": GONE}, "counter is missing"),
    (signing.OrderSeal, {"counter": 1.0}, "counter is 1.0, not a whole number"),
    (signing.OrderSeal, {"signature": GONE}, "signature is missing"),
    (signing.OrderSeal, {"signature": "s"}, "signature is 's', not up to 1000 bytes"),
    (signing.OrderSeal, {"signature": b"x" * 1001}, "not up to 1000 bytes"),
    (signing.OrderSeal, {"more": 1}, "more is not known"),
    (signing.ReplySeal, {"site": GONE}, "site is missing"),
    (signing.ReplySeal, {"site": 1}, "site is 1, not a text of up to 1000 characters"),
    (signing.ReplySeal, {"site": "x" * 1001}, "not a text of up to 1000 characters"),
    (signing.ReplySeal, {"key": GONE}, "key is missing"),
    (signing.ReplySeal, {"key": b"k"}, "key is b'k', not a text of up to 1000 characters"),
    (signing.ReplySeal, {"key": "x" * 1001}, "not a text of up to 1000 characters"),
    (signing.ReplySeal, {"signature": GONE}, "signature is missing"),
    (signing.ReplySeal, {"signature": 1}, "signature is 1, not up to 1000 bytes"),
    (signing.ReplySeal, {"signature": b"x" * 1001}, "not up to 1000 bytes"),
    (signing.ReplySeal, {"more": 1}, "more is not known"),
    (signing.GuardState, {"counter": "5"}, "counter is '5', not a whole number of 0 or more"),
    (signing.GuardState, {"counter": -1}, "counter is -1, not a whole number of 0 or more"),
    *(
        row
        for key in ("trained", "evaluated", "repeated")
        for row in (
            (signing.GuardState, {key: 0.5}, f"{key} is 0.5, not a whole number of 0 or more"),
            (signing.GuardState, {key: -1}, f"{key} is -1, not a whole number of 0 or more"),
        )
    ),
    (signing.GuardState, {"answered": "a"}, "answered is 'a', not a list"),
    (signing.GuardState, {"more": 1}, "more is not known"),
    (MemberRow, {"number": GONE}, "number is missing"),
    (MemberRow, {"number": "0"}, f"number is '0', {ROUND}"),
    (MemberRow, {"number": -1}, f"number is -1, {ROUND}"),
    (MemberRow, {"number": 10**9 + 1}, f"number is 1000000001, {ROUND}"),
    (MemberRow, {"site": GONE}, "site is missing"),
    (MemberRow, {"site": 1}, "site is 1, not a text of up to 1000 characters"),
    (MemberRow, {"site": "x" * 1001}, "not a text of up to 1000 characters"),
    (MemberRow, {"key": GONE}, "key is missing"),
    (MemberRow, {"key": 1}, "key is 1, not a text"),
    (MemberRow, {"more": 1}, "more is not known"),
]


def changed(model: type[StrictModel], change: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in {**HONEST[model], **change}.items() if value is not GONE}


def as_received(model: type[StrictModel], values: dict[str, Any]) -> Any:
    """Descriptions of data and headers travel as JSON text, all else as records of Flower's."""
    return json.dumps(values) if model in (Task, TensorHeader) else values


def label(row: tuple[type[StrictModel], dict[str, Any], str]) -> str:
    return f"{row[0].__name__}-{'-'.join(row[1])}"


@pytest.mark.parametrize(("model", "change", "sentence"), TABLE, ids=map(label, TABLE))
def test_a_malformed_record_is_refused_in_a_sentence(
    model: type[StrictModel], change: dict[str, Any], sentence: str
) -> None:
    model.parse(as_received(model, HONEST[model]))
    with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
        model.parse(as_received(model, changed(model, change)))
    text = str(caught.value)
    assert text.isprintable()
    assert len(text) < 700


@pytest.mark.parametrize("model", HONEST, ids=lambda model: model.__name__)
def test_the_table_has_every_field(model: type[StrictModel]) -> None:
    """Missing, of another type, below and above its bounds; and an unknown key."""
    rows = [change for each, change, _ in TABLE if each is model]
    assert any(key not in model.model_fields for change in rows for key in change), "an unknown key"
    for name, info in model.model_fields.items():
        if name == "data_offsets":  # of any type here: the library reads them
            continue
        values = [change[name] for change in rows if name in change]
        assert not info.is_required() or GONE in values, f"{name} missing"
        assert any(not accepts_type(info, value) for value in values if value is not GONE), f"{name} of another type"
        schema = model.model_json_schema()["properties"][name]
        schema = schema["anyOf"][0] if "anyOf" in schema else schema
        for key, beyond in (("minimum", -1), ("maximum", 1)):
            if key in schema:
                numbers = [value for value in values if type(value) in (int, float)]
                assert any((value - schema[key]) * beyond > 0 for value in numbers), f"{name} beyond its {key}"
        if "maxLength" in schema or "maxItems" in schema:
            most = schema.get("maxLength", schema.get("maxItems"))
            assert any(isinstance(value, str | bytes | list) and len(value) > most for value in values), f"{name} long"


def accepts_type(info: FieldInfo, value: object) -> bool:
    kinds = [each for each in (get_args(info.annotation) or (info.annotation,)) if each is not type(None)]
    outer = get_origin(info.annotation)
    if outer in (tuple, list):
        return isinstance(value, list | tuple)
    if any(get_origin(kind) in (list, tuple) for kind in kinds):
        return isinstance(value, list | tuple)
    if kinds == [Task]:
        return isinstance(value, str)
    return any(type(value) is kind or (kind is float and type(value) is int) for kind in kinds)


# --- nothing else happens ------------------------------------------------------------------------------------------


def test_a_site_does_nothing_for_a_malformed_order(tmp_path: Path) -> None:
    """The server has signed them. The site's audit log has the sentence; no sample is counted, no state is kept."""
    scene, config = Scene(tmp_path), config_of()
    hello = scene.deliver(scene.signed(question(dump(config))))
    task = Hello.read(signing.without_signature(hello.content)).task
    records = {Order: "order", SentConfig: "config", SiteNotice: "notice"}
    log, kept = StateFolder(tmp_path / "state").audit_file("a"), files(tmp_path / "state")
    for model, change, sentence in [row for row in TABLE if row[0] in records]:
        content = Order(client=0, round=1).write(dump(config), task, protocol.to_arrays({}), protocol.to_arrays({}))
        content = protocol.notice("x") if model is SiteNotice else content
        honest = dict(content[records[model]])
        values = {key: value for key, value in {**honest, **change}.items() if value is not GONE}
        content[records[model]] = ConfigRecord(values)
        kind = protocol.NOTICE if model is SiteNotice else "train"
        where = {} if model is SiteNotice else {"round_": 1, "site": "a"}
        reply = scene.deliver(scene.signed(content, kind=kind, **where))  # type: ignore[arg-type]
        assert problem(reply) == "ValueError; the site's own log says more", change.keys()
        last = chain.read(log).lines[-1]
        wrong_format = model is SentConfig and "format" in change
        assert ("install the same fednh" if wrong_format else sentence) in last["why"], change.keys()
    assert files(tmp_path / "state") == kept
    (guard,) = (tmp_path / "state").glob("orders-*.json")
    state = signing.GuardState.parse(guard.read_bytes())
    assert (state.trained, state.evaluated, state.answered) == (0, 0, ())


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_server_uses_nothing_of_a_malformed_answer(tmp_path: Path) -> None:
    """Client 1 sends another one in every round: the note has the sentence, and the others train without it."""
    rows = [row for row in TABLE if row[0] in (Facts, Metrics)][::7]
    rounds = len(rows) + 1
    more = {"partition.clients": 3, "participation.rate": 1.0, "eval.every": 0, "checkpoint.every": 0}
    config = small("fedavg", rounds=rounds, **more)

    def tamper(node: int, request: Message, reply: Message) -> Message:
        round_ = int(request.metadata.group_id or 0)
        if node == 1001 and request.metadata.message_type == "train" and round_ < rounds:
            model, change, _ = rows[round_ - 1]
            name = "facts" if model is Facts else "figures"
            honest = dict(reply.content[name]) if name in reply.content else {}
            values = {key: value for key, value in {**honest, **change}.items() if value is not GONE}
            reply.content[name] = MetricRecord(values)
        return travelled(reply)

    _, watcher = federate(config, tmp_path, tamper)
    assert [(row["clients"], row["refused"]) for row in watcher.records[:-1]] == [([0, 2], [1])] * len(rows)
    assert watcher.records[-1]["clients"] == [0, 1, 2]
    notes = [note for note in watcher.notes if "client 1" in note]
    for (_, change, sentence), note in zip(rows, notes, strict=True):
        assert sentence in note, change


def test_a_checkpoint_without_the_sites_keys_is_refused_in_a_sentence(tmp_path: Path) -> None:
    config = small("fedavg", rounds=1, **{"partition.clients": 2, "participation.rate": 1.0, "checkpoint.every": 1})
    wire = divided(config, tmp_path)
    real = Sites.checkpoint_extras
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sites, "checkpoint_extras", lambda self: {**real(self), "sites": [{"number": 0, "site": "a"}]})
        serve(config, wire, tmp_path / "run", server_identity(tmp_path / "fed"))
    longer = config.model_copy(update={"rounds": 2})
    with pytest.raises(UserError, match=r"does not hold the sites of a federation of this version \(key is missing\)"):
        serve(longer, wire, tmp_path / "run", server_identity(tmp_path / "fed"))


# --- site.toml -----------------------------------------------------------------------------------------------------


LIMITS = ("rounds", "epochs", "sites", "samples", "parameters", "pixels", "views")
TEXTS = (
    "federation",
    "set",
    "label",
    "site-column",
    "columns",
    "ignore",
    "group",
    "separator",
    "decimal",
    "weights",
    "missing",
)
TEXTS += ("weights", "site", "state", "test", "device", "encoding", "layout", "on-bad", "orders", "key")
SETTINGS: list[tuple[dict[str, Any], str]] = [
    *(({key: 3}, f"{key} is 3, not ") for key in ("ledger", "network", "peers")),
    ({"allow.secure": "x"}, "allow.secure is 'x', not "),
    *(({f"allow.{key}": 0}, f"allow.{key} is 0, not a whole number of 1 or more") for key in LIMITS),
    *(({f"allow.{key}": -3}, f"allow.{key} is -3, not a whole number of 1 or more") for key in LIMITS),
    *(({f"allow.{key}": NAN}, f"allow.{key} is nan, not a whole number of 1 or more") for key in LIMITS),
    *(({f"allow.{key}": "3"}, f"allow.{key} is '3', not a whole number of 1 or more") for key in LIMITS),
    *(({f"allow.{key}": True}, f"allow.{key} is True, not a whole number of 1 or more") for key in LIMITS),
    *(({f"allow.{key}": 3}, f"allow.{key} is 3, not a text") for key in ("methods", "models", "metrics")),
    ({"allow.metrics": "loss, accuracy"}, f"allow.metrics has 'accuracy'; metrics are {', '.join(METRICS)}"),
    ({"allow.weights": -1}, "allow.weights is -1, not a whole number of 0 or more"),
    ({"allow.counts": "no"}, "allow.counts is 'no', not true or false"),
    ({"allow.privacy": "dp"}, "allow.privacy is 'dp', not one of none, sample"),
    ({"allow.privacy": "sample"}, "allow.privacy = 'sample' needs a budget"),
    ({"allow.epsilon": 8.0}, "allow.epsilon bounds nothing without allow.privacy"),
    ({"allow.privacy": "sample", "allow.epsilon": NAN}, "allow.epsilon is nan, not a number of 0 or more"),
    ({"allow.privacy": "sample", "allow.epsilon": "8"}, "allow.epsilon is '8', not a number of 0 or more"),
    ({"allow.delta": 1.0}, "allow.delta is 1.0, not a number from 0 to 0.001"),
    ({"allow.more": 1}, "allow.more is not known"),
    *(({key: 7}, f"{key} is 7, not a text") for key in TEXTS),
    ({"data": 7}, "data is 7, not a text"),
    ({"more": 1}, "more is not known"),
    ({"site": "a\nb"}, "site= cannot be the site's name: it holds a new line"),
    ({"site": GONE}, "data= needs site=NAME beside it"),
    ({"state": GONE}, "give state=FOLDER, where the site keeps its personal state and model"),
    ({"data": GONE}, "give data=SOURCE, the site's own data, or partition-id=K and num-partitions=N"),
    ({"data": GONE, "partition-id": 3, "num-partitions": 3}, "give data=SOURCE"),
    ({"data": GONE, "partition-id": -1, "num-partitions": 3}, "give data=SOURCE"),
    ({"data": GONE, "partition-id": "0", "num-partitions": 3}, "give data=SOURCE"),
    ({"data": GONE, "partition-id": True, "num-partitions": 3}, "give data=SOURCE"),
    ({"encoding": "klingon"}, "encoding = 'klingon' is not an encoding"),
    ({"on-bad": "ignore"}, "on-bad = 'ignore' "),
]


@pytest.mark.parametrize(
    ("change", "sentence"), SETTINGS, ids=lambda each: "-".join(each) if isinstance(each, dict) else ""
)
def test_a_malformed_site_toml_is_refused_in_a_sentence(change: dict[str, Any], sentence: str) -> None:
    read_site_config(NODE)
    node = {key: value for key, value in {**NODE, **change}.items() if value is not GONE}
    with pytest.raises(UserError) as caught:
        read_site_config(node)
    assert str(caught.value).startswith("site.toml: ")
    assert sentence in str(caught.value)
    assert str(caught.value).isprintable()


def test_the_settings_have_every_key() -> None:
    keys = {f"allow.{name}" for name in Allow.model_fields}
    for model in (Policy, SiteConfig):
        keys |= {info.alias or name for name, info in model.model_fields.items() if name not in ("policy", "allow")}
    assert keys <= {key for change, _ in SETTINGS for key in change}
