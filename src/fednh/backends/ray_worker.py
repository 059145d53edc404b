"""The far side of a cluster: what an actor of Ray does on a machine that has this package and nothing of the run.

Everything arrives through Ray: the samples once, what clients receive once an exchange, what a client kept with its
job. Nothing is read from or written to a disk.
"""

from __future__ import annotations

import hashlib
import pickle
import platform
import socket
import subprocess
import sys
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import fednh
from fednh import machine
from fednh.backends.tasks import ClientBatch, ClientTask, EvaluateTask, Measured, SimulatedData
from fednh.data.batches import Samples
from fednh.data.partitions import Indices
from fednh.errors import RunError, UserError
from fednh.federated.client import ClientResult
from fednh.runs.run_folder import cpu
from fednh.tree import Tree

# --- last words -----------------------------------------------------------------------------------------------------
# A sentence for the case that Ray ends this process: it does so, at once, when this machine's part of it is lost.
#
# A tiny process waits at the other end of a pipe. If the pipe closes without a goodbye, it prints the sentence. What
# was saved is intact, as after any kill.


_WAIT = "import sys; sys.stdin.buffer.read() or print(sys.argv[1], file=sys.stderr)"


class LastWords:
    def __init__(self, sentence: str):
        # A session of its own: Ctrl-C is not for it.
        command = [sys.executable, "-I", "-S", "-c", _WAIT, sentence]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        )

    def not_needed(self) -> None:
        with suppress(OSError, subprocess.TimeoutExpired):
            self._process.communicate(b"goodbye", timeout=5)


# --- user code ------------------------------------------------------------------------------------------------------
# A user's own modules on other machines: their source travels, so that nothing need be copied there by hand.
#
# What is installed (in site-packages) must be installed on every machine; what lies anywhere else, such as a method
# in the current folder, is sent as text and imported from there.


Sources = dict[str, tuple[str, str, bool]]  # module -> its file, its text, and whether it is a package


def gather() -> Sources:
    """The modules of this process that were read from a file outside of Python's own folders and of this package."""
    found: Sources = {}
    installed = tuple(
        Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")
    )
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        origin = getattr(spec, "origin", None)
        if name.partition(".")[0] in ("fednh", "__main__") or spec is None or not str(origin).endswith(".py"):
            continue
        file = Path(str(origin))
        if not file.is_file() or any(file.resolve().is_relative_to(folder) for folder in installed):
            continue
        if "site-packages" in file.parts or "dist-packages" in file.parts:
            continue
        found[name] = str(file), file.read_text(encoding="utf-8"), spec.submodule_search_locations is not None
    return found


def install(sources: Sources) -> None:
    """Have these modules imported from their texts; those that were installed so before are replaced."""
    for finder in [finder for finder in sys.meta_path if isinstance(finder, _Finder)]:
        sys.meta_path.remove(finder)
    if sources:
        sys.meta_path.insert(0, _Finder(sources))


class _Finder(MetaPathFinder):
    def __init__(self, sources: Sources):
        self.sources = sources

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in self.sources:
            file, _, package = self.sources[name]
            return spec_from_loader(name, _Text(self.sources), origin=file, is_package=package)
        if any(other.startswith(f"{name}.") for other in self.sources):  # a folder without __init__.py
            spec = ModuleSpec(name, None, is_package=True)
            return spec
        return None


class _Text(Loader):
    def __init__(self, sources: Mapping[str, tuple[str, str, bool]]):
        self.sources = sources

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        file, text, _ = self.sources[module.__name__]
        module.__file__ = file
        exec(compile(text, file, "exec"), module.__dict__)


# --- packing --------------------------------------------------------------------------------------------------------
# Trees as NumPy arrays for Ray's object store, which shares arrays between the processes of a machine without a copy.
#
# Trees of one form, such as the uploads of a block, travel as one array a name. A tensor comes back with the same
# bits and the same order in memory: a sum over a tensor depends on that order in its last bits.


_Form = tuple[tuple[str, torch.dtype, tuple[int, ...], tuple[int, ...]], ...]  # name, type, shape, axes in memory


@dataclass(frozen=True)
class Packed:
    """Some neighbours among trees that have one form."""

    form: _Form
    count: int
    arrays: tuple[NDArray[Any], ...]  # one a name: (count, ...), the axes in their order in memory


def pack(trees: Sequence[Tree]) -> list[Packed]:
    """The trees as arrays; neighbours of one form share theirs."""
    return [_together(form, list(alike)) for form, alike in groupby(trees, _form_of)]


def unpack(packed: Sequence[Packed], device: str = "cpu", apart: bool = True) -> Iterator[Tree]:
    """The trees, in torch's own memory: what was shared is given back. `apart`: each tensor in memory of its own."""
    for some in packed:
        columns = []
        for (_, dtype, _, axes), array in zip(some.form, some.arrays, strict=True):
            rows = [_copy(row, dtype) for row in array] if apart else list(_copy(array, dtype))
            back = [axes.index(axis) for axis in range(len(axes))]
            columns.append([row.permute(back).to(device) for row in rows])
        names = [name for name, *_ in some.form]
        for k in range(some.count):
            yield {name: column[k] for name, column in zip(names, columns, strict=True)}


def _form_of(tree: Tree) -> _Form:
    return tuple((name, value.dtype, tuple(value.shape), _axes(value)) for name, value in tree.items())


def _axes(value: Tensor) -> tuple[int, ...]:
    """The axes from the slowest to the fastest in memory, where the tensor lies there without gaps."""
    if value.is_contiguous():
        return tuple(range(value.ndim))
    strides = value.stride()
    axes = tuple(sorted(range(value.ndim), key=lambda axis: -strides[axis]))
    return axes if value.permute(axes).is_contiguous() else tuple(range(value.ndim))


