"""Who loses when a class is rare: accuracy of every class against how many samples of it there are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from fednh.report.figures.base import Choice, Drawing, FigureUnavailable, Kind, stated_n, variant_looks
from fednh.report.figures.style import Look, grid, legend_below, panels
from fednh.report.groups import by_variant
from fednh.report.load import Run
from fednh.report.stats import sd

SHOTS = ("absent", "few", "medium", "many")


def shot_group(samples: int, bounds: tuple[int, int]) -> str:
    """absent: none; few: below the first bound; many: above the second; medium: between, both included."""
    if samples == 0:
        return "absent"
    if samples < bounds[0]:
        return "few"
    return "many" if samples > bounds[1] else "medium"


def personal_groups(run: Run, bounds: tuple[int, int]) -> dict[str, tuple[float, int]]:
    """For the personal models: mean accuracy over all (client, class) pairs of a shot group, and how many pairs."""
    counts = run.counts
    rows = ((counts[row["client"]], row["per_class"]) for row in run.summary["clients"])
    return _shot_means((pair for samples, right in rows for pair in zip(samples.tolist(), right, strict=True)), bounds)


def global_groups(run: Run, bounds: tuple[int, int]) -> dict[str, tuple[float, int]]:
    """For the global model: mean accuracy over the classes of a shot group by their samples on all clients together."""
    return _shot_means(zip(_totals(run).tolist(), run.summary["per_class"] or [], strict=False), bounds)


def _shot_means(pairs: Iterable[tuple[int, float | None]], bounds: tuple[int, int]) -> dict[str, tuple[float, int]]:
    """shot group -> mean accuracy and number of these (samples, accuracy); None: the test set lacks the class."""
    values: dict[str, list[float]] = {}
    for samples, accuracy in pairs:
        if accuracy is not None:
            values.setdefault(shot_group(samples, bounds), []).append(accuracy)
    return {group: (float(np.mean(values[group])), len(values[group])) for group in SHOTS if group in values}


def draw(runs: Sequence[Run], choice: Choice) -> Drawing:
    able = [run for run in runs if run.summary["clients"] and run.summary["clients"][0].get("per_class")]
    if not able:
        raise FigureUnavailable("no personal model was measured by class on a test set that all clients share")
    variants = by_variant(able)
    look = variant_looks(variants)
    figure, axes = panels(1, 2, 4.4, 3.3)
    rows = _global(axes[0, 0], variants, look, choice.shots) + _personal(axes[0, 1], variants, look, choice.shots)
    legend_below(figure, variants)
    few, many = choice.shots
    n = stated_n(map(len, variants.values()))
    caption = (
        f"Means over {n}; whiskers ± one standard deviation over seeds. A class is few-shot below {few} training "
        f"samples, many-shot above {many}, medium-shot between: on the left counted over all clients, on the right "
        "on the client whose model it is."
    )
    return Drawing(figure, caption, ["model", "method", "class_or_group", "samples_or_pairs", "accuracy", "sd"], rows)


def _global(
    ax: Axes, variants: dict[str, list[Run]], look: dict[str, Look], bounds: tuple[int, int]
) -> list[list[Any]]:
    rows = []
    for label, group in variants.items():
        own = [run for run in group if run.summary["per_class"] is not None]
        if not own:
            continue
        samples = np.mean([_totals(run) for run in own], axis=0)
        right = np.mean(np.array([run.summary["per_class"] for run in own], np.float64), axis=0)  # None becomes NaN
        dots: dict[str, Any] = {"s": 20, "alpha": 0.75, "linewidths": 0}
        ax.scatter(samples, right, label=label, color=look[label].colour, marker=look[label].marker, **dots)
        names = own[0].partition["classes"]
        seen = [row for row in zip(names, samples, right, strict=True) if not np.isnan(row[2])]
        rows += [["global", label, c, s, a, ""] for c, s, a in seen]
        for shot in SHOTS:
            means = [g[shot] for run in own if shot in (g := global_groups(run, bounds))]
            if means:
                accuracy = [a for a, _ in means]
                rows.append(["global", label, f"{shot}-shot", means[0][1], np.mean(accuracy), sd(accuracy)])
    grid(ax)
    ax.set(title="Global model, class by class", xlabel="training samples on all clients", ylabel="accuracy, %")
    return rows


def _personal(
    ax: Axes, variants: dict[str, list[Run]], look: dict[str, Look], bounds: tuple[int, int]
) -> list[list[Any]]:
    rows, width = [], 0.8 / len(variants)
    groups = {label: [personal_groups(run, bounds) for run in group] for label, group in variants.items()}
    present = [shot for shot in SHOTS if any(shot in g for seeds in groups.values() for g in seeds)]
    for i, (label, seeds) in enumerate(groups.items()):
        for place, shot in enumerate(present):
            values = [g[shot][0] for g in seeds if shot in g]
            if values:
                at = place + (i - (len(groups) - 1) / 2) * width
                ax.bar(at, np.mean(values), width * 0.9, color=look[label].colour, label=label)
                ax.errorbar(at, np.mean(values), yerr=sd(values), color=look[label].colour, alpha=0.6, linewidth=1)
                pairs = sum(g[shot][1] for g in seeds if shot in g)
                rows.append(["personal", label, f"{shot}-shot", pairs, np.mean(values), sd(values)])
    words = {"absent": "absent\n0", "few": f"few\n1–{bounds[0] - 1}", "many": f"many\n> {bounds[1]}"}
    words["medium"] = f"medium\n{bounds[0]}–{bounds[1]}"
    ax.set_xticks(range(len(present)), [words[shot] for shot in present])
    grid(ax)
    ax.set(
        title="Personal models, by their owner's samples",
        xlabel="training samples of the class on the client",
        ylabel="accuracy, %",
    )
    return rows


def _totals(run: Run) -> NDArray[np.int64]:
    return np.asarray(run.counts.sum(axis=0), np.int64)


FREQUENCY = Kind(
    "frequency",
    "Who loses when a class is rare",
    "On the left a flat cloud means that rare classes are recognised as well as common ones. On the right, the lower "
    "the bars of the few-shot group, the more a client's model gives up on what its owner rarely sees.",
    draw,
)
