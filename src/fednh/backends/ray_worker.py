"""What a Ray worker computes, on a machine that has nothing of the run.

Everything arrives through Ray: the samples once, what clients receive once an exchange, what a client kept with its
job. Nothing is read from or written to a disk. Uploads of which only the sum is needed are added up where they are:
a job returns the sums of its own clients, and `combine` makes one of several. The driver sees the last one alone.
"""

from __future__ import annotations

import io
import os
import pickle
import socket
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import metadata
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from torch import Tensor

from fednh import machine
from fednh.backends.tasks import ClientBatch, ClientTask, SimulatedData, TrainTask
from fednh.data.batches import Samples
from fednh.errors import RunError, UserError
from fednh.federated import checks
from fednh.federated.aggregate import SumRule
from fednh.federated.client import ClientResult
from fednh.runs.run_folder import cpu
from fednh.tree import FAN, SumTree, Tree, compact, size

# --- serialisation --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Packed:
    """A pickled value, and the memory of its tensors beside it: Ray copies that once, into its object store."""

    text: bytes
    memory: list[NDArray[np.uint8]]

    @property
    def nbytes(self) -> int:
        return len(self.text) + sum(each.nbytes for each in self.memory)


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO):
        super().__init__(file, protocol=5)
        self.memory: list[NDArray[np.uint8]] = []
        self.places: dict[int, int] = {}  # address -> which of them

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        form = value.dtype, tuple(value.shape), value.stride()
        if value.device.type == "meta":
            return None, 0, *form
        storage = value.detach().cpu().untyped_storage()
        place = self.places.get(storage.data_ptr()) if storage.nbytes() else None
        if place is None:
            place = self.places[storage.data_ptr()] = len(self.memory)
            self.memory.append(torch.empty(0, dtype=torch.uint8).set_(storage).numpy())
        return place, value.storage_offset(), *form


class _Unpacker(pickle.Unpickler):
    def __init__(self, packed: Packed, device: str, own: bool):
        super().__init__(io.BytesIO(packed.text))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*not writable", category=UserWarning)
            made = (torch.from_numpy(each.copy() if own else each) for each in packed.memory)
            self.memory = [each.to(device).untyped_storage() for each in made]
        self.device = device

    def persistent_load(self, place: Any) -> Tensor:
        number, offset, dtype, shape, stride = place
        if number is None:
            return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return torch.empty(0, dtype=dtype, device=self.device).set_(self.memory[number], offset, shape, stride)


def pack(value: Any) -> Packed:
    """The value with its tensors. Tensors of one memory, such as those of a block, stay in one and are sent once.

    Strides stay: a sum over a tensor depends on its order in memory in the last bits.
    """
    packer = _Packer(file := io.BytesIO())
    packer.dump(value)
    return Packed(file.getvalue(), packer.memory)


def unpack(packed: Packed, device: str = "cpu", own: bool = True) -> Any:
    """The value; unless its memory is its `own`, it is Ray's, and who writes to it ends the process."""
    return _Unpacker(packed, device, own).load()


SHARED = ("x", "y", "gain", "shift")  # the tensors of Samples


def as_arrays(samples: Samples) -> Samples:
    """With NumPy arrays in place of tensors: Ray shares them, without a copy, between the processes of a machine."""
    arrays: dict[str, Any] = {name: getattr(samples, name).cpu().numpy() for name in SHARED}
    return replace(samples, **arrays)


def as_tensors(samples: Samples, device: str) -> Samples:
    with warnings.catch_warnings():
        # Arrays in the object store cannot be written to, and torch knows no such tensors. Batches are copies.
        warnings.filterwarnings("ignore", message=".*not writable", category=UserWarning)
        tensors: dict[str, Any] = {name: torch.from_numpy(getattr(samples, name)).to(device) for name in SHARED}
    return replace(samples, **tensors)


def pack_data(data: SimulatedData, dumps: Callable[[Any], bytes]) -> tuple[Samples, Samples, bytes, dict[str, str]]:
    """For Ray's object store: the samples, the rest as `dumps` pickles it, and this machine's versions."""
    rest: Any = {"train": None, "test": None}
    return as_arrays(data.train), as_arrays(data.test), dumps(replace(data, **rest)), versions()


def unpack_data(train: Samples, test: Samples, rest: bytes, device: str) -> SimulatedData:
    data: SimulatedData = pickle.loads(rest)
    return replace(data, train=as_tensors(train, device), test=as_tensors(test, device))


# --- jobs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JobResult:
    """What a job returns to the driver, and where it was computed."""

    node: str
    cpu: str
    attempt: int  # 0: the first one
    results: Packed
    seconds: float
    summed: bool = False  # whether uploads stayed there, in the job's sums, which are ...
    places: tuple[int, ...] = ()  # ... of those at these places of the round's order


@dataclass(frozen=True)
class Sums:
    """Sums of a part of a round's uploads, in their order: what `SumTree.add` takes, packed."""

    trees: Packed  # a list of (tree, group, level)
    attempt: int = 0  # of the job that made it, of these clients ...
    clients: int = 0
    again: int = 0  # ... and how many clients were computed again for what it is made of


