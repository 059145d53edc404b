"""Held-out accuracy against training samples a site, for `fednh learning-curve`; it is no figure of single runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fednh.report.figures.base import Drawing
from fednh.report.figures.style import CYCLE, MARKERS, muted, panels

COLUMNS = ["samples", "model", "accuracy", "low", "high", "held_out", "seeds"]


def draw(method: str, noun: str, rows: Sequence[Sequence[Any]]) -> Drawing:
    """A line with 95% intervals for each kind of model; `rows` have COLUMNS."""
    figure, axes = panels(1, 1, 6.4, 3.8)
    ax, kinds = axes[0, 0], list(dict.fromkeys(row[1] for row in rows))
    sizes = sorted({row[0] for row in rows})
    for place, kind in enumerate(kinds):
        mine = [row for row in rows if row[1] == kind]
        x = [row[0] * 1.03 ** (place - 1) for row in mine]  # beside each other
        mean, low, high = ([row[column] for row in mine] for column in (2, 3, 4))
        whiskers = [[m - a for m, a in zip(mean, low, strict=True)], [b - m for m, b in zip(mean, high, strict=True)]]
        label = kind if kind == "local only" else f"{method}, {kind}"
        look = {"color": CYCLE[place], "marker": MARKERS[place], "markersize": 5, "linewidth": 1.4}
        ax.errorbar(x, mean, yerr=whiskers, elinewidth=1, label=label, **look)
    ax.set_xscale("log")
    ax.set_xticks(sizes, [str(size) for size in sizes])
    ax.minorticks_off()
    ax.grid(True, axis="y")
    ax.set(xlabel=f"training samples a {noun}", ylabel="accuracy on held-out samples, %")
    ax.legend(loc="lower right", labelcolor=muted())
    caption = (
        "Whiskers are 95% intervals over samples and seeds; the held-out samples of a seed are the same everywhere."
    )
    return Drawing(figure, caption, COLUMNS, [list(row) for row in rows])
