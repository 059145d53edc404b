"""The far side of a cluster: what an actor of Ray does on a machine that has this package and nothing of the run.

Everything arrives through Ray: the samples once, what clients receive once an exchange, what a client kept with its
job. Nothing is read from or written to a disk.
"""

from __future__ import annotations

import hashlib
import pickle
import platform
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import fednh
from fednh.core import memory
from fednh.errors import RunError, UserError
from fednh.executors.packing import Packed, PackedParts, PackedResults, PackedSamples, pack, unpack
from fednh.executors.user_code import Sources, install
from fednh.executors.work import Material, Measuring, Stage, Unit
from fednh.storage.run_folder import cpu

SAME = ("python", "fednh", "source", "torch", "numpy")  # what must be the same on all machines


@cache
def facts() -> dict[str, str]:
    """What this machine computes with."""
    return {
        "host": socket.gethostname(),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "fednh": fednh.__version__,
        "source": _digest(Path(fednh.__file__).parent),
        "torch": metadata.version("torch"),
        "numpy": metadata.version("numpy"),
        "cpu": cpu(),
    }


def _digest(folder: Path) -> str:
    """Of the package's source: two copies of one version may differ."""
    whole = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        whole.update(f"{file.relative_to(folder)}\n".encode() + file.read_bytes())
    return whole.hexdigest()[:12]


@dataclass(frozen=True)
class PackedMaterial:
    """A run's Material as it travels."""

    sources: Sources
    train: PackedSamples
    test: PackedSamples
    parts: PackedParts
    held_out: PackedParts
    sites: tuple[str, ...]
    code: bytes  # the network and the method: they may need `sources`, so they are unpickled later
    device: str

    @classmethod
    def of(cls, on: Material, sources: Sources, device: str, dumps: Callable[[Any], bytes]) -> PackedMaterial:
        train, test = PackedSamples.of(on.train), PackedSamples.of(on.test)
        parts, held_out = PackedParts.of(on.parts), PackedParts.of(on.held_out)
        return cls(sources, train, test, parts, held_out, on.sites, dumps((on.net, on.method)), device)

    def material(self) -> Material:
        install(self.sources)
        net, method = pickle.loads(self.code)
        train, test = self.train.samples(self.device), self.test.samples(self.device)
        return Material(train, test, self.parts, self.held_out, net, method, self.sites)


@dataclass(frozen=True)
class PackedStage:
    """What all clients of an exchange do, as it travels once."""

    number: int  # of the exchange in this run
    stage: Stage  # without its trees
    trees: list[Packed]  # what clients received, and the global model where it is measured
    records: dict[int, list[Packed]]  # what single clients received in place of it

    @classmethod
    def of(cls, number: int, stage: Stage) -> PackedStage:
        records = {client: pack([record]) for client, record in stage.records.items()}
        if isinstance(stage, Measuring) and stage.shared is not None:
            bare = replace(stage, down={}, shared={}, records={})
            return cls(number, bare, pack([stage.down, stage.shared]), records)
        return cls(number, replace(stage, down={}, records={}), pack([stage.down]), records)

    def whole(self, device: str) -> Stage:
        down, *shared = unpack(self.trees, device)
        records = {client: next(unpack(packed, device)) for client, packed in self.records.items()}
        stage = replace(self.stage, down=down, records=records)
        return replace(stage, shared=shared[0]) if shared and isinstance(stage, Measuring) else stage


@dataclass(frozen=True)
class Done:
    """What comes back from a job."""

    results: list[PackedResults]
    seconds: float
    problem: str = ""  # a sentence: why there are no results; an exception may not survive the way


class Bench:
    """Where an actor works: one client or one block at a time, in one thread."""

    def __init__(self, packed: PackedMaterial):
        torch.set_num_threads(1)  # as in the pool's threads: a sum's last bits depend on how many share it
        memory.keep_freed()
        self.device = packed.device
        self.material = packed.material()

    number = -1  # of the exchange that `stage` belongs to
    stage: Stage

    def work(self, packed: PackedStage, units: Sequence[Unit], kept: Sequence[list[Packed]]) -> Done:
        began = time.perf_counter()
        if self.number != packed.number:
            self.number, self.stage = packed.number, packed.whole(self.device)
        results = []
        for unit, mine in zip(units, kept, strict=True):
            try:
                found = self.stage(self.material, unit, list(unpack(mine, self.device)))
            except Exception as error:
                return Done([], 0.0, _sentence(error))
            results.append(PackedResults.of(found))
        return Done(results, time.perf_counter() - began)


def _sentence(error: Exception) -> str:
    if isinstance(error, RunError | UserError):
        return str(error)
    return f"on {socket.gethostname()}: {type(error).__name__}: {error}"