def versions() -> dict[str, str]:
    """What decides the bits of a result, and must be the same on all machines; Ray itself compares Python's version."""
    return {name: metadata.version(name) for name in ("torch", "numpy")}


def compute(
    device: str, refs: Sequence[Any], batches: Sequence[ClientBatch], kept: Sequence[Any], first: int
) -> tuple[JobResult, Sums | None]:
    """The packed results of the batches, and the sums of their uploads where the task wants no more of them.

    `refs` are the packed data and the packed task, `kept` has what the clients kept or a reference to it; `first` is
    the place of the first client in the round's order. A failure is a RunError with a sentence: any other exception may
    not survive the way to the driver.
    """
    process: Any = ray._private.worker.global_worker  # nothing public tells the attempt
    attempt, node = process.core_worker.get_current_task_attempt_number(), ray.get_runtime_context().get_node_id()
    try:
        began, device = time.perf_counter(), _assigned(device)
        data, results, sums = _data(refs[0], device), list[list[Any]](), None
        places: tuple[int, ...] = ()
        task = _task(refs[1], device) if batches else None
        mine = ray.get(kept[0]) if isinstance(kept[0], ray.ObjectRef) else kept[0]
        for batch, states in zip(batches, unpack(mine, device), strict=True):
            assert task is not None
            results.append([_sendable(result) for result in task(data, batch, states)])
        if isinstance(task, TrainTask) and task.sums is not None:
            clients = [client for batch in batches for client in batch]
            flat = [result for batch in results for result in batch]
            places, trees = _job_sums([len(data.parts[client]) for client in clients], flat, first, task.sums)
            sums = Sums(pack(trees), attempt, len(clients))
            results = [[_form_alone(result) for result in batch] for batch in results]
    except UserError as error:
        raise RunError(str(error)) from None
    except Exception as error:
        raise RunError(f"on {socket.gethostname()}: {type(error).__name__}: {error}") from None
    seconds = time.perf_counter() - began
    return JobResult(node, cpu(), attempt, pack(results), seconds, sums is not None, places), sums


def _job_sums(
    samples: Sequence[int], results: Sequence[ClientResult], first: int, rule: SumRule
) -> tuple[tuple[int, ...], list[tuple[Tree, int, int]]]:
    """The places of the uploads that can be used, and their sums: of groups that begin here, the others one by one.

    The driver refuses the same results, by the same checks (rounds.py), and tells why.
    """
    groups, places = dict[int, list[Tree]](), []
    for place, (result, number) in enumerate(zip(results, samples, strict=True), first):
        upload = result.upload
        if upload is None or checks.not_finite(result) or checks.form_of(upload) != rule.forms:
            continue
        groups.setdefault(place // FAN, []).append(rule.scaled(upload, number / rule.reference))
        places.append(place)
    trees = []
    for group, uploads in groups.items():
        if len(uploads) > 1 and group * FAN >= first:
            sums = SumTree()
            for upload in uploads:
                sums.add(upload, group)
            uploads = [sums.total()]
        trees += [(compact(tree), group, 0) for tree in uploads]
    return tuple(places), trees


def _form_alone(result: ClientResult) -> ClientResult:
    """The result with an upload that has no numbers; what it would cost to send is known still."""
    if result.upload is None:
        return result
    upload = {name: value.to("meta") for name, value in result.upload.items()}
    return replace(result, upload=upload, bytes_up=size(result.upload) if result.bytes_up is None else result.bytes_up)


def combine(known: Sequence[int], group: int, level: int, *parts: Sums) -> Sums:
    """The sum of all parts, neighbours in their order, which is that of a group of this level.

    `known` are the attempts of which the driver knows: a part of a later one was lost since and computed again.
    """
    torch.set_num_threads(1)
    total, again = SumTree(), 0
    for attempt, part in zip(known, parts, strict=True):
        again += part.again + (part.clients if part.attempt > attempt else 0)
        for tree, number, where in unpack(part.trees, own=False):
            total.add(tree, number, where)
    return Sums(pack([(total.total(level), group, level)]), again=again)


@lru_cache(maxsize=1)
def _data(ref: Any, device: str) -> SimulatedData:
    torch.set_num_threads(1)  # as in the threads of one machine: a sum's last bits depend on how many share it
    machine.keep_freed()
    train, test, rest, wanted = ray.get(ref)
    for name, installed in versions().items():
        if installed != wanted[name]:
            raise RunError(
                f"the machine {socket.gethostname()} has {name} {installed}, the driver {wanted[name]}; install the "
                f"same versions"
            )
    return unpack_data(train, test, rest, device)


@lru_cache(maxsize=1)
def _task(ref: Any, device: str) -> ClientTask:
    task: ClientTask = unpack(ray.get(ref), device)
    return task


def _assigned(device: str) -> str:
    """The accelerator that Ray has assigned to this job; a worker may get another one for the next job.

    Ray hides the others through CUDA_VISIBLE_DEVICES, which CUDA reads only once in a process.
    """
    ids = ray.get_runtime_context().get_accelerator_ids().get("GPU")
    if device == "cpu" or not ids:
        return device
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    return f"{device}:{ids[0]}"


def _sendable(result: Any) -> Any:
    """An exception may hold anything, and need not be picklable."""
    return replace(result, error=None) if isinstance(result, ClientResult) else result
