"""What a Ray worker computes, on a machine that has nothing of the run.

Everything arrives through Ray: the samples once, what clients receive once an exchange, what a client kept with its
job. Nothing is read from or written to a disk.
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

import ray
import torch

from fednh import machine
from fednh.backends.tasks import ClientBatch, ClientTask, SimulatedData
from fednh.data.batches import Samples
from fednh.errors import RunError, UserError
from fednh.federated.client import ClientResult
from fednh.runs.run_folder import cpu

# --- serialisation --------------------------------------------------------------------------------------------------


def pack(value: Any) -> bytes:
    """The value with its tensors. Tensors of one memory, such as those of a block, stay in one and are sent once.

    torch's own format keeps strides: a sum over a tensor depends on its order in memory in the last bits.
    """
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpack(packed: bytes, device: str = "cpu") -> Any:
    return torch.load(io.BytesIO(packed), map_location=device, weights_only=False)


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
    """What a job returns, and where it was computed."""

    node: str
    cpu: str
    attempt: int  # 0: the first one
    results: bytes
    seconds: float


def versions() -> dict[str, str]:
    """What decides the bits of a result, and must be the same on all machines; Ray itself compares Python's version."""
    return {name: metadata.version(name) for name in ("torch", "numpy")}


def compute(device: str, refs: Sequence[Any], batches: Sequence[ClientBatch], kept: bytes) -> JobResult:
    """The packed results of the batches; `refs` are the packed data and the packed task.

    A failure is a RunError with a sentence: any other exception may not survive the way to the driver.
    """
    process: Any = ray._private.worker.global_worker  # nothing public tells the attempt
    attempt, node = process.core_worker.get_current_task_attempt_number(), ray.get_runtime_context().get_node_id()
    try:
        began, device = time.perf_counter(), _assigned(device)
        data, results = _data(refs[0], device), []
        for batch, mine in zip(batches, unpack(kept, device), strict=True):
            results.append([_sendable(result) for result in _task(refs[1], device)(data, batch, mine)])
    except UserError as error:
        raise RunError(str(error)) from None
    except Exception as error:
        raise RunError(f"on {socket.gethostname()}: {type(error).__name__}: {error}") from None
    return JobResult(node, cpu(), attempt, pack(results), time.perf_counter() - began)


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
