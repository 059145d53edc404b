"""Sheets: tables independent of their output format; their cells, and how a terminal, Markdown and LaTeX show them.

HTML shows the same Sheets. CSV has other columns: see tables.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from rich.console import Group, JustifyMethod, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fednh.report.stats import Spread
from fednh.text import size as bytes_text

DASH = "–"
T = TypeVar("T")
_PLACES = {0: "", 1: "bold", 2: "underline"}  # on a terminal
_NARROWEST = 8  # characters of a column of words that makes room for others


@dataclass(frozen=True)
class Cell:
    """The text, the value it is sorted by, and its rank in its column (1: best, 2: second, 0: neither)."""

    text: str
    value: float | str | None = None
    place: int = 0
    style: str = ""  # on a terminal, instead of that of its rank


@dataclass(frozen=True)
class Sheet:
    """A titled table; `note` says how to read it (what n is, what the spread is)."""

    name: str  # for file names and anchors: "accuracy", "fairness", "cost"
    title: str
    columns: list[str]
    rows: list[list[Cell]] = field(default_factory=list)
    note: str = ""


# --- cells ---------------------------------------------------------------------------------------------------------


def word(value: object) -> Cell:
    """A word or a whole number; words sort as text, numbers by value."""
    return Cell(str(value), value if isinstance(value, int | float) else str(value))


def number(value: float | None, form: str = "{:.2f}") -> Cell:
    return Cell(DASH) if value is None else Cell(form.format(value), float(value))


def spread_sample(ordered: Sequence[T], most: int) -> list[T]:
    """At most so many of these, evenly spaced, the first and the last among them."""
    if len(ordered) <= most:
        return list(ordered)
    return [ordered[at] for at in np.linspace(0, len(ordered) - 1, most).astype(int)]


def percent(share: float) -> str:
    """A fraction as a percentage; rounding never turns a small share into 0% or an incomplete one into 100%."""
    text = f"{100 * share:.3g}%"
    return ">99.9%" if text == "100%" and share < 1 else text


def span(values: NDArray[Any]) -> str:
    """The lowest and the highest value as whole numbers: "3 to 1,200"."""
    low, high = round(values.min()), round(values.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


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


# --- output formats ------------------------------------------------------------------------------------------------

_LATEX = {
    "\\": r"\textbackslash{}",
    **{char: f"\\{char}" for char in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
    "–": "--",
    "−": "$-$",
}


def to_rich(sheet: Sheet, width: int) -> Group:
    """For a terminal of this width: the best bold, the second underlined. Nothing is cut off, and no number broken.

    Columns that do not fit go on in another table below, which repeats the words at the beginning of every row.
    """
    parts: list[RenderableType] = [Text(sheet.title, "table.title")]
    left = _left(sheet)
    for columns in _fitted(sheet, width):
        table = Table(pad_edge=False)
        for at, wide in columns.items():
            justify: JustifyMethod = "left" if left[at] else "right"
            table.add_column(escape(sheet.columns[at]), justify=justify, overflow="fold", width=wide)
        for row in sheet.rows:
            table.add_row(*(Text(row[at].text, row[at].style or _PLACES[row[at].place]) for at in columns))
        parts.append(table)
    return Group(*parts, *([Text(sheet.note, "table.caption")] if sheet.note else []))


def _fitted(sheet: Sheet, width: int) -> list[dict[int, int]]:
    """The columns of each table, with their widths: numbers and words stay whole if there is room, sentences need not.

    Words at the beginning of a row may have to make room for the widest other column.
    """
    least, full = [], []
    for at, (name, words) in enumerate(zip(sheet.columns, _left(sheet), strict=True)):
        texts = [row[at].text for row in sheet.rows]
        whole = [*name.split(), *(" ".join(texts).split() if words else texts)]
        least.append(max(map(len, whole)))
        full.append(max(map(len, [name, *texts])))
    keys = list(range(max(1, _left(sheet).index(False) if False in _left(sheet) else 1)))
    others = range(len(keys), len(least))
    room = _room(width, len(keys) + bool(others)) - max((least[at] for at in others), default=0)
    while sum(least[at] for at in keys) > room and max(least[at] for at in keys) > _NARROWEST:
        least[max(keys, key=lambda at: least[at])] -= 1
    tables = [list(keys)]
    for at in others:
        if len(tables[-1]) > len(keys) and sum(least[k] for k in (*tables[-1], at)) > _room(width, len(tables[-1]) + 1):
            tables.append(list(keys))
        tables[-1].append(at)
    return [_widened({at: least[at] for at in columns}, full, _room(width, len(columns))) for columns in tables]


def _room(width: int, columns: int) -> int:
    """What a terminal's width leaves for the text of so many columns, beside borders and padding."""
    return width - (3 * columns - 1)


def _widened(widths: dict[int, int], full: Sequence[int], room: int) -> dict[int, int]:
    """Widths that use the room that is left, the neediest column first."""
    for _ in range(min(room - sum(widths.values()), sum(full[at] - wide for at, wide in widths.items()))):
        widths[max(widths, key=lambda at: full[at] - widths[at])] += 1
    return widths


def to_markdown(sheet: Sheet) -> str:
    """GitHub's Markdown, which has no underline; the second is in <u>."""

    def show(cell: Cell) -> str:
        text = _markdown(cell.text)
        return {0: text, 1: f"**{text}**", 2: f"<u>{text}</u>"}[cell.place]

    lines = [[_markdown(name) for name in sheet.columns]]
    lines.append([":--" if left else "--:" for left in _left(sheet)])
    lines += [[show(cell) for cell in row] for row in sheet.rows]
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"**{_markdown(sheet.title)}**\n\n{body}\n\n{_markdown(sheet.note)}\n"


def to_latex(sheet: Sheet) -> str:
    r"""A `table` for a document with \usepackage{booktabs}; needs no other package."""

    def show(cell: Cell) -> str:
        text = _latex(cell.text)
        return {0: text, 1: rf"\textbf{{{text}}}", 2: rf"\underline{{{text}}}"}[cell.place]

    lines = [
        r"\begin{table}",
        r"  \centering",
        rf"  \caption{{{_latex(sheet.title)}. {_latex(sheet.note)}}}",
        rf"  \label{{tab:{sheet.name}}}",
        rf"  \begin{{tabular}}{{{''.join('l' if left else 'r' for left in _left(sheet))}}}",
        r"    \toprule",
        f"    {' & '.join(map(_latex, sheet.columns))} \\\\",
        r"    \midrule",
        *(f"    {' & '.join(map(show, row))} \\\\" for row in sheet.rows),
        r"    \bottomrule",
        r"  \end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _left(sheet: Sheet) -> list[bool]:
    """Which columns hold words: they are aligned left."""
    return [any(isinstance(row[at].value, str) for row in sheet.rows) for at in range(len(sheet.columns))]


def _markdown(text: str) -> str:
    for char in "\\`*_[]<>|":
        text = text.replace(char, f"\\{char}")
    return text


def _latex(text: str) -> str:
    return "".join(_LATEX.get(char, char) for char in text)
