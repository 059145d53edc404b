"""Reads tables, CSV or Parquet: a label column, perhaps a site and a split column, and features for all the rest.

A number is a feature of its own; what is missing is NaN until it takes the mean of the training rows that count (see
scaling.py). A category becomes one slot for each value that training rows have, and one for everything else, missing
values included. `vectors` does the same to raw rows later, from a model card's preprocessing alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fednh.data.dataset import Dataset
from fednh.data.scaling import measure
from fednh.data.sources.options import Options, in_order, numbered, test_rows
from fednh.errors import UserError, did_you_mean

if TYPE_CHECKING:
    import pyarrow as pa

SPLITS = {"train": "train", "test": "test", "val": "", "valid": "", "validation": ""}
MISSING = ["", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "?"]
MANY_VALUES = 100  # a text column with more, in more than half of its rows, is a name or a note


def dataset(name: str, path: Path, options: Options) -> Dataset:
    """The table at `path` as a data set."""
    return from_table(name, read(path), str(path), options)


def read(path: Path) -> pa.Table:
    """A CSV or Parquet file; a folder's train.* and test.* become one table with a split column."""
    try:
        import pyarrow as pa
        from pyarrow import csv, parquet
    except ImportError as error:
        raise UserError("tables need the extra `tables`: pip install 'fednh[tables]'") from error
    if path.is_dir():
        return _parts(path)
    if not path.is_file():
        raise UserError(f"{path} does not exist; check the path of the table")
    try:
        if path.suffix == ".parquet" or path.read_bytes()[:4] == b"PAR1":
            return parquet.ParquetFile(path).read()
        convert = csv.ConvertOptions(null_values=MISSING, strings_can_be_null=True)
        return csv.read_csv(path, convert_options=convert)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as a table: {str(error).splitlines()[0].rstrip('.')}") from error


def _parts(folder: Path) -> pa.Table:
    import pyarrow as pa

    found = []
    for split in ("train", "test"):
        files = sorted(f for f in folder.glob(f"{split}*") if f.suffix in (".csv", ".parquet"))
        if not files and split == "train":
            raise UserError(f"{folder} holds no train.csv or train.parquet; give a file, or a folder with these")
        for file in files:
            rows = read(file)
            found.append(rows.append_column("split", pa.array([split] * len(rows), pa.string())))
    text = {f.name for rows in found for f in rows.schema if pa.types.is_string(f.type)}
    for at, rows in enumerate(found):  # a category may look like numbers in one of the files
        for name in text & set(rows.column_names):
            if not pa.types.is_string(rows.schema.field(name).type):
                words = pa.array(_texts(rows, name), pa.string())
                found[at] = rows = rows.set_column(rows.column_names.index(name), name, words)
    try:
        return pa.concat_tables(found, promote_options="permissive")
    except pa.ArrowException as error:
        raise UserError(f"{folder}: train and test have different columns: {str(error).splitlines()[0]}") from error


def from_table(name: str, table: pa.Table, where: str, options: Options) -> Dataset:
    """The rows with what they hold: label, site, split, features."""
    header = table.column_names
    if twice := [column for column in header if header.count(column) > 1]:
        raise UserError(f"{where} has two columns named {twice[0]!r}; rename one")
    label = find_column(where, header, options.label, "label", needed=True)
    site = find_column(where, header, options.site, "site", needed=False)
    table, test, has_split = _split(table, {label, site})
    if len(table) == 0:
        raise UserError(f"{where} holds no row")
    y, classes = numbered(_words(table, label, where), options.classes, where)
    if options.test_share and not has_split:
        test = test_rows(y, options.test_share)
    if test.all():
        raise UserError(f"{where} holds test rows only; training rows are those whose split is 'train'")
    preprocessing: dict[str, Any] = {
        "kind": "table",
        "columns": _described(where, table, {label, site, "split" if has_split else ""}, ~test, options),
    }
    x = vectors(table, preprocessing, where)
    names = _words(table, site, where) if site else []
    sites = tuple(in_order({n for n, t in zip(names, test, strict=True) if not t})) if site else ()
    number = {n: k for k, n in enumerate(sites)}
    place = np.array([number.get(n, -1) for n in names], np.int64)
    mean, std = measure(x[~test], 1.0, preprocessing)
    return Dataset(
        name,
        x[~test],
        y[~test],
        x[test],
        y[test],
        classes,
        mean,
        std,
        1.0,
        sites=sites,
        site_train=place[~test] if sites else None,
        site_test=place[test] if sites else None,
        fitted=True,
        preprocessing=preprocessing,
        notes=_gaps(where, table, preprocessing["columns"]),
    )


