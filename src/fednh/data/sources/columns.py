"""Class names as numbers, and one column of a table: whether it holds numbers or categories, and how they are spelled.

A CSV file has no types: its columns are text. What they hold is decided once, from training rows, and recorded in the
model's card, or agreed in data.columns; later files are read as decided, whatever they look like themselves.

A category's value is matched as it is spelled: "01" is not "1". Where that spelling is not known, another one of the
same value is, if there is only one: 1, 1.0 and "1"; true and "True"; a date and a time stamp at midnight.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fednh.data.dataset import Labels
from fednh.errors import DataError
from fednh.text import some

if TYPE_CHECKING:
    import pyarrow as pa

MISSING = ("", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "?")
TRUTHS = ("true", "false")
LARGEST = float(np.finfo(np.float32).max)
FEW_NUMBERS, MOST_NUMBERS, ROWS_OF_A_CLASS = 20, 100, 20  # see `regression_values`
_CODE = "^0[0-9]+$"  # digits that are no number: 01
_DECIMAL = re.compile(r"([+-]?)(0|[1-9]\d*)(?:\.(\d*))?", re.ASCII)
_FLOAT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_DATE = r"^([0-9]{1,2}[./-][0-9]{1,2}[./-][0-9]{2,4}|[0-9]{4}[./][0-9]{1,2}[./][0-9]{1,2})([ T][0-9:.]+)?$"
_MOMENT = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d)(?::(\d\d)(?:\.(\d+))?)?(.*)", re.ASCII)


def alike(names: Iterable[str], what: str) -> list[str]:
    """One sentence on all names that differ only in case or blanks, or none."""
    by_letters: dict[str, list[str]] = {}
    for name in names:
        by_letters.setdefault("".join(name.split()).casefold(), []).append(name)
    pairs = [" and ".join(map(repr, same)) for same in by_letters.values() if len(same) > 1]
    words = f"{what} that differ only in case or blanks: {some(pairs, 8)}"
    return [f"{words}; if they mean the same, write them alike"] if pairs else []


def numbered(names: Sequence[str], agreed: Sequence[str], where: str) -> tuple[Labels, tuple[str, ...]]:
    """Class names as numbers, and the classes in their order: as agreed, else sorted (numbers as numbers)."""
    held = set(names)
    classes = tuple(agreed) or tuple(in_order(held))
    if len(set(classes)) < len(classes):
        raise DataError(f"data.classes names a class twice: {', '.join(classes)}")
    if strangers := in_order(held - set(classes)):
        raise DataError(f"{where} holds the class {strangers[0]!r}, which is not one of data.classes")
    if len(classes) < 2:
        raise DataError(
            f"{where} holds only the class {classes[0]!r}; training needs at least two, and a site that has one names "
            "all in data.classes"
        )
    number = {name: k for k, name in enumerate(classes)}
    return np.array([number[name] for name in names], np.int64), classes


def numbered_sites(names: Sequence[str | None], test: NDArray[np.bool_]) -> tuple[tuple[str, ...], Labels]:
    """The sites of training samples, sorted, and the site number of every sample; -1: of none of them."""
    sites = tuple(
        in_order({name for name, is_test in zip(names, test, strict=True) if name is not None and not is_test})
    )
    number = {name: k for k, name in enumerate(sites)}
    return sites, np.array([-1 if name is None else number.get(name, -1) for name in names], np.int64)


def in_order(names: set[str]) -> list[str]:
    """Sorted; as numbers where all are."""
    numbers = all(n.isdecimal() and n.isascii() for n in names)
    return sorted(names, key=lambda n: (int(n) if numbers else 0, n))


class Categories(NamedTuple):
    """The values of a column as text."""

    values: list[str]  # the different ones
    codes: NDArray[np.int64]  # (N,), which of them a row has; -1: none

    def counts(self) -> NDArray[np.int64]:
        return np.bincount(self.codes[self.codes >= 0], minlength=len(self.values))

    def missing(self, known: Sequence[str] = ()) -> int:
        """How many rows have no value, or a text such as NA that is no known value."""
        absent = [value in MISSING and value not in known for value in self.values]
        return int((self.codes < 0).sum() + self.counts()[np.array(absent, bool)].sum())


class OneHotIndex(NamedTuple):
    """Each row's index among the known values of a category."""

    codes: NDArray[np.int64]  # (N,); the number of known values stands for none of them
    unseen: dict[str, int]  # values that are not known, and how many rows have them


def kind(column: pa.ChunkedArray, name: str, where: str, from_csv: bool) -> str:
    """Number or category; a column of a CSV file is what its values look like."""
    column = _plain(column)
    type_ = _detected_type(column) if from_csv and _is_text(column.type) else column.type
    if _is_number(type_):
        return "number"
    if _is_text(type_):
        return "category"
    raise DataError(
        f"{where}: the column {name!r} holds {_type_name(type_)}, neither numbers nor text; turn it into a number, "
        "such as an age or days, or leave it out with data.ignore"
    )


