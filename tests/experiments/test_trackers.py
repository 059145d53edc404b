"""Trackers, against real log directories and a real data base."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fednh import extras
from fednh.callbacks import Callback, CallbackList, trackers
from fednh.callbacks.trackers import Tracking, tracked_metrics
from fednh.cli import app
from fednh.config import Config, load
from fednh.errors import UserError
from fednh.runs.run_folder import RunFolder

pytest.importorskip("tensorboard", reason="the extra `tensorboard` is not installed")
pytest.importorskip("mlflow", reason="the extra `mlflow` is not installed")
pytest.importorskip("wandb", reason="the extra `wandb` is not installed")


class Screen(Callback):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.rounds: list[int] = []

    def on_round(self, record: dict[str, Any]) -> None:
        self.rounds.append(record["round"])

    def on_note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all runs here: MLflow takes seconds to set up its data base, once."""
    return tmp_path_factory.mktemp("tracked")


@pytest.fixture
def _no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_URI", "WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)


def scalars(run: Path) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (_,) = (run / "tensorboard").iterdir()  # one file: nothing of an earlier attempt is left to be shown beside it
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return {key: {e.step: e.value for e in events.Scalars(key)} for key in events.Tags()["scalars"]}


def mlflow_runs(run: Path) -> Iterator[tuple[Any, dict[str, dict[int, float]]]]:
    """The runs that MLflow has for a folder: status and the history of each metric."""
    from mlflow import MlflowClient

    uri = f"sqlite:///{run.parent / 'mlflow.db'}"
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    experiment = client.get_experiment_by_name("fednh")
    assert experiment is not None
    for found in client.search_runs([experiment.experiment_id], f"tags.`fednh.folder` = '{run}'"):
        history = {k: client.get_metric_history(found.info.run_id, k) for k in found.data.metrics}
        assert all(len({m.step for m in line}) == len(line) for line in history.values())  # no round is there twice
        yield found, {key: {m.step: m.value for m in line} for key, line in history.items()}


@dataclass
class Logged:
    """What W&B keeps of a run that it was to send later."""

    config: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, dict[int, float]] = field(default_factory=dict)
    kinds: set[str] = field(default_factory=set)
    exit_code: int | None = None


def wandb_log(run: Path) -> Logged:
    """The one log file that W&B has for a folder, read record by record."""
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    (file,) = run.glob("wandb/offline-run-*/*.wandb")
    store, found = DataStore(), Logged()
    store.open_for_scan(str(file))
    while (data := store.scan_data()) is not None:
        entry = Record.FromString(data)
        found.kinds.add(entry.WhichOneof("record_type"))
        if entry.HasField("run"):
            found.config |= {item.key: json.loads(item.value_json) for item in entry.run.config.update}
        if entry.HasField("exit"):
            found.exit_code = entry.exit.exit_code
        line = {(item.key or ".".join(item.nested_key)): json.loads(item.value_json) for item in entry.history.item}
        for key in line.keys() - {"_step", "_timestamp", "_runtime"}:
            steps = found.metrics.setdefault(key, {})
            assert line["_step"] not in steps, "no round is there twice"
            steps[line["_step"]] = line[key]
    return found


def written(run: Path) -> dict[str, dict[int, float]]:
    """The figures of metrics.jsonl: key -> round -> value."""
    found: dict[str, dict[int, float]] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        for key, value in tracked_metrics(record).items():
            found.setdefault(key, {})[record["round"]] = value
    return found


def record(round_: int, loss: float | None = 0.5) -> dict[str, Any]:
    return {"round": round_, "train_loss": loss, "bytes_up": 10 * round_, "clients": [1, 2], "dropped": []}


def test_figures_are_the_numbers_of_a_record() -> None:
    assert tracked_metrics(record(3)) == {"train_loss": 0.5, "bytes_up": 30.0, "clients": 2.0, "dropped": 0.0}
    assert "train_loss" not in tracked_metrics(record(3, loss=None))