def vectors(table: pa.Table, preprocessing: dict[str, Any], where: str = "the table") -> NDArray[np.float32]:  # (N, F)
    """Raw rows as samples, before `(v / scale - mean) / std`; a missing number is NaN and takes the mean."""
    features: list[NDArray[Any]] = []
    for column in preprocessing["columns"]:
        if column["name"] not in table.column_names:
            raise UserError(f"{where} lacks the column {column['name']!r}")
        if column["kind"] == "number":
            features.append(_numbers(table, column["name"], where)[:, None])
        else:
            slot = {value: k for k, value in enumerate(column["values"])}
            chosen = [slot.get(value, len(slot)) for value in _texts(table, column["name"])]
            features.append(np.eye(len(slot) + 1, dtype=np.float32)[chosen])
    return np.concatenate(features, axis=1).astype(np.float32)


def find_column(where: str, header: Sequence[str], chosen: str | None, usual: str, needed: bool) -> str:
    name = chosen or usual
    if name in header:
        return name
    if chosen or needed:
        hint = did_you_mean(name, header)
        raise UserError(f"{where} has no column {name!r}{hint}; say which one it is with data.{usual}")
    return ""


def _split(table: pa.Table, used: set[str]) -> tuple[pa.Table, NDArray[np.bool_], bool]:
    """Training and test rows; which of them are test rows; whether the table says so."""
    if "split" not in table.column_names or "split" in used:
        return table, np.zeros(len(table), bool), False
    words = [SPLITS.get((value or "").lower()) for value in _texts(table, "split")]
    if any(word is None for word in words):  # a feature that happens to have this name
        return table, np.zeros(len(table), bool), False
    kept = np.array([bool(word) for word in words])
    return table.filter(kept), np.array([word == "test" for word in words if word], bool), True


def _described(
    where: str, table: pa.Table, aside: set[str], train: NDArray[np.bool_], options: Options
) -> list[dict[str, Any]]:
    """The features: as agreed in data.columns, else all columns that are left, as their training rows have them."""
    if options.columns:
        if strangers := [name for name in options.columns if name not in table.column_names]:
            raise UserError(f"{where} lacks the column {strangers[0]!r} of data.columns")
        return [
            {"name": name, "kind": "number"}
            if kind == "number"
            else {"name": name, "kind": "category", "values": list(kind)}
            for name, kind in options.columns.items()
        ]
    found: list[dict[str, Any]] = []
    rows = table.filter(train)
    for name in table.column_names:
        if name in aside:
            continue
        kind = _kind(where, table, name)
        if kind == "number":
            found.append({"name": name, "kind": "number"})
            continue
        values = in_order({value for value in _texts(rows, name) if value is not None})
        if len(values) > MANY_VALUES and 2 * len(values) > len(rows):
            raise UserError(
                f"{where}: the text column {name!r} has {len(values)} different values in {len(rows)} rows, so it "
                "names rows rather than describing them; list the columns to use in data.columns"
            )
        found.append({"name": name, "kind": "category", "values": values})
    if not found:
        raise UserError(f"{where} holds no feature beside {', '.join(sorted(filter(None, aside)))}")
    return found


def _kind(where: str, table: pa.Table, name: str) -> str:
    import pyarrow.types as t

    kind = table.schema.field(name).type
    if t.is_dictionary(kind):
        kind = kind.value_type
    if t.is_integer(kind) or t.is_floating(kind) or t.is_boolean(kind) or t.is_decimal(kind) or t.is_null(kind):
        return "number"
    if t.is_string(kind) or t.is_large_string(kind):
        return "category"
    raise UserError(f"{where}: the column {name!r} holds {kind}, neither numbers nor text; convert it or leave it out")


def _numbers(table: pa.Table, name: str, where: str) -> NDArray[np.float64]:
    import pyarrow as pa

    try:
        column = table.column(name).cast(pa.float64(), safe=False)
    except pa.ArrowException as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{where}: the column {name!r} should hold numbers, but does not ({reason})") from error
    values: NDArray[np.float64] = column.to_numpy().astype(np.float64)
    if np.isinf(values.astype(np.float32)).any():
        raise UserError(f"{where}: the column {name!r} holds an infinite value; correct or remove it")
    return values


def _texts(table: pa.Table, name: str) -> list[str | None]:
    """Values as words; None for what is missing."""
    return [None if v is None or v != v else word(v) for v in table.column(name).to_pylist()]


def word(value: Any) -> str:
    """3, 3.0 and "3" are the same word, yes and no are true and false."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip()


def _words(table: pa.Table, name: str, where: str) -> list[str]:
    words = _texts(table, name)
    if lacking := sum(word is None for word in words):
        raise UserError(
            f"{where}: {lacking} of {len(words)} rows have nothing in the column {name!r}; fill or remove them"
        )
    return [str(word) for word in words]


def _gaps(where: str, table: pa.Table, columns: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """What is missing, and what becomes of it."""
    found = []
    for column in columns:
        missing = sum(value is None for value in _texts(table, column["name"]))
        if missing:
            becomes = (
                "take the mean of the training rows (with natural sites, of the site's own)"
                if column["kind"] == "number"
                else "count as unknown"
            )
            found.append(f"{where}: {missing} of {len(table)} values of {column['name']!r} are missing and {becomes}")
    return tuple(found)
