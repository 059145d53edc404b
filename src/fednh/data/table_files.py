"""Files of rows as Arrow tables: CSV in any form, Parquet, and folders of both.

A CSV file has no types: all its columns are text here, numbers with a decimal point.
"""

from __future__ import annotations

import csv as plain_csv
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fednh import extras
from fednh.data import columns, delimited
from fednh.data.delimited import FOUND, Form, Usual
from fednh.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa

EXTRA = "tables"  # of this package: pyarrow
BLOCK = 256  # rows of numbers that are read at a time
USUAL = {"encoding": "utf-8", "separator": ",", "decimal": "."}
WRITTEN = {"fednh": "written"}  # metadata of a table from a CSV file


def read(path: Path, form: Form = FOUND) -> pa.Table:
    """A CSV or Parquet file; a folder's train.* and test.* become one table with a split column."""
    extras.need(EXTRA, "a table")
    import pyarrow as pa
    from pyarrow import parquet

    if path.is_dir():
        return _parts(path, form)
    if not path.is_file():
        raise UserError(f"{path} does not exist; check the path of the table")
    try:
        if is_parquet(path):
            return parquet.ParquetFile(path).read()
        return _text(path, form)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as a table: {str(error).splitlines()[0].rstrip('.')}") from error


def _text(path: Path, form: Form) -> pa.Table:
    """A CSV file, all of its columns as text; the table's metadata say in which form the file was."""
    import pyarrow as pa
    from pyarrow import csv

    encoding = delimited.encoding_of(path, form)
    separator = delimited.separator_of(path, encoding, form)
    how, parse = csv.ReadOptions(encoding=encoding), csv.ParseOptions(delimiter=separator)
    with csv.open_csv(path, how, parse) as start:
        text = {name: pa.string() for name in start.schema.names}
    convert = csv.ConvertOptions(column_types=text, strings_can_be_null=False)
    table = csv.read_csv(path, how, parse, convert)
    decimal = delimited.decimal_of(table, separator, form, str(path))
    table = delimited.with_points(table) if decimal == "," else table
    used = {"encoding": encoding, "separator": separator, "decimal": decimal}
    return table.replace_schema_metadata({**WRITTEN, **used})


def form_of(table: pa.Table) -> dict[str, str]:
    """The form of the CSV file that a table was read from: encoding, separator, decimal; nothing that is usual."""
    about = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    return {key: about[key] for key, usual in USUAL.items() if about.get(key, usual) != usual}


def is_parquet(path: Path) -> bool:
    """Whether a file is Parquet, by its suffix or its first bytes."""
    if path.suffix == ".parquet":
        return True
    with path.open("rb") as file:
        return file.read(4) == b"PAR1"


def _parts(folder: Path, form: Form) -> pa.Table:
    import pyarrow as pa

    found = []
    for split in ("train", "test"):
        files = sorted(f for f in folder.glob(f"{split}*") if f.suffix in (".csv", ".parquet"))
        if not files and split == "train":
            raise UserError(f"{folder} holds no train.csv or train.parquet; give a file, or a folder with these")
        for file in files:
            rows = read(file, form)
            form = replace(form, usual=Usual(**{**form.usual._asdict(), **form_of(rows)}))
            found.append(rows.append_column("split", pa.array([split] * len(rows), pa.string())))
    return joined(found, str(folder))


def joined(parts: Sequence[pa.Table], where: str) -> pa.Table:
    """One table of all rows; a column that is text in one part and something else in another becomes text."""
    import pyarrow as pa

    found, text = list(parts), {f.name for rows in parts for f in rows.schema if pa.types.is_string(f.type)}
    for at, rows in enumerate(found):
        for name in text & set(rows.column_names):
            if not pa.types.is_string(rows.schema.field(name).type):
                values, index = columns.words(rows.column(name), name, where)
                words = pa.array(values, pa.string()).take(pa.array(index, mask=index < 0))
                found[at] = rows = rows.set_column(rows.column_names.index(name), name, words)
    try:
        whole = pa.concat_tables(found, promote_options="permissive")
    except pa.ArrowException as error:
        raise UserError(f"{where}: train and test have different columns: {str(error).splitlines()[0]}") from error
    return whole.replace_schema_metadata(next((p.schema.metadata for p in parts if is_written(p)), None))


def is_written(table: pa.Table) -> bool:
    """Whether a table comes from a CSV file: its columns are text, whatever they hold."""
    return (table.schema.metadata or {}).get(b"fednh") == b"written"


def rows_of_numbers(path: Path, width: int, form: Form = FOUND) -> Iterator[NDArray[np.float64]]:
    """A CSV file of numbers; a first line without numbers is a heading."""
    try:
        name = delimited.encoding_of(path, form)
        separator = delimited.separator_of(path, name, form)
        decimal = form.decimal or form.usual.decimal or ("." if separator == "," else ",")
        with path.open(newline="", encoding="utf-8-sig" if name == "utf-8" else name) as file:
            rows = plain_csv.reader(file, delimiter=separator)
            lines = ([delimited.number(value, decimal) for value in row] for row in rows)
            head = next(lines, [])
            rest = lines if head and not _all_numbers(head) else chain([head], lines)
            done = 0
            while block := list(islice(rest, BLOCK)):
                bad = next((i for i, row in enumerate(block) if not _all_numbers(row) or len(row) != width), None)
                if bad is not None:
                    raise UserError(f"{path}: row {done + bad} is not {width} numbers: {','.join(block[bad])}")
                yield np.array([[float(value) for value in row] for row in block])
                done += len(block)
    except (OSError, UnicodeDecodeError, plain_csv.Error, ValueError) as error:
        raise UserError(f"{path} cannot be read as CSV: {error}") from error


def numbers_of(table: pa.Table, width: int, where: str) -> NDArray[np.float64]:  # (N, F)
    """The rows of a table for a model of arrays, which knows no names of columns."""
    names = table.column_names
    if len(names) != width:
        some = ", ".join(names[:8]) + ", ..." * (len(names) > 8)
        takes = f"this model was trained on arrays and takes rows of {width} numbers"
        raise UserError(f"{where}: {takes}, but this table has {len(names)} columns: {some}")
    return np.stack([columns.numbers(table.column(k), name, where) for k, name in enumerate(names)], axis=1)


def _all_numbers(row: Sequence[str]) -> bool:
    try:
        return bool([float(value) for value in row])
    except ValueError:
        return False
