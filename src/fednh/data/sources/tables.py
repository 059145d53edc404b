"""Reads tables, CSV or Parquet: a label column, perhaps a site and a split column, and features for all the rest.

A number is a feature of its own; what is missing is NaN until it takes the mean of the training rows that count (see
scaling.py). A category becomes one slot for each value that training rows have, and one for everything else, missing
values included. `encode` does the same to raw rows later, from a model card's preprocessing alone.
"""

from __future__ import annotations

import csv as plain_csv
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fednh import extras
from fednh.data import columns, site_choice
from fednh.data.columns import MISSING
from fednh.data.dataset import Dataset, Inputs
from fednh.data.encoding import checked
from fednh.data.labels import in_order, numbered
from fednh.data.scaling import measure
from fednh.data.sources.base import Source
from fednh.data.sources.settings import Column, Columns, Encoding
from fednh.data.test_set import test_rows
from fednh.errors import Notice, UserError, did_you_mean
from fednh.storage.files import expanded

if TYPE_CHECKING:
    import pyarrow as pa

EXTRA = "tables"  # of this package: pyarrow
SPLITS = {"train": "train", "test": "test", "val": "", "valid": "", "validation": ""}
MANY_VALUES = 100  # a text column with more, in more than half of its rows, is a name or a note
BLOCK = 256  # rows of numbers that are read at a time
WRITTEN = {"fednh": "written"}  # metadata of a table from a CSV file: its columns are text, whatever they hold


@dataclass(frozen=True)
class Tabular(Source):
    """A source with rows and columns."""

    named = True
    chooses = True

    label: Column = None
    site: Column = None
    columns: Columns = None


@dataclass(frozen=True)
class Table(Tabular):
    """A file of either kind, whatever the prefix says, or a folder with files for training and test rows."""

    address = "FILE"
    extra = EXTRA

    encoding: Encoding = None

    def read(self, name: str, address: str) -> Dataset:
        path = expanded(address)
        return from_table(name, read(path, self.encoding), str(path), self)

    def inputs(self, name: str, address: str, preprocessing: Mapping[str, Any]) -> Inputs:
        """The rows; which column the label was is not needed."""
        if preprocessing.get("kind") != "table":
            return super().inputs(name, address, preprocessing)
        return vectors(read(expanded(address), self.encoding), preprocessing)

    def unlabelled(
        self, path: Path, shape: tuple[int, ...], preprocessing: Mapping[str, Any]
    ) -> Iterator[NDArray[Any]]:
        """Rows with the columns that the model was trained on, or, where it was trained on arrays, rows of numbers."""
        if len(shape) == 3:
            raise UserError(f"{path}: this model takes images, not tables")
        if preprocessing.get("kind") == "table":
            return iter([told(*encode(read(path, self.encoding), preprocessing, str(path)))])
        return rows_of_numbers(path, shape[0], self.encoding)


@dataclass(frozen=True)
class Csv(Table):
    prefix = "csv"
    example = "patients.csv"
    help = "a table with a label column"
    suffixes = (".csv",)


@dataclass(frozen=True)
class Parquet(Table):
    prefix = "parquet"
    example = "patients.parquet"
    help = "the same as Parquet"
    suffixes = (".parquet",)


def read(path: Path, encoding: str | None = None) -> pa.Table:
    """A CSV or Parquet file; a folder's train.* and test.* become one table with a split column."""
    extras.need(EXTRA, "a table")
    import pyarrow as pa
    from pyarrow import csv, parquet

    if path.is_dir():
        return _parts(path, encoding)
    if not path.is_file():
        raise UserError(f"{path} does not exist; check the path of the table")
    try:
        if path.suffix == ".parquet" or _starts_with(path, b"PAR1"):
            return parquet.ParquetFile(path).read()
        how = csv.ReadOptions(encoding=checked(path, encoding))
        with csv.open_csv(path, how) as start:
            text = {name: pa.string() for name in start.schema.names}
        convert = csv.ConvertOptions(column_types=text, strings_can_be_null=False)
        return csv.read_csv(path, how, convert_options=convert).replace_schema_metadata(WRITTEN)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as a table: {str(error).splitlines()[0].rstrip('.')}") from error


