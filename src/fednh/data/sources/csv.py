"""Files of rows as Arrow tables: CSV in any dialect, Parquet, folders of both, and several files as sites.

A CSV file has no types: all its columns are text here, numbers with a decimal point.

Its encoding is UTF-8, with or without a byte order mark, unless data.encoding names another. The separator and the
decimal mark are settings (data.separator, data.decimal) or are detected. The separator is the one under which the first
lines have equally many values; a comma wins where it is one. In a file with another separator, 3,5 is a number with a
decimal comma and 1.234,5 has a point for the thousands. An ambiguous number, such as 1,234, is not guessed: other rows,
the file that a model was trained on, or data.decimal decide. Every value is then read by itself, so a row means the
same alone and among others.
"""

from __future__ import annotations

import codecs
import csv
import glob
import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TextIO

import numpy as np
from numpy.typing import NDArray

from fednh import extras
from fednh.data.sources import columns, known_encoding
from fednh.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

EXTRA = "tables"  # of this package: pyarrow
DEFAULTS = {"encoding": "utf-8", "separator": ",", "decimal": "."}
FROM_CSV = {"fednh": "csv"}  # metadata of a table from a CSV file
READ_BYTES = 1 << 20
BLOCK_ROWS = 256  # rows of numbers that are read at a time
SEPARATORS = (",", ";", "\t", "|")
SUFFIXES = (".csv", ".tsv", ".data", ".parquet")  # of the tables in a folder
FILE_SITE = "site, by the file"  # the column of a table of several files that has the stem of each row's file
START = 1 << 16  # characters of a file that are looked at
LINES = 50
_EXPONENT = "([eE][+-]?[0-9]+)?$"
_NUMBER = r"^[+-]?[0-9.,]*[0-9][0-9.,]*" + _EXPONENT  # of either convention
_COMMA = r"^[+-]?([0-9]*|[0-9]{1,3}(\.[0-9]{3})+),[0-9]+" + _EXPONENT  # 3,5 and 1.234,5
_THOUSANDS = r"^[+-]?[0-9]{1,3}(\.[0-9]{3})+$"  # 1.234, in a file with decimal commas
_EITHER = r"^[+-]?[1-9][0-9]{0,2},[0-9]{3}$"  # 1,234: a decimal comma, or an English thousand
_POINT = r"^[+-]?([0-9]*|[0-9]{1,3}(,[0-9]{3})+)\.[0-9]+" + _EXPONENT
_EITHER_POINT = r"^[+-]?[1-9][0-9]{0,2}\.[0-9]{3}$"


class TrainingDialect(NamedTuple):
    """The dialect of the files that a model was trained on: it decides where a file is ambiguous."""

    encoding: str | None = None
    separator: str | None = None
    decimal: str | None = None


UNKNOWN = TrainingDialect()


@dataclass(frozen=True)
class CsvDialect:
    """How a text file is to be read; None: detected."""

    encoding: str | None = None
    separator: str | None = None
    decimal: str | None = None
    training: TrainingDialect = UNKNOWN


AUTO = CsvDialect()


def encoding_of(path: Path, dialect: CsvDialect) -> str:
    """The encoding of a file, after all of it was decoded once."""
    try:
        return _checked_encoding(path, dialect.encoding)
    except DataError:
        if dialect.encoding or not dialect.training.encoding:
            raise
    return _checked_encoding(path, dialect.training.encoding)


def _checked_encoding(path: Path, encoding: str | None) -> str:
    if encoding and not known_encoding(encoding):
        raise DataError(f"{path}: {encoding!r} is not an encoding that Python knows")
    name = codecs.lookup(encoding).name if encoding else "utf-8"
    decoder = codecs.getincrementaldecoder(name)()
    line, guess = 1, "cp1252"

    def refusal(problem: str) -> DataError:
        if encoding:
            return DataError(
                f"{path} is not text in the encoding {encoding} ({problem}); correct data.encoding, or save it as UTF-8"
            )
        return DataError(
            f"{path} is not UTF-8 text ({problem}); save it as UTF-8, or say its encoding, such as "
            f"data.encoding={guess}"
        )

    with path.open("rb") as file:
        if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            guess = "utf-16"
        file.seek(0)
        while block := file.read(READ_BYTES):
            try:
                text = decoder.decode(block)
            except UnicodeDecodeError as error:
                line += error.object[: error.start].count(b"\n")
                raise refusal(f"line {line} holds the byte 0x{error.object[error.start]:02x}") from error
            if encoding is None and "\0" in text:
                guess = "utf-16"
                raise refusal("it holds zero bytes")
            line += text.count("\n")
    try:
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise refusal("it ends within a letter") from error
    return "utf-8" if name == "utf-8-sig" else name


