"""Data that a program gives instead of a file: `fednh.run(data=...)`, and what `py:package.module:function` returns.

Arrays and tables may be data frames of any library, dicts, tensors or lists. No library is imported for them: pandas,
Polars and torch are known by what their objects offer. Tables need pyarrow.

The run records `memory:NAME`: the name of a Dataset, or else a checksum of what was given. The data are not kept, so
only a program that gives the same data again can resume the run.
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
from fednh.data.sources import Source
from fednh.data.sources.csv import EXTRA
from fednh.data.sources.npz import KEYS, MEDMNIST_KEYS, from_arrays
from fednh.data.sources.table import Tabular, from_table
from fednh.errors import DataError, UserError
from fednh.extras import imported_function

if TYPE_CHECKING:
    import pyarrow as pa

FORMS = (
    "(x, y), (x, y, site), (x_train, y_train, x_test, y_test), a dict of arrays with the names of an .npz file, a data "
    "frame, or a Dataset"
)


def array(value: Any, what: str) -> NDArray[Any]:
    """An array, a tensor on any device, a series or a list as an array."""
    if isinstance(value, np.ndarray):
        return value
    try:
        if hasattr(value, "detach"):  # a tensor
            value = value.detach().cpu().numpy()
        made: NDArray[Any] = np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise DataError(f"{what} cannot be made one array: {str(error).splitlines()[0]}") from error
    return made


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
        raise DataError(f"the data frame cannot be read as a table: {str(error).splitlines()[0]}") from error


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


def _rows(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> pa.Table:
    """Rows as dicts; None is a missing value."""
    import pyarrow as pa

    columns = {}
    for name in names:
        if lacking := [at for at, row in enumerate(rows) if name not in row]:
            where = "the row" if len(rows) == 1 else f"row {lacking[0]}"
            raise DataError(f"{where} lacks the column {name!r}; None stands for a value that is missing")
        values = [value.item() if isinstance(value, np.generic) else value for value in (row[name] for row in rows)]
        try:
            columns[name] = pa.array(values)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):  # of several kinds: each as it is spelled
            columns[name] = pa.array(
                [None if value is None else _spelled(value, name) for value in values], pa.string()
            )
    return pa.table(columns)


def _spelled(value: Any, name: str) -> str:
    if not isinstance(value, str | int | float | bool):
        raise DataError(f"a row has {type(value).__name__} in the column {name!r}; give a number or a text")
    return str(value)


@dataclass(frozen=True)
class Memory(Tabular):
    prefix = "memory"
    address = "NAME"
    example = "visits"
    help = "what a program gave to fednh.run(data=...)"

    def read(self, name: str, address: str) -> Dataset:
        raise DataError(
            f"the data {name} were given in Python and are not kept; give them again there, for example "
            "fednh.resume(RUN, data=...)"
        )

    def taken(self, data: Any) -> Dataset:
        """What a program gives, as a data set."""
        if is_frame(data):
            return _named_by_checksum(from_table("memory", table(data), "the data frame", self))
        if isinstance(data, Dataset):
            dataset = replace(data, name=f"{self.prefix}:{data.name}") if data.name else _named_by_checksum(data)
        else:
            dataset = _named_by_checksum(
                from_arrays("memory", "data", _arrays(data, "data"), self.classes or (), self.group)
            )
        return self.restricted(dataset, "data")

    @classmethod
    def file(cls, address: str) -> Path | None:
        return None


def is_given(data: Any) -> bool:
    """Whether these are data, and not a name or settings."""
    if data is None or isinstance(data, str | Path):
        return False
    return not isinstance(data, Mapping) or any(key in data for key in (KEYS[0], MEDMNIST_KEYS[0]))


def _named_by_checksum(data: Dataset) -> Dataset:
    """Named by a checksum of its contents, so that reports do not take different data for the same."""
    text = json.dumps(data.fingerprint, sort_keys=True)
    return replace(data, name=f"{Memory.prefix}:{hashlib.sha256(text.encode()).hexdigest()[:8]}")


def _arrays(data: Any, where: str) -> dict[str, NDArray[Any]]:
    """Arrays by the names that an .npz file has for them."""
    if isinstance(data, Mapping):
        named = dict(data)
    elif isinstance(data, tuple | list) and len(data) in (2, 3, 4):
        named = dict(zip((*KEYS[:2], "site_train") if len(data) == 3 else KEYS, data, strict=False))
    else:
        raise DataError(f"{where} is of the type {type(data).__name__}; give {FORMS}")
    return {str(key): array(value, f"{where}: {key}") for key, value in named.items()}


@dataclass(frozen=True)
class Python(Source):
    """A function takes nothing and returns a Dataset, a dict of arrays as in an .npz file, or a tuple of 2 or 4 arrays.

    The tuple is (x_train, y_train) or (x_train, y_train, x_test, y_test). The function is importable from here or
    installed.
    """

    prefix = "py"
    address = "MODULE:FUNCTION"
    example = "mydata:load"
    help = "what a Python function returns"
    runs_code = True

    def read(self, name: str, address: str) -> Dataset:
        module, _, function = address.partition(":")
        if not module or not function:
            raise DataError(f"{name!r} should be py:package.module:function")
        load = imported_function(address, "data.name")
        try:
            given = load()
        except UserError:
            raise
        except Exception as error:  # whatever a person's own code may raise
            raise DataError(f"{name} failed: {type(error).__name__}: {error}") from error
        if isinstance(given, Dataset):
            return given
        return from_arrays(name, name, _arrays(given, name), self.classes or (), self.group)

    @classmethod
    def file(cls, address: str) -> Path | None:
        return None
