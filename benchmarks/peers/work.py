"""What every library is given: the same clients, the same networks, and the form of the answer.

An adapter is a module of this package that is run by the Python of one library's own virtual environment, where fednh
is not installed. It trains a warm-up round of one epoch and then the rounds that are timed, and prints a line of JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

CLASSES, BATCH, LR, MOMENTUM = 10, 64, 0.01, 0.9
CORES = 2
WORKERS = "two workers of one thread"
PROCESSES = "two processes of one thread"
THREADS = "one process of two threads"
ONE = "one process of one thread"


@dataclass(frozen=True)
class Work:
    """Clients of equal size; images of 3x32x32 and Conv2, or vectors of 64 features and an MLP."""

    clients: int
    size: int
    images: bool


WORKS = {"conv2": Work(10, 500, True), "small": Work(1000, 50, False)}


@dataclass(frozen=True)
class Job:
    """One measurement: `rounds` of `epochs` each, of all clients, in a setting that the adapter offers."""

    work: str
    setting: str
    epochs: int = 5
    rounds: int = 1

    @property
    def clients(self) -> int:
        return WORKS[self.work].clients

    @property
    def samples(self) -> int:
        """That the timed rounds must process."""
        return WORKS[self.work].clients * WORKS[self.work].size * self.epochs * self.rounds

    @property
    def threads(self) -> int:
        """Of torch, in each process."""
        return CORES if self.setting == THREADS else 1


@dataclass(frozen=True)
class Answer:
    versions: dict[str, str]
    samples: int  # counted while they were processed, not computed from the settings
    seconds: float
    before: float  # mean cross-entropy of the global model on the first samples, before the timed rounds
    after: float


def job() -> Job:
    """The job that this process is given, as its only argument."""
    given = Job(**json.loads(sys.argv[1]))
    torch.set_num_threads(given.threads)
    return given


def versions(*packages: str) -> dict[str, str]:
    return {name: version(name) for name in (*packages, "torch", "numpy")}


def answer(versions: dict[str, str], samples: int, seconds: float, before: float, after: float) -> None:
    print(json.dumps(asdict(Answer(versions, samples, seconds, before, after))), flush=True)


def raw(work: Work) -> tuple[NDArray[np.uint8] | NDArray[np.float32], NDArray[np.int64]]:
    """All clients' samples: noise around one pattern a class, so that there is something to learn."""
    rng, count = np.random.default_rng(0), work.clients * work.size
    y = rng.integers(0, CLASSES, count)
    shape = (32, 32, 3) if work.images else (64,)
    x = rng.standard_normal((count, *shape), np.float32)
    x += rng.standard_normal((CLASSES, *shape), np.float32)[y]
    return (np.clip(128 + 50 * x, 0, 255).astype(np.uint8) if work.images else x), y


def tensors(work: Work) -> tuple[Tensor, Tensor]:
    """The same as float tensors, images normalised and channels first: ready, so that no library is timed on that."""
    x, y = raw(work)
    ready = torch.from_numpy(x)
    if work.images:
        ready = ready.permute(0, 3, 1, 2).float().div(255).sub(0.5).div(0.25).contiguous()
    return ready, torch.from_numpy(y)


def clients(work: Work) -> list[tuple[Tensor, Tensor]]:
    x, y = tensors(work)
    return list(zip(x.split(work.size), y.split(work.size), strict=True))


class Batches:
    """Shuffled batches of one client, cut from its tensors: faster than a DataLoader that collects single samples."""

    def __init__(self, x: Tensor, y: Tensor):
        self.x, self.y = x, y

    def __len__(self) -> int:
        return -(-len(self.y) // BATCH)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(self.y))
        yield from zip(self.x[order].split(BATCH), self.y[order].split(BATCH), strict=True)


class Seen:
    """How many samples this process has trained on."""

    samples = 0


class Network(nn.Module):
    """Conv2 or the MLP, the layers of `fednh.models` in an ordinary module; it counts what it is trained on."""

    def __init__(self, work: Work):
        super().__init__()
        if work.images:
            self.body = nn.Sequential(
                nn.Conv2d(3, 64, 5), nn.MaxPool2d(2), nn.ReLU(),
                nn.Conv2d(64, 64, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(),
                nn.Linear(1600, 384), nn.ReLU(), nn.Linear(384, 192), nn.ReLU(),
            )  # fmt: skip
        else:
            self.body = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
        self.head = nn.Linear(192 if work.images else 64, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            Seen.samples += len(x)
        return self.head(self.body(x))


def network(work: Work) -> Network:
    torch.manual_seed(0)
    return Network(work)


def loss_of(logits: Callable[[Tensor], Tensor], work: Work) -> float:
    """Mean cross-entropy on the first 500 samples."""
    x, y = tensors(work)
    with torch.no_grad():
        return float(F.cross_entropy(logits(x[:500]), y[:500]))


def module_loss(model: nn.Module, work: Work) -> float:
    was = model.training
    found = loss_of(model.eval(), work)
    model.train(was)
    return found
