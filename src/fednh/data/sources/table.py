"""Reads tables, CSV or Parquet: a label column, perhaps a site and a split column, and features for all the rest.

A number is a feature of its own; what is missing is NaN until it takes the mean that the run scales by (scaling.py). A
category becomes one slot for each value that training rows have, and one for everything else, missing values included.
`encode` does the same to raw rows later, from a model card's preprocessing alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fednh.data import inspection
from fednh.data.dataset import Dataset, Inputs, Labels
from fednh.data.scaling import measure
from fednh.data.sources import (
    Column,
    Columns,
    Decimal,
    Encoding,
    Missing,
    MissingIndicator,
    Names,
    Separator,
    Source,
    columns,
)
from fednh.data.sources.columns import MISSING, in_order, numbered
from fednh.data.sources.csv import (
    EXTRA,
    FILE_SITE,
    CsvDialect,
    TrainingDialect,
    dialect_of,
    is_from_csv,
    is_parquet,
    numbers_of,
    read,
    rows_of_numbers,
)
from fednh.data.splits import from_rows, numbered_groups, test_rows
from fednh.errors import DataError, Notice, did_you_mean
from fednh.io.files import expanded
from fednh.text import some

if TYPE_CHECKING:
    import pyarrow as pa

SPLITS = {"train": "train", "test": "test", "val": "", "valid": "", "validation": ""}
TEXT_NUMBER = "text, by its number"  # a column for the numbers of texts, which become features elsewhere
MANY_VALUES = 100  # a text column with more, in more than half of its rows, is a name or a note


@dataclass(frozen=True)
class Tabular(Source):
    """A source with rows and columns."""

    named = True
    chooses = True

    label: Column = None  # the column that holds the class; None: "label"
    site: Column = None  # the column that holds the site; None: "site", if there is one
    columns: Columns = None
    ignore: Names = None  # columns that are no features
    missing: Missing = None  # values that mean missing, beside empty cells and words such as NA; for all, or by column
    missing_indicator: MissingIndicator = False  # after every number, a feature that is 1 where it is missing


@dataclass(frozen=True)
class Table(Tabular):
    """A file of either kind, whatever the prefix says, a folder with files for training and test rows, or several
    files that are sites: a folder of them or a pattern.
    """

    address = "FILE"
    extra = EXTRA

    encoding: Encoding = None
    separator: Separator = None  # between the values of a line; None: detected
    decimal: Decimal = None  # before the fraction of a number; None: detected

    @property
    def dialect(self) -> CsvDialect:
        """How its text files are to be read."""
        return CsvDialect(self.encoding, self.separator, self.decimal)

    def read(self, name: str, address: str) -> Dataset:
        path = expanded(address)
        ignored, agreed = self.ignore or (), self.columns
        of_interest = {*(agreed or ()), self.label or "label", self.site, self.group}
        table = read(path, self.dialect, lambda column: column in of_interest if agreed else column not in ignored)
        return from_table(name, table, str(path), self)

    def texts(self, name: str, address: str, column: str) -> tuple[Dataset, list[str]]:
        """The texts of a column, and a data set of which the only feature is the number of a sample's text."""
        path = expanded(address)
        table = read(path, self.dialect, lambda _: True)
        texts = column_texts(table, column, str(path))
        numbers = table.append_column(TEXT_NUMBER, [list(map(str, range(len(texts))))])
        return from_table(name, numbers, str(path), replace(self, columns={TEXT_NUMBER: "number"})), texts

    @classmethod
    def applicable(cls, address: str, known: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Columns that the table has; and the dialect of the file, which may be another than the run's."""
        stated, training = ({key: which.get(key) for key in TrainingDialect._fields} for which in (given, known))
        dialect = CsvDialect(**stated, training=TrainingDialect(**training))
        table = read(expanded(address), dialect, lambda column: False)
        columns = {key: known[key] for key in ("label", "site", "group") if known.get(key) in table.column_names}
        return {**columns, **dialect_of(table)}

    def inputs(self, name: str, address: str, preprocessing: Mapping[str, Any]) -> Inputs:
        """The rows; which column the label was is not needed."""
        if preprocessing.get("kind") != "table":
            return super().inputs(name, address, preprocessing)
        needed = {column["name"] for column in preprocessing["columns"]}
        return encode(read(expanded(address), self.dialect, needed.__contains__), preprocessing, "the table")[0]

    def unlabelled(
        self, path: Path, shape: tuple[int, ...], preprocessing: Mapping[str, Any]
    ) -> Iterator[NDArray[Any]]:
        """Rows with the columns that the model was trained on, or, where it was trained on arrays, rows of numbers."""
        if len(shape) == 3:
            raise DataError(
                f"{path}: this model takes images, not tables: image files, folders of them, or .npz arrays"
            )
        if preprocessing.get("kind") == "text":
            column = preprocessing["column"]
            table = read(path, self.dialect, lambda name: name == column)
            return iter([np.array(column_texts(table, column, str(path)), str)])
        if preprocessing.get("kind") == "table":
            return iter([warn_notes(*encode(read(path, self.dialect), preprocessing, str(path)))])
        if is_parquet(path):
            return iter([numbers_of(read(path), shape[0], str(path))])
        return rows_of_numbers(path, shape[0], self.dialect)


@dataclass(frozen=True)
class Csv(Table):
    prefix = "csv"
    example = "patients.csv"
    help = "a table with a label column; a folder of tables or 'DIR/*.csv': each file is a site"
    suffixes = (".csv",)


@dataclass(frozen=True)
class Parquet(Table):
    prefix = "parquet"
    example = "patients.parquet"
    help = "the same as Parquet"
    suffixes = (".parquet",)


def column_texts(table: pa.Table, column: str, where: str) -> list[str]:
    """The texts of a column; an empty cell is an empty text."""
    if column not in table.column_names:
        raise DataError(f"{where} has no column {column!r} with texts{did_you_mean(column, table.column_names)}")
    return ["" if text is None else str(text) for text in table.column(column).to_pylist()]


def from_table(name: str, table: pa.Table, where: str, options: Tabular) -> Dataset:
    """A data set of the rows: the columns of label, site, group and split, and all others as features."""
    header = _header(table, where)
    label = find_column(where, header, options.label, "label", needed=True)
    site = _site_column(where, header, options)
    group = find_column(where, header, options.group, "group", needed=True) if options.group else ""
    used = {label, site, group, FILE_SITE}
    if group and group in (options.columns or ()):
        raise DataError(f"data.group: the column {group!r} of {where} says what belongs together, and is no feature")
    aside = {*used, *_ignored(where, header, used, options)}
    table, test, has_split = _split(table, used, where)
    aside |= {"split"} if has_split else set()
    if len(table) == 0:
        raise DataError(f"{where} holds no row")
    from_csv = is_from_csv(table)
    sites = columns.names(table.column(site), site, where, from_csv) if site else []
    if options.chooses_sites():
        chosen = options.chosen_rows(sites, where)
        table, test, sites = table.filter(chosen), test[chosen], list(compress(sites, chosen))
    groups = columns.names(table.column(group), group, where, from_csv) if group else []
    y, classes = _labels(table, label, where, options)
    if options.test_share and not has_split:
        test = test_rows(y, options.test_share, numbered_groups(groups) if group else None)
    if test.all():
        raise DataError(f"{where} holds test rows only; training rows are those whose split is 'train'")
    missing = _missing_values([name for name in table.column_names if name not in aside], where, options)
    table = _without_values(table, missing, where)
    described, notes = _described(where, table, aside, ~test, options)
    for column in described:
        column |= {"missing": missing[column["name"]]} if column["name"] in missing else {}
        column |= {"indicator": True} if options.missing_indicator and column["kind"] == "number" else {}
    preprocessing: dict[str, Any] = {"kind": "table", "columns": described}
    x, gaps = encode(table, preprocessing, where)
    mean, std = measure(x[~test], 1.0, preprocessing)
    data = from_rows(
        name,
        x,
        y,
        test,
        sites if site else [None] * len(y),
        groups,
        where,
        classes=classes,
        mean=mean,
        std=std,
        scale=1.0,
        fitted=True,
        preprocessing=preprocessing,
        reading=dialect_of(table),
        notes=(*notes, *gaps),
    )
    suspects = _identifiers(where, table.filter(~test), described, data.site_train, options)
    mixed = _mixed_columns(where, table, described, sites) if site == FILE_SITE and not options.columns else []
    return replace(data, warnings=(*data.warnings, *suspects, *mixed))


def _site_column(where: str, header: Sequence[str], options: Tabular) -> str:
    """The column that has the site of every row; empty if there is none."""
    if FILE_SITE not in header or options.site:
        return find_column(where, header, options.site, "site", needed=False)
    if "site" in header and "site" not in (options.ignore or ()) and (not options.columns or "site" in options.columns):
        raise DataError(
            f"{where}: its files are the sites, but they have a column 'site' as well; leave that out with "
            "data.ignore, or say with data.site which column has the sites"
        )
    return FILE_SITE


def _labels(table: pa.Table, label: str, where: str, options: Tabular) -> tuple[Labels, tuple[str, ...]]:
    """The class of every row as a number, and the classes; an amount to be estimated is refused."""
    agreed = options.classes or ()
    names = columns.names(table.column(label), label, where, is_from_csv(table), agreed)
    if not agreed and (different := columns.regression_values(names)):
        raise DataError(
            f"{where}: the label column {label!r} holds {different} different numbers in {len(names)} rows, an amount "
            "to be estimated (regression), not classes; make classes of it, or choose another column with data.label"
        )
    return numbered(names, agreed, where)


def encode(
    table: pa.Table, preprocessing: Mapping[str, Any], where: str
) -> tuple[NDArray[np.float32], tuple[str, ...]]:  # (N, F)
    """Raw rows as samples, before `(v / scale - mean) / std`, and notes on values that are missing or were never seen.

    A missing number is NaN and takes the mean.
    """
    features: list[NDArray[Any]] = []
    gaps: dict[str, int] = {}
    notes: list[str] = []
    header = _header(table, where)
    for column in preprocessing["columns"]:
        name = column["name"]
        if name not in header:
            raise DataError(f"{where} lacks the column {name!r}")
        cells = columns.without_values(table.column(name), name, where, column.get("missing", ()))
        if column["kind"] == "number":
            values = columns.numbers(cells, name, where)
            absent = np.isnan(values)
            gaps[name] = int(absent.sum())
            features += [values[:, None], *([absent[:, None]] if column.get("indicator") else [])]
        else:
            category, known = columns.categories(cells, name, where), column["values"]
            one_hot = columns.one_hot_index(category, known)
            gaps[name] = category.missing(known)
            notes += _unseen(where, name, len(table), one_hot.unseen)
            features.append(np.eye(len(known) + 1, dtype=np.float32)[one_hot.codes])
    return np.concatenate(features, axis=1).astype(np.float32), (*_gaps(where, len(table), gaps), *notes)


def warn_notes(x: NDArray[np.float32], notes: Sequence[str]) -> NDArray[np.float32]:  # (N, F)
    """The samples; a warning for each note."""
    for note in notes:
        warnings.warn(note, Notice, stacklevel=4)
    return x


def _gaps(where: str, rows: int, missing: Mapping[str, int]) -> list[str]:
    """One sentence on all values that are missing, by column."""
    counts = sorted(((n, name) for name, n in missing.items() if n), key=lambda each: -each[0])
    if not counts:
        return []
    named = some([f"{name!r} {n} of {rows}" for n, name in counts], 3)
    return [f"{where}: values are missing ({named}); numbers take the mean, categories are unknown"]


def _unseen(where: str, name: str, rows: int, unseen: dict[str, int]) -> list[str]:
    """How many values of a category were never seen, and which."""
    if not unseen:
        return []
    values = f"{sum(unseen.values())} of {rows} values of {name!r}"
    shown = some([repr(value) for value in unseen], 5)
    return [f"{where}: {values} were never seen in training or data.columns ({shown}) and count as unknown"]


def _header(table: pa.Table, where: str) -> list[str]:
    header: list[str] = table.column_names
    if twice := [column for column in header if header.count(column) > 1]:
        raise DataError(f"{where} has two columns named {twice[0]!r}; rename one")
    return header


def find_column(where: str, header: Sequence[str], chosen: str | None, default: str, needed: bool) -> str:
    """The chosen column or the default one; empty if there is none and none is needed."""
    name = chosen or default
    if name in header:
        return name
    if chosen or needed:
        hint = did_you_mean(name, [column for column in header if column != FILE_SITE])
        raise DataError(f"{where} has no column {name!r}{hint}; say which one it is with data.{default}")
    return ""


def _split(table: pa.Table, used: set[str], where: str) -> tuple[pa.Table, NDArray[np.bool_], bool]:
    """Training and test rows; which of them are test rows; whether the table says so."""
    if "split" not in table.column_names or "split" in used:
        return table, np.zeros(len(table), bool), False
    values, index = columns.categories(table.column("split"), "split", where)
    split_of = [*(SPLITS.get(value.lower()) for value in values), None]
    splits = [split_of[at] for at in index]
    if None in splits:  # a feature that happens to have this name
        return table, np.zeros(len(table), bool), False
    kept = np.array([bool(split) for split in splits])
    return table.filter(kept), np.array([split == "test" for split in splits if split], bool), True


def _ignored(where: str, header: Sequence[str], used: set[str], options: Tabular) -> list[str]:
    """The columns of data.ignore, which are no features."""
    for name in options.ignore or ():
        if name not in header:
            raise DataError(f"data.ignore: {where} has no column {name!r}{did_you_mean(name, header)}")
        if name in used or name in (options.columns or ()):
            raise DataError(f"data.ignore leaves out the column {name!r} of {where}, which another setting uses")
    return options.ignore or []


def _missing_values(features: Sequence[str], where: str, options: Tabular) -> dict[str, list[str]]:
    """The values of each feature that mean that it is missing, where there are any."""
    if isinstance(options.missing, dict):
        if strangers := [name for name in options.missing if name not in features]:
            hint = did_you_mean(strangers[0], features)
            raise DataError(f"data.missing: {where} has no feature {strangers[0]!r}{hint}")
        return {name: values for name, values in options.missing.items() if values}
    return dict.fromkeys(features, options.missing) if options.missing else {}


def _without_values(table: pa.Table, missing: Mapping[str, Sequence[str]], where: str) -> pa.Table:
    """The table with nothing where a column has one of its values that mean missing."""
    for name, values in missing.items():
        cells = columns.without_values(table.column(name), name, where, values)
        table = table.set_column(table.column_names.index(name), name, cells)
    return table


def _described(
    where: str, table: pa.Table, aside: set[str], train: NDArray[np.bool_], options: Tabular
) -> tuple[list[dict[str, Any]], list[str]]:
    """The features: as agreed in data.columns, else all columns that are left, as their training rows have them."""
    if options.columns:
        if strangers := [name for name in options.columns if name not in table.column_names]:
            raise DataError(f"{where} lacks the column {strangers[0]!r} of data.columns")
        return [
            {"name": name, "kind": "number"}
            if kind == "number"
            else {"name": name, "kind": "category", "values": list(kind)}
            for name, kind in options.columns.items()
        ], []
    features: list[dict[str, Any]] = []
    notes: list[str] = []
    rows, from_csv = table.filter(train), is_from_csv(table)
    for name in table.column_names:
        if name in aside:
            continue
        if columns.kind(rows.column(name), name, where, from_csv) == "number":
            features.append({"name": name, "kind": "number"})
            continue
        if from_csv and (code := columns.leading_zero_value(rows.column(name))):
            notes.append(
                f"{where}: the column {name!r} holds codes such as {code!r}, no numbers, and is a category; "
                f'data.columns.{name} = "number" reads numbers'
            )
        if from_csv and (day := columns.date(rows.column(name))):
            notes.append(
                f"{where}: the column {name!r} holds dates such as {day!r}, each of which is a word of its own; turn "
                "it into a number, such as an age or days, or leave it out with data.ignore"
            )
        features.append({"name": name, "kind": "category", "values": _values(where, rows, name, from_csv)})
    if not features:
        raise DataError(f"{where} holds no feature beside {', '.join(sorted(filter(None, aside)))}")
    return features, notes


def _mixed_columns(
    where: str, table: pa.Table, described: Sequence[Mapping[str, Any]], sites: Sequence[str]
) -> list[str]:
    """A warning of each column that has words in some files and numbers in others, and so is a category in all."""
    warnings = []
    for name in [column["name"] for column in described if column["kind"] == "category"]:
        numeric = {
            site: columns.looks_numeric(table.column(name).filter(np.array([each == site for each in sites])))
            for site in in_order(set(sites))
        }
        words, numbers = ([site for site, is_number in numeric.items() if is_number is kind] for kind in (False, True))
        if words and numbers:
            warnings.append(
                f"{where}: the column {name!r} has words at {some(words, 3)} and numbers at {some(numbers, 3)}, so it "
                "is a category; correct it, or name in data.missing the words that mean missing"
            )
    return warnings


def _identifiers(
    where: str, rows: pa.Table, described: Sequence[Mapping[str, Any]], site: NDArray[np.int64] | None, options: Tabular
) -> list[str]:
    """A warning of features that look like identifiers, unless data.columns chose them."""
    reasons: list[tuple[str, str | None]] = []
    for column in [] if options.columns else described:
        name = column["name"]
        if column["kind"] == "category":
            reasons.append((name, inspection.word_identifiers(len(column["values"]), len(rows), name)))
            continue
        start = rows.column(name).slice(0, inspection.NUMBER_START)
        if inspection.possible_identifier(columns.numbers(start, name, where)):
            # Before they become float32, which large numbers do not survive.
            values = columns.numbers(rows.column(name), name, where)
            reasons.append((name, inspection.number_identifiers(values, name, site)))
    remedy = "leave them out with data.ignore, or name with data.group what belongs together"
    return inspection.identifier_warning(where, "columns", reasons, remedy)


def _values(where: str, rows: pa.Table, name: str, from_csv: bool) -> list[str]:
    """The different values of a category."""
    category = columns.categories(rows.column(name), name, where)
    values = in_order({value for value in category.values if not (from_csv and value in MISSING)})
    if len(values) > MANY_VALUES and 2 * len(values) > len(rows):
        raise DataError(
            f"{where}: the text column {name!r} has {len(values)} different values in {len(rows)} rows, so it "
            "names rows rather than describing them; leave it out with data.ignore, or list the columns to use in "
            "data.columns"
        )
    return values
