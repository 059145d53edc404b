"""What a Ray worker computes, on a machine that has this package and nothing of the run.

Everything arrives through Ray: the samples once, what clients receive once an exchange, what a client kept with its
job. Nothing is read from or written to a disk.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import platform
import socket
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray

import fednh
from fednh import machine
from fednh.backends.tasks import ClientBatch, ClientTask, SimulatedData
from fednh.data.batches import Samples
from fednh.data.partitions import Indices
from fednh.errors import UserError
from fednh.federated.client import ClientResult
from fednh.runs.run_folder import cpu

SAME = ("python", "fednh", "source", "torch", "numpy")  # what must be the same on all machines


@cache
def facts() -> dict[str, str]:
    """What this machine computes with."""
    return {
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


@dataclass(frozen=True)
class PackedParts(Sequence[Indices]):
    """Each client's indices, as two arrays instead of one for each client."""

    indices: NDArray[np.int64]
    ends: NDArray[np.int64]

    @classmethod
    def of(cls, parts: Sequence[Indices]) -> PackedParts:
        none = np.zeros(0, np.int64)
        return cls(np.concatenate([*parts, none]), np.cumsum([len(part) for part in parts], dtype=np.int64))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, client: Any) -> Any:
        return self.indices[self.ends[client - 1] if client else 0 : self.ends[client]].copy()  # shared: not writable


def pack_data(data: SimulatedData, dumps: Callable[[Any], bytes]) -> tuple[SimulatedData, bytes]:
    """The data for Ray's object store, and the network and the method as `dumps` pickles them."""
    train, test = as_arrays(data.train), as_arrays(data.test)
    parts, held_out, code = PackedParts.of(data.parts), PackedParts.of(data.held_out), dumps((data.net, data.method))
    empty: Any = None
    return SimulatedData(train, test, parts, held_out, empty, empty, data.sites), code


def unpack_data(packed: SimulatedData, code: bytes, device: str) -> SimulatedData:
    net, method = pickle.loads(code)
    train, test = as_tensors(packed.train, device), as_tensors(packed.test, device)
    return replace(packed, train=train, test=test, net=net, method=method)


# --- jobs -----------------------------------------------------------------------------------------------------------


def compute(
    wanted: Mapping[str, str], device: str, refs: Sequence[Any], batches: Sequence[ClientBatch], kept: bytes
) -> dict[str, Any]:
    """This machine's facts and, if they are as `wanted`, the packed results of the batches and their seconds.

    `refs` are the packed data and the packed task. A failure is returned as a sentence, "error": an exception may
    not survive the way to the driver.
    """
    here = facts()
    if any(here[key] != wanted[key] for key in SAME):
        return here
    device = _assigned(device)
    began, data = time.perf_counter(), _data(refs[0], device)
    if not batches:
        return here
    task, results = _task(refs[1], device), []
    for batch, mine in zip(batches, unpack(kept, device), strict=True):
        try:
            results.append([_sendable(result) for result in task(data, batch, mine)])
        except Exception as error:
            return {**here, "error": _sentence(error)}
    return {**here, "results": pack(results), "seconds": time.perf_counter() - began}


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


def _sentence(error: Exception) -> str:
    if isinstance(error, UserError):
        return str(error)
    return f"on {socket.gethostname()}: {type(error).__name__}: {error}"
