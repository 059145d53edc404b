"""Runs under [privacy] through the command line's functions: accounts in all that is written, and resumed runs."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import fednh
from fednh.backends import tasks
from fednh.callbacks import Callback
from fednh.config import load
from fednh.errors import Interrupted, UserError
from fednh.metric_names import RoundRecord
from fednh.privacy.accounting import Release
from fednh.privacy.plan import PrivacyPlan, entry, epsilon_so_far, exceeds

FAST: dict[str, Any] = {
    "train.steps": 2, "privacy.rate": 0.2, "partition.clients": 4, "method.name": "fedavg", "rounds": 2,
}  # fmt: skip


def run(folder: Path, **settings: Any) -> Path:
    fednh.run("digits", out=folder, **{**FAST, **settings})
    return folder


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights(folder: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(folder / "models/global.safetensors")


@pytest.mark.parametrize("level", ["sample", "client"])
def test_a_run_says_what_it_spent_and_keeps_to_its_budget(level: str, tmp_path: Path) -> None:
    folder = run(tmp_path / "run", **{"privacy.level": level, "privacy.epsilon": 8.0})
    first, last = lines(folder)
    summary = json.loads((folder / "summary.json").read_text())
    assert 0 < first["epsilon"] < last["epsilon"] == summary["epsilon"] <= 8.0
    assert last["epsilon"] > 7.8  # and uses it
    assert summary["delta"] == 1e-5
    assert last["train_loss"] is None
    assert "epsilon" in fednh.load_run(folder).summary


def test_results_do_not_depend_on_workers_and_differ_by_seed(tmp_path: Path) -> None:
    private = {"privacy.level": "sample", "privacy.noise": 1.0}
    one, two = (run(tmp_path / str(n), workers=n, **private) for n in (1, 2))
    other = run(tmp_path / "seed", seed=1, **private)
    a, b, c = map(weights, (one, two, other))
    assert all(np.array_equal(a[name], b[name]) for name in a)
    assert not all(np.array_equal(a[name], c[name]) for name in a)


def test_the_account_is_read_from_all_records_each_client_for_itself() -> None:
    privacy = load("digits", {"privacy.level": "sample", "privacy.epsilon": 7.5}).privacy
    answer = (Release("gradients", 2.0, 1.0, 4),)
    plan = PrivacyPlan(privacy, None, answer, answer, (Release("number of samples", 5.0),))
    records: list[dict[str, Any]] = []
    for round_, asked in enumerate(([0, 1], [1], [2]), 1):
        row = entry(plan, round_, asked, records)
        records.append({"epsilon": row.pop("epsilon"), "privacy": row})
    alone, twice = plan.epsilon([1]), plan.epsilon([1, 2])
    assert [record["epsilon"] for record in records] == pytest.approx([alone, twice, twice])
    assert alone < twice
    assert epsilon_so_far(privacy, records[1:]) == pytest.approx(alone)
    assert exceeds(plan, 4, [1], records)  # client 1 cannot take part a third time
    assert not exceeds(plan, 4, [0], records[:2])


def test_a_run_that_goes_on_past_its_plan_stops_before_the_budget_is_exceeded(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", **{"privacy.level": "sample", "privacy.epsilon": 8.0})
    with pytest.raises(UserError, match=r"round 3 would exceed privacy\.epsilon = 8"):
        fednh.resume(folder, rounds=4)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"method.name": "fedvls"}, "method fedvls cannot be used with privacy.level = 'sample': its loss looks at a"),
        (
            {"method.name": "fednh", "method.aggregation": "uniform"},
            "method fednh cannot be used with privacy.level = 'sample': it reads data.batches",
        ),
        ({"aggregator": "weighted_mean"}, "numbers of samples would weigh uploads"),
        ({"diagnostics.gradient_norm": True}, "norms of gradients leave without noise"),
        (
            {"privacy.level": "client", "method.name": "fedas"},
            "method fedas cannot be used with privacy.level = 'client': its server works on weights that clients send",
        ),
        ({"privacy.epsilon": None, "privacy.noise": 0.1, "train.steps": 1000}, "privacy.noise = 0.1 protects nothing"),
    ],
)
def test_what_no_account_covers_is_refused_before_anything_is_computed(
    settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=words):
        run(tmp_path / "run", **{"privacy.level": "sample", "privacy.epsilon": 8.0, **settings})
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


class _Stop(Callback):
    def on_round(self, record: RoundRecord) -> bool:
        return True


def test_an_interrupted_run_has_the_same_noise_and_the_same_account(tmp_path: Path) -> None:
    private = {"privacy.level": "sample", "privacy.noise": 1.0, "checkpoint.every": 1}
    whole = run(tmp_path / "whole", **private)
    with contextlib.suppress(Interrupted):
        run(tmp_path / "halves", **private, callbacks=[_Stop()])
    assert len(lines(tmp_path / "halves")) == 1
    fednh.resume(tmp_path / "halves")
    a, b = weights(whole), weights(tmp_path / "halves")
    assert all(np.array_equal(a[name], b[name]) for name in a)
    spent = [[(row["epsilon"], row["privacy"]) for row in lines(each)] for each in (whole, tmp_path / "halves")]
    assert spent[0] == spent[1]


def test_clients_that_send_nothing_spend_nothing(tmp_path: Path) -> None:
    for level in ("sample", "client"):
        private = {"privacy.level": level, "privacy.epsilon": 8.0, "method.name": "local"}
        folder = run(tmp_path / level, **private)
        assert [row["epsilon"] for row in lines(folder)] == [0.0, 0.0]


def test_an_upload_with_more_than_its_account_names_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a method did other than in the plan's trial: nothing of it is used."""
    honest = tasks.clients.private_update

    def more(*arguments: Any) -> Any:
        result = honest(*arguments)
        return replace(result, released=(*result.released, Release("gradients", 1.0, 0.2, 1)))

    monkeypatch.setattr(tasks.clients, "private_update", more)
    with pytest.raises(UserError, match="more than the account of its privacy names"):
        run(tmp_path / "run", **{"privacy.level": "sample", "privacy.epsilon": 8.0})
    assert not lines(tmp_path / "run")


class Dropping(nn.Module):
    """With dropout and batch normalisation, both of which clients' privacy leaves alone."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.head = nn.Linear(8, num_classes)


def test_what_only_samples_privacy_refuses_is_allowed_to_clients(tmp_path: Path) -> None:
    odd = {"model.name": f"{__name__}:Dropping", "model.args": {}, "model.norm": "local", "privacy.epsilon": 8.0}
    run(tmp_path / "client", **odd, **{"privacy.level": "client"})
    with pytest.raises(UserError, match=r"level = 'sample' does not go with model\.norm = 'local'"):
        run(tmp_path / "sample", **odd, **{"privacy.level": "sample"})
    for level in ("client", "sample"):
        with pytest.raises(UserError, match=r"does not go with model\.norm = 'average'"):
            run(tmp_path / "average", **{**odd, "model.norm": "average", "privacy.level": level})


def test_a_model_says_what_its_run_has_spent_and_a_personal_one_made_of_it_does_not(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", **{"privacy.level": "sample", "privacy.epsilon": 8.0})
    spent = lines(folder)[-1]["epsilon"]
    assert fednh.load_model(folder).info["privacy"] == {"level": "sample", "epsilon": spent, "delta": 1e-5}
    assert "privacy" not in fednh.personalize(folder, "digits", epochs=1).model.info
