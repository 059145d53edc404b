"""Experiment trackers beside a run: TensorBoard, MLflow and W&B are told what metrics.jsonl says, no more and no less.

A tracker is opened with the first round that this process finishes and is then given all rounds of metrics.jsonl, so a
resumed run is tracked as if it had never stopped. What goes wrong in a tracker is told once, and the run goes on.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from filelock import FileLock

from fednh import extras
from fednh.callbacks import Callback
from fednh.config import Config, flat
from fednh.errors import UserError, did_you_mean
from fednh.metric_names import RoundRecord
from fednh.runs.run_folder import RunFolder, read_metrics


class Tracker(Protocol):
    """One tracker of one run."""

    def log(self, records: Sequence[Mapping[str, Any]]) -> None: ...
    def close(self, finished: bool) -> None: ...


def tracked_metrics(record: Mapping[str, Any]) -> dict[str, float]:
    """A line of metrics.jsonl as numbers: what is not known is left out, and of a list of clients it is the count."""
    metrics = {}
    for key, value in record.items():
        if isinstance(value, list):
            metrics[key] = float(len(value))
        elif isinstance(value, int | float) and key != "round":
            metrics[key] = float(value)
    return metrics


class TensorBoard:
    """Event files in the run folder: `tensorboard --logdir` finds them below the run, or below a sweep."""

    def __init__(self, folder: RunFolder, config: Config):
        from torch.utils.tensorboard import SummaryWriter

        place = folder.tensorboard
        shutil.rmtree(place, ignore_errors=True)  # of an interrupted run: all its rounds are written again
        self.writer = SummaryWriter(str(place))

    def log(self, records: Sequence[Mapping[str, Any]]) -> None:
        for record in records:
            for key, value in tracked_metrics(record).items():
                self.writer.add_scalar(key, value, record["round"])
        self.writer.flush()

    def close(self, finished: bool) -> None:
        self.writer.close()


class MLflow:
    """A run in the experiment `fednh`: at $MLFLOW_TRACKING_URI, else in mlflow.db beside the run folder."""

    def __init__(self, folder: RunFolder, config: Config):
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # a run talks to nobody that it was not told to
        from mlflow import MlflowClient
        from mlflow.entities import Param

        here = folder.path.absolute()
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{here.parent / 'mlflow.db'}"
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        with FileLock(here.parent / ".mlflow.lock"):  # runs of a sweep must not set up one data base at the same time
            self.client = MlflowClient(tracking_uri=uri, registry_uri=uri)
            known = self.client.get_experiment_by_name("fednh")
            experiment = known.experiment_id if known else self.client.create_experiment("fednh")
        for old in self.client.search_runs([experiment], f"tags.`fednh.folder` = '{_quoted(here)}'"):
            self.client.delete_run(old.info.run_id)  # of an interrupted run: all its rounds are written again
        tags = {"fednh.folder": _quoted(here)}
        self.run = self.client.create_run(experiment, run_name=here.name, tags=tags).info.run_id
        settings = flat(config.model_dump())
        self.client.log_batch(self.run, params=[Param(key, str(value)) for key, value in settings.items()])

    def log(self, records: Sequence[Mapping[str, Any]]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        for record in records:
            metrics = [Metric(key, value, now, record["round"]) for key, value in tracked_metrics(record).items()]
            self.client.log_batch(self.run, metrics=metrics)

    def close(self, finished: bool) -> None:
        self.client.set_terminated(self.run, status="FINISHED" if finished else "KILLED")


class WandB:
    """A run in the project `fednh` of Weights & Biases, kept in the run folder; sent only where $WANDB_MODE says so.

    The same folder is the same run there: an interrupted one is written again, with all its rounds.
    """

    def __init__(self, folder: RunFolder, config: Config):
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # a run talks to nobody that it was not told to
        import wandb

        here = folder.path.absolute()
        mode: Any = os.environ.get("WANDB_MODE") or "offline"
        shutil.rmtree(folder.wandb, ignore_errors=True)
        only_metrics = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            x_disable_stats=True,
            x_disable_meta=True,
            x_save_requirements=False,
        )
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "fednh",
            mode=mode,
            id=hashlib.sha256(f"{platform.node()}:{here}".encode()).hexdigest()[:16],
            name=here.name,
            dir=here,
            config=flat(config.model_dump()),
            settings=only_metrics,
            reinit="create_new",
        )

    def log(self, records: Sequence[Mapping[str, Any]]) -> None:
        for record in records:
            self.run.log(tracked_metrics(record), step=record["round"])

    def close(self, finished: bool) -> None:
        self.run.finish(exit_code=0 if finished else 1)


TRACKERS: dict[str, Callable[[RunFolder, Config], Tracker]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WandB,
}


def check(names: Sequence[str]) -> None:
    """Refuse a tracker that is not known or not installed."""
    for name in names:
        if name not in TRACKERS:
            raise UserError(f"tracker {name!r} is not known{did_you_mean(name, TRACKERS)}")
        extras.need(name, f"tracker {name}")


class Tracking(Callback):
    """Passes a run's rounds to trackers; `note` is told once about a tracker that stops working."""

    def __init__(self, names: Sequence[str], folder: RunFolder, config: Config, note: Callable[[str], None]):
        self.folder, self.config, self.note = folder, config, note
        self._waiting = list(dict.fromkeys(names))
        self._open: dict[str, Tracker] = {}

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        for name, tracker in list(self._open.items()):
            with self._forgiving(name):
                tracker.close(finished=kind is None)

    def on_round(self, record: RoundRecord) -> None:
        for name, tracker in list(self._open.items()):
            with self._forgiving(name):
                tracker.log([record])
        while self._waiting:
            name = self._waiting.pop()
            with self._forgiving(name):
                self._open[name] = TRACKERS[name](self.folder, self.config)
                self._open[name].log(read_metrics(self.folder.path))  # up to and with this round

    @contextmanager
    def _forgiving(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever a tracker, its data base or its network may raise
            self._open.pop(name, None)
            what = str(error).strip().partition("\n")[0] or type(error).__name__
            self.note(f"tracker {name} stopped working and is left out from now on: {what}")


def _quoted(path: Path) -> str:
    """A path as it can stand between the quotes of a search."""
    return str(path).replace("'", "_")