def _type_name(type_: pa.DataType) -> str:
    import pyarrow.types as t

    return "dates" if t.is_date(type_) or t.is_timestamp(type_) else "times" if t.is_time(type_) else str(type_)


def looks_numeric(column: pa.ChunkedArray) -> bool | None:
    """Whether a text column's values look like numbers; None: it has no values."""
    values = present(column).drop_null()
    return _is_number(_detected_type(values)) if len(values) else None


def date(column: pa.ChunkedArray) -> str | None:
    """A value of a text column that holds dates as people write them, in an order that nobody can be sure of."""
    import pyarrow.compute as pc

    text = present(column).drop_null()
    if not len(text) or not pc.all(pc.match_substring_regex(text, _DATE)).as_py():
        return None
    return str(text[0].as_py())


def regression_values(names: Sequence[str]) -> int:
    """How many different values the labels of a regression have; 0 if the labels are classes.

    That is more than a hundred numbers with few rows each, or numbers with fractions of which nearly every row has its
    own.
    """
    values = set(names)
    if len(values) <= FEW_NUMBERS or not all(_DECIMAL.fullmatch(name) or _FLOAT.fullmatch(name) for name in values):
        return 0
    fractions = any(not float(name).is_integer() for name in values)
    many = len(values) > MOST_NUMBERS and (fractions or len(names) < ROWS_OF_A_CLASS * len(values))
    return len(values) if many or (fractions and 2 * len(values) > len(names)) else 0


def leading_zero_value(column: pa.ChunkedArray) -> str | None:
    """A value whose leading zero makes a column of numbers one of codes."""
    import pyarrow.compute as pc

    text = present(column)
    codes = text.filter(pc.match_substring_regex(text, _CODE))
    return str(codes[0].as_py()) if len(codes) and _parsed(text) is not None else None


def numbers(column: pa.ChunkedArray, name: str, where: str) -> NDArray[np.float64]:  # (N,)
    """Values as numbers, true as 1; what is missing is NaN."""
    import pyarrow as pa

    column = _plain(column)
    if _is_text(column.type):
        parsed = _parsed(present(column))
        if parsed is None:
            raise DataError(
                f"{where}: the column {name!r} should hold numbers, but {_no_numbers(column)}; correct that, or agree "
                "on its values in data.columns before training"
            )
    else:
        try:
            parsed = column.cast(pa.float64(), safe=False)
        except pa.ArrowException as error:
            raise DataError(f"{where}: the column {name!r} should hold numbers, but holds {column.type}") from error
    values: NDArray[np.float64] = parsed.to_numpy().astype(np.float64)
    if (np.abs(values) > LARGEST).any():
        raise DataError(f"{where}: the column {name!r} holds an infinite value or one beyond 3.4e38; correct it")
    return values


def categories(column: pa.ChunkedArray, name: str, where: str) -> Categories:
    """Values as text, in the same spelling whatever the type of the source."""
    import pyarrow as pa
    import pyarrow.types as t

    column = _plain(column)
    if t.is_nested(column.type) or t.is_binary(column.type) or t.is_large_binary(column.type):
        raise DataError(f"{where}: the column {name!r} holds {column.type}; convert it to text or leave it out")
    if t.is_timestamp(column.type):  # nanoseconds are no Python value
        column = column.cast(pa.timestamp("us", column.type.tz), safe=False)
    encoded = pa.chunked_array([column.combine_chunks()], column.type).dictionary_encode().combine_chunks()
    index = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    different = encoded.dictionary.to_pylist()
    if t.is_floating(column.type):  # by way of text: 0.1 of 32 bits is 0.1
        different = [float(text) for text in encoded.dictionary.cast(pa.string()).to_pylist()]
    nan = np.array([*(value != value for value in different), True])
    return Categories([spelling(value) for value in different], np.where(nan[index], -1, index))


def spelling(value: Any) -> str:
    """A value as text: 3, 3.0 and "3" are spelled alike, and a bool as true or false."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip()


def names(column: pa.ChunkedArray, name: str, where: str, from_csv: bool, agreed: Sequence[str] = ()) -> list[str]:
    """Each row's value in a label or site column: in the `agreed` spelling, else numbers in their plainest form."""
    category = categories(column, name, where)
    absent = category.missing(agreed) if from_csv else int((category.codes < 0).sum())
    if absent:
        raise DataError(
            f"{where}: {absent} of {len(category.codes)} rows have nothing in the column {name!r}; fill or remove them"
        )
    if agreed:
        match = matcher(agreed)
        spelled = [value if (at := match(value)) is None else agreed[at] for value in category.values]
    elif from_csv and _is_number(_detected_type(_plain(column))):
        spelled = [_simplest(value) for value in category.values]
    else:
        spelled = category.values
    return [spelled[at] for at in category.codes.tolist()]


def one_hot_index(category: Categories, known: Sequence[str]) -> OneHotIndex:
    """The index of each row's value among those known from training or data.columns."""
    chosen = list(map(matcher(known), category.values))
    index = np.array([*(len(known) if at is None else at for at in chosen), len(known)], np.int64)[category.codes]
    rows = zip(category.values, chosen, category.counts().tolist(), strict=True)
    return OneHotIndex(index, {value: n for value, at, n in rows if at is None and n and value not in MISSING})


