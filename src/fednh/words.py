"""Names and sentences that come from elsewhere: checked, or made harmless, before they reach a log or a terminal."""

from __future__ import annotations

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
    """Text on one line in which nothing is left that a terminal or a log would obey: `\\x1b` is shown, not done."""
    words = " ".join(text.split())
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in words)
    return shown if len(shown) <= longest else f"{shown[:longest]}..."
