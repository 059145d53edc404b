"""A table independent of its output format: the terminal, Markdown, LaTeX, CSV and HTML show the same Sheet."""

from __future__ import annotations

from dataclasses import dataclass, field


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
