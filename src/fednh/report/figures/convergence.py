"""How the body's gradient shrinks: its squared norm on the picked clients' data, by round and by rho."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.ticker import MaxNLocator

from fednh.report.figures.base import Choice, Drawing, FigureUnavailable, Kind, stated_n, variant_looks
from fednh.report.figures.style import grid, legend_below, log_y, muted, panels, plot_band
from fednh.report.groups import by_variant
from fednh.report.load import Run

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


@dataclass(frozen=True)
class Norm:
    """The squared gradient norm of one round: mean over its clients, then over seeds, with the seeds' range."""

    round: int
    mean: float
    low: float
    high: float
    n: int


def norms(runs: Sequence[Run]) -> list[Norm]:
    """By round, where every run of the group logged it."""
    tables = [{r["round"]: float(r["gradient_norm"]) for r in run.records if "gradient_norm" in r} for run in runs]
    shared = sorted(set.intersection(*(set(table) for table in tables)))
    found = []
    for round_ in shared:
        values = [table[round_] for table in tables]
        found.append(Norm(round_, float(np.mean(values)), min(values), max(values), len(values)))
    return found


def draw(runs: Sequence[Run], choice: Choice) -> Drawing:
    logged = [run for run in runs if any("gradient_norm" in record for record in run.records)]
    if not logged:
        raise FigureUnavailable("no run logged gradient norms (run with --set diagnostics.gradient_norm=true)")
    variants = by_variant(logged)
    look = variant_looks(variants)
    figure, axes = panels(1, 2, 4.3, 3.2)
    ax, rows = axes[0, 0], []
    for label, group in variants.items():
        points = norms(group)
        x, mean, low, high = (np.array([getattr(p, k) for p in points]) for k in ("round", "mean", "low", "high"))
        plot_band(ax, label, look[label], x, mean, low, high)
        rows += [[label, p.round, p.mean, p.low, p.high, p.n] for p in points]
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
        f"{n} seeds; the band is their range. Losses of different methods have different scales: compare values of "
        "rho, not methods."
    )
    return Drawing(figure, caption, ["method", "round", "mean", "lowest_seed", "highest_seed", "n"], rows)


CONVERGENCE = Kind(
    "convergence",
    "How the gradient shrinks",
    "Lower means closer to a point where the clients' bodies have nothing left to learn. Theorem 1 promises a small "
    "value in the end if rho is close enough to 1 and the learning rate small enough; beside it stands what was "
    "measured.",
    draw,
)
