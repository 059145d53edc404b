"""How long runs take: the sum by hand, and what is measured for it."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fednh.config import Config, load
from fednh.core import client
from fednh.core.federation import Federation, build_federation
from fednh.core.tree import Uploads
from fednh.data.batches import Samples
from fednh.experiments import time_estimate
from fednh.experiments.sweep import combine
from fednh.experiments.time_estimate import Pace, estimate, kind_of, measure
from fednh.methods import METHODS
from fednh.methods.creff import CReFF
from fednh.methods.fedbabu import FedBABU


def digits(**settings: Any) -> tuple[Config, Federation]:
    """Four clients of 360.5 training samples, two in a round."""
    given = {"partition.name": "iid", "partition.clients": 4, "participation.rate": 0.5, "workers": 1}
    config = load("digits", given | {key.replace("__", "."): value for key, value in settings.items()})
    return config, build_federation(config)


@pytest.mark.parametrize(
    ("settings", "done", "training", "looks"),
    [
        ({"rounds": 10, "eval__every": 5}, 0, 10, 1),  # after round 5; round 10 is the last
        ({"rounds": 11, "eval__every": 5}, 0, 11, 2),
        ({"rounds": 11, "eval__every": 5}, 7, 4, 1),
        ({"rounds": 11, "eval__every": 0}, 0, 11, 0),
    ],
)
def test_a_run_is_its_rounds_and_evaluations(settings: dict[str, Any], done: int, training: int, looks: int) -> None:
    config, fed = digits(**settings)
    pace = Pace(sample=0.01, tune=0.1, test=3.0, aggregate=7.0, shared=1000.0)
    size, seen = 360.5, 4 * (1 - 0.5**config.rounds)
    person = size * 0.1 + 3.0
    expected = training * (2 * size * 0.01 + 7.0) + (looks * 2 + seen) * person + (looks + 1) * 1000.0
    assert pace.seconds(config, fed, done) == pytest.approx(expected)


def test_costly_servers_and_personal_models_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that only the server's part (a second) and fine-tuning (two a sample) move."""
    clock, uploads = SimpleNamespace(now=0.0), []
    monkeypatch.setattr(time_estimate, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    usual = client.personal_model

    def aggregate(self: CReFF, server: Any, given: Uploads) -> Any:
        uploads.extend(given.trees)
        clock.now += 1.0
        return server

    def tune(method: Any, net: Any, kept: Any, received: Any, data: Any, sgd: Any, **more: Any) -> Any:
        clock.now += 2.0 * len(data)
        return usual(method, net, kept, received, data, sgd, **more)

    monkeypatch.setattr(CReFF, "aggregate", aggregate)
    monkeypatch.setattr(client, "personal_model", tune)
    config, fed = digits(method__name="creff", train__epochs=1)
    assert measure(config, fed) == Pace(0.0, 2.0, 0.0, 1.0, 0.0)
    assert len(uploads) == 2, "as many as a round has"


def test_the_global_model_is_evaluated_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at all 355 test samples takes 5 seconds; FedProto has no global model."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(time_estimate, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    def look(predict: Any, test: Samples) -> None:
        clock.now += len(test) / 71

    monkeypatch.setattr(time_estimate.evaluate, "correct_per_class", look)
    for method, shared in (("fedavg", 5.0), ("fedproto", 0.0)):
        pace = measure(*digits(method__name=method, train__epochs=1))
        assert (pace.test, pace.shared) == (pytest.approx(5.0), pytest.approx(shared))


def test_settings_of_a_method_are_measured_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FedBABU with one and with fifty epochs of fine-tuning; seeds and rounds share a measurement."""
    measured: list[int] = []

    def pretended(config: Config, fed: Federation) -> Pace:
        measured.append(config.method["finetune_epochs"])
        return Pace(0.0, config.method["finetune_epochs"], 0.0, 0.0)

    monkeypatch.setattr(time_estimate, "measure", pretended)
    monkeypatch.setattr(time_estimate, "start_seconds", lambda: 0.0)
    axes = {"method.name": ["fedbabu"], "method.finetune_epochs": [1, 50], "seed": [0, 1], "rounds": [3, 4]}
    plan = combine("digits", axes, axes, tmp_path)
    found = estimate(plan, 1)
    assert measured == [1, 50]
    assert len(found) == 8
    by_epochs = [sorted(s for name, s in found.items() if f"finetune_epochs{n}-" in name) for n in (1, 50)]
    assert by_epochs[1] == pytest.approx([50 * s for s in by_epochs[0]])


@pytest.mark.parametrize(
    ("settings", "same"),
    [
        ({"seed": 3, "rounds": 7, "eval.every": 2, "eval.final": 3, "eval.clients": "all"}, True),
        ({"eval.samples": 50}, False),
        ({"train.epochs": 9}, False),
        ({"model.args": {"hidden": [8]}}, False),
        ({"data.holdout": 0.1}, False),
        ({"participation.rate": 1.0}, False),
    ],
)
def test_what_decides_a_pace(settings: dict[str, Any], same: bool) -> None:
    assert (kind_of(load("digits", settings)) == kind_of(load("digits", {}))) is same


@pytest.mark.parametrize("method", METHODS)
def test_every_method_can_be_measured(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_estimate, "_ENOUGH", 0.0)
    quick = {"creff": {"method__retrain_epochs": 2}, "fedetf": {"method__turns": 1, "method__turn_epochs": 1}}
    config, fed = digits(method__name=method, train__epochs=1, **quick.get(method, {}))
    began = time.perf_counter()
    pace = measure(config, fed)
    assert min(pace.sample, pace.test, pace.aggregate) > 0
    assert pace.aggregate < time.perf_counter() - began
    assert isinstance(fed.method, FedBABU) is False or pace.tune > 0