@pytest.mark.usefixtures("_no_server")
def test_a_real_run_is_tracked_as_its_metrics_say(place: Path) -> None:
    run = place / "real"
    words = ["--rounds", "2", "--epochs", "1", "--set", "eval.every=1", "--quiet", "--out", str(run)]
    words += ["--track", "tensorboard", "--track", "mlflow", "--track", "wandb"]
    result = CliRunner().invoke(app, ["run", "digits", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    expected = written(run)
    assert {"gm", "pm_v", "pm_l", "train_loss", "bytes_up", "bytes_down", "seconds"} <= expected.keys()
    board = scalars(run)
    assert board.keys() == expected.keys()
    for key, values in expected.items():
        assert board[key] == pytest.approx(values, rel=1e-6)  # TensorBoard keeps single precision
    ((found, metrics),) = mlflow_runs(run)
    assert metrics == expected
    assert (found.info.status, found.info.run_name) == ("FINISHED", "real")
    assert (found.data.params["method.name"], found.data.params["rounds"]) == ("fednh", "2")
    kept = wandb_log(run)
    assert kept.metrics == expected
    assert (kept.config["method.name"], kept.config["rounds"], kept.exit_code) == ("fednh", 2, 0)
    assert kept.kinds.isdisjoint({"stats", "output", "output_raw", "files", "artifact"}), "figures and nothing else"


@pytest.mark.usefixtures("_no_server")
def test_a_resumed_run_is_tracked_as_one(place: Path) -> None:
    folder, config = RunFolder(place / "resumed"), load("digits", {})
    folder.path.mkdir()
    first = Tracking(["tensorboard", "mlflow", "wandb"], folder, config, Screen().on_note)
    for round_ in (1, 2):
        folder.append_metrics(record(round_, loss=9.0))
        first.on_round(record(round_, loss=9.0))
    first.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    ((found, _),) = mlflow_runs(folder.path)
    assert found.info.status == "KILLED"
    assert wandb_log(folder.path).exit_code == 1
    folder.write_metrics([record(1)])  # the checkpoint was after round 1
    with Tracking(["tensorboard", "mlflow", "wandb"], folder, config, Screen().on_note) as second:
        for round_ in (2, 3):
            folder.append_metrics(record(round_))
            second.on_round(record(round_))
    assert scalars(folder.path)["train_loss"] == {1: 0.5, 2: 0.5, 3: 0.5}
    ((found, metrics),) = mlflow_runs(folder.path)
    assert metrics == written(folder.path)
    assert (wandb_log(folder.path).metrics, wandb_log(folder.path).exit_code) == (metrics, 0)


def test_a_tracker_that_cannot_start_warns_once_and_the_run_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["run", "digits", "--rounds", "2", "--epochs", "1", "--clients", "8", "--quiet", "--out", str(run)]
    CliRunner().invoke(app, [*words, "--set", "checkpoint.every=1"], catch_exceptions=False)
    (run / "summary.json").unlink()
    (run / "tensorboard").write_text("a file where the log directory should be")
    result = CliRunner().invoke(
        app, [*words, "--set", "checkpoint.every=1", "--track", "tensorboard"], catch_exceptions=False
    )
    assert result.exit_code == 0
    assert result.output.count("tracker tensorboard stopped working") == 1
    assert (run / "summary.json").exists()


class Breaks:
    """A tracker whose second message fails."""

    def __init__(self, folder: RunFolder, config: Config):
        self.told = 0

    def log(self, records: Sequence[dict[str, Any]]) -> None:
        self.told += 1
        if self.told > 1:
            raise ConnectionError("the server is gone")

    def close(self, finished: bool) -> None:
        raise AssertionError("a tracker that was given up is not touched again")


def test_a_tracker_that_breaks_warns_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(trackers.TRACKERS, "breaks", Breaks)
    folder, screen = RunFolder(tmp_path), Screen()
    with Tracking(["breaks"], folder, load("digits", {}), screen.on_note) as tracking:
        both = CallbackList([screen, tracking])
        for round_ in (1, 2, 3, 4):
            folder.append_metrics(record(round_))
            both.on_round(record(round_))
    assert screen.rounds == [1, 2, 3, 4]
    assert len(screen.notes) == 1
    assert "the server is gone" in screen.notes[0]


def test_a_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(extras.MODULES, "mlflow", ("a_module_that_nobody_has",))
    with pytest.raises(UserError, match=r"pip install 'fednh\[mlflow\]'"):
        trackers.check(["mlflow"])
    with pytest.raises(UserError, match="did you mean 'tensorboard'"):
        trackers.check(["tensorbord"])
