"""BlazeFL: its FedAvg on its pool of processes, which share tensors in memory, or on its pool of threads.

Its trainers make SGD without momentum, which is a little less work than the others have. It says that it needs Python
3.12; what it is made of runs on 3.11 too. Threads are fastest on a Python without the GIL, and this one has it.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from blazefl.contrib import fedavg
from blazefl.core import IPCMode
from torch import Tensor, nn

from benchmarks.peers import work


class Models:
    """What BlazeFL asks for a network."""

    def __init__(self, what: work.Work):
        self.what = what

    def select_model(self, name: str) -> nn.Module:
        return work.network(self.what)


class Loader(work.Batches):
    """Batches of one client; BlazeFL hands `dataset` back after a round."""

    dataset = None


class Data:
    """What BlazeFL asks for samples."""

    def __init__(self, clients: list[tuple[Tensor, Tensor]]):
        self.clients = clients

    def get_dataloader(self, type_: str, cid: int, batch_size: int, generator: object) -> Loader:
        return Loader(*self.clients[cid])

    def set_dataset(self, type_: str, cid: int, dataset: object) -> None:
        """Nothing: clients' samples do not change."""


def trainer(job: work.Job, models: Models, data: Data, folder: Path) -> Any:
    clients, batch = job.clients, work.BATCH
    if job.setting == work.PROCESSES:
        return fedavg.FedAvgProcessPoolClientTrainer(
            models, "", folder / "share", folder / "state", data, "cpu", clients, 1, batch, work.LR, 0, work.CORES,
            IPCMode.SHARED_MEMORY,
        )  # fmt: skip
    return fedavg.FedAvgThreadPoolClientTrainer(models, "", data, "cpu", clients, 1, batch, work.LR, 0, work.CORES)


def main() -> None:
    job = work.job()
    what = work.WORKS[job.work]
    models, data = Models(what), Data(work.clients(what))
    server = fedavg.FedAvgBaseServerHandler(
        models, "", data, job.rounds + 1, job.clients, 1.0, "cpu", work.BATCH, 0
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        clients = trainer(job, models, data, Path(folder))
        before, started, samples = 0.0, 0.0, 0
        for round_ in range(job.rounds + 1):
            if round_ == 1:  # the first one is the warm-up, of one epoch
                clients.epochs, before, started = job.epochs, work.module_loss(server.model, what), time.perf_counter()
            clients.local_process(server.downlink_package(), server.sample_clients())
            uploads = clients.uplink_package()
            samples += sum(upload.data_size for upload in uploads) if round_ else 0
            for upload in uploads:
                server.load(replace(upload))
        seconds = time.perf_counter() - started
    work.answer(work.versions("blazefl"), samples, seconds, before, work.module_loss(server.model, what))


if __name__ == "__main__":
    main()