def open_text(path: Path, encoding: str) -> TextIO:
    """The file for the csv module, without a byte order mark."""
    return path.open(newline="", encoding="utf-8-sig" if encoding == "utf-8" else encoding)


def separator_of(path: Path, encoding: str, dialect: CsvDialect) -> str:
    """What separates the values of a line."""
    if dialect.separator:
        return dialect.separator
    with open_text(path, encoding) as file:
        text = file.read(START)
    if len(text) == START:
        text = text[: text.rfind("\n") + 1] or text
    widths = {mark: _widths(text, mark) for mark in (*SEPARATORS, *filter(None, [dialect.training.separator]))}
    even = [mark for mark, counts in widths.items() if len(set(counts)) == 1 and counts[0] > 1]
    several = even or [mark for mark, counts in widths.items() if counts and counts[0] > 1]
    if not several or dialect.training.separator in several:
        return dialect.training.separator or ","
    return "," if "," in several else max(several, key=lambda mark: widths[mark][0])


def _widths(text: str, mark: str) -> list[int]:
    """How many values the first lines have under a separator."""
    try:
        rows = csv.reader(io.StringIO(text, newline=""), delimiter=mark)
        return [len(row) for row in islice((row for row in rows if row), LINES)]
    except csv.Error:
        return []


def decimal_of(table: pa.Table, separator: str, dialect: CsvDialect, where: str) -> str:
    """The decimal mark of a table of text; an ambiguous one is refused."""
    training = dialect.training.decimal if (separator == ",") == (dialect.training.separator in (None, ",")) else None
    if dialect.decimal == "." or (separator == "," and "," not in (dialect.decimal, training)):
        return "."  # a comma between values is none within them, unless somebody says so
    commas, unclear, points = _evidence(table)
    if points and (dialect.decimal or commas):
        raise DataError(
            f"{where}: the column {points!r} has decimal points"
            + (f" and {commas!r} decimal commas" if commas else ", but data.decimal says commas")
            + "; write all numbers in one way"
        )
    if dialect.decimal or commas:
        return ","
    if points or not unclear:
        return "." if points else training or "."
    if training:
        return training
    raise DataError(
        f"{where}: the commas in the column {unclear!r} could be decimal commas or thousands; say which with "
        'data.decimal, "," or "."'
    )


def _evidence(table: pa.Table) -> tuple[str | None, str | None, str | None]:
    """A column with decimal commas, one with commas that could also be thousands, one with decimal points."""
    import pyarrow.compute as pc

    def any_is(values: pa.ChunkedArray, pattern: str, but: str) -> bool:
        matches = pc.and_(pc.match_substring_regex(values, pattern), pc.invert(pc.match_substring_regex(values, but)))
        return bool(pc.any(matches).as_py())

    commas = unclear = points = None
    for name in table.column_names:
        values = columns.present(table.column(name)).drop_null()
        if not len(values) or not pc.all(pc.match_substring_regex(values, _NUMBER)).as_py():
            continue
        commas = commas or (name if any_is(values, _COMMA, _EITHER) else None)
        points = points or (name if any_is(values, _POINT, _EITHER_POINT) else None)
        unclear = unclear or (name if any_is(values, _EITHER, "^$") else None)
    return commas, unclear, points


def number(text: str, decimal: str) -> str:
    """One value; a number with a decimal comma gets a decimal point, where that is the decimal mark."""
    plain = text.strip()
    return plain.replace(".", "").replace(",", ".") if decimal == "," and re.match(_COMMA, plain) else text


def with_points(table: pa.Table) -> pa.Table:
    """A table of text in which every number with a decimal comma has a decimal point."""
    import pyarrow.compute as pc

    for at, name in enumerate(table.column_names):
        text = pc.utf8_trim_whitespace(table.column(name))
        number = pc.or_(pc.match_substring_regex(text, _COMMA), pc.match_substring_regex(text, _THOUSANDS))
        plain = pc.replace_substring(pc.replace_substring(text, ".", ""), ",", ".")
        table = table.set_column(at, name, pc.if_else(number, plain, table.column(name)))
    return table


