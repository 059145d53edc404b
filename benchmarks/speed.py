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
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from benchmarks import plain
from benchmarks.limit import BATCH, CLASSES, Conv2Primitives
from benchmarks.row import Row
from fednh import machine
from fednh.backends import threads
from fednh.backends.tasks import SimulatedData, TrainTask
from fednh.backends.threads import in_order
from fednh.backends.vmap import blocks
from fednh.callbacks import Callback
from fednh.config import Config, load
from fednh.data.batches import ClientData
from fednh.data.dataset import Dataset
from fednh.federated.evaluate import count_correct, logits_of
from fednh.federated.setup import Federation, build_federation
from fednh.methods.base import MODEL
from fednh.methods.fit import LocalFit, Sgd
from fednh.methods.losses import cross_entropy
from fednh.runs.run_folder import RunFolder
from fednh.seeding import torch_rng
from fednh.tree import mean

OWN_CLASSES = 0.72  # of CIFAR-10's classes a client has that many on average: Dir(0.3), 100 clients, seed 0
CORES = len(os.sched_getaffinity(0))
Parts = NDArray[np.int64]  # clients by samples


def rows() -> Iterator[Row]:
    # The plain way first: it does without `keep_freed`, which holds for the whole process once it is called.
    conv2_data, resnet18_data, small_data = conv2_clients(), resnet18_clients(), small_clients()
    with all_threads():
        usual = plain_conv2(*conv2_data), plain_resnet18(*resnet18_data), plain_small(*small_data)
    machine.keep_freed()
    yield from conv2(*conv2_data, usual[0])
    yield from resnet18(*resnet18_data, usual[1])
    yield from small(*small_data, usual[2])
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


def federation(data: Dataset, parts: Parts, **settings: object) -> tuple[Config, Federation]:
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


STEPS = 6  # of a Conv2 client
RESNET_BATCH = 16
SMALL, SMALL_SIZE, PLAIN_SMALL = 1000, 50, 100  # small clients, their samples, and how many the plain way is timed on


def conv2_clients() -> tuple[Dataset, Parts]:
    data = images(2 * CORES * STEPS * BATCH, 32)
    return data, np.arange(len(data.y_train)).reshape(2 * CORES, -1)


def resnet18_clients() -> tuple[Dataset, Parts]:
    data = images(CORES * RESNET_BATCH, 64)
    return data, np.arange(len(data.y_train)).reshape(CORES, -1)


def small_clients() -> tuple[Dataset, Parts]:
    rng, count = np.random.default_rng(0), SMALL * SMALL_SIZE
    x, y = rng.normal(size=(count, 64)).astype(np.float32), rng.integers(0, CLASSES, count)
    names = tuple(map(str, range(CLASSES)))
    return Dataset("random", x, y, x[:100], y[:100], names, (0.0,) * 64, (1.0,) * 64, 1.0), np.arange(count).reshape(
        SMALL, -1
    )


def plain_conv2(data: Dataset, parts: Parts) -> float:
    return plain_round(plain.PlainConv2(CLASSES), plain.Images, data, parts, Sgd(epochs=1), 3)


def plain_resnet18(data: Dataset, parts: Parts) -> float:
    sgd = Sgd(epochs=1, batch_size=RESNET_BATCH)
    return plain_round(plain.PlainResNet18(CLASSES), plain.Images, data, parts, sgd, 2)


def plain_small(data: Dataset, parts: Parts) -> float:
    few = plain_round(plain.PlainMLP(64, CLASSES), plain.Vectors, data, parts[:PLAIN_SMALL], Sgd(), 2)
    return few * SMALL / PLAIN_SMALL


def plain_round(
    model: nn.Module, kind: type[plain.Images] | type[plain.Vectors], data: Dataset, parts: Parts, sgd: Sgd, times: int
) -> float:
    x, y = torch.from_numpy(data.x_train), torch.from_numpy(data.y_train)
    clients = [kind(x, y, part.tolist()) for part in parts]
    return best(times, lambda: plain.round_of(model, clients, sgd))[0]


