"""What changes as training goes on: accuracy by round, bytes or seconds; and how the body's gradient shrinks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from fednh.errors import UserError, did_you_mean
from fednh.metric_names import GM
from fednh.report.figures.base import Choice, Drawing, FigureUnavailable, Kind, metrics_of, stated_n, variant_looks
from fednh.report.figures.style import grid, legend_below, log_y, muted, panels, plot_band, side_by_side
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
    """One measured round over the seeds that have it."""

    x: float
    mean: float
    spread: float  # standard deviation over seeds (n - 1); 0 for one seed
    low: float  # of the seeds
    high: float
    n: int


def curve(runs: Sequence[Run], metric: str, x: str = "round") -> list[Point]:
    """The metric over seeds at every round in which all of `runs` measured it; x is the mean over them."""
    tables = [_evaluated(run, metric, x) for run in runs]
    shared = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
    points = []
    for round_ in shared:
        places, values = np.array([table[round_] for table in tables]).T
        low, high = float(values.min()), float(values.max())
        points.append(Point(float(places.mean()), float(values.mean()), sd(values), low, high, len(values)))
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
        raise UserError(f"x = {choice.x!r} is not an axis{did_you_mean(choice.x, AXES)}")
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
        f"Mean over {stated_n(map(len, variants.values()))} a method ({', '.join(map(str, seeds(runs)))}); "
        f"{band}. Personal models before the end are those of eval.clients = {', '.join(clients)}."
    )
    rows = [[label, metrics[metric], p.x, p.mean, p.spread, p.n] for (label, metric), ps in curves.items() for p in ps]
    explanation = _EXPLANATION if GM in metrics else f"{_EXPLANATION} {_HELD}"
    return Drawing(figure, caption, ["method", "metric", choice.x, "mean", "sd_over_seeds", "n"], rows, explanation)


_EXPLANATION = "Higher is better, and further left is cheaper."
_HELD = (
    "The upper two are the personal models, the lower two the global model on the same samples, which each client held "
    "out of its own data: on the left plain accuracy, on the right all of its classes alike."
)
CURVES = Kind("curves", "Accuracy as training goes on", _EXPLANATION, draw)


# --- the gradient of the body --------------------------------------------------------------------------------------

THEOREM = (
    "Theorem 1 (FedNH, informal)\n\n"
    "For every ε > 0 there is a ν₁(ε) < 1 and a ν₂(ε, ρ) > 0 such that\n"
    "with  ν₁ < ρ < 1,  a constant step size below ν₂\n"
    "and R > O(1/ε) rounds, a client's iterate drawn\n"
    "at random from all its local steps satisfies\n\n"
    "          E ‖∇θ F_k(θ*; W*)‖²  ≤  ε .\n\n"
    "Proved for full participation. It asks for ρ close to 1\n"
    "when ε is small; it does not say that the curves\n"
    "are ordered by ρ at any given round."
)


def draw_gradient(runs: Sequence[Run], choice: Choice) -> Drawing:
    """Its squared norm on the picked clients' data by round, beside what Theorem 1 says."""
    logged = [run for run in runs if any("gradient_norm" in record for record in run.records)]
    if not logged:
        raise FigureUnavailable("no run logged gradient norms (run with diagnostics.gradient_norm = true)")
    variants = by_variant(logged)
    look = variant_looks(variants)
    figure, axes = panels(1, 2, 4.3, 3.2)
    ax, rows = axes[0, 0], []
    for label, group in variants.items():
        points = curve(group, "gradient_norm")
        x, mean, low, high = (np.array([getattr(p, key) for p in points]) for key in ("x", "mean", "low", "high"))
        plot_band(ax, label, look[label], x, mean, low, high)
        rows += [[label, round(p.x), p.mean, p.low, p.high, p.n] for p in points]
    log_y(ax)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    grid(ax)
    ax.set(xlabel="round", ylabel="‖∇ body‖², mean over picked clients", title="Measured, at the received model")
    legend_below(figure, variants, 4)
    axes[0, 1].set_axis_off()
    axes[0, 1].text(0.02, 0.97, THEOREM, va="top", fontsize=8, color=muted(), transform=axes[0, 1].transAxes)
    n = stated_n(map(len, variants.values()))
    caption = (
        f"Full gradient of the method's own loss on all samples of each picked client; mean over clients, then over "
        f"{n}; the band is their range. Losses of different methods have different scales: compare values of "
        "rho, not methods."
    )
    return Drawing(figure, caption, ["method", "round", "mean", "lowest_seed", "highest_seed", "n"], rows)


CONVERGENCE = Kind(
    "convergence",
    "How the gradient shrinks",
    "Lower means closer to a point where the clients' bodies have nothing left to learn. Theorem 1 promises a small "
    "value in the end if rho is close enough to 1 and the learning rate small enough; beside it stands what was "
    "measured.",
    draw_gradient,
)
