"""FedLab: its FedAvg, standalone in one process, or as a server with two client processes that each train half."""

from __future__ import annotations

import socket
import time
from typing import Any

import torch
from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.core.client.manager import PassiveClientManager
from fedlab.core.network import DistNetwork
from fedlab.core.server.manager import SynchronousServerManager
from fedlab.core.standalone import StandalonePipeline
from torch import Tensor

from benchmarks.peers import work


class Clients:
    """What FedLab asks a data set for."""

    def __init__(self, clients: list[tuple[Tensor, Tensor]]):
        self.clients = [work.Batches(*client) for client in clients]

    def get_dataloader(self, client: int, batch_size: int) -> work.Batches:
        return self.clients[client]


class Trainer(SGDSerialClientTrainer):
    """FedLab's trainer with momentum, which starts anew for every client; the first round is one epoch."""

    def setup_optim(self, epochs: int, batch_size: int, lr: float) -> None:
        super().setup_optim(1, batch_size, lr)
        self.later = epochs

    def local_process(self, payload: list[Tensor], id_list: list[int]) -> None:
        super().local_process(payload, id_list)
        self.epochs = self.later

    def train(self, model_parameters: Tensor, train_loader: work.Batches) -> list[Tensor]:
        self.optimizer = torch.optim.SGD(self._model.parameters(), self.lr, work.MOMENTUM)
        seen = work.Seen.samples
        upload = super().train(model_parameters, train_loader)
        return [*upload, torch.tensor([float(work.Seen.samples - seen)])]


class Handler(SyncServerHandler):
    """FedLab's server; it times the rounds after the first, which is the warm-up."""

    samples, seconds, before, after = 0, 0.0, 0.0, 0.0
    job: work.Job

    def global_update(self, buffer: list[Any]) -> None:
        super().global_update(buffer)
        what = work.WORKS[self.job.work]
        if self.round == 0:
            self.before = work.module_loss(self.model, what)
            self.started = time.perf_counter()
            return
        self.samples += sum(int(upload[1]) for upload in buffer)
        if self.round == self.job.rounds:
            self.seconds = time.perf_counter() - self.started
            self.after = work.module_loss(self.model, what)


class Pipeline(StandalonePipeline):
    def evaluate(self) -> None:
        """Nothing: what is timed is training."""


def trainer(job: work.Job, clients: list[tuple[Tensor, Tensor]]) -> Trainer:
    made = Trainer(work.network(work.WORKS[job.work]), len(clients))
    made.setup_dataset(Clients(clients))
    made.setup_optim(job.epochs, work.BATCH, work.LR)
    return made


def free_port() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


def main() -> None:
    job = work.job()
    what = work.WORKS[job.work]
    everyone = work.clients(what)
    handler = Handler(work.network(what), job.rounds + 1, 1.0)
    handler.job = job
    if job.setting == work.PROCESSES:
        place, half = ("127.0.0.1", free_port()), what.clients // 2
        halves = [
            PassiveClientManager(DistNetwork(place, 3, rank, dist_backend="gloo"), trainer(job, some))
            for rank, some in ((1, everyone[:half]), (2, everyone[half:]))
        ]
        for one in halves:
            one.start()
        SynchronousServerManager(DistNetwork(place, 3, 0, dist_backend="gloo"), handler).run()
        for one in halves:
            one.join()
    else:
        Pipeline(handler, trainer(job, everyone)).main()
    work.answer(work.versions("fedlab"), handler.samples, handler.seconds, handler.before, handler.after)


if __name__ == "__main__":
    main()
