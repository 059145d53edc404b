"""Trees in messages: one array per name, in numpy's own format; what arrives is not trusted.

The header of an array declares its type and shape. Before any number is read, both are compared with the expected
form, and the number of bytes received with the number that the form needs: a small message cannot claim a large array.
"""

from __future__ import annotations

import math
from io import BytesIO

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from numpy.lib import format as npy

from fednh.core import checks
from fednh.core.checks import Form
from fednh.core.tree import Tree, arranged
from fednh.flower.bounds import quoted
from fednh.words import one_line

TYPES = {
    torch.from_numpy(np.empty(0, kind)).dtype: np.dtype(kind)
    for kind in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "?")
}
MAGIC = npy.magic(1, 0)
HEADER = 1 << 10  # bytes; numpy writes 128 for what travels here


def to_arrays(tree: Tree) -> ArrayRecord:
    """A tree as the record that a message carries."""
    plain = {name: value.detach().cpu().contiguous().numpy() for name, value in tree.items()}
    return ArrayRecord({name: Array.from_numpy_ndarray(value) for name, value in plain.items()})


def to_tree(record: ArrayRecord, device: str = "cpu", form: Form | None = None) -> Tree:
    """A tree from a message, copied and arranged: the bits of a result must not depend on how the message stored it.

    With a `form`, a tree of another form is refused before anything is allocated.
    """
    try:
        heads = {name: _head(array) for name, array in record.items()}
    except Exception as error:  # numpy's parsers raise many kinds on bytes that they do not expect
        raise ValueError(f"its arrays cannot be read: {one_line(str(error), 200)}") from error
    found: Form = {name: (shape, dtype) for name, (shape, dtype, _) in heads.items()}
    if form is not None and (problem := checks.form_problem(found, form)):
        raise ValueError(problem)
    return arranged({name: _tensor(record[name], *head).to(device) for name, head in heads.items()})


def _head(array: Array) -> tuple[tuple[int, ...], torch.dtype, int]:
    """Shape, type and the offset of the numbers; checks that exactly the bytes they need follow."""
    if array.stype != "numpy.ndarray":
        raise ValueError(f"{quoted(array.stype)} is not a kind of array that travels here")
    if array.data[: len(MAGIC)] != MAGIC:
        raise ValueError("it is not in numpy's format 1.0")
    file = BytesIO(array.data[:HEADER])
    file.seek(len(MAGIC))
    shape, columns, dtype = npy.read_array_header_1_0(file, max_header_size=HEADER)
    known = [mine for mine, theirs in TYPES.items() if theirs == dtype]
    if not known or columns or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"{quoted(str(dtype))} of shape {quoted(shape)} is not an array that travels here")
    needed, there = math.prod(shape) * dtype.itemsize, len(array.data) - file.tell()
    if needed != there:
        raise ValueError(f"its header declares {needed} bytes, and {there} follow")
    return shape, known[0], file.tell()


def _tensor(array: Array, shape: tuple[int, ...], dtype: torch.dtype, start: int) -> torch.Tensor:
    values = np.frombuffer(array.data, TYPES[dtype], math.prod(shape), start)
    return torch.from_numpy(values.reshape(shape).copy())
