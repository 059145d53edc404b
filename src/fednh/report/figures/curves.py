"""Accuracy as training goes on: by round, by bytes sent, or by seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from fednh.errors import UserError, did_you_mean
from fednh.metric_names import GM
from fednh.report.figures.base import Choice, Drawing, FigureUnavailable, Kind, metrics_of, stated_n, variant_looks
from fednh.report.figures.style import grid, legend_below, plot_band, side_by_side
from fednh.report.groups import by_variant, seeds
from fednh.report.load import Run
from fednh.report.stats import sd

AXES: dict[str, tuple[str, Callable[[dict[str, Any]], float]]] = {
    "round": ("round", lambda record: 1.0),
    "bytes": ("megabytes sent, up and down", lambda record: (record["bytes_up"] + record["bytes_down"]) / 1e6),
    "seconds": ("seconds of training", lambda record: float(record["seconds"])),
}


@dataclass(frozen=True)
class Point:
    """One evaluated round over the seeds that have it."""

    x: float
    mean: float
    spread: float  # standard deviation over seeds (n - 1); 0 for one seed
    n: int


def curve(runs: Sequence[Run], metric: str, x: str = "round") -> list[Point]:
    """The metric's mean and spread over seeds at every round that all of `runs` evaluated; x is the mean over them."""
    tables = [_evaluated(run, metric, x) for run in runs]
    shared = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
    points = []
    for round_ in shared:
        places, values = np.array([table[round_] for table in tables]).T
        points.append(Point(float(places.mean()), float(values.mean()), sd(values), len(values)))
    return points


def _evaluated(run: Run, metric: str, x: str) -> dict[int, tuple[float, float]]:
    """round -> (how far along x, value)."""
    step = AXES[x][1]
    far, table = 0.0, {}
    for record in run.records:
        far += step(record)
        if record.get(metric) is not None:
            table[int(record["round"])] = (far, float(record[metric]))
    return table


def draw(runs: Sequence[Run], choice: Choice) -> Drawing:
    if choice.x not in AXES:
        raise UserError(f"--x {choice.x!r} is not an axis{did_you_mean(choice.x, AXES)}")
    variants, metrics = by_variant(runs), metrics_of(runs)
    curves = {
        (label, metric): curve(group, metric, choice.x) for label, group in variants.items() for metric in metrics
    }
    if max(len(points) for points in curves.values()) < 2:
        raise FigureUnavailable(
            "no run evaluated more than one round that its other seeds evaluated too (see eval.every)"
        )
    look = variant_looks(variants)
    figure, axes = side_by_side(len(metrics), 3.1)
    for ax, (metric, name) in zip(axes.flat, metrics.items(), strict=True):
        for label in variants:
            points = curves[label, metric]
            if not points:
                continue
            x, mean, spread = (np.array([getattr(p, key) for p in points]) for key in ("x", "mean", "spread"))
            plot_band(ax, label, look[label], x, mean, mean - spread, mean + spread)
        grid(ax)
        ax.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=choice.x == "round"))
        ax.set(title=name, xlabel=AXES[choice.x][0])
    for ax in axes[:, 0]:
        ax.set_ylabel("test accuracy, %" if GM in metrics else "held-out accuracy, %")
    legend_below(figure, variants)
    several = max(map(len, variants.values())) > 1
    band = "the band is ± one standard deviation over seeds" if several else "one seed, so no band"
    clients = sorted({str(run.config.eval.clients) for run in runs})
    caption = (
        f"Mean over {stated_n(map(len, variants.values()))} run(s) a method (seed {', '.join(map(str, seeds(runs)))}); "
        f"{band}. Personal models before the end are those of eval.clients = {', '.join(clients)}."
    )
    rows = [[label, metrics[metric], p.x, p.mean, p.spread, p.n] for (label, metric), ps in curves.items() for p in ps]
    explanation = f"{_EXPLANATION} {_TESTED if GM in metrics else _HELD}"
    return Drawing(figure, caption, ["method", "metric", choice.x, "mean", "sd_over_seeds", "n"], rows, explanation)


_EXPLANATION = "Higher is better, and further left is cheaper."
_TESTED = (
    "GM is the global model on all classes; PM(V) and PM(L) are the personal models on their owners' classes, all "
    "alike or by their share."
)
_HELD = (
    "All four are means over what each client holds out of its own data: macro counts its classes alike, share is "
    "plain accuracy. The upper two are the personal models, the lower two (GM) the global model on the same samples."
)
CURVES = Kind("curves", "Accuracy as training goes on", _EXPLANATION, draw)
