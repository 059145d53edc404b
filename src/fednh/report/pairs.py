"""Compares each method with a reference, seed by seed, under the same settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fednh.errors import UserError, did_you_mean
from fednh.report.groups import Group, Row, TableLayout
from fednh.report.stats import WILCOXON_FROM, Paired, holm, paired

METRICS = {"gm": "GM", "pm_v": "PM(V)", "pm_l": "PM(L)"}
# Metrics on the clients' own held-out samples, which differ by client, so they are never mixed with the paper's.
HELD_OUT = {
    "held_macro": "held-out macro",
    "held_share": "held-out share",
    "held_gm_macro": "GM held-out macro",
    "held_gm_share": "GM held-out share",
}


@dataclass(frozen=True)
class Comparison:
    """One method against the reference in one metric and setting."""

    row: Row
    column: str
    group: Group
    metric: str  # the summary's name
    reference: Row
    result: Paired
    corrected: float | None  # p after Holm

    @property
    def reading(self) -> str:
        """The conclusion that the numbers support."""
        n, p = self.result.n, self.corrected
        side = "above" if self.result.mean > 0 else "below"
        if self.result.p is None:
            return f"{side}, untested"
        if p is None or p >= 0.05:
            return "no difference shown" if n >= WILCOXON_FROM else f"unclear (n={n})"
        return side if n >= WILCOXON_FROM else f"maybe {side} (n={n})"


def default_reference(layout: TableLayout) -> str | None:
    """FedNH if there are runs of it, else FedAvg, else None."""
    there = {row.method for row in layout.rows}
    return next((name for name in ("fednh", "fedavg") if name in there), None)


def compare(layout: TableLayout, reference: str | None) -> list[Comparison]:
    """All comparisons with two or more seeds in common. `reference` is a method, or a row's full label."""
    chosen = reference or default_reference(layout)
    if chosen is None:
        return []
    known = {row.method for row in layout.rows} | {row.label for row in layout.rows}
    if chosen not in known:
        raise UserError(f"--reference {chosen!r} is in none of the runs{did_you_mean(chosen, known)}")
    found: list[Comparison] = []
    for setting in dict.fromkeys(group.setting for group in layout.groups):
        here = [place for place in layout.by_row() if place[2].setting == setting]
        rivals = [place for place in here if chosen in (place[0].method, place[0].label)]
        if rivals:
            base = min(rivals, key=lambda place: not _by_default(place[2]))
            for metric in (*METRICS, *HELD_OUT):
                found += _one_metric([place for place in here if place is not base], base, metric)
    return sorted(found, key=lambda c: (layout.rows.index(c.row), layout.columns.index(c.column)))


def _one_metric(
    others: Sequence[tuple[Row, str, Group]], base: tuple[Row, str, Group], metric: str
) -> list[Comparison]:
    pairs = [(place, _differences(place[2], base[2], metric)) for place in others]
    tested = [(place, paired(d)) for place, d in pairs if len(d) >= 2]
    corrected = holm([result.p for _, result in tested])
    return [
        Comparison(row, column, group, metric, base[0], result, p)
        for ((row, column, group), result), p in zip(tested, corrected, strict=True)
    ]


def _differences(group: Group, base: Group, metric: str) -> list[float]:
    theirs = {run.config.seed: run.summary.get(metric) for run in base.runs}
    return [
        run.summary[metric] - other
        for run in group.runs
        if run.summary.get(metric) is not None and (other := theirs.get(run.config.seed)) is not None
    ]


def _by_default(group: Group) -> bool:
    """Whether the method's own settings are its defaults; among several variants that one is the reference."""
    method = group.runs[0].config.build_method()
    return method == type(method)()
