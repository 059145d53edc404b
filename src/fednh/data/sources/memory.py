"""Data from a person's own Python function: `py:package.module:function`, importable from here or installed.

The function takes nothing and returns a Dataset, a dict of arrays with the names of an .npz file, or the tuple
(x_train, y_train) or (x_train, y_train, x_test, y_test).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fednh import extras
from fednh.data.dataset import Dataset
from fednh.data.sources.base import Source, restricted
from fednh.data.sources.columns import numbered, word
from fednh.data.sources.npz import KEYS, MEDMNIST_KEYS, from_arrays
from fednh.data.sources.table import Tabular, from_table
from fednh.errors import UserError
from fednh.extras import imported_function

if TYPE_CHECKING:
    import pyarrow as pa


# --- given ----------------------------------------------------------------------------------------------------------
# What a program gives instead of a file, as arrays and tables: data frames of any library, dicts, tensors, lists.
#
# No library is imported for it: pandas, Polars and torch are known by what their objects offer. Tables need pyarrow.


EXTRA = "tables"  # of this package: pyarrow


def array(value: Any, what: str) -> NDArray[Any]:
    """An array, a tensor on any device, a series or a list as an array."""
    if isinstance(value, np.ndarray):
        return value
    try:
        if hasattr(value, "detach"):  # a tensor
            value = value.detach().cpu().numpy()
        found: NDArray[Any] = np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise UserError(f"{what} cannot be made one array: {str(error).splitlines()[0]}") from error
    return found


def is_frame(value: Any) -> bool:
    """Whether it is a data frame or an Arrow table: something with columns that have names."""
    streams = any(hasattr(value, way) for way in ("__arrow_c_stream__", "__arrow_c_array__", "__dataframe__"))
    pandas = type(value).__module__.partition(".")[0] == "pandas"
    named = hasattr(value, "columns") or hasattr(value, "schema")  # a series has neither
    return (streams or pandas) and named


def table(frame: Any) -> pa.Table:
    """A data frame of pandas, Polars or another library, or an Arrow table or batch; pandas' index is no column."""
    extras.need(EXTRA, "a data frame")
    import pyarrow as pa

    try:
        if type(frame).__module__.partition(".")[0] == "pandas":
            return pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata(None)
        if hasattr(frame, "__dataframe__") and not hasattr(frame, "__arrow_c_stream__"):
            from pyarrow import interchange

            return interchange.from_dataframe(frame)
        return pa.table(frame)
    except (pa.ArrowException, TypeError, ValueError, NotImplementedError) as error:
        raise UserError(f"the data frame cannot be read as a table: {str(error).splitlines()[0]}") from error


def is_dicts(value: Any) -> bool:
    """Whether it is a row as a dict, a list of rows, or a dict of columns."""
    rows = value if isinstance(value, list | tuple) else [value]
    return bool(rows) and all(isinstance(row, Mapping) for row in rows)


def dicts(value: Any, names: Sequence[str]) -> pa.Table:
    """A row as a dict, a list of rows, or a dict of columns, of which those of these names are used."""
    extras.need(EXTRA, "rows as dicts")
    if isinstance(value, Mapping):
        columns = [not isinstance(each, str) and np.ndim(each) > 0 for each in value.values()]
        if columns and all(columns):
            return table(dict(value))
        value = [value]
    return _rows(value, names)


def _rows(found: Sequence[Mapping[str, Any]], names: Sequence[str]) -> pa.Table:
    """Rows as dicts; None is a missing value."""
    import pyarrow as pa

    columns = {}
    for name in names:
        if lacking := [at for at, row in enumerate(found) if name not in row]:
            where = "the row" if len(found) == 1 else f"row {lacking[0]}"
            raise UserError(f"{where} lacks the column {name!r}; None stands for a value that is missing")
        values = [value.item() if isinstance(value, np.generic) else value for value in (row[name] for row in found)]
        try:
            columns[name] = pa.array(values)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):  # of several kinds: each as it is spelled
            columns[name] = pa.array(
                [None if value is None else _spelled(value, name) for value in values], pa.string()
            )
    return pa.table(columns)


def _spelled(value: Any, name: str) -> str:
    if not isinstance(value, str | int | float | bool):
        raise UserError(f"a row has {type(value).__name__} in the column {name!r}; give a number or a text")
    return str(value)


# --- memory ---------------------------------------------------------------------------------------------------------
# Data that a program gives instead of a name: `fednh.run(data=...)`, with arrays, a data frame or a Dataset.
#
# The run records `memory:NAME`: the name of a Dataset, or else a checksum of what was given. They are not kept, so
# only a program that gives the same data again can go on with the run.


FORMS = (
    "(x, y), (x, y, site), (x_train, y_train, x_test, y_test), a dict of arrays with the names of an .npz file, a data "
    "frame, or a Dataset"
)


