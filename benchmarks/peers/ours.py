"""Ours: FedAvg through the simulator, with its default executor on two workers."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.peers import work
from fednh import __version__
from fednh.backends import threads
from fednh.callbacks import Callback
from fednh.config import load
from fednh.data.dataset import Dataset
from fednh.federated.setup import build_federation
from fednh.runs.run_folder import RunFolder
from fednh.seeding import torch_rng


def dataset(what: work.Work) -> Dataset:
    x, y = work.raw(what)
    names = tuple(map(str, range(work.CLASSES)))
    if what.images:
        return Dataset("random", x, y, x[:10], y[:10], names, (0.5,) * 3, (0.25,) * 3, augment="none")
    return Dataset("random", x, y, x[:10], y[:10], names, (0.0,) * 64, (1.0,) * 64, 1.0)


def run(job: work.Job, data: Dataset) -> tuple[int, float, float, float]:
    """Samples, seconds, and the global model's loss before and after."""
    what = work.WORKS[job.work]
    config = load(
        None,
        {
            "data.name": "npz:unused", "data.augment": "none", "rounds": job.rounds, "method.name": "fedavg",
            "partition.name": "iid", "partition.clients": what.clients, "partition.min_samples": 1,
            "participation.rate": 1.0, "model.name": "conv2" if what.images else "mlp", "workers": work.CORES,
            "train.epochs": job.epochs, "train.batch_size": work.BATCH, "train.lr": work.LR, "train.lr_decay": 1.0,
            "train.momentum": work.MOMENTUM, "train.weight_decay": 0.0, "train.clip": 0.0,
            "eval.every": 0, "eval.final": 1, "checkpoint.every": 0,
        },
    )  # fmt: skip
    parts = list(np.arange(len(data.y_train)).reshape(what.clients, -1))
    fed = replace(build_federation(config, data), parts=parts, held_out=[np.empty(0, np.int64)] * what.clients)
    with tempfile.TemporaryDirectory() as place, RunFolder(Path(place) / "run") as folder:
        simulation = threads.make_run(config, fed, folder, Callback())
        simulation.run()
    seconds = sum(record["seconds"] for record in simulation.progress.records)
    first, last = fed.method.init(fed.net, torch_rng(config.seed, "init")), simulation.server
    before, after = (work.loss_of(lambda x, m=model: fed.net.logits(m, x), what) for model in (first, last))
    return simulation.progress.samples, seconds, before, after


def main() -> None:
    job = work.job()
    data = dataset(work.WORKS[job.work])
    run(replace(job, epochs=1, rounds=1), data)
    samples, *rest = run(job, data)
    work.answer({"fednh": __version__, **work.versions()}, samples, *rest)


if __name__ == "__main__":
    main()
