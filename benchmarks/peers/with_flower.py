"""Flower: its FedAvg on the simulation runtime, whose clients are computed by Ray actors."""

from __future__ import annotations

import time
from functools import cache

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import Tensor

from benchmarks.peers import work

client_app, server_app = ClientApp(), ServerApp()


@cache
def clients(name: str) -> list[tuple[Tensor, Tensor]]:
    """All clients' samples, made once by every actor."""
    return work.clients(work.WORKS[name])


@client_app.train()
def train(message: Message, context: Context) -> Message:
    config = message.content["config"]
    job = work.Job(config["work"], config["setting"], config["epochs"])
    torch.set_num_threads(job.threads)
    seen = work.Seen.samples
    model = work.Network(work.WORKS[job.work])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimiser = torch.optim.SGD(model.parameters(), work.LR, work.MOMENTUM)
    batches = work.Batches(*clients(job.work)[context.node_config["partition-id"]])
    for _ in range(1 if config["server-round"] == 1 else job.epochs):
        for x, y in batches:
            optimiser.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimiser.step()
    metrics = MetricRecord({"num-examples": len(batches.y), "seen": work.Seen.samples - seen})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


class Watch:
    """Times the rounds after the first, which is the warm-up."""

    def __init__(self, job: work.Job):
        self.job, self.what = job, work.WORKS[job.work]
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def __call__(self, round_: int, arrays: ArrayRecord) -> None:
        if round_:
            self.seconds.append(time.perf_counter() - self.started)
            model = work.Network(self.what)
            model.load_state_dict(arrays.to_torch_state_dict())
            self.losses.append(work.module_loss(model, self.what))
        self.started = time.perf_counter()


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    job = work.job()
    what, watch = work.WORKS[job.work], Watch(job)
    config = ConfigRecord({"work": job.work, "setting": job.setting, "epochs": job.epochs})
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=what.clients)
    arrays = ArrayRecord(work.network(what).state_dict())
    result = strategy.start(grid, arrays, job.rounds + 1, train_config=config, evaluate_fn=watch)
    each = [result.train_metrics_clientapp[2 + i]["seen"] for i in range(job.rounds)]  # the mean over the clients
    versions = work.versions("flwr", "ray")
    work.answer(versions, round(sum(each) * what.clients), sum(watch.seconds[1:]), watch.losses[0], watch.losses[-1])


def main() -> None:
    job = work.job()
    resources = {"num_cpus": job.threads, "num_gpus": 0.0}
    ray = {"address": "local", "num_cpus": work.CORES, "num_gpus": 0}  # else it would join a cluster that runs here
    backend = {"init_args": ray, "client_resources": resources}
    run_simulation(server_app, client_app, num_supernodes=job.clients, backend_config=backend)


if __name__ == "__main__":
    from benchmarks.peers import with_flower  # Ray's actors look for the apps by the name of their module

    with_flower.main()
