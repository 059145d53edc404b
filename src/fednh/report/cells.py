"""Cells of a Sheet: how numbers are written, and which cells of a column are best and second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fednh.report.sheet import Cell
from fednh.report.stats import Spread
from fednh.words import size as bytes_text

DASH = "–"


def word(value: object) -> Cell:
    """A word or a whole number; words sort as text, numbers by value."""
    return Cell(str(value), value if isinstance(value, int | float) else str(value))


def number(value: float | None, form: str = "{:.2f}") -> Cell:
    return Cell(DASH) if value is None else Cell(form.format(value), float(value))


def percent(share: float) -> str:
    """A fraction as a percentage; rounding never turns a small share into 0% or an incomplete one into 100%."""
    text = f"{100 * share:.3g}%"
    return ">99.9%" if text == "100%" and share < 1 else text


def measured(value: Spread | None, form: str = "{:.2f}", say_n: bool = False) -> Cell:
    """mean ± standard deviation, and on request n."""
    if value is None:
        return Cell(DASH)
    text = form.format(value.mean) + ("" if value.std is None else f" ± {form.format(value.std)}")
    return Cell(text + (f" (n={value.n})" if say_n else ""), value.mean)


def size(value: float | None) -> Cell:
    """A number of bytes with its unit."""
    return Cell(DASH) if value is None else Cell(bytes_text(value), float(value))


def probability(p: float | None) -> Cell:
    if p is None:
        return Cell(DASH)
    return Cell("< 0.001" if p < 0.001 else f"{p:.3f}", p)


def rank(rows: Sequence[list[Cell]], at: int, places: int = 2) -> None:
    """Mark the highest and the second of a column; values equal to two decimals tie. A single row is not marked."""
    values = [(row, round(value, 2)) for row in rows if isinstance(value := row[at].value, float)]
    if len(values) > 1:
        _mark(values, at, sorted({value for _, value in values}, reverse=True)[:places])


def rank_spread(rows: Sequence[list[Cell]], at: int, mean_at: int, places: int = 2) -> None:
    """Mark the lowest spreads, higher mean first: a method that serves everybody badly is even, but not best.

    So only rows with the highest mean are marked, and none of them if a row with a lower mean has the lowest spread.
    """
    pairs = [(row, row[mean_at].value, row[at].value) for row in rows]
    values = [(row, round(m, 2), round(s, 2)) for row, m, s in pairs if isinstance(m, float) and isinstance(s, float)]
    if len(values) > 1:
        highest = max(mean for _, mean, _ in values)
        first = [(row, spread) for row, mean, spread in values if mean == highest]
        order = sorted({spread for _, spread in first})
        if order[0] == min(spread for _, _, spread in values):
            _mark(first, at, order[:places])


def _mark(values: Sequence[tuple[list[Cell], float]], at: int, order: Sequence[float]) -> None:
    for row, value in values:
        if value in order:
            row[at] = replace(row[at], place=order.index(value) + 1)