def as_table(frame: Any) -> pa.Table:
    """A data frame, or whatever else gives Arrow its columns."""
    import pyarrow as pa

    try:
        return pa.table(frame)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise UserError(f"the data frame cannot be read as a table: {str(error).splitlines()[0]}") from error


def _starts_with(path: Path, start: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(start)) == start


def _parts(folder: Path, encoding: str | None) -> pa.Table:
    import pyarrow as pa

    found = []
    for split in ("train", "test"):
        files = sorted(f for f in folder.glob(f"{split}*") if f.suffix in (".csv", ".parquet"))
        if not files and split == "train":
            raise UserError(f"{folder} holds no train.csv or train.parquet; give a file, or a folder with these")
        for file in files:
            rows = read(file, encoding)
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
    return whole.replace_schema_metadata(WRITTEN if any(map(_written, parts)) else None)


def _written(table: pa.Table) -> bool:
    return (table.schema.metadata or {}).get(b"fednh") == b"written"


def from_table(name: str, table: pa.Table, where: str, options: Tabular) -> Dataset:
    """The rows with what they hold: label, site, split, features."""
    header = _header(table, where)
    label = find_column(where, header, options.label, "label", needed=True)
    site = find_column(where, header, options.site, "site", needed=False)
    table, test, has_split = _split(table, {label, site}, where)
    if len(table) == 0:
        raise UserError(f"{where} holds no row")
    written = _written(table)
    names = columns.names(table.column(site), site, where, written) if site else []
    if site_choice.is_made(options):
        here = site_choice.rows_of(names, options, where)
        table, test, names = table.filter(here), test[here], [n for n, kept in zip(names, here, strict=True) if kept]
    agreed = options.classes or ()
    said = columns.names(table.column(label), label, where, written, agreed)
    y, classes = numbered(said, agreed, where)
    if options.test_share and not has_split:
        test = test_rows(y, options.test_share)
    if test.all():
        raise UserError(f"{where} holds test rows only; training rows are those whose split is 'train'")
    described, told = _described(where, table, {label, site, "split" if has_split else ""}, ~test, options)
    preprocessing: dict[str, Any] = {"kind": "table", "columns": described}
    x, gaps = encode(table, preprocessing, where)
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
        notes=(*told, *gaps),
    )


def vectors(
    table: pa.Table, preprocessing: Mapping[str, Any], where: str = "the table"
) -> NDArray[np.float32]:  # (N, F)
    """Raw rows as samples, before `(v / scale - mean) / std`; a missing number is NaN and takes the mean."""
    return encode(table, preprocessing, where)[0]


def encode(
    table: pa.Table, preprocessing: Mapping[str, Any], where: str
) -> tuple[NDArray[np.float32], tuple[str, ...]]:  # (N, F)
    """Raw rows as samples, and in words what is missing or was never seen, and what becomes of it."""
    features: list[NDArray[Any]] = []
    notes: list[str] = []
    header = _header(table, where)
    for column in preprocessing["columns"]:
        name = column["name"]
        if name not in header:
            raise UserError(f"{where} lacks the column {name!r}")
        if column["kind"] == "number":
            values = columns.numbers(table.column(name), name, where)
            if missing := int(np.isnan(values).sum()):
                becomes = "take the mean of the training rows (with natural sites, of the site's own)"
                notes.append(f"{where}: {missing} of {len(table)} values of {name!r} are missing and {becomes}")
            features.append(values[:, None])
        else:
            words, known = columns.words(table.column(name), name, where), column["values"]
            slots = columns.slots(words, known)
            notes += _unknown(where, name, len(table), words.missing(known), slots.unseen)
            features.append(np.eye(len(known) + 1, dtype=np.float32)[slots.place])
    return np.concatenate(features, axis=1).astype(np.float32), tuple(notes)


def told(x: NDArray[np.float32], notes: Sequence[str]) -> NDArray[np.float32]:  # (N, F)
    """The samples; missing and unseen values are reported."""
    for note in notes:
        warnings.warn(note, Notice, stacklevel=4)
    return x


