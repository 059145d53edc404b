"""What privacy costs: accuracy against epsilon, a line a method; runs without privacy as a level to compare with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fednh.report.figures.base import Choice, Drawing, FigureUnavailable, Kind, metrics_of, stated_n
from fednh.report.figures.style import grid, legend_below, numbered, side_by_side
from fednh.report.load import Run
from fednh.report.stats import sd
from fednh.runs.run_folder import display_names


def draw(runs: Sequence[Run], choice: Choice) -> Drawing:
    if not any("epsilon" in run.summary for run in runs):
        raise FigureUnavailable("no run has privacy (sweep privacy.epsilon=1,2,4,8 with privacy.level)")
    names, metrics = display_names({run.method for run in runs}), metrics_of(runs)
    figure, axes = side_by_side(len(metrics), 2.9)
    rows, counts, labels = [], set(), dict[str, None]()
    for ax, (metric, title) in zip(axes.flat, metrics.items(), strict=True):
        for i, method in enumerate(sorted(names)):
            look, mine = numbered(i), [run for run in runs if run.method == method and run.has(metric)]
            points = [row for row in _points(mine, metric) if row[0] is not None]
            plain = [row for row in _points(mine, metric) if row[0] is None]
            if points:
                x, mean, spread = (np.array([row[k] for row in points], float) for k in range(3))
                ax.errorbar(x, mean, yerr=spread, marker=look.marker, color=look.colour, capsize=2, label=names[method])
                labels[names[method]] = None
            for row in plain if points else ():
                ax.axhline(row[1], color=look.colour, linestyle=":", linewidth=1)
            rows += [[names[method], title, *row] for row in (*points, *plain)]
            counts |= {row[3] for row in (*points, *plain)}
        grid(ax)
        ax.set_xscale("log", base=2)
        ax.set(title=title, xlabel="epsilon")
    for ax in axes[:, 0]:
        ax.set_ylabel("accuracy, %")
    legend_below(figure, labels)
    caption = (
        f"Accuracy after the last round; mean over {stated_n(counts)}, whiskers ± one standard deviation. Dotted: "
        "without privacy."
    )
    return Drawing(figure, caption, ["method", "metric", "epsilon", "mean", "sd_over_seeds", "n"], rows)


def _points(runs: Sequence[Run], metric: str) -> list[tuple[float | None, float, float, int]]:
    """(epsilon, mean, deviation, number of runs), by budget; None: without privacy."""
    by_budget: dict[float | None, list[float]] = {}
    for run in runs:
        spent = run.summary.get("epsilon")
        key = None if spent is None else run.config.privacy.epsilon or round(spent, 2)
        by_budget.setdefault(key, []).append(run.summary[metric])
    ordered = sorted(by_budget.items(), key=lambda row: (row[0] is None, row[0] or 0.0))
    return [(key, float(np.mean(seen)), sd(seen) if len(seen) > 1 else 0.0, len(seen)) for key, seen in ordered]


PRIVACY = Kind(
    "privacy",
    "What privacy costs",
    "To the left promises are stronger. A line that is flat loses nothing by them.",
    draw,
    whole=True,
)
