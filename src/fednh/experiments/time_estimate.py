"""How long runs will take, from a short measurement: a client's work, an aggregation and an evaluation.

The client trains on a few of its samples, then on more, until there is something to measure; time is taken to grow with
the number of samples. Nothing is written.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from fednh.config import Config
from fednh.core import client, evaluate
from fednh.core.federation import Federation, build_federation, initial_state, load_data
from fednh.core.picks import picked_clients
from fednh.core.tree import Uploads, arranged
from fednh.data.batches import EVAL_BATCH, ClientData, subset
from fednh.data.dataset import Dataset
from fednh.experiments.sweep import Planned
from fednh.storage.run_folder import worker_count

A = TypeVar("A")
_ENOUGH = 0.5  # seconds of client work that are worth extrapolating from


@dataclass(frozen=True)
class Pace:
    """Seconds, as they pass when all workers are busy: threads and cores get in each other's way."""

    sample: float  # a client's work, for each of its training samples
    tune: float  # making a personal model, for each training sample
    test: float  # evaluating a client's models on the test set and on what it holds out
    aggregate: float  # a round's aggregation, on one thread while the others wait
    shared: float = 0.0  # evaluating the global model on the test set, on one thread while the others wait

    def seconds(self, config: Config, fed: Federation, rounds_done: int = 0) -> float:
        """What is left of a run."""
        size = float(np.mean([len(part) for part in fed.parts]))
        total, picked = len(fed.parts), len(picked_clients(config, 1, len(fed.parts)))
        seen = total * (1 - (1 - picked / total) ** config.rounds)  # clients that ever take part
        rounds = max(config.rounds - rounds_done, 0)
        person = size * self.tune + self.test
        every, last = config.eval.every, config.rounds - 1  # the last round has an evaluation of its own, of the final
        looks = max(last // every - rounds_done // every, 0) if every else 0
        active = picked if config.eval.clients == "active" else at_most(config.eval.clients, seen)
        training = rounds * (picked * size * self.sample + self.aggregate)
        evaluated = looks * active + at_most(config.eval.final, seen)
        return training + evaluated * person + (looks + 1) * self.shared


def at_most(number: str | int, seen: float) -> float:
    """How many clients of those seen a setting such as `eval.final` means."""
    return min(number, seen) if isinstance(number, int) else seen


def measure(config: Config, fed: Federation) -> Pace:
    """A few seconds of the work of real clients of this federation, one for each worker at the same time."""
    method, net, lanes = fed.method, fed.net, worker_count(config)
    server = initial_state(method, net, config.seed, config.device)
    down, kept = method.broadcast(server), method.enroll(server)
    part = sorted(fed.parts, key=len)[len(fed.parts) // 2]
    sgd = config.train.sgd(1)

    def train(count: int) -> client.Update:
        return client.update(method, net, kept, down, ClientData(fed.train, part[:count], config.seed), sgd)

    with ThreadPoolExecutor(lanes, initializer=torch.set_num_threads, initargs=(1,)) as pool:

        def all_at_once(work: Callable[[], A]) -> tuple[float, A]:
            """Wall seconds for each of the workers' pieces, and one result."""
            began = time.perf_counter()
            results = [future.result() for future in [pool.submit(work) for _ in range(lanes)]]
            return (time.perf_counter() - began) / lanes, results[0]

        all_at_once(lambda: train(2))  # warms up
        count = min(8, len(part))
        spent, update = all_at_once(partial(train, count))
        while spent * lanes < _ENOUGH and count < len(part):
            count = min(4 * count, len(part))
            spent, update = all_at_once(partial(train, count))
        data = ClientData(fed.train, part[:count], config.seed)
        tune, model = all_at_once(
            lambda: client.personal_model(method, net, update.keep, down, data, sgd, how=config.personal)
        )
        seen = fed.test if len(fed.test) else fed.train
        some = min(len(seen), EVAL_BATCH)
        test = subset(seen, np.arange(some))
        model = arranged(model)
        look, _ = all_at_once(lambda: evaluate.correct_per_class(lambda x: method.scores(net, model, x), test))
        picked = len(picked_clients(config, 1, len(fed.parts)))
        began = time.perf_counter()
        pool.submit(method.aggregate, server, Uploads([update.upload] * picked)).result()
        aggregate = time.perf_counter() - began
    models = 1 if method.global_model(server) is None else 2  # a client measures the global model, too
    looked_at = len(fed.test) + models * float(np.mean([len(held) for held in fed.held_out]))
    shared = (models - 1) * lanes * look * len(fed.test) / some
    return Pace(spent / count, tune / count, look * looked_at / some, aggregate, shared)


def start_seconds() -> float:
    """What a new process takes before its first round."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import fednh.executors.pool"], check=True, capture_output=True)
    return time.perf_counter() - began


def kind_of(config: Config) -> str:
    """What decides a pace: runs that differ in other settings are measured once."""
    free = {"seed", "rounds", "checkpoint", "store", "federation", "ray"}
    return config.model_dump_json(exclude={**dict.fromkeys(free, True), "eval": {"every", "clients", "final"}})


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
        kind = kind_of(config)
        if kind not in paces:
            paces[kind] = measure(config, fed)
        seconds[run.name] = start + paces[kind].seconds(config, fed, run.folder.rounds_written())
    return seconds
