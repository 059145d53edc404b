"""Features that look like identifiers: numbers of rows or of people, and times, which a model can learn by heart.

An increasing number in a file that is sorted by class gives away the class of every held-out row, and of no new one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fednh.data.dataset import Inputs

LEAST = 20  # rows; with fewer, everything looks like one
START = 1000  # rows that rule most features out
PER_STEP = 3  # rows that one value of an ordered column may have, on average
PER_NAME = 20  # rows that one value of a column with a telling name may have, on average
_WHOSE = "row|record|case|patient|person|subject|sample|customer|user|member|serial|invoice|order|entry|line"
_TELLING = re.compile(
    rf"(^|[^a-z])(id|ids|uuid|guid)$|^({_WHOSE})?[^a-z]*(nr|no|num|number|idx|index|key|name)$|^unnamed\b|^$",
    re.IGNORECASE,
)
_CAMEL = re.compile(r"[a-z](Id|ID|Nr|No)$")


def of_numbers(values: NDArray[np.float64], name: str = "x", site: NDArray[np.int64] | None = None) -> str | None:
    """Why a feature of numbers looks like an identifier, or None; `site` has the sites of the rows."""
    if not possible(values[:START]):
        return None
    there = np.isfinite(values)
    values = values[there]
    if len(values) < LEAST:
        return None
    if _steady(values):
        return "rises or falls from row to row"
    if not _whole(values):
        return None
    if _counts(values):
        return "is a number of its own in every row"
    if site is not None and _counts_sites(values, site[there]):
        return "numbers the rows of every site"
    return _telling(name, len(np.unique(values)), len(values))


def possible(start: NDArray[np.floating[Any]]) -> bool:
    """Whether a feature may be one, by its first rows."""
    values = start[np.isfinite(start)]
    return _whole(values) or _steady(values)


def of_words(different: int, rows: int, name: str) -> str | None:
    """Why a text column looks like an identifier, or None."""
    if rows >= LEAST and 2 * different > rows:
        return "has a word of its own in most rows"
    return _telling(name, different, rows)


def sentence(where: str, what: str, found: Iterable[tuple[str, str]], remedy: str) -> list[str]:
    """One warning on all features that were found, each with the reason."""
    named = [f"{name!r} ({why})" for name, why in found]
    more = f" and {len(named) - 5} more" if len(named) > 5 else ""
    words = f"{where}: {what} that look like identifiers, which a model learns by heart"
    return [f"{words}: {', '.join(named[:5])}{more}; {remedy}"] if named else []


def in_vectors(x: Inputs, where: str, site: NDArray[np.int64] | None) -> list[str]:
    """The same for features without names."""
    some = [k for k in range(x.shape[1]) if possible(x[:START, k].astype(np.float64))]
    reasons = ((str(k), of_numbers(x[:, k].astype(np.float64), "x", site)) for k in some)
    return sentence(where, "features", [(k, why) for k, why in reasons if why], "leave them out")


def _telling(name: str, different: int, rows: int) -> str | None:
    """A name that says so, of a column with many values."""
    called = _TELLING.search(name.strip()) or _CAMEL.search(name.strip())
    return "is called so" if called and different >= LEAST and different * PER_NAME >= rows else None


def _whole(values: NDArray[np.float64]) -> bool:
    return bool((values == np.floor(values)).all())


def _steady(values: NDArray[np.float64]) -> bool:
    """Whether they rise or fall throughout; a few rows in a row may have the same one, as those of one patient."""
    step = np.diff(values)
    ordered = bool((step >= 0).all() or (step <= 0).all())
    return ordered and PER_STEP * (int(np.count_nonzero(step)) + 1) >= len(values)


def _counts(values: NDArray[np.float64]) -> bool:
    """Whether all are different, with few gaps."""
    dense = len(values) >= LEAST and bool(np.ptp(values) < 2 * len(values))
    return dense and len(np.unique(values)) == len(values)


def _counts_sites(values: NDArray[np.float64], site: NDArray[np.int64]) -> bool:
    sizes: Sequence[int] = np.bincount(site[site >= 0]).tolist()
    large = [k for k, size in enumerate(sizes) if size >= LEAST]
    return bool(large) and all(_counts(values[site == k]) or _steady(values[site == k]) for k in large)
