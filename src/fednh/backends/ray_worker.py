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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib import metadata
from typing import Any

import numpy as np
import ray
import torch

from fednh import machine
from fednh.backends.tasks import ClientBatch, ClientTask, SimulatedData
from fednh.data.batches import Samples
from fednh.data.partitions import Indices
from fednh.errors import UserError
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


def pack_parts(parts: Sequence[Indices]) -> Any:
    """Each client's indices, as two arrays instead of one for each client."""
    return np.concatenate([*parts, np.zeros(0, np.int64)]), np.cumsum([len(part) for part in parts], dtype=np.int64)


def unpack_parts(packed: tuple[Indices, Indices]) -> list[Indices]:
    indices, ends = packed
    return np.split(indices.copy(), ends[:-1])  # a copy can be written to, which torch wants


def pack_data(data: SimulatedData, dumps: Callable[[Any], bytes]) -> tuple[SimulatedData, bytes]:
    """The data for Ray's object store, and the network and the method as `dumps` pickles them."""
    train, test, parts, held_out = as_arrays(data.train), as_arrays(data.test), data.parts, data.held_out
    empty: Any = None
    packed = replace(data, train=train, test=test, parts=pack_parts(parts), held_out=pack_parts(held_out))
    return replace(packed, net=empty, method=empty), dumps((data.net, data.method))


def unpack_data(packed: Any, code: bytes, device: str) -> SimulatedData:
    net, method = pickle.loads(code)
    train, test = as_tensors(packed.train, device), as_tensors(packed.test, device)
    parts, held_out = unpack_parts(packed.parts), unpack_parts(packed.held_out)
    return SimulatedData(train, test, parts, held_out, net, method, packed.sites)


# --- jobs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JobResult:
    """What a job returns. A failure is a sentence: an exception may not survive the way to the driver."""

    node: str
    cpu: str
    attempt: int  # 0: the first one
    error: str = ""
    results: bytes = b""
    seconds: float = 0.0


@cache
def versions() -> dict[str, str]:
    """What decides the bits of a result, and must be the same on all machines; Ray itself compares Python's version."""
    return {name: metadata.version(name) for name in ("torch", "numpy")}


def compute(
    wanted: Mapping[str, str], device: str, refs: Sequence[Any], batches: Sequence[ClientBatch], kept: bytes
) -> JobResult:
    """The packed results of the batches; `refs` are the packed data and the packed task."""
    process: Any = ray._private.worker.global_worker  # nothing public tells the attempt
    attempt, node = process.core_worker.get_current_task_attempt_number(), ray.get_runtime_context().get_node_id()
    here, host = JobResult(node, cpu(), attempt), socket.gethostname()
    for name, mine in versions().items():
        if mine != wanted[name]:
            words = f"the machine {host} (node {node[:8]}) has {name} {mine}, the driver {wanted[name]}"
            return replace(here, error=f"{words}; install the same versions")
    try:
        began, device = time.perf_counter(), _assigned(device)
        data, results = _data(refs[0], device), []
        for batch, mine in zip(batches, unpack(kept, device), strict=True):
            results.append([_sendable(result) for result in _task(refs[1], device)(data, batch, mine)])
    except UserError as error:
        return replace(here, error=str(error))
    except Exception as error:
        return replace(here, error=f"on {host}: {type(error).__name__}: {error}")
    return replace(here, results=pack(results), seconds=time.perf_counter() - began)


@lru_cache(maxsize=1)
def _data(ref: Any, device: str) -> SimulatedData:
    torch.set_num_threads(1)  # as in the threads of one machine: a sum's last bits depend on how many share it
    machine.keep_freed()
    packed, code = ray.get(ref)
    return unpack_data(packed, code, device)


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
