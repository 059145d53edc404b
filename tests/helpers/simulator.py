"""Runs on this machine, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fednh.backends import threads
from fednh.config import Config, load
from fednh.federated.rounds import RoundLoop
from fednh.federated.setup import Federation, build_federation
from fednh.runs.run_folder import RunFolder
from tests.helpers.callbacks import Recorder

SMALL = {"rounds": 3, "train.epochs": 1, "partition.clients": 8, "eval.every": 2}


def play(
    path: Path, federation: Federation | None = None, **settings: Any
) -> tuple[RoundLoop, dict[str, Any], Recorder]:
    quick = {"creff": {"method.retrain_epochs": 20}, "fedetf": {"method.turns": 1, "method.turn_epochs": 1}}
    config = load(
        "digits",
        {
            **SMALL,
            **{k.replace("__", "."): v for k, v in settings.items()},
            **quick.get(settings.get("method__name", ""), {}),
        },
    )
    return run_config(path, config, federation)


def run_config(
    path: Path, config: Config, federation: Federation | None = None
) -> tuple[RoundLoop, dict[str, Any], Recorder]:
    told = Recorder()
    federation = federation or build_federation(config)
    with RunFolder(path) as folder:
        simulation = threads.make_run(config, federation, folder, told)
        folder.begin(config, federation.dataset.classes, federation.class_counts())
        summary = simulation.run()
    return simulation, summary, told


def simulate(config: Config, out: Path, recorder: Recorder | None = None) -> Recorder:
    """The config on this machine, in the run folder `out`, from where that stands."""
    federation, recorder = build_federation(config), recorder or Recorder()
    with RunFolder(out) as folder:
        if not folder.started:
            folder.begin(config, federation.dataset.classes, federation.class_counts(), federation.sites)
        threads.make_run(config, federation, folder, recorder).run()
    return recorder
