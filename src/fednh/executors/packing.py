"""Trees as NumPy arrays for Ray's object store, which shares arrays between the processes of a machine without a copy.

Trees of one form, such as the uploads of a block, travel as one array a name. A tensor comes back with the same bits
and the same order in memory: a sum over a tensor depends on that order in its last bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fednh.core.client import Update
from fednh.core.tree import Tree
from fednh.data.batches import Samples
from fednh.data.partitions import Indices
from fednh.executors.work import Failure, Measured

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
    def of(cls, results: Sequence[Update | Failure | Measured]) -> PackedResults:
        updates = [result for result in results if isinstance(result, Update)]
        models = [r.model for r in results if isinstance(r, Measured) and r.model is not None]
        return cls(
            [_without_trees(result) for result in results],
            (pack([u.keep for u in updates]), pack([u.upload for u in updates]), pack(models)),
        )

    def results(self, device: str, apart: bool) -> list[Any]:
        keep, upload, model = (unpack(packed, device, apart) for packed in self.trees)
        found: list[Any] = []
        for result in self.rest:
            if isinstance(result, Update):
                found.append(replace(result, keep=next(keep), upload=next(upload)))
            elif isinstance(result, Measured) and result.model is not None:
                found.append(replace(result, model=next(model)))
            else:
                found.append(result)
        return found


def _without_trees(result: Update | Failure | Measured) -> Update | Failure | Measured:
    if isinstance(result, Update):
        return replace(result, keep={}, upload={})
    if isinstance(result, Failure):
        return Failure(result.words)  # an exception may hold anything, and need not travel
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
