"""Runs under [privacy] through the command line's functions: accounts in all that is written, and resumed runs."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fednh
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