def without_values(column: pa.ChunkedArray, name: str, where: str, missing: Sequence[str]) -> pa.ChunkedArray:
    """The column with nothing where it has one of these values, however it is spelled: -9 is -9.0."""
    import pyarrow as pa
    import pyarrow.compute as pc

    column = _plain(column)
    if not missing:
        return column
    category = categories(column, name, where)
    meanings = {*missing, *map(_meaning, missing)}
    absent = np.array([*(value in meanings or _meaning(value) in meanings for value in category.values), False], bool)
    if not absent.any():
        return column
    return pc.if_else(pa.array(absent[category.codes]), pa.scalar(None, column.type), column)


def matcher(known: Sequence[str]) -> Callable[[str], int | None]:
    """Finds a value's index among the known ones: by its spelling, else by its meaning if only one value has that."""
    exact = {value: at for at, value in enumerate(known)}
    by_meaning: dict[str, set[int]] = {}
    for value, at in exact.items():
        by_meaning.setdefault(_meaning(value), set()).add(at)

    def match(value: str) -> int | None:
        same = by_meaning.get(_meaning(value), set())
        return exact.get(value, next(iter(same)) if len(same) == 1 else None)

    return match


def _meaning(value: str) -> str:
    """One spelling for the ways in which files write the same number, truth value or time."""
    if value.lower() in TRUTHS:
        return value.lower()
    if _DECIMAL.fullmatch(value):
        return _simplest(value)
    if moment := _MOMENT.fullmatch(value):
        date, minute, second, fraction, zone = moment.groups(default="")
        fraction = fraction.rstrip("0")
        if minute == "00:00" and second in ("", "00") and not fraction and not zone:
            return date
        return f"{date} {minute}:{second or '00'}{'.' * bool(fraction)}{fraction}{zone}"
    return value


def _simplest(value: str) -> str:
    """A number or truth value in its plainest form: 1 for 1.00, true for True."""
    if value.lower() in TRUTHS:
        return value.lower()
    if decimal := _DECIMAL.fullmatch(value):
        sign, whole, fraction = decimal.groups(default="")
        digits = f"{whole}{'.' * bool(fraction.strip('0'))}{fraction.rstrip('0')}"
        return f"-{digits}" if sign == "-" and digits != "0" else digits
    return spelling(float(value))


def _detected_type(column: pa.ChunkedArray) -> pa.DataType:
    """The type that a text column's values look like."""
    import pyarrow as pa
    import pyarrow.compute as pc

    text = present(column)
    if text.null_count == len(text):
        return pa.null()
    if _parsed(text) is not None:
        return pa.string() if pc.any(pc.match_substring_regex(text, _CODE)).as_py() else pa.float64()
    times = (pa.date32(), pa.time32("s"), pa.timestamp("s"), pa.timestamp("ns"), pa.timestamp("ns", "UTC"))
    return next((time for time in times if _cast(text, time) is not None), pa.string())


def _parsed(text: pa.ChunkedArray) -> pa.ChunkedArray | None:
    """Text as float64 if all of it is numbers, or truth values."""
    import pyarrow as pa
    import pyarrow.compute as pc

    floats = _cast(text, pa.float64())
    if floats is not None:
        return floats
    bits = pc.index_in(pc.utf8_lower(text), pa.array(["false", "true", "0", "1"]))
    return None if bits.null_count > text.null_count else _cast(pc.bit_wise_and(bits, 1), pa.float64())


def _no_numbers(text: pa.ChunkedArray) -> str:
    """Which values are not numbers."""
    import pyarrow as pa

    category = categories(present(text), "", "")
    rows = zip(category.values, category.counts().tolist(), strict=True)
    bad = {value: n for value, n in rows if _cast(pa.chunked_array([[value]]), pa.float64()) is None}
    return f"{sum(bad.values())} of {len(text)} values are none, such as {next(iter(bad))!r}"


def _cast(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray | None:
    import pyarrow as pa

    try:
        return column.cast(kind)
    except pa.ArrowException:
        return None


def present(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Trimmed text; null where nothing is there, or a word for that."""
    import pyarrow as pa
    import pyarrow.compute as pc

    text = pc.utf8_trim_whitespace(_plain(column).cast(pa.string()))
    return pc.if_else(pc.is_in(text, value_set=pa.array(MISSING)), pa.scalar(None, pa.string()), text)


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Without a dictionary."""
    import pyarrow.types as t

    return column.cast(column.type.value_type) if t.is_dictionary(column.type) else column


def _is_number(kind: pa.DataType) -> bool:
    import pyarrow.types as t

    tests = (t.is_integer, t.is_floating, t.is_boolean, t.is_decimal, t.is_null)
    return any(test(kind) for test in tests)


def _is_text(kind: pa.DataType) -> bool:
    return str(kind) in ("string", "large_string", "string_view")
