"""Text files of rows: what separates their values, and whether numbers have a decimal point or a decimal comma.

Both can be said (data.separator, data.decimal) and are found otherwise. The separator is the one under which the first
lines have equally many values; a comma wins where it is one. In a file with another separator, 3,5 is a number with a
decimal comma and 1.234,5 has a point for the thousands. What could be both, such as 1,234, is not guessed: other
rows, the file that a model was trained on, or data.decimal decide. Every value is then read by itself, so a row means
the same alone and among others.
"""

from __future__ import annotations

import csv
import io
import re
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fednh.data.encoding import checked
from fednh.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa

SEPARATORS = (",", ";", "\t", "|")
START = 1 << 16  # characters of a file that are looked at
LINES = 50
_EXPONENT = "([eE][+-]?[0-9]+)?$"
_NUMBER = r"^[+-]?[0-9.,]*[0-9][0-9.,]*" + _EXPONENT  # of either convention
_COMMA = r"^[+-]?([0-9]*|[0-9]{1,3}(\.[0-9]{3})+),[0-9]+" + _EXPONENT  # 3,5 and 1.234,5
_THOUSANDS = r"^[+-]?[0-9]{1,3}(\.[0-9]{3})+$"  # 1.234, in a file with decimal commas
_EITHER = r"^[+-]?[1-9][0-9]{0,2},[0-9]{3}$"  # 1,234: a decimal comma, or an English thousand
_POINT = r"^[+-]?([0-9]*|[0-9]{1,3}(,[0-9]{3})+)\.[0-9]+" + _EXPONENT
_EITHER_POINT = r"^[+-]?[1-9][0-9]{0,2}\.[0-9]{3}$"


class Usual(NamedTuple):
    """The form of the files that a model was trained on: it decides where a file does not say itself."""

    encoding: str | None = None
    separator: str | None = None
    decimal: str | None = None


UNKNOWN = Usual()


@dataclass(frozen=True)
class Form:
    """How a text file is to be read; None: found."""

    encoding: str | None = None
    separator: str | None = None
    decimal: str | None = None
    usual: Usual = UNKNOWN


FOUND = Form()


def encoding_of(path: Path, form: Form) -> str:
    """The encoding of a file, after all of it proved to be that."""
    try:
        return checked(path, form.encoding)
    except UserError:
        if form.encoding or not form.usual.encoding:
            raise
    return checked(path, form.usual.encoding)


def separator_of(path: Path, encoding: str, form: Form) -> str:
    """What separates the values of a line."""
    if form.separator:
        return form.separator
    with path.open(newline="", encoding="utf-8-sig" if encoding == "utf-8" else encoding) as file:
        text = file.read(START)
    if len(text) == START:
        text = text[: text.rfind("\n") + 1] or text
    widths = {mark: _widths(text, mark) for mark in (*SEPARATORS, *filter(None, [form.usual.separator]))}
    even = [mark for mark, found in widths.items() if len(set(found)) == 1 and found[0] > 1]
    several = even or [mark for mark, found in widths.items() if found and found[0] > 1]
    if not several:
        return form.usual.separator or ","
    return "," if "," in several else max(several, key=lambda mark: widths[mark][0])


def _widths(text: str, mark: str) -> list[int]:
    """How many values the first lines have under a separator."""
    try:
        rows = csv.reader(io.StringIO(text, newline=""), delimiter=mark)
        return [len(row) for row in islice((row for row in rows if row), LINES)]
    except csv.Error:
        return []


def decimal_of(table: pa.Table, separator: str, form: Form, where: str) -> str:
    """The decimal mark of a table of text; what cannot be told is refused."""
    usual = form.usual.decimal if (separator == ",") == (form.usual.separator in (None, ",")) else None
    if form.decimal == "." or (separator == "," and "," not in (form.decimal, usual)):
        return "."  # a comma between values is none within them, unless somebody says so
    commas, unclear, points = _evidence(table)
    if points and (form.decimal or commas):
        raise UserError(
            f"{where}: the column {points!r} has decimal points"
            + (f" and {commas!r} decimal commas" if commas else ", but data.decimal says commas")
            + "; write all numbers in one way"
        )
    if form.decimal or commas:
        return ","
    if points or not unclear:
        return "." if points else usual or "."
    if usual:
        return usual
    raise UserError(
        f"{where}: the commas in the column {unclear!r} could be decimal commas or thousands; say which with "
        'data.decimal, "," or "."'
    )


def _evidence(table: pa.Table) -> tuple[str | None, str | None, str | None]:
    """A column with decimal commas, one with commas that could also be thousands, one with decimal points."""
    import pyarrow.compute as pc

    from fednh.data.columns import present

    def any_is(values: pa.ChunkedArray, pattern: str, but: str) -> bool:
        matches = pc.and_(pc.match_substring_regex(values, pattern), pc.invert(pc.match_substring_regex(values, but)))
        return bool(pc.any(matches).as_py())

    commas = unclear = points = None
    for name in table.column_names:
        values = present(table.column(name)).drop_null()
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
