"""Text for people: numbers, times, sizes, small tables, received text made safe; and CSV for programs."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from html import escape

LONGEST = 200  # characters of a name


def name_problem(name: str) -> str | None:
    """Why this cannot be the name of a site or a federation, or None; the name itself is not quoted.

    A name goes into logs, tables and onto screens of others: a new line in it would forge a line, an escape code would
    change what a terminal shows, and invisible characters would make two names look alike.
    """
    if not name:
        return "it is empty"
    if len(name) > LONGEST:
        return f"it is longer than {LONGEST} characters"
    if not name.isprintable():
        return "it holds a new line, an escape code or another character that cannot be printed"
    if name != name.strip():
        return "it begins or ends with a blank"
    return None


def one_line(text: str, longest: int = 2000) -> str:
    """Text on one line, with control characters escaped: `\\x1b` is shown, not obeyed by a terminal."""
    words = " ".join(text.split())
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in words)
    return shown if len(shown) <= longest else f"{shown[:longest]}..."


def some(names: Sequence[str], most: int = 5) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def plural(number: int, noun: str, several: str | None = None) -> str:
    """A number with its noun: 1 run, 2 runs, 1,200 runs; `several` is the plural of a noun that has another one."""
    return f"{number:,} {noun if number == 1 else several or f'{noun}s'}"


def html_table(facts: Mapping[str, str]) -> str:
    """Facts by name as a small table, for notebooks."""
    rows = (f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts.items())
    return f"<table>{''.join(rows)}</table>"


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """Rows as lines of CSV; None is an empty cell."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def duration(seconds: float) -> str:
    """Seconds as people say them: 2m05s, 1h02m."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"


def size(count: float) -> str:
    """A number of bytes as people say it: 999 B, 1.0 kB."""
    amount, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while round(amount, 1) >= 1000 and len(units) > 1:
        amount, units = amount / 1000, units[1:]
    return f"{amount:.0f} B" if units[0] == "B" else f"{amount:.1f} {units[0]}"
