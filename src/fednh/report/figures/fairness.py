"""How evenly the clients are served: every client's PM(L), the worst tenth marked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from fednh.metric_names import HELD_SHARE, PM_L, TEST_SET, std_of
from fednh.report.figures.base import (
    Choice,
    Drawing,
    FigureUnavailable,
    Kind,
    client_noun,
    identified,
    identity,
    metrics_of,
    stated_n,
    variant_looks,
)
from fednh.report.figures.style import ALARM, ink, muted, panels, shortened
from fednh.report.groups import by_variant
from fednh.report.load import Run, left_out
from fednh.report.stats import lowest_tenth, worst_tenth

MOST_DOTS = 20_000  # of more clients and seeds, each method has a histogram
BINS = 100
RASTER = 800  # more dots than this are drawn as pixels, which keeps vector files small


def draw(runs: Sequence[Run], choice: Choice) -> Drawing:
    metric_key = PM_L if PM_L in metrics_of(runs) else HELD_SHARE
    name = {PM_L: TEST_SET[PM_L], HELD_SHARE: "held-out accuracy"}[metric_key]
    able = [run for run in runs if run.counted(metric_key)]
    if not able:
        raise FigureUnavailable("no client took part in any run, or no accuracy of single clients was measured")
    variants = dict(sorted(by_variant(able).items(), key=lambda item: -_mean(item[1], metric_key)))
    look = variant_looks(variants)
    figure, axes = panels(1, 1, 7.6, 0.9 + 0.46 * len(variants))
    ax, rows = axes[0, 0], []
    total = sum(len(run.counted(metric_key)) for group in variants.values() for run in group)
    binned = total > MOST_DOTS
    for place, (label, group) in enumerate(variants.items()):
        by_seed = [list(run.counted(metric_key).values()) for run in group]
        values, marked = np.concatenate(by_seed), np.concatenate([lowest_tenth(column) for column in by_seed])
        mean, worst = _mean(group, metric_key), float(np.mean([worst_tenth(column) for column in by_seed]))
        if binned:
            rows += [[label, *row] for row in _histogram(ax, place, look[label].colour, values, marked)]
        else:
            height = place + np.random.default_rng(0).uniform(-0.27, 0.27, len(values))
            dots = {"s": 13, "linewidths": 0, "rasterized": total > RASTER}
            ax.scatter(values[~marked], height[~marked], color=look[label].colour, alpha=0.6, **dots)
            ax.scatter(values[marked], height[marked], color=ALARM, marker="D", **dots)
            clients = [
                (run.config.seed, *identified(run, client), value)
                for run in group
                for client, value in run.counted(metric_key).items()
            ]
            rows += [[label, *client, bool(mark)] for client, mark in zip(clients, marked, strict=True)]
        ax.plot([mean] * 2, [place - 0.38, place + 0.38], color=ink(), linewidth=1.6)
        spread = float(np.mean([run.summary[std_of(metric_key)] for run in group if run.has(metric_key)]))
        note = f"{mean:.1f} ± {spread:.1f}, {_worst(group, metric_key)} {worst:.1f}"
        ax.annotate(note, (1.01, place), xycoords=("axes fraction", "data"), va="center", fontsize=8, color=muted())
    ax.set_yticks(range(len(variants)), variants, color=ink())
    ax.set_ylim(len(variants) - 0.5, -0.5)
    ax.set_xlabel(f"{name} of one {client_noun(able[0], several=False)}, %")
    ax.grid(True, axis="x")
    ax.set_axisbelow(True)
    ax.tick_params(length=0)
    ax.spines["left"].set_visible(False)
    whose = client_noun(able[0])
    seeds = stated_n(map(len, variants.values()))
    one = client_noun(able[0], several=False)
    shown = f"How many {whose} lie where, each once a seed" if binned else f"One dot a {one} and seed"
    caption = (
        f"{shown}, {total:,} in all ({seeds} a method); "
        f"higher mean first. The bar is the mean, ± the standard deviation over {whose}, beside it "
        f"the mean of the worst 10% of {whose} (at least one), all three averaged over seeds; "
        f"{'red is' if binned else 'red diamonds are'} the worst 10% of each seed."
    )
    if metric_key == HELD_SHARE:
        caption += left_out(able)
    columns = _BIN_COLUMNS if binned else ["seed", *identity(able[0]), metric_key, "worst_tenth"]
    explanation = FAIRNESS.explanation.replace("diamonds", "part") if binned else ""
    return Drawing(figure, caption, ["method", *columns], rows, explanation)


_BIN_COLUMNS = ["from", "to", "number", "of_them_worst_tenth"]


def _histogram(
    ax: Axes, place: int, colour: str, values: NDArray[np.float64], marked: NDArray[np.bool_]
) -> list[list[float]]:
    """How many values lie in each bin, as a silhouette around `place`, its worst tenth red; and these numbers."""
    edges = np.linspace(0, 100, BINS + 1)
    number, worst = (np.histogram(part, edges)[0] for part in (values, values[marked]))
    half = 0.38 / max(number.max(), 1)
    for part, fill in ((number, colour), (worst, ALARM)):
        ax.bar((edges[:-1] + edges[1:]) / 2, 2 * half * part, 100 / BINS, place - half * part, color=fill, linewidth=0)
    rows: list[list[float]] = np.column_stack([edges[:-1], edges[1:], number, worst]).tolist()
    return rows


def _mean(runs: Sequence[Run], metric: str) -> float:
    return float(np.mean([np.mean(list(run.counted(metric).values())) for run in runs]))


def _worst(runs: Sequence[Run], metric: str) -> str:
    """ "worst 10%", or the name of the site where that is one."""
    clients = runs[0].counted(metric)
    if len(runs) > 1 or len(clients) > 10 or not runs[0].names:
        return "worst 10%"
    return f"worst: {shortened(runs[0].client_name(min(clients, key=clients.__getitem__)), 16)}"


FAIRNESS = Kind(
    "fairness",
    "How evenly everybody is served",
    "A narrow cloud far to the right serves everybody well; a narrow cloud further left serves everybody badly. Look "
    "at the red diamonds: two methods with the same mean may treat those whom they serve worst very differently.",
    draw,
)
