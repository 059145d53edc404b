"""fluke: its FedAVG on clients that hold its own fast data loaders."""

from __future__ import annotations

import time
from typing import Any

from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader
from fluke.utils import FederationObserver

from benchmarks.peers import work


class Watch(FederationObserver):
    """Times the rounds after the first, which is the warm-up."""

    def __init__(self, algorithm: FedAVG, job: work.Job):
        self.algorithm, self.job, self.what = algorithm, job, work.WORKS[job.work]
        self.seconds = self.before = self.after = 0.0
        self.samples = 0

    def end_round(self, round: int) -> None:
        if round == 1:
            for client in self.algorithm.clients:
                client.hyper_params.local_epochs = self.job.epochs
            self.before, work.Seen.samples = work.module_loss(self.algorithm.server.model, self.what), 0
            self.started = time.perf_counter()
        elif round == self.job.rounds + 1:
            self.seconds = time.perf_counter() - self.started
            self.samples = work.Seen.samples
            self.after = work.module_loss(self.algorithm.server.model, self.what)


def main() -> None:
    job = work.job()
    what = work.WORKS[job.work]
    environment = FlukeENV()
    environment.set_seed(0)
    environment.set_device("cpu")
    environment.set_inmemory(True)
    environment.set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    loaders = [
        FastDataLoader(x, y, num_labels=work.CLASSES, batch_size=work.BATCH, shuffle=True)
        for x, y in work.clients(what)
    ]
    nothing: list[Any] = [None] * what.clients
    data = DataSplitter(DummyDataContainer(loaders, nothing, None, work.CLASSES))
    settings = DDict(
        client=DDict(
            batch_size=work.BATCH,
            local_epochs=1,
            loss="CrossEntropyLoss",
            optimizer=DDict(name="SGD", lr=work.LR, momentum=work.MOMENTUM),
            scheduler=DDict(name="StepLR", step_size=1, gamma=1.0),
        ),
        server=DDict(weighted=False),
        model=work.network(what),
    )
    algorithm = FedAVG(what.clients, data, settings)
    watch = Watch(algorithm, job)
    algorithm.set_callbacks(watch)
    algorithm.run(job.rounds + 1, 1.0)
    work.answer(work.versions("fluke-fl"), watch.samples, watch.seconds, watch.before, watch.after)


if __name__ == "__main__":
    main()
