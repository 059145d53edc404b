"""Sheets: tables independent of their output format; their cells, and how a terminal, Markdown and LaTeX show them.

HTML shows the same Sheets. CSV has other columns: see tables.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from numpy.typing import NDArray
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fednh.report.stats import Spread
from fednh.text import size as bytes_text

DASH = "–"


@dataclass(frozen=True)
class Cell:
    """The text, the value it is sorted by, and its rank in its column (1: best, 2: second, 0: neither)."""

    text: str
    value: float | str | None = None
    place: int = 0


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


class Titled(Table):
    """A table whose title and note are as wide as the terminal, however narrow its columns are."""

    above, below = Text(), Text()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.above
        yield from super().__rich_console__(console, options)
        if self.below:
            yield self.below


def to_rich(sheet: Sheet, width: int) -> Titled:
    """For a terminal of this width: the best bold, the second underlined. Text is wrapped, never cut off."""
    table = Titled(pad_edge=False)
    table.above, table.below = Text(sheet.title, "table.title"), Text(sheet.note, "table.caption")
    for name, left, wide in zip(sheet.columns, _left(sheet), _widths(sheet, width), strict=True):
        table.add_column(escape(name), justify="left" if left else "right", overflow="fold", width=wide)
    style = {0: "", 1: "bold", 2: "underline"}
    for row in sheet.rows:
        table.add_row(*(f"[{style[c.place]}]{escape(c.text)}[/]" if c.place else escape(c.text) for c in row))
    return table


def _widths(sheet: Sheet, width: int) -> Sequence[int | None]:
    """The width of each column: numbers and words are not broken if there is room, sentences and headings may be."""
    least, full = [], []
    for at, (name, words) in enumerate(zip(sheet.columns, _left(sheet), strict=True)):
        texts = [row[at].text for row in sheet.rows]
        whole = [*name.split(), *(" ".join(texts).split() if words else texts)]
        least.append(max(map(len, whole)))
        full.append(max(map(len, [name, *texts])))
    left = width - (3 * len(least) - 1) - sum(least)  # the width left after borders and padding
    if left < 0:
        return [None] * len(least)  # rich folds what does not fit
    for _ in range(min(left, sum(full) - sum(least))):
        neediest = max(range(len(least)), key=lambda at: full[at] - least[at])
        least[neediest] += 1
    return least


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
