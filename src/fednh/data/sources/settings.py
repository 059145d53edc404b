"""The settings below [data] that kinds of sources share: their types, ranges and spellings, each declared once."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from fednh.data import folder_layout
from fednh.data.encoding import known
from fednh.data.images import Fit as HowToFit

AGREED = "agreed"  # marks settings that a federation's config decides for all sites; the others are each site's own


def _words(value: Any) -> Any:
    """A list; as flat settings have it, also text with commas."""
    return [word.strip() for word in value.split(",") if word.strip()] if isinstance(value, str) else value


def _names(value: Any) -> Any:
    """A list of names, of which a number is one too; as flat settings have it, also text with commas."""
    found = [value] if type(value) is int else _words(value)
    return [str(name) if type(name) is int else name for name in found] if isinstance(found, list) else found


def _column(value: Any) -> Any:
    """The word "number", or the list of the values that a column of text has."""
    return value if value == "number" else _words(value)


def _encoding(value: str) -> str:
    """The name of an encoding that Python knows."""
    if not known(value):
        raise ValueError("is not an encoding that Python knows, such as utf-8, cp1252 or latin-1")
    return value


def _layout(value: str) -> str:
    """The words of a folder's layout."""
    if problem := folder_layout.problem(value):
        raise ValueError(problem)
    return value


def _set(value: Any) -> Any:
    """Empty text is no setting: `--set data.site=` overrules what a model remembers."""
    return None if value == "" else value


def _separator(value: Any) -> Any:
    """One character, or its name: a tab cannot be typed everywhere."""
    mark = {"comma": ",", "semicolon": ";", "tab": "\t", "\\t": "\t", "pipe": "|"}.get(value, value)
    if not isinstance(mark, str) or len(mark) != 1 or mark.isalnum() or mark in "\"'\r\n.+-":
        raise ValueError("should be one character: comma, semicolon, tab, pipe, or another one")
    return mark


def _decimal(value: Any) -> Any:
    mark = {"comma": ",", "point": "."}.get(value, value)
    if mark not in (",", "."):
        raise ValueError("should be a comma or a point")
    return mark


def _sizes(value: Any) -> Any:
    """[height, width] from that, from one number, or from text such as 32 or 24,32."""
    found = value
    if isinstance(value, str):
        found = [int(word) if word.strip().isdecimal() else word for word in value.replace("x", ",").split(",")]
    found = [found] if isinstance(found, int) else found
    if not isinstance(found, list) or not all(type(n) is int and 1 <= n <= 4096 for n in found) or len(found) > 2:
        raise ValueError("should be a number of pixels or [height, width], from 1 to 4096")
    return [*found, *found][:2]


# Of images of any size: [height, width].
Size = Annotated[Annotated[list[int], BeforeValidator(_sizes)] | None, AGREED]
# Of images of another shape: pulled to the size, cut to its shape, or filled up with black.
Fit = Annotated[HowToFit, AGREED]
# What is done about images that cannot be read: the owner of the files decides.
OnBad = Literal["refuse", "skip"]
# What the folders above an image mean; None: found by their names and depth.
Layout = Annotated[str, AfterValidator(_layout)] | None
# The class names, agreed beforehand: a site may lack some.
Classes = Annotated[Annotated[list[str], BeforeValidator(_words)] | None, AGREED]
# Sites by name: those that are read (None: all), and those that are left out.
Names = Annotated[list[str], BeforeValidator(_names)] | None
# Of every class, cut off as a test set where the source has none.
TestShare = Annotated[float, Field(ge=0, lt=1), AGREED]
# Of text files; None: UTF-8.
Encoding = Annotated[Annotated[str, AfterValidator(_encoding)] | None, AGREED]
# Between the values of a line, and before the fraction of a number, in a CSV file; None: found.
Separator = Annotated[str, BeforeValidator(_separator)] | None
Decimal = Annotated[str, BeforeValidator(_decimal)] | None
# The columns of a table that are features, agreed beforehand: name = "number" or the list of its values.
Columns = dict[str, Annotated[str | list[str], BeforeValidator(_column)]] | None
# The column that holds the class (None: "label"), and the one that holds the site (None: "site", if there is one).
Column = Annotated[str | None, BeforeValidator(_set)]
# Which samples belong together: a column, an array, a pattern of file names or a CSV file of them; empty: none do.
Group = Annotated[str | None, BeforeValidator(_set)]
