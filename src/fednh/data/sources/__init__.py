"""Source: a prefix, settings below [data], and a way to read samples. A file a kind; registry.py lists them.

The settings that several kinds share are declared here once, with their ranges and spellings. data.sites names the
sites that are read and data.without leaves some out: a site is held out of a run without copying files, and the run's
classes, columns and statistics do not know it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BeforeValidator, Field

from fednh.data.dataset import Dataset, Inputs, select_rows
from fednh.data.scaling import measure
from fednh.data.sources.columns import in_order, spelling
from fednh.errors import DataError, did_you_mean
from fednh.io.files import expanded

AGREED = "agreed"  # marks settings that a federation's config decides for all sites; the others are each site's own


def _list(value: Any) -> Any:
    """A list; as flat settings have it, also text with commas."""
    return [word.strip() for word in value.split(",") if word.strip()] if isinstance(value, str) else value


def _names(value: Any) -> Any:
    """A list of names, of which a number is one too; as flat settings have it, also text with commas."""
    names = [value] if type(value) is int else _list(value)
    return [str(name) if type(name) is int else name for name in names] if isinstance(names, list) else names


def _column(value: Any) -> Any:
    """The word "number", or the list of the values that a column of text has."""
    return value if value == "number" else _list(value)


def known_encoding(name: str) -> bool:
    """Whether Python has a text encoding of this name."""
    try:
        "a".encode(name)
    except (LookupError, ValueError):
        return False
    return True


def _encoding(value: str) -> str:
    """The name of an encoding that Python knows."""
    if not known_encoding(value):
        raise ValueError("is not an encoding that Python knows, such as utf-8, cp1252 or latin-1")
    return value


def _set(value: Any) -> Any:
    """Empty text is no setting: `--set data.site=` overrules what a model remembers."""
    return None if value == "" else value


def _missing(value: Any) -> Any:
    """The spellings of values, for all features or by the name of a column; also one value, or text with commas."""
    if isinstance(value, dict):
        return {column: _missing(values) for column, values in value.items()}
    values = [value] if isinstance(value, int | float) else _list(value)
    return [spelling(each) if isinstance(each, int | float) else each for each in values] if values else values


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
    sizes = [value] if isinstance(value, int) else value
    if isinstance(value, str):
        sizes = [int(word) if word.strip().isdecimal() else word for word in value.replace("x", ",").split(",")]
    if not isinstance(sizes, list) or not all(type(n) is int and 1 <= n <= 4096 for n in sizes) or len(sizes) > 2:
        raise ValueError("should be a number of pixels or [height, width], from 1 to 4096")
    return [*sizes, *sizes][:2]


# Of images of any size: [height, width].
Size = Annotated[Annotated[list[int], BeforeValidator(_sizes)] | None, AGREED]
# Of images of another shape: pulled to the size, cut to its shape, or filled up with black.
FitRule = Literal["stretch", "crop", "pad"]  # how an image of another shape gets the size
Fit = Annotated[FitRule, AGREED]
# What is done about images that cannot be read: the owner of the files decides.
OnBad = Literal["refuse", "skip"]
# The class names, agreed beforehand: a site may lack some.
Classes = Annotated[Annotated[list[str], BeforeValidator(_list)] | None, AGREED]
# Names of sites or of columns.
Names = Annotated[list[str], BeforeValidator(_names)] | None
# Of every class, cut off as a test set where the source has none.
TestShare = Annotated[float, Field(ge=0, lt=1), AGREED]
# Of text files; None: UTF-8.
Encoding = Annotated[Annotated[str, AfterValidator(_encoding)] | None, AGREED]
# Between the values of a line, and before the fraction of a number, in a CSV file; None: detected.
Separator = Annotated[str, BeforeValidator(_separator)] | None
Decimal = Annotated[str, BeforeValidator(_decimal)] | None
# The columns of a table that are features, agreed beforehand: name = "number" or the list of its values.
Columns = dict[str, Annotated[str | list[str], BeforeValidator(_column)]] | None
# Spellings of values, of all features or by the name of a column.
Missing = Annotated[list[str] | dict[str, list[str]] | None, BeforeValidator(_missing)]
MissingIndicator = Annotated[bool, AGREED]
# The column that holds the class (None: "label"), and the one that holds the site (None: "site", if there is one).
Column = Annotated[str | None, BeforeValidator(_set)]
# Which samples belong together: a column, an array, a pattern of file names or a CSV file of them; empty: none do.
Group = Annotated[str | None, BeforeValidator(_set)]


@dataclass(frozen=True)
class Source(ABC):
    """A kind of user data, `prefix:address`. Its fields are the settings below [data] that it uses, with ranges."""

    prefix: ClassVar[str]
    address: ClassVar[str]  # what follows the colon, in a word for people
    example: ClassVar[str]  # such an address
    help: ClassVar[str]  # one line for people
    extra: ClassVar[str | None] = None  # of this package, that it needs
    suffixes: ClassVar[tuple[str, ...]] = ()  # of files that are of this kind where no prefix is given
    named: ClassVar[bool] = False  # its labels are names, so they can be matched with a model's classes
    runs_code: ClassVar[bool] = False  # the address decides which code is run on this machine
    chooses: ClassVar[bool] = False  # `read` leaves out what data.sites and data.without do; else it is done afterwards

    classes: Classes = None
    test_share: TestShare = 0.0
    sites: Names = None  # the sites that are read, by name; None: all
    without: Names = None  # the sites that are left out
    group: Group = None

    @abstractmethod
    def read(self, name: str, address: str) -> Dataset:
        """The samples at an address; `name` is all of it, with the prefix, and the name of the data set."""

    def inputs(self, name: str, address: str, preprocessing: Mapping[str, Any]) -> Inputs:
        """The samples, whatever their labels, as inputs for a model with this preprocessing."""
        data = self.read(name, address)
        return data.x_test if len(data.x_test) else data.x_train

    @classmethod
    def applicable(cls, address: str, known: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Those settings that a run was `known` by which hold for this address, too, beside those `given` for it."""
        return dict(known)

    def unlabelled(
        self, path: Path, shape: tuple[int, ...], preprocessing: Mapping[str, Any]
    ) -> Iterator[NDArray[Any]]:
        """Inputs in a file, in their order, for a model that takes samples of this shape and preprocessing."""
        raise DataError(f"{path}: inputs for predictions are not read from {self.prefix}:")

    @classmethod
    def file(cls, address: str) -> Path | None:
        """The file or folder that is read; None where the address is no path."""
        return expanded(address)

    @classmethod
    def absolute(cls, address: str) -> str:
        """The address as it holds from any folder."""
        file = cls.file(address)
        return address if file is None else str(file.absolute())

    @classmethod
    def form(cls) -> str:
        return f"{cls.prefix}:{cls.address}"

    def chooses_sites(self) -> bool:
        """Whether data.sites or data.without is set."""
        return self.sites is not None or self.without is not None

    def chosen_sites(self, known: Sequence[str], where: str) -> list[str]:
        """Those of the sites that are read, in their order."""
        for key, names in (("sites", self.sites), ("without", self.without)):
            if names is None:
                continue
            if not known:
                raise DataError(f"data.{key} chooses sites, but {where} does not say which site a sample comes from")
            if unknown := [name for name in names if name not in known]:
                raise DataError(f"data.{key}: {where} has no site {unknown[0]!r}{did_you_mean(unknown[0], known)}")
        kept = [name for name in known if self.sites is None or name in self.sites]
        kept = [name for name in kept if name not in (self.without or ())]
        if not kept and self.chooses_sites():
            raise DataError(f"data.sites and data.without leave no site of {where}; it has {', '.join(known)}")
        return kept

    def chosen_rows(self, sites: Sequence[str], where: str) -> NDArray[np.bool_]:
        """Marks the rows to read, given the site of each."""
        kept = set(self.chosen_sites(in_order(set(sites)), where))
        return np.array([site in kept for site in sites], bool)

    def restricted(self, data: Dataset, where: str) -> Dataset:
        """A data set that was read as a whole, without the other sites; statistics are measured again."""
        if not self.chooses_sites():
            return data
        kept = self.chosen_sites(data.sites, where)
        number = np.array([*(kept.index(name) if name in kept else -1 for name in data.sites), -1], np.int64)
        assert data.site_train is not None  # a data set that names sites says so of every training sample
        train, test = number[data.site_train], None if data.site_test is None else number[data.site_test]
        chosen = select_rows(data, train >= 0, None if test is None else test >= 0)
        chosen = replace(chosen, sites=tuple(kept), site_train=train[train >= 0])
        if test is not None:
            chosen = replace(chosen, site_test=test[test >= 0])
        elif len(data.y_test):
            note = f"{where}: its test samples do not say which site they come from, so all of them are kept"
            chosen = replace(chosen, notes=(*data.notes, note))
        if data.fitted:
            mean, std = measure(chosen.x_train, data.scale, data.preprocessing)
            chosen = replace(chosen, mean=mean, std=std)
        return chosen
