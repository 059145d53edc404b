"""Trees in messages: a whole tree is one array of bytes in the safetensors format; what arrives is not trusted.

Flower sends every array of a record as two objects of its own, each with a call on every hop, so a tree travels as one.
The header of the bytes declares the name, type and shape of every tensor. Before any number is read, they are compared
with the expected form, and the number of bytes received with the number that they need: a small message cannot claim
a large tree.
"""

from __future__ import annotations

import math

import safetensors.numpy
import torch
from flwr.app import Array, ArrayRecord

from fednh.core import checks
from fednh.core.checks import Form
from fednh.core.tree import Tree, arranged
from fednh.flower import bounds
from fednh.flower.bounds import quoted
from fednh.words import one_line

TREE = "tree"  # the name of the one array
KIND = "safetensors"  # its serialisation type
TYPES = {
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
LENGTH = 8  # bytes; the length of the header comes first, little-endian
AXES = 16


def to_arrays(tree: Tree) -> ArrayRecord:
    """A tree as the record that a message carries; an empty tree is an empty record."""
    if not tree:
        return ArrayRecord()
    data = safetensors.numpy.save({name: value.detach().cpu().contiguous().numpy() for name, value in tree.items()})
    return ArrayRecord({TREE: Array(dtype="uint8", shape=(len(data),), stype=KIND, data=data)})


def to_tree(record: ArrayRecord, device: str = "cpu", form: Form | None = None) -> Tree:
    """A tree from a message, copied and arranged: the bits of a result must not depend on how the message stored it.

    With a `form`, a tree of another form is refused before anything is allocated.
    """
    found = form_of(record)
    if form is not None and (problem := checks.form_problem(found, form)):
        raise ValueError(problem)
    try:
        plain = safetensors.numpy.load(record[TREE].data) if record else {}
        tree = {name: torch.from_numpy(array) for name, array in plain.items()}
    except Exception as error:  # the header's offsets are checked by the library
        raise ValueError(f"its arrays cannot be read: {one_line(str(error), 200)}") from error
    if checks.form_of(tree) != found:
        raise ValueError("its arrays cannot be read: the header can be understood in two ways")
    return arranged({name: value.to(device) for name, value in tree.items()})


def form_of(record: ArrayRecord) -> Form:
    """The names, shapes and types that a record declares; ValueError unless exactly the bytes they need follow."""
    try:
        return _declared(record)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"its arrays cannot be read: {one_line(str(error), 200)}") from error


def _declared(record: ArrayRecord) -> Form:
    if not record:
        return {}
    if list(record) != [TREE]:
        raise ValueError(f"it holds {quoted(sorted(record))} where one array {TREE!r} belongs")
    array, data = record[TREE], record[TREE].data
    if (array.stype, array.dtype, tuple(array.shape)) != (KIND, "uint8", (len(data),)):
        raise ValueError(f"{quoted([array.stype, array.dtype, *array.shape])} is not a kind of array that travels here")
    length = int.from_bytes(data[:LENGTH], "little")
    if len(data) < LENGTH or length > min(len(data) - LENGTH, bounds.TEXT):
        raise ValueError(f"its {len(data)} bytes cannot hold a header of {length}")
    header = bounds.read_json(data[LENGTH : LENGTH + length].decode())
    if not isinstance(header, dict) or len(header) > bounds.NAMES:
        raise ValueError(f"its header is not a table of up to {bounds.NAMES} names")
    form = {name: _tensor(name, row) for name, row in header.items()}
    needed = sum(math.prod(shape) * dtype.itemsize for shape, dtype in form.values())
    if needed != (there := len(data) - LENGTH - length):
        raise ValueError(f"its header declares {needed} bytes, and {there} follow")
    return form


def _tensor(name: str, row: object) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and type of one tensor."""
    if not isinstance(row, dict) or row.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{quoted(name)} is described by {quoted(row)}")
    if not isinstance(row["dtype"], str) or row["dtype"] not in TYPES:
        raise ValueError(f"{quoted(name)} is of type {quoted(row['dtype'])}, which does not travel here")
    shape = bounds.numbers(row["shape"], 0, bounds.SAMPLE)
    if len(shape) > AXES:
        raise ValueError(f"{quoted(name)} has {len(shape)} axes, where up to {AXES} travel")
    return shape, TYPES[row["dtype"]]
