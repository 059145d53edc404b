"""How long runs will take, from a short measurement: a client's work, an aggregation and an evaluation.

The client trains on a few of its samples, then on more, until there is something to measure; time is taken to grow with
the number of samples. Nothing is written.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from fednh import client, evaluate
from fednh.config import Config
from fednh.data.batches import ClientData
from fednh.data.dataset import Dataset
from fednh.federation import Federation, build_federation, load_data
from fednh.fit import Sgd
from fednh.runs import worker_count
from fednh.seeding import torch_rng
from fednh.simulate import picked_clients
from fednh.sweep import Planned
from fednh.tree import Tree, arranged

_ENOUGH = 0.5  # seconds of client work that are worth extrapolating from


@dataclass(frozen=True)
class Pace:
    """Seconds of one worker's time."""

    sample: float  # a client's work, for each of its training samples
    tune: float  # making a personal model, for each training sample
    test: float  # evaluating a model on the test set
    aggregate: float  # a round's aggregation, on one thread while the others wait

    def seconds(self, config: Config, fed: Federation, rounds_done: int = 0) -> float:
        """What is left of a run."""
        sizes = np.array([len(part) for part in fed.parts])
        workers = worker_count(config)
        picked = len(picked_clients(config, 1))
        lanes = min(workers, picked)
        round_ = picked * sizes.mean() * self.sample / lanes + self.aggregate
        person = sizes.mean() * self.tune + self.test
        rounds = max(config.rounds - rounds_done, 0)
        seen = len(fed.parts) * (1 - (1 - picked / len(fed.parts)) ** config.rounds)  # clients that ever take part
        looks = rounds // config.eval.every if config.eval.every else 0
        active = picked if config.eval.clients == "active" else seen
        every = looks * (active * person / workers + self.test)
        return float(rounds * round_ + every + seen * person / workers + self.test)


def measure(config: Config, fed: Federation) -> Pace:
    """A few seconds of a real client of this federation."""
    method, net = fed.method, fed.net
    server = arranged(method.init(net, torch_rng(config.seed, "init")))
    server = {name: value.to(config.device) for name, value in server.items()}
    down, kept = method.broadcast(server), method.enroll(server)
    part = sorted(fed.parts, key=len)[len(fed.parts) // 2]
    t = config.train
    sgd = Sgd(t.lr, t.momentum, t.weight_decay, t.clip, t.batch_size, t.epochs)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        client.update(method, net, kept, down, ClientData(fed.train, part[:2], config.seed), sgd)  # warms up
        count, spent = min(8, len(part)), 0.0
        while True:
            data = ClientData(fed.train, part[:count], config.seed)
            began = time.perf_counter()
            update = client.update(method, net, kept, down, data, sgd)
            spent = time.perf_counter() - began
            if spent >= _ENOUGH or count == len(part):
                break
            count = min(4 * count, len(part))
        began = time.perf_counter()
        method.aggregate(server, [update.upload])
        aggregate = time.perf_counter() - began
        began = time.perf_counter()
        model = client.personal_model(method, net, update.keep, down, data, sgd)
        tune = time.perf_counter() - began
        return Pace(spent / count, tune / count, _test_seconds(fed, model), aggregate)
    finally:
        torch.set_num_threads(threads)


def start_seconds() -> float:
    """What a new process takes before its first round."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import fednh.simulate"], check=True, capture_output=True)
    return time.perf_counter() - began


def _test_seconds(fed: Federation, model: Tree) -> float:
    some = min(len(fed.test), 256)
    test = replace(fed.test, x=fed.test.x[:some], y=fed.test.y[:some])
    began = time.perf_counter()
    evaluate.correct_per_class(lambda x: fed.method.logits(fed.net, arranged(model), x), test)
    return (time.perf_counter() - began) * len(fed.test) / some


def estimate(plan: Sequence[Planned], workers: int) -> dict[str, float]:
    """Seconds that each unfinished run will take with so many workers; each kind of run is measured once."""
    pending = [run for run in plan if not run.folder.finished]
    start = start_seconds() if pending else 0.0
    paces: dict[str, Pace] = {}
    seconds, loaded = {}, dict[str, Dataset]()
    for run in pending:
        config = run.config.model_copy(update={"workers": workers})
        data = config.data.model_dump_json()
        loaded = loaded if data in loaded else {data: load_data(config)}
        fed = build_federation(config, loaded[data])
        kind = data + config.method["name"] + config.model.model_dump_json() + config.train.model_dump_json()
        if kind not in paces:
            paces[kind] = measure(config, fed)
        seconds[run.name] = start + paces[kind].seconds(config, fed, run.rounds_done)
    return seconds