def rows_of_numbers(path: Path, width: int, encoding: str | None) -> Iterator[NDArray[np.float64]]:
    """A CSV file of numbers; a first line without numbers is a heading."""
    try:
        name = checked(path, encoding)
        with path.open(newline="", encoding="utf-8-sig" if name == "utf-8" else name) as file:
            lines = plain_csv.reader(file)
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


def _all_numbers(row: Sequence[str]) -> bool:
    try:
        return bool([float(value) for value in row])
    except ValueError:
        return False


def _unknown(where: str, name: str, rows: int, missing: int, unseen: dict[str, int]) -> list[str]:
    """How many values of a category are unknown, and which."""
    shown = ", ".join(repr(value) for value in list(unseen)[:5]) + ", ..." * (len(unseen) > 5)
    said = [f"{missing} of {rows} values of {name!r} are missing"] if missing else []
    if unseen:
        whose = f"of {rows} values of {name!r} " * (not missing)
        said.append(f"{sum(unseen.values())} {whose}were never seen in training or data.columns ({shown})")
    return [f"{where}: {' and '.join([*said, 'count as unknown'])}"] if said else []


def _header(table: pa.Table, where: str) -> list[str]:
    header: list[str] = table.column_names
    if twice := [column for column in header if header.count(column) > 1]:
        raise UserError(f"{where} has two columns named {twice[0]!r}; rename one")
    return header


def find_column(where: str, header: Sequence[str], chosen: str | None, usual: str, needed: bool) -> str:
    name = chosen or usual
    if name in header:
        return name
    if chosen or needed:
        hint = did_you_mean(name, header)
        raise UserError(f"{where} has no column {name!r}{hint}; say which one it is with data.{usual}")
    return ""


def _split(table: pa.Table, used: set[str], where: str) -> tuple[pa.Table, NDArray[np.bool_], bool]:
    """Training and test rows; which of them are test rows; whether the table says so."""
    if "split" not in table.column_names or "split" in used:
        return table, np.zeros(len(table), bool), False
    values, index = columns.words(table.column("split"), "split", where)
    parts = [*(SPLITS.get(value.lower()) for value in values), None]
    words = [parts[at] for at in index]
    if any(word is None for word in words):  # a feature that happens to have this name
        return table, np.zeros(len(table), bool), False
    kept = np.array([bool(word) for word in words])
    return table.filter(kept), np.array([word == "test" for word in words if word], bool), True


def _described(
    where: str, table: pa.Table, aside: set[str], train: NDArray[np.bool_], options: Tabular
) -> tuple[list[dict[str, Any]], list[str]]:
    """The features: as agreed in data.columns, else all columns that are left, as their training rows have them."""
    if options.columns:
        if strangers := [name for name in options.columns if name not in table.column_names]:
            raise UserError(f"{where} lacks the column {strangers[0]!r} of data.columns")
        return [
            {"name": name, "kind": "number"}
            if kind == "number"
            else {"name": name, "kind": "category", "values": list(kind)}
            for name, kind in options.columns.items()
        ], []
    found: list[dict[str, Any]] = []
    notes: list[str] = []
    rows, written = table.filter(train), _written(table)
    for name in table.column_names:
        if name in aside:
            continue
        if columns.kind(rows.column(name), name, where, written) == "number":
            found.append({"name": name, "kind": "number"})
            continue
        if written and (code := columns.code(rows.column(name))):
            notes.append(
                f"{where}: the column {name!r} holds codes such as {code!r}, no numbers, and is a category; "
                f'data.columns.{name} = "number" reads numbers'
            )
        found.append({"name": name, "kind": "category", "values": _values(where, rows, name, written)})
    if not found:
        raise UserError(f"{where} holds no feature beside {', '.join(sorted(filter(None, aside)))}")
    return found, notes


def _values(where: str, rows: pa.Table, name: str, written: bool) -> list[str]:
    """The different values of a category."""
    words = columns.words(rows.column(name), name, where)
    values = in_order({value for value in words.values if not (written and value in MISSING)})
    if len(values) > MANY_VALUES and 2 * len(values) > len(rows):
        raise UserError(
            f"{where}: the text column {name!r} has {len(values)} different values in {len(rows)} rows, so it "
            "names rows rather than describing them; list the columns to use in data.columns"
        )
    return values
