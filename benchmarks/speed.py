"""Speed against the primitive limit, against the plain way, and of one engine against the other.

Every figure is a ratio of two times measured alternately in this process, best of a few repetitions, on data of the
right shape made from random numbers: how long arithmetic takes does not depend on what it says.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks import plain
from benchmarks.limit import BATCH, CLASSES, Conv2Primitives
from benchmarks.row import Row
from fednh import engine, memory
from fednh.config import Config, load
from fednh.data.batches import ClientData
from fednh.data.dataset import Dataset
from fednh.evaluate import correct_per_class
from fednh.federation import Federation, build_federation
from fednh.fit import LocalFit, Sgd
from fednh.losses import cross_entropy
from fednh.methods.base import MODEL
from fednh.runs import RunFolder
from fednh.seeding import torch_rng
from fednh.simulate import Simulation
from fednh.tree import mean

CORES = len(os.sched_getaffinity(0))


def rows() -> Iterator[Row]:
    memory.keep_freed()
    yield from conv2()
    yield resnet18()
    yield from small_clients()
    yield from methods_and_evaluation()
    yield from start_up()


def images(count: int, side: int, classes: int = CLASSES) -> Dataset:
    """Random pictures in the form of a data set."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (count, side, side, 3), np.uint8)
    y = np.arange(count) % classes
    names, half = tuple(map(str, range(classes))), (0.5,) * 3
    return Dataset("random", x, y, x[:classes], y[:classes], names, half, (0.25,) * 3, augment="crop_flip")


@contextmanager
def workers() -> Iterator[ThreadPoolExecutor]:
    """One-thread workers, one a core, as the simulator has them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with ThreadPoolExecutor(CORES, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield pool
    torch.set_num_threads(before)


@contextmanager
def all_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(CORES)
    yield
    torch.set_num_threads(before)


def best(times: int, *works: Callable[[], object]) -> list[float]:
    """The shortest time of each, taken in turn; one round before that counts for nothing."""
    found = [float("inf")] * len(works)
    for repetition in range(times + 1):
        for i, work in enumerate(works):
            started = time.perf_counter()
            work()
            if repetition:
                found[i] = min(found[i], time.perf_counter() - started)
    return found


def federation(data: Dataset, parts: Sequence[Sequence[int]], **settings: object) -> tuple[Config, Federation]:
    """A federation of given clients."""
    config = load("cifar10", {"partition.name": "iid", "partition.clients": 1, **settings})
    fed = build_federation(config, data)
    indices = [np.asarray(part) for part in parts]
    return config, replace(fed, parts=indices, held_out=[np.empty(0, np.int64)] * len(indices))


def local_training(fed: Federation, sgd: Sgd, pool: ThreadPoolExecutor) -> Callable[[], object]:
    """FedAvg's local training of all clients, on the pool."""
    server = fed.net.init(torch_rng(0, "init"))

    def one(k: int) -> object:
        fit = LocalFit(ClientData(fed.train, fed.parts[k], 0, 1, k), sgd)
        return fit(server, cross_entropy(fed.net.logits), only=MODEL)

    return lambda: list(pool.map(one, range(len(fed.parts))))


def conv2() -> Iterator[Row]:
    """Conv2 on CIFAR-shaped data: near the limit, and far from the plain way."""
    steps, count = 6, 2 * CORES
    data = images(count * steps * BATCH, 32)
    parts = np.arange(len(data.y_train)).reshape(count, -1)
    _, fed = federation(data, parts, **{"method.name": "fedavg"})
    sgd = Sgd(epochs=1)
    with workers() as pool:
        primitives = [Conv2Primitives() for _ in range(count)]

        def bare() -> None:
            list(pool.map(lambda one: [one.step() for _ in range(steps)], primitives))

        ours, limit = best(6, local_training(fed, sgd, pool), bare)
    x, y = torch.from_numpy(data.x_train), torch.from_numpy(data.y_train)
    clients = [plain.Images(x, y, part.tolist()) for part in parts]
    with all_threads():
        (usual,) = best(2, lambda: plain.round_of(plain.PlainConv2(CLASSES), clients, sgd))
    each = f"{count * steps} steps of 64 images: ours {ours:.2f} s, primitives {limit:.2f} s, plain {usual:.2f} s"
    yield Row("Conv2: share of the primitive limit", limit / ours, "", 0.9, False, each)
    yield Row("Conv2: against the plain way", usual / ours, "x", 2.5, False, each)


def resnet18() -> Row:
    """ResNet-18 with GroupNorm at 64x64; the plain way has the same module in NCHW."""
    batch = 16
    data = images(CORES * batch, 64)
    parts = np.arange(len(data.y_train)).reshape(CORES, -1)
    _, fed = federation(data, parts, **{"method.name": "fedavg", "model.name": "resnet18"})
    sgd = Sgd(epochs=1, batch_size=batch)
    with workers() as pool:
        (ours,) = best(2, local_training(fed, sgd, pool))
    x, y = torch.from_numpy(data.x_train), torch.from_numpy(data.y_train)
    clients = [plain.Images(x, y, part.tolist()) for part in parts]
    module = plain.PlainResNet18(CLASSES)
    with all_threads():
        (usual,) = best(2, lambda: plain.round_of(module, clients, sgd))
    each = f"{CORES} steps of {batch} images: ours {ours:.2f} s, plain {usual:.2f} s"
    return Row("ResNet-18 (64x64): against the plain way", usual / ours, "x", 2.0, False, each)


