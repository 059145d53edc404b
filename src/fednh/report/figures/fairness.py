"""How evenly the clients are served: every client's PM(L), the worst tenth marked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fednh.report.figures.base import Choice, Drawing, Kind, NotAllowed, metrics_of, stated_n
from fednh.report.figures.style import ALARM, colours, ink, muted, panels
from fednh.report.grouping import by_variant
from fednh.report.load import Run

RASTER = 800  # more dots than this are drawn as pixels, which keeps vector files small


def worst_tenth(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Marks the lowest 10% of `values`, at least one; equal values are taken in order."""
    marked = np.zeros(len(values), bool)
    marked[np.argsort(values, kind="stable")[: math.ceil(0.1 * len(values))]] = True
    return marked


def _people(run: Run, figure: str) -> list[tuple[int, dict[str, Any]]]:
    """The run's seed and what it says of each client that has the figure."""
    return [(run.config.seed, person) for person in run.summary["clients"] if person.get(figure) is not None]


def draw(runs: Sequence[Run], choice: Choice) -> Drawing:
    figure_key = "pm_l" if "pm_l" in metrics_of(runs) else "held_share"
    name = {"pm_l": "PM(L)", "held_share": "held-out accuracy"}[figure_key]
    variants = {
        label: group for label, group in by_variant(runs).items() if any(_people(run, figure_key) for run in group)
    }
    if not variants:
        raise NotAllowed("no client took part in any run")
    paint = colours(list(variants), [group[0].method for group in variants.values()])
    figure, axes = panels(1, 1, 7.6, 0.9 + 0.46 * len(variants))
    ax, rows = axes[0, 0], []
    measured = {label: [p for run in group for p in _people(run, figure_key)] for label, group in variants.items()}
    total = sum(map(len, measured.values()))
    for place, (label, group) in enumerate(variants.items()):
        people = measured[label]
        values = np.array([person[figure_key] for _, person in people])
        marked = worst_tenth(values)
        height = place + np.random.default_rng(0).uniform(-0.27, 0.27, len(values))
        dots = {"s": 13, "linewidths": 0, "rasterized": total > RASTER}
        ax.scatter(values[~marked], height[~marked], color=paint[label], alpha=0.6, **dots)
        ax.scatter(values[marked], height[marked], color=ALARM, marker="D", **dots)
        ax.plot([values.mean()] * 2, [place - 0.38, place + 0.38], color=ink(), linewidth=1.6)
        spread = float(np.mean([run.summary[f"{figure_key}_std"] for run in group if run.has(figure_key)]))
        note = f"{values.mean():.1f} ± {spread:.1f}, worst tenth {values[marked].mean():.1f}"
        ax.annotate(note, (1.01, place), xycoords=("axes fraction", "data"), va="center", fontsize=8, color=muted())
        for (seed, person), mark in zip(people, marked, strict=True):
            rows.append([label, seed, person["client"], person[figure_key], bool(mark)])
    ax.set_yticks(range(len(variants)), variants, color=ink())
    ax.set_ylim(len(variants) - 0.5, -0.5)
    ax.set_xlabel(f"{name} of one client, %")
    ax.grid(True, axis="x")
    ax.set_axisbelow(True)
    ax.tick_params(length=0)
    ax.spines["left"].set_visible(False)
    caption = (
        f"One dot a client and seed, {total:,} in all ({stated_n(map(len, variants.values()))} seeds a method); "
        "the bar is the mean, ± the standard deviation over clients averaged over seeds; red diamonds are each "
        "method's worst 10%."
    )
    return Drawing(figure, caption, ["method", "seed", "client", figure_key, "worst_tenth"], rows)


FAIRNESS = Kind(
    "fairness",
    "How evenly clients are served",
    "A narrow cloud far to the right serves everybody well. Look at the red diamonds: two methods with the same mean "
    "may treat their worst-off clients very differently.",
    draw,
)
