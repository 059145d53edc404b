"""A table before it has a form: the terminal, Markdown, LaTeX, CSV and HTML all show the same Sheet."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Cell:
    """What is shown, what it is sorted by, and its place in its column (1: best, 2: second, 0: neither)."""

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
