"""What a hyper-parameter does: the gain over a base value, compared seed by seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fednh.errors import UserError
from fednh.report.figures.base import Choice, Drawing, FigureUnavailable, Kind, metrics_of, stated_n
from fednh.report.figures.style import grid, legend_below, line, numbered, side_by_side
from fednh.report.groups import Group, apart, group_runs, varying
from fednh.report.load import Run
from fednh.report.stats import sd
from fednh.runs.run_folder import display_names


@dataclass(frozen=True)
class RelativeGain:
    """What a value gains over the base value, in percentage points, over the seeds that both have."""

    value: float
    mean: float
    spread: float  # standard deviation of the paired differences (n - 1); 0 for one seed
    n: int


def swept(runs: Sequence[Run]) -> list[str]:
    """Numeric settings in which runs differ that are otherwise the same, hyper-parameters of the method first."""
    keys = []
    settings = [group.settings for group in group_runs(runs)]
    for key in varying(settings):  # a setting that is the same everywhere was not swept
        values: dict[str, set[float]] = {}
        for s in settings:
            if _number(s.get(key)):
                values.setdefault(_rest(s, key), set()).add(float(s[key]))
        if any(len(different) > 1 for different in values.values()):
            keys.append(key)
    return sorted(keys, key=lambda k: not k.startswith("method."))


def gains(runs: Sequence[Run], key: str, metric: str, base: float) -> list[RelativeGain]:
    """For every value of `key`: the metric minus the metric at `base` with the same seed."""
    at = {
        (float(group.settings[key]), run.config.seed): run.summary[metric]
        for group in group_runs(runs)
        for run in group.runs
        if run.has(metric)
    }
    relative_gains = []
    for value in sorted({v for v, _ in at}):
        pairs = [at[v, s] - at[base, s] for v, s in sorted(at) if v == value and (base, s) in at]
        if pairs:
            relative_gains.append(RelativeGain(value, float(np.mean(pairs)), sd(pairs), len(pairs)))
    return relative_gains


def draw(runs: Sequence[Run], choice: Choice) -> Drawing:
    keys = swept(runs)
    if choice.setting is not None and choice.setting not in keys:
        raise UserError(f"{choice.setting} was not swept in these runs" + (f"; {', '.join(keys)} was" if keys else ""))
    if not keys:
        raise FigureUnavailable("no two runs differ in one number only (sweep one, such as method.rho=0.1,0.5,0.9)")
    key = choice.setting or keys[0]
    lines = _lines(runs, key)
    values = sorted({float(group.settings[key]) for groups in lines.values() for group in groups})
    base = values[0] if choice.base is None else choice.base
    if base not in values:
        raise UserError(f"no run has {key} = {base:g}; the base may be {', '.join(f'{v:g}' for v in values)}")
    metrics = metrics_of(runs)
    figure, axes = side_by_side(len(metrics), 2.9)
    rows, counts = [], set()
    for ax, (metric, name) in zip(axes.flat, metrics.items(), strict=True):
        ax.axhline(0, color=line(), linewidth=1)
        for i, (label, groups) in enumerate(lines.items()):
            points = gains([run for group in groups for run in group.runs], key, metric, base)
            if not points:
                continue
            x, mean, spread = (np.array([getattr(p, k) for p in points]) for k in ("value", "mean", "spread"))
            look = numbered(i)
            drawn = {"color": look.colour, "linestyle": look.dashes, "marker": look.marker}
            ax.errorbar(x, mean, yerr=spread, markersize=4, capsize=2, label=label, **drawn)
            rows += [[label, name, p.value, p.mean, p.spread, p.n] for p in points]
            counts |= {p.n for p in points}
        grid(ax)
        ax.set_xticks(values, [f"{v:g}" for v in values])
        ax.set(title=name, xlabel=key)
    for ax in axes[:, 0]:
        ax.set_ylabel(f"gain over {base:g}, percentage points")
    legend_below(figure, lines)
    if not counts:
        raise FigureUnavailable(f"no run of another value has a seed in common with {key} = {base:g}")
    n = stated_n(counts)
    caption = (
        f"Each run is compared with the run at {key} = {base:g} of the same seed; mean of the differences over {n}, "
        "whiskers ± one standard deviation."
    )
    return Drawing(figure, caption, ["runs", "metric", key, "gain", "sd_over_seeds", "n"], rows)


def _rest(settings: dict[str, object], key: str) -> str:
    """Everything but the swept setting, as a name for what is otherwise the same."""
    return repr(sorted((k, repr(v)) for k, v in settings.items() if k != key))


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _lines(runs: Sequence[Run], key: str) -> dict[str, list[Group]]:
    """The groups of runs that differ in `key` alone, by a label that says in what else the lines differ."""
    alike: dict[str, list[Group]] = {}
    for group in group_runs(runs):
        if _number(group.settings.get(key)):
            alike.setdefault(_rest(group.settings, key), []).append(group)
    swept_ones = [groups for groups in alike.values() if len(groups) > 1]
    rests = [{**groups[0].settings, "data.name": groups[0].data, key: None} for groups in swept_ones]
    names = display_names(groups[0].method for groups in swept_ones)
    words = apart([{k: v for k, v in rest.items() if k != "method.name"} for rest in rests], "{key} {value}")
    lines = {" ".join([names[groups[0].method], *more]): groups for groups, more in zip(swept_ones, words, strict=True)}
    return dict(sorted(lines.items()))


SENSITIVITY = Kind(
    "sensitivity",
    "What a hyper-parameter does",
    "Zero is the base value; above it the value is better. Where the whiskers reach zero, the seeds do not agree.",
    draw,
    whole=True,
)