def read(path: Path, dialect: CsvDialect = AUTO, compared: Callable[[str], bool] = lambda column: True) -> pa.Table:
    """A CSV or Parquet file, a folder's train.* and test.* with a split column, or files that are sites.

    Files that are sites must have the same columns, of those that are `compared`; their order is free.
    """
    extras.need(EXTRA, "a table")
    import pyarrow as pa
    from pyarrow import parquet

    if files := site_files(path):
        return _site_tables(path, files, dialect, compared)
    if path.is_dir():
        return _parts(path, dialect)
    if not path.is_file():
        raise DataError(f"{path} does not exist; check the path of the table")
    try:
        if is_parquet(path):
            return parquet.ParquetFile(path).read()
        return _csv_table(path, dialect)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as a table: {str(error).splitlines()[0].rstrip('.')}") from error


def site_files(path: Path) -> list[Path]:
    """The files of a pattern such as hospitals/*.csv, or the tables of a folder, each of which is a site.

    None of a single file, nor of a folder that train.* and test.* divide.
    """
    if path.is_dir():
        tables = [file for file in path.iterdir() if file.suffix.lower() in SUFFIXES]
        files = [] if any(file.name.startswith("train") for file in tables) else tables
    elif glob.has_magic(path.name) and not path.exists():
        files = list(path.parent.glob(path.name))
        if not files:
            raise DataError(f"no file is called {path}; check the pattern, and put it in quotes")
    else:
        files = []
    files = [file for file in files if file.is_file() and file.name[0] != "."]
    stems = [file.stem for file in files]
    if twice := sorted({stem for stem in stems if stems.count(stem) > 1}):
        raise DataError(f"{path}: a file is a site, and two files are called {twice[0]!r}; rename one")
    return sorted(files)


def _site_tables(path: Path, files: Sequence[Path], dialect: CsvDialect, compared: Callable[[str], bool]) -> pa.Table:
    """One table of files that are sites, each in a dialect of its own.

    What is said of the dialect holds for those files that leave it open, as in a federation of these sites.
    """
    import pyarrow as pa

    stated = [getattr(dialect, key) or getattr(dialect.training, key) for key in TrainingDialect._fields]
    tables = [read(file, CsvDialect(training=TrainingDialect(*stated))) for file in files]
    headers = [frozenset(filter(compared, table.column_names)) for table in tables]
    most_common = max(headers, key=headers.count)
    pattern = files[headers.index(most_common)]
    for file, header in zip(files, headers, strict=True):
        if lacking := sorted(most_common - header):
            raise DataError(f"{file} lacks the column {lacking[0]!r}, which {pattern.name} has; sites need the same")
        if more := sorted(header - most_common):
            raise DataError(
                f"{file} has the column {more[0]!r}, which {pattern.name} lacks; leave it out with data.ignore"
            )
    named = [
        table.append_column(FILE_SITE, pa.array([file.stem] * len(table), pa.string()))
        for file, table in zip(files, tables, strict=True)
    ]
    whole = joined(named, str(path))
    if not is_from_csv(whole):
        return whole
    dialects = [_metadata(table) for table in tables if is_from_csv(table)]
    common = {key: value for key, value in dialects[0].items() if all(each[key] == value for each in dialects)}
    return whole.replace_schema_metadata(common)


def _csv_table(path: Path, dialect: CsvDialect) -> pa.Table:
    """A CSV file, all of its columns as text; the table's metadata hold the dialect of the file."""
    import pyarrow as pa
    from pyarrow import csv

    encoding = encoding_of(path, dialect)
    separator = separator_of(path, encoding, dialect)
    how, parse = csv.ReadOptions(encoding=encoding), csv.ParseOptions(delimiter=separator)
    try:
        with csv.open_csv(path, how, parse) as start:
            text = {name: pa.string() for name in start.schema.names}
        table = csv.read_csv(path, how, parse, csv.ConvertOptions(column_types=text, strings_can_be_null=False))
    except pa.ArrowInvalid:
        _check_widths(path, encoding, separator)
        raise
    decimal = decimal_of(table, separator, dialect, str(path))
    table = with_points(table) if decimal == "," else table
    used = {"encoding": encoding, "separator": separator, "decimal": decimal}
    return table.replace_schema_metadata({**FROM_CSV, **used})


def _check_widths(path: Path, encoding: str, separator: str) -> None:
    """Refuse a file by its first line that has more or fewer values than the heading."""
    with open_text(path, encoding) as file:
        rows = csv.reader(file, delimiter=separator)
        heading = next(rows, [])
        for row in rows:
            if row and len(row) != len(heading):
                raise DataError(
                    f"{path}: line {rows.line_num} has {len(row)} values where the heading has {len(heading)}; correct "
                    "it, or say with data.separator what separates values"
                )