def small_clients() -> Iterator[Row]:
    """1,000 clients a round of 50 samples each, an MLP on 64 features."""
    count, size, few = 1000, 50, 100
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(count * size, 64)).astype(np.float32), rng.integers(0, CLASSES, count * size)
    data = Dataset("random", x, y, x[:100], y[:100], tuple(map(str, range(CLASSES))), (0.0,) * 64, (1.0,) * 64, 1.0)
    parts = np.arange(count * size).reshape(count, -1)
    _, fed = federation(data, parts, **{"method.name": "fedavg", "model.name": "mlp", "model.args": {}})
    server = fed.method.init(fed.net, torch_rng(0, "init"))
    down, kept = fed.method.broadcast(server), fed.method.enroll(server)
    work = engine.Work(fed, down, Sgd(), 0, 1, lambda _: kept, lambda: False)
    with workers() as pool:

        def by(name: str, clients: int) -> Callable[[], object]:
            return lambda: mean(
                update.upload  # type: ignore[union-attr]
                for _, update in engine.updates(name, pool, work, range(clients), ahead=2 * CORES)
            )

        block, loop = best(2, by("vmap", count), by("loop", count))
    model = plain.PlainMLP(64, CLASSES)
    clients = [plain.Vectors(torch.from_numpy(x), torch.from_numpy(y), part.tolist()) for part in parts[:few]]
    with all_threads():
        (usual,) = best(2, lambda: plain.round_of(model, clients, Sgd()))
    usual *= count / few
    each = f"a round: blocks {block:.2f} s, loop {loop:.2f} s, plain {usual:.1f} s (from {few} clients)"
    yield Row("1,000 small clients: blocks against the loop", loop / block, "x", 4.0, False, each)
    yield Row("1,000 small clients: against the plain way", usual / block, "x", 8.0, False, each)


def methods_and_evaluation() -> Iterator[Row]:
    """A round of the paper's CIFAR-10 setting by FedAvg, CReFF and FedROD, and what evaluation adds to a run."""
    data = images(10 * 500, 32)
    parts = np.arange(len(data.y_train)).reshape(10, -1)
    seconds = {}
    for name in ("fedavg", "creff", "fedrod"):
        config, fed = federation(
            data, parts, **{"method.name": name, "participation.rate": 1.0, "rounds": 1, "checkpoint.every": 0}
        )
        seconds[name] = one_round(config, fed)
    each = (
        ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items()) + " (10 clients of 500 images, 5 epochs)"
    )
    yield Row("CReFF: a round against FedAvg's", seconds["creff"] / seconds["fedavg"], "x", 3.0, True, each)
    yield Row("FedROD: a round against FedAvg's", seconds["fedrod"] / seconds["fedavg"], "x", 2.0, True, each)

    looks = 2 * CORES
    model = fed.net.init(torch_rng(0, "init"))
    with workers() as pool:

        def look(_: int) -> object:
            return correct_per_class(lambda x: fed.net.logits(model, x), fed.train)

        (taken,) = best(2, lambda: list(pool.map(look, range(looks))))
    per_model = taken / looks * 10_000 / len(fed.train)
    evaluation = 20 * 11 * per_model + 100 * per_model  # every 10 rounds: the global and 10 personal; at the end all
    training = 200 * seconds["fedavg"]
    each = f"a model on 10,000 images {per_model:.2f} s, a round {seconds['fedavg']:.1f} s, for 200 rounds"
    yield Row("evaluation every 10 rounds: share of a run", evaluation / (evaluation + training), "", 0.2, True, each)


class Nobody:
    """A watcher that does not look."""

    def round_done(self, record: dict[str, object]) -> None: ...
    def evaluating(self, done: int, total: int) -> None: ...
    def note(self, text: str) -> None: ...


def one_round(config: Config, fed: Federation) -> float:
    """Seconds of one round through the simulator: training and aggregation."""
    with tempfile.TemporaryDirectory() as place, RunFolder(Path(place) / "run") as folder:
        simulation = Simulation(config, fed, folder, Nobody())
        with workers() as simulation.pool:
            started = time.perf_counter()
            simulation._train(1)
            return time.perf_counter() - started


def start_up() -> Iterator[Row]:
    """From the command to its answer, in processes of their own."""
    tried = [_seconds("--help") for _ in range(5)]
    yield Row("fednh --help", min(tried), "s", 0.5, True, f"best of {len(tried)}")
    with tempfile.TemporaryDirectory() as place:
        first = [_first_round(Path(place) / str(i)) for i in range(3)]
    yield Row("first round of `fednh run digits`", min(first), "s", 6.0, True, f"best of {len(first)}")


def _seconds(*arguments: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "fednh", *arguments], check=True, stdout=subprocess.DEVNULL, timeout=120)
    return time.perf_counter() - started


def _first_round(folder: Path) -> float:
    """Seconds until the first line of metrics.jsonl."""
    started, metrics = time.perf_counter(), folder / "metrics.jsonl"
    command = [sys.executable, "-m", "fednh", "run", "digits", "--rounds", "2", "--quiet", "--out", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while not (metrics.exists() and metrics.stat().st_size) and time.perf_counter() - started < 120:
            if process.poll() not in (None, 0):
                raise RuntimeError(f"fednh run ended with exit code {process.returncode}")
            time.sleep(0.01)
        return time.perf_counter() - started
    finally:
        process.wait(timeout=120)