def _together(form: _Form, trees: Sequence[Tree]) -> Packed:
    arrays = []
    for name, _, _, axes in form:
        rows = [_array(tree[name].permute(axes)) for tree in trees]
        arrays.append(rows[0][None] if len(rows) == 1 else np.stack(rows))
    return Packed(form, len(trees), tuple(arrays))


def _array(value: Tensor) -> NDArray[Any]:
    value = value.detach().cpu().contiguous()
    return value.view(torch.int16).numpy() if value.dtype == torch.bfloat16 else value.numpy()  # NumPy lacks bfloat16


def _copy(array: NDArray[Any], dtype: torch.dtype) -> Tensor:
    """In memory that torch has allocated: how it is aligned may decide the last bits of a product."""
    value = torch.empty(array.shape, dtype=dtype)
    _array_of(value)[...] = array
    return value


def _array_of(value: Tensor) -> NDArray[Any]:
    return value.view(torch.int16).numpy() if value.dtype == torch.bfloat16 else value.numpy()


@dataclass(frozen=True)
class PackedResults:
    """The results of one unit: the trees as arrays, the rest as it is."""

    rest: list[Any]
    trees: tuple[list[Packed], ...]  # an Update's keep and upload, or a Measured's model

    @classmethod
    def of(cls, results: Sequence[ClientResult | Measured]) -> PackedResults:
        updates = [result for result in results if (isinstance(result, ClientResult) and result.upload is not None)]
        models = [r.model for r in results if isinstance(r, Measured) and r.model is not None]
        return cls(
            [_without_trees(result) for result in results],
            (pack([u.keep for u in updates]), pack([u.upload or {} for u in updates]), pack(models)),
        )

    def results(self, device: str, apart: bool) -> list[Any]:
        keep, upload, model = (unpack(packed, device, apart) for packed in self.trees)
        found: list[Any] = []
        for result in self.rest:
            if isinstance(result, ClientResult) and result.upload is not None:
                found.append(replace(result, keep=next(keep), upload=next(upload)))
            elif isinstance(result, Measured) and result.model is not None:
                found.append(replace(result, model=next(model)))
            else:
                found.append(result)
        return found


def _without_trees(result: ClientResult | Measured) -> ClientResult | Measured:
    if isinstance(result, ClientResult) and result.upload is not None:
        return replace(result, keep={}, upload={})
    if isinstance(result, ClientResult):
        return replace(result, error=None)  # an exception may hold anything, and need not travel
    return result if result.model is None else replace(result, model={})


@dataclass(frozen=True)
class PackedSamples:
    """A split's samples; `arrays` are shared, never copied, on every machine that has them."""

    arrays: dict[str, NDArray[Any]]
    rest: Samples  # without its tensors

    @classmethod
    def of(cls, samples: Samples) -> PackedSamples:
        tensors = {"x": samples.x, "y": samples.y, "gain": samples.gain, "shift": samples.shift}
        nothing = torch.zeros(0)
        empty = replace(samples, x=nothing, y=nothing, gain=nothing, shift=nothing)
        return cls({name: _array(value) for name, value in tensors.items()}, empty)

    def samples(self, device: str) -> Samples:
        with warnings.catch_warnings():
            # Arrays in the object store cannot be written to, and torch knows no such tensors. Batches are copies.
            warnings.filterwarnings("ignore", message=".*not writable", category=UserWarning)
            found = {name: torch.from_numpy(array).to(device) for name, array in self.arrays.items()}
        return replace(self.rest, x=found["x"], y=found["y"], gain=found["gain"], shift=found["shift"])


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


# --- hand -----------------------------------------------------------------------------------------------------------


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
    def of(cls, on: SimulatedData, sources: Sources, device: str, dumps: Callable[[Any], bytes]) -> PackedMaterial:
        train, test = PackedSamples.of(on.train), PackedSamples.of(on.test)
        parts, held_out = PackedParts.of(on.parts), PackedParts.of(on.held_out)
        return cls(sources, train, test, parts, held_out, on.sites, dumps((on.net, on.method)), device)

    def material(self) -> SimulatedData:
        install(self.sources)
        net, method = pickle.loads(self.code)
        train, test = self.train.samples(self.device), self.test.samples(self.device)
        return SimulatedData(train, test, self.parts, self.held_out, net, method, self.sites)


@dataclass(frozen=True)
class PackedStage:
    """What all clients of an exchange do, as it travels once."""

    number: int  # of the exchange in this run
    stage: ClientTask  # without its trees
    trees: list[Packed]  # what clients received, and the global model where it is measured
    records: dict[int, list[Packed]]  # what single clients received in place of it

    @classmethod
    def of(cls, number: int, stage: ClientTask) -> PackedStage:
        records = {client: pack([record]) for client, record in stage.records.items()}
        if isinstance(stage, EvaluateTask) and stage.shared is not None:
            bare = replace(stage, down={}, shared={}, records={})
            return cls(number, bare, pack([stage.down, stage.shared]), records)
        return cls(number, replace(stage, down={}, records={}), pack([stage.down]), records)

    def whole(self, device: str) -> ClientTask:
        down, *shared = unpack(self.trees, device)
        records = {client: next(unpack(packed, device)) for client, packed in self.records.items()}
        stage = replace(self.stage, down=down, records=records)
        return replace(stage, shared=shared[0]) if shared and isinstance(stage, EvaluateTask) else stage


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
        machine.keep_freed()
        self.device = packed.device
        self.material = packed.material()

    number = -1  # of the exchange that `stage` belongs to
    stage: ClientTask

    def work(self, packed: PackedStage, units: Sequence[ClientBatch], kept: Sequence[list[Packed]]) -> Done:
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
