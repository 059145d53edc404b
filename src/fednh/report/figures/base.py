"""What a figure is: a name, a sentence on how to read it, what it needs, and one function that draws it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from fednh.errors import UserError
from fednh.metric_names import HELD_OUT, TEST_SET
from fednh.report.figures.style import Look, looks
from fednh.report.load import Run
from fednh.text import plural


class FigureUnavailable(UserError):
    """These runs do not hold what the figure shows; the sentence says what is missing."""


def metrics_of(runs: Iterable[Run]) -> dict[str, str]:
    """The metrics on the test set; for runs without one, those on held-out samples."""
    known = list(runs)
    tested = any(run.has(*TEST_SET) for run in known)
    return TEST_SET if tested or not any(run.has(*HELD_OUT) for run in known) else HELD_OUT


def stated_n(counts: Iterable[int]) -> str:
    """ "n = 3 seeds", or "n = 2 to 3 seeds" where the groups differ."""
    low, high = min(known := list(counts)), max(known)
    return f"n = {plural(low, 'seed')}" if low == high else f"n = {low} to {high} seeds"


def variant_looks(variants: Mapping[str, Sequence[Run]]) -> dict[str, Look]:
    """The look of every label of `by_variant`."""
    return looks(list(variants), [runs[0].method for runs in variants.values()])


def client_noun(run: Run, several: bool = True) -> str:
    """What a figure calls the clients of a run."""
    return ("site" if run.names else "client") + "s" * several


def identified(run: Run, client: int) -> list[int | str]:
    """A client in a figure's table: its number, and its name if it has one. `identity` has the columns."""
    return [client, run.names[client]] if client in run.names else [client]


def identity(run: Run) -> list[str]:
    return ["client", "site"] if run.names else ["client"]


@dataclass(frozen=True)
class Choice:
    """What a person may choose about a figure; None leaves it to the figure."""

    clients: tuple[int | str, ...] | None = None  # numbers or sites' names: partition, representations (two)
    classes: tuple[str, ...] | None = None  # representations
    x: str = "round"  # curves: round, bytes or seconds
    groups: Path | None = None  # similarity: a mapping file {"group": ["class", ...]}
    setting: str | None = None  # sensitivity: the swept setting, such as method.rho
    base: float | None = None  # sensitivity: the value that the others are compared with
    shots: tuple[int, int] = (20, 100)  # frequency: few-shot below the first, many-shot above the second


@dataclass(frozen=True)
class Drawing:
    """A drawn figure, what its numbers stand on, and the numbers themselves."""

    figure: Figure
    caption: str  # n, the spread, and what else was measured
    columns: list[str]
    rows: list[list[Any]] = field(default_factory=list)
    explanation: str = ""  # how to read this drawing; empty: the kind's sentence


@dataclass(frozen=True)
class Kind:
    """One figure of the catalogue; `draw` takes runs of one setting, and raises FigureUnavailable if they lack data."""

    name: str
    title: str
    explanation: str
    draw: Callable[[Sequence[Run], Choice], Drawing]
    whole: bool = False  # it compares settings, so that one drawing may show runs of several
