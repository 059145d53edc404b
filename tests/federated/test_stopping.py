"""`stop_when`: which round is kept, that the run is then one of so many rounds, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fednh.config import Config, load
from fednh.errors import ConfigError, Interrupted, RunError
from fednh.federated import stopping
from fednh.report.load import load_run
from fednh.report.tables import comparison_sheet, held_out_sheet
from fednh.runs.layout import RunLayout
from fednh.runs.model_file import read_model
from tests.helpers.callbacks import Recorder
from tests.helpers.compare import identical, lines, same_runs
from tests.helpers.simulator import simulate

RULE = {
    **{"stop_when.metric": "held_share", "stop_when.patience": 2, "eval.every": 2, "data.holdout": 0.3},
    **{"partition.clients": 6, "participation.rate": 1.0, "participation.dropout": 0.0, "train.epochs": 1},
    **{"train.lr": 0.1, "train.batch_size": 16, "data.limit": 30, "model.args": {"hidden": [8]}, "workers": 1},
    **{"method.name": "fedavg", "engine": "loop", "rounds": 40, "eval.clients": "all"},
}
PARTIAL = {"participation.rate": 0.5, "method.name": "feddyn", "server.optimizer": "momentum", "server.momentum": 0.5}


def config_of(**more: Any) -> Config:
    return load("digits", {**RULE, **{key.replace("__", "."): value for key, value in more.items()}})


def unchanged(folder: Path) -> dict[str, Any]:
    """The summary without what is said of the choice, and without costs and bests, which are of all rounds."""
    costs = ("bytes", "samples", "seconds", "client_seconds", "eval_seconds", "kept_", "held_pooled_best", "held_gm_po")
    summary = json.loads((folder / "summary.json").read_text())
    return {key: value for key, value in summary.items() if not key.startswith((*costs, "rounds"))}


# --- the choice ------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 100), min_size=1, max_size=30), st.integers(1, 5), st.floats(0, 20))
def test_the_round_is_the_last_that_beat_all_before_it(values: list[float], patience: int, gain: float) -> None:
    """Walked through by other means: the run sees one value after the other until it ends."""
    rule = {"eval.every": 3, "rounds": 1000, "stop_when.patience": patience, "stop_when.gain": gain}
    config = load("digits", {**RULE, **rule})
    best, waited, seen = -1000.0, 0, 0
    at = 0
    for at, value in enumerate(values, start=1):
        waited += 1
        if value > best + gain:
            best, seen, waited = value, at, 0
        if waited == patience:
            break
    records = [{"round": r, **({"held_share": values[r // 3 - 1]} if r % 3 == 0 else {})} for r in range(1, 3 * at + 2)]
    chosen = stopping.choice(config, records)
    assert chosen is not None
    assert (chosen.round, chosen.value, chosen.ends) == (3 * seen, best, waited == patience)


def test_no_rule_and_no_evaluation_choose_nothing() -> None:
    assert stopping.choice(load("digits", {}), [{"round": 10, "held_share": 50.0}]) is None
    assert stopping.choice(config_of(), [{"round": 1}]) is None
    with pytest.raises(RunError, match=r"round 2: no client has held_share .*data\.holdout"):
        stopping.choice(config_of(), [{"round": 2, "held_share": None}])


# --- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, PARTIAL], ids=["fedavg", "partial"])
def test_a_run_that_went_back_is_one_of_so_many_rounds(more: dict[str, Any], tmp_path: Path) -> None:
    """Models to the bit, metrics and what the models say of themselves; only costs are of all that was trained."""
    simulate(load("digits", {**RULE, **more}), tmp_path / "stopped")
    found = lines(tmp_path / "stopped")
    summary, kept = found[-1], found[-1]["kept_round"]
    assert 2 <= kept == summary["rounds"] - 4 < 36  # type: ignore[operator]
    assert summary["kept_by"] == {
        "metric": "held_share",
        "value": found[kept - 1]["held_share"],  # type: ignore[operator]
        "chosen_on": "held-out samples",
        "rounds_trained": summary["rounds"],
    }
    assert len(found) - 1 == summary["rounds"]
    assert summary["bytes_up"] == sum(line["bytes_up"] for line in found[:-1])  # type: ignore[misc]
    plain = {**RULE, **more, "stop_when.metric": "none", "rounds": kept}
    simulate(load("digits", plain), tmp_path / "short")
    assert unchanged(tmp_path / "stopped") == unchanged(tmp_path / "short")
    files = sorted(path.relative_to(tmp_path / "short") for path in (tmp_path / "short/models").rglob("*.safetensors"))
    assert len(files) >= 5
    for file in files:
        ours, card = read_model(tmp_path / "stopped" / file)
        theirs, expected = read_model(tmp_path / "short" / file)
        identical(ours, theirs)
        assert card.trained_on["rounds"] == expected.trained_on["rounds"] == kept
    assert len(list((tmp_path / "stopped/kept").iterdir())) == 1, "one copy is kept, and no other"


def test_the_last_round_may_be_the_best_or_not(tmp_path: Path) -> None:
    """A run that did not stop keeps its best round all the same."""
    simulate(config_of(rounds=2, stop_when__patience=9), tmp_path / "best")
    assert lines(tmp_path / "best")[-1]["kept_round"] == 2
    assert not (tmp_path / "best/kept").exists()
    simulate(config_of(rounds=6, stop_when__patience=9, stop_when__gain=60.0), tmp_path / "first")
    simulate(config_of(rounds=2, stop_when__metric="none"), tmp_path / "short")
    assert lines(tmp_path / "first")[-1]["kept_round"] == 2
    assert unchanged(tmp_path / "first") == unchanged(tmp_path / "short")


class StopAfter(Recorder):
    def __init__(self, round_: int):
        super().__init__()
        self.round = round_

    def on_round(self, record: dict[str, Any]) -> bool:
        super().on_round(record)
        return bool(record["round"] == self.round)


def test_interrupted_before_and_after_the_best_round_it_ends_alike(tmp_path: Path) -> None:
    simulate(config_of(**PARTIAL), tmp_path / "once")
    kept = int(lines(tmp_path / "once")[-1]["kept_round"])  # type: ignore[call-overload]
    for at in (kept - 1, kept, kept + 3):
        for _ in ("interrupted", "went on"):
            try:
                simulate(config_of(**PARTIAL), tmp_path / f"at-{at}", StopAfter(at))
            except Interrupted:
                continue
        same_runs(tmp_path / "once", tmp_path / f"at-{at}")


def test_a_lost_copy_is_said(tmp_path: Path) -> None:
    rule = config_of(rounds=6, stop_when__patience=9, stop_when__gain=60.0, checkpoint__every=1)
    with pytest.raises(Interrupted):
        simulate(rule, tmp_path / "run", StopAfter(4))
    shutil.rmtree(RunLayout(tmp_path / "run").kept_round(2).path)
    with pytest.raises(RunError, match="does not hold the state after round 2, which stop_when has chosen"):
        simulate(rule, tmp_path / "run")


def test_tables_say_which_round_and_that_it_flatters(tmp_path: Path) -> None:
    simulate(config_of(rounds=6, stop_when__patience=9, stop_when__gain=60.0), tmp_path / "run")
    run = load_run(tmp_path / "run")
    sheet = comparison_sheet([run])
    assert "2 of 6" in [cell.text for cell in sheet.rows[0]]
    assert "chosen on these samples" in sheet.note
    assert "chosen on these samples" in held_out_sheet([run]).note


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"stop_when.metric": "gm"}, "stop_when.metric = 'gm' is measured on the test set, which must not choose"),
        ({"stop_when.metric": "pm_l"}, "is measured on the test set"),
        ({"stop_when.metric": "loss"}, "stop_when.metric = 'loss' should be 'none', 'held_share'"),
        ({"stop_when.patience": 0}, "stop_when.patience = 0 should be greater than or equal to 1"),
        ({"eval.every": 0}, "eval.every = 0 makes none"),
        ({"participation.rate": 0.5, "eval.clients": "active"}, "set eval.clients = 'all'"),
        ({"participation.dropout": 0.5, "eval.clients": "active"}, "set eval.clients = 'all'"),
        ({"eval.clients": 3}, "set eval.clients = 'all'"),
        ({"privacy.level": "sample", "privacy.epsilon": 8.0}, "held-out samples without noise"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load("digits", {**RULE, **settings})


def test_without_held_out_samples_nothing_is_begun(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs held-out samples, and no client has any; set data\.holdout"):
        simulate(config_of(data__holdout=0.0), tmp_path / "run")
    assert not RunLayout(tmp_path / "run").metrics_file.exists()


def test_sites_keep_the_states_of_some_rounds_only() -> None:
    stopping.check(config_of(stop_when__patience=45), False, simulated=False)
    with pytest.raises(ConfigError, match=r"may go back 92 rounds, and sites keep the states of 90"):
        stopping.check(config_of(stop_when__patience=46), False, simulated=False)