@dataclass(frozen=True)
class Memory(Tabular):
    prefix = "memory"
    address = "NAME"
    example = "visits"
    help = "what a program gave to fednh.run(data=...)"

    def read(self, name: str, address: str) -> Dataset:
        raise UserError(
            f"the data {name} were given in Python and are not kept; give them again there, for example "
            "fednh.resume(RUN, data=...)"
        )

    def taken(self, data: Any) -> Dataset:
        """What a program gives, as a data set."""
        if is_frame(data):
            return _called(from_table("memory", table(data), "the data frame", self))
        if isinstance(data, Dataset):
            found = replace(data, name=f"{self.prefix}:{data.name}") if data.name else _called(data)
        else:
            arrays, agreed = _named(_arrays(data), self.classes or [])
            found = _called(from_arrays("memory", "data", arrays, agreed, self.group))
        return restricted(found, self, "data")

    @classmethod
    def file(cls, address: str) -> Path | None:
        return None


def is_given(data: Any) -> bool:
    """Whether these are data, and not a name or settings."""
    if data is None or isinstance(data, str | Path):
        return False
    return not isinstance(data, Mapping) or any(key in data for key in (KEYS[0], MEDMNIST_KEYS[0]))


def _called(data: Dataset) -> Dataset:
    """Named by a checksum of the contents, so that reports do not take different data for the same."""
    text = json.dumps(data.fingerprint, sort_keys=True)
    return replace(data, name=f"{Memory.prefix}:{hashlib.sha256(text.encode()).hexdigest()[:8]}")


def _arrays(data: Any) -> dict[str, NDArray[Any]]:
    """Arrays by the names that an .npz file has for them."""
    if isinstance(data, Mapping):
        named = dict(data)
    elif isinstance(data, tuple | list) and len(data) in (2, 3, 4):
        named = dict(zip((*KEYS[:2], "site_train") if len(data) == 3 else KEYS, data, strict=False))
    else:
        raise UserError(f"data is of the type {type(data).__name__}; give {FORMS}")
    return {str(key): array(value, f"data: {key}") for key, value in named.items()}


def _named(arrays: dict[str, NDArray[Any]], agreed: list[str]) -> tuple[dict[str, NDArray[Any]], list[str]]:
    """The arrays with classes as numbers, and the names of the classes where labels are names."""
    if "site_train" in arrays:
        arrays["site_train"] = _words(arrays["site_train"], "site_train")
    labels = [key for key in (KEYS[1], KEYS[3], MEDMNIST_KEYS[1], MEDMNIST_KEYS[3]) if key in arrays]
    words = {key: _words(arrays[key], key) for key in labels}
    if not any(found.dtype.kind == "U" for found in words.values()):
        return arrays, agreed
    every = [str(name) for found in words.values() for name in found.reshape(-1)]
    numbers, classes = numbered(every, agreed, "data")
    parts = np.split(numbers, np.cumsum([found.size for found in words.values()])[:-1])
    return {**arrays, **dict(zip(words, parts, strict=True))}, list(classes)


def _words(values: NDArray[Any], key: str) -> NDArray[Any]:
    """Names as text; numbers as they are."""
    if values.dtype.kind not in "bOSU":
        return values
    wrong = next((value for value in values.reshape(-1).tolist() if not isinstance(value, str | int)), None)
    if wrong is not None or None in values.reshape(-1).tolist():
        raise UserError(f"data: {key} holds {wrong!r}; give every sample a name or a number")
    return np.array([word(value) for value in values.reshape(-1).tolist()], str)


# --- python ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Python(Source):
    prefix = "py"
    address = "MODULE:FUNCTION"
    example = "mydata:load"
    help = "what a Python function returns"
    runs_code = True

    def read(self, name: str, address: str) -> Dataset:
        return dataset(name, address, self.classes or (), self.group)

    @classmethod
    def file(cls, address: str) -> Path | None:
        return None


def dataset(name: str, address: str, agreed: Sequence[str], group: str | None = None) -> Dataset:
    """What the function at `address` returns, checked."""
    module, _, function = address.partition(":")
    if not module or not function:
        raise UserError(f"{name!r} should be py:package.module:function")
    load = imported_function(address, "data.name")
    try:
        found = load()
    except UserError:
        raise
    except Exception as error:  # whatever a person's own code may raise
        raise UserError(f"{name} failed: {type(error).__name__}: {error}") from error
    if isinstance(found, Dataset):
        return found
    if isinstance(found, tuple) and len(found) in (2, 4):
        found = dict(zip(KEYS, found, strict=False))
    if not isinstance(found, dict):
        raise UserError(
            f"{name} returned {type(found).__name__}; it should return a Dataset, a dict of arrays, or "
            "(x_train, y_train) with or without (x_test, y_test)"
        )
    return from_arrays(name, name, found, agreed, group)