def dialect_of(table: pa.Table) -> dict[str, str]:
    """The dialect of the CSV file that a table was read from: those of encoding, separator and decimal that are not
    the defaults.
    """
    about = _metadata(table)
    return {key: about[key] for key, default in DEFAULTS.items() if about.get(key, default) != default}


def _metadata(table: pa.Table) -> dict[str, str]:
    return {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}


def is_parquet(path: Path) -> bool:
    """Whether a file is Parquet, by its suffix or its first bytes."""
    if path.suffix == ".parquet":
        return True
    with path.open("rb") as file:
        return file.read(4) == b"PAR1"


def _parts(folder: Path, dialect: CsvDialect) -> pa.Table:
    import pyarrow as pa

    tables = []
    for split in ("train", "test"):
        files = sorted(f for f in folder.glob(f"{split}*") if f.suffix in (".csv", ".parquet"))
        if not files and split == "train":
            raise DataError(
                f"{folder} holds no table ({', '.join(SUFFIXES)}); give a file, a folder of sites' files, or one with "
                "train.csv and test.csv"
            )
        for file in files:
            rows = read(file, dialect)
            dialect = replace(dialect, training=dialect.training._replace(**dialect_of(rows)))
            tables.append(rows.append_column("split", pa.array([split] * len(rows), pa.string())))
    return joined(tables, str(folder))


def joined(parts: Sequence[pa.Table], where: str) -> pa.Table:
    """One table of all rows; a column that is text in one part and something else in another becomes text."""
    import pyarrow as pa

    tables, text = list(parts), {f.name for rows in parts for f in rows.schema if pa.types.is_string(f.type)}
    for at, rows in enumerate(tables):
        for name in text & set(rows.column_names):
            if not pa.types.is_string(rows.schema.field(name).type):
                values, index = columns.categories(rows.column(name), name, where)
                words = pa.array(values, pa.string()).take(pa.array(index, mask=index < 0))
                tables[at] = rows = rows.set_column(rows.column_names.index(name), name, words)
    try:
        whole = pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        raise DataError(f"{where}: its parts have different columns: {str(error).splitlines()[0]}") from error
    return whole.replace_schema_metadata(next((p.schema.metadata for p in parts if is_from_csv(p)), None))


def is_from_csv(table: pa.Table) -> bool:
    """Whether a table comes from a CSV file: its columns are text, whatever they hold."""
    return (table.schema.metadata or {}).get(b"fednh") == b"csv"


def rows_of_numbers(path: Path, width: int, dialect: CsvDialect = AUTO) -> Iterator[NDArray[np.float64]]:
    """A CSV file of numbers; a first line without numbers is a heading."""
    try:
        encoding = encoding_of(path, dialect)
        separator = separator_of(path, encoding, dialect)
        decimal = dialect.decimal or dialect.training.decimal or ("." if separator == "," else ",")
        with open_text(path, encoding) as file:
            rows = csv.reader(file, delimiter=separator)
            lines = ([number(value, decimal) for value in row] for row in rows)
            head = next(lines, [])
            rest = lines if head and not _all_numbers(head) else chain([head], lines)
            done = 0
            while block := list(islice(rest, BLOCK_ROWS)):
                bad = next((i for i, row in enumerate(block) if not _all_numbers(row) or len(row) != width), None)
                if bad is not None:
                    raise DataError(f"{path}: row {done + bad} is not {width} numbers: {','.join(block[bad])}")
                yield np.array([[float(value) for value in row] for row in block])
                done += len(block)
    except (OSError, UnicodeDecodeError, csv.Error, ValueError) as error:
        raise DataError(f"{path} cannot be read as CSV: {error}") from error


def numbers_of(table: pa.Table, width: int, where: str) -> NDArray[np.float64]:  # (N, F)
    """The rows of a table for a model of arrays, which knows no names of columns."""
    names = table.column_names
    if len(names) != width:
        some = ", ".join(names[:8]) + ", ..." * (len(names) > 8)
        takes = f"this model was trained on arrays and takes rows of {width} numbers"
        raise DataError(f"{where}: {takes}, but this table has {len(names)} columns: {some}")
    return np.stack([columns.numbers(table.column(k), name, where) for k, name in enumerate(names)], axis=1)


def _all_numbers(row: Sequence[str]) -> bool:
    try:
        return bool([float(value) for value in row])
    except ValueError:
        return False