def conv2(data: Dataset, parts: Parts, usual: float) -> Iterator[Row]:
    """Conv2 on CIFAR-shaped data: near the limit of ordinary convolutions or beyond it, and far from the plain way."""
    fed, ordinary = both_ways(data, parts, "conv2")
    with workers() as pool:
        primitives = [Conv2Primitives() for _ in parts]

        def bare() -> None:
            list(pool.map(lambda one: [one.step() for _ in range(STEPS)], primitives))

        works = [local_training(each, Sgd(epochs=1), pool) for each in (fed, ordinary)]
        ours, before, limit = best(6, *works, bare)
    each = f"{len(parts) * STEPS} steps of {BATCH} images: ours {ours:.2f} s, "
    each += f"with ordinary convolutions {before:.2f} s, primitives {limit:.2f} s, plain {usual:.2f} s"
    yield Row("Conv2: share of the primitive limit", limit / ours, "", 0.9, False, each)
    yield Row("Conv2: with fast convolutions against ordinary ones", before / ours, "x", 1.2, False, each)
    yield Row("Conv2: against the plain way", usual / ours, "x", 2.5, False, each)


def resnet18(data: Dataset, parts: Parts, usual: float) -> Iterator[Row]:
    """ResNet-18 with GroupNorm at 64x64; the plain way has the same module in NCHW."""
    sgd = Sgd(epochs=1, batch_size=RESNET_BATCH)
    with workers() as pool:
        ours, before = best(2, *(local_training(fed, sgd, pool) for fed in both_ways(data, parts, "resnet18")))
    each = f"{CORES} steps of {RESNET_BATCH} images: ours {ours:.2f} s, "
    each += f"with ordinary convolutions {before:.2f} s, plain {usual:.2f} s"
    yield Row("ResNet-18 (64x64): with fast convolutions against ordinary ones", before / ours, "x", 1.2, False, each)
    yield Row("ResNet-18 (64x64): against the plain way", usual / ours, "x", 2.0, False, each)


def both_ways(data: Dataset, parts: Parts, model: str) -> list[Federation]:
    """The same federation with fast and with ordinary convolutions."""
    settings = {"method.name": "fedavg", "model.name": model}
    return [federation(data, parts, **settings, **{"model.convolution": way})[1] for way in ("fast", "ordinary")]


def small(data: Dataset, parts: Parts, usual: float) -> Iterator[Row]:
    """1,000 clients a round of 50 samples each, an MLP on 64 features."""
    _, fed = federation(data, parts, **{"method.name": "fedavg", "model.name": "mlp", "model.args": {}})
    server = fed.method.init(fed.net, torch_rng(0, "init"))
    down, kept = fed.method.broadcast(server), fed.method.enroll(server)
    material, everyone = SimulatedData.of(fed), range(len(parts))
    with workers() as threads:

        def by(together: bool) -> Callable[[], object]:
            stage = TrainTask(down, Sgd(), 0, 1, together=together)
            units = list(blocks(fed, everyone)) if together else [[client] for client in everyone]

            def work(unit: Sequence[int]) -> list[Any]:
                return stage(material, unit, [kept] * len(unit))

            done = in_order
            return lambda: mean(u.upload for some in done(threads, work, units, ahead=2 * CORES) for u in some)

        block, loop = best(3, by(True), by(False))
    each = f"a round: blocks {block:.2f} s, loop {loop:.2f} s, plain {usual:.1f} s (from {PLAIN_SMALL} clients)"
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
            return count_correct(logits_of(lambda x: fed.net.logits(model, x), fed.train).argmax(1), fed.train)

        (taken,) = best(4, lambda: list(pool.map(look, range(looks))))
    per_model = taken / looks * 10_000 / len(fed.train)
    # Every 10 rounds the global model, and 10 personal ones on the classes of their clients; at the end all 100.
    evaluation = (20 * (1 + 10 * OWN_CLASSES) + 100) * per_model
    training = 200 * seconds["fedavg"]
    each = f"a model on 10,000 images {per_model:.2f} s, a round {seconds['fedavg']:.1f} s, for 200 rounds"
    yield Row("evaluation every 10 rounds: share of a run", evaluation / (evaluation + training), "", 0.2, True, each)


def one_round(config: Config, fed: Federation) -> float:
    """Seconds of one round through the simulator: training and aggregation."""
    with tempfile.TemporaryDirectory() as place, RunFolder(Path(place) / "run") as folder:
        simulation = threads.make_run(config, fed, folder, Callback())
        simulation.run()
        record: dict[str, float] = simulation.progress.records[0]
        return record["seconds"]


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
