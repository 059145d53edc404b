"""What a program gives instead of a file, as arrays and tables: data frames of any library, dicts, tensors, lists.

No library is imported for it: pandas, Polars and torch are known by what their objects offer. Tables need pyarrow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fednh import extras
from fednh.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa

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
