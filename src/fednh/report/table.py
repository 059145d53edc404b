"""A comparison of finished runs: method by GM, PM(V), PM(L) and fairness."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from fednh.runs import read_config, read_summary

METRICS = {"gm": "GM", "pm_v": "PM(V)", "pm_l": "PM(L)"}


def comparison(runs: Sequence[Path]) -> Table:
    """One row a run; the best figure of each column is bold where there is something to compare."""
    rows = [(read_config(run), read_summary(run)) for run in runs]
    table = Table(title="Test accuracy in percent" + _common(rows), title_justify="left", pad_edge=False)
    table.add_column("method", no_wrap=True)
    for name in ("data", "seed", "rounds", *METRICS.values(), "fairness", "samples/s"):
        table.add_column(name, justify="right", no_wrap=True)
    best = {key: max((s[key] for _, s in rows if s[key] is not None), default=None) for key in METRICS}
    spreads = [s["pm_l_std"] for _, s in rows if s["pm_l_std"] is not None]
    best["pm_l_std"] = min(spreads, default=None)
    for config, summary in rows:
        cells = [_cell(summary[key], len(rows) > 1 and summary[key] == best[key]) for key in (*METRICS, "pm_l_std")]
        table.add_row(
            config.method["name"],
            summary["data"],
            str(config.seed),
            str(summary["rounds"]),
            *cells,
            f"{summary['samples_per_second']:,.0f}",
        )
    table.caption = (
        "GM: global model; PM(V), PM(L): personal models, owned classes alike or by their share, mean over clients; "
        "fairness: standard deviation of PM(L) over clients, lower is more even."
    )
    table.caption_justify = "left"
    return table


def _common(rows: Sequence[tuple[Any, dict[str, Any]]]) -> str:
    """The setting, when all runs share it."""
    settings = {(c.partition.name, c.partition.beta, c.partition.clients, c.participation.rate) for c, _ in rows}
    if len(settings) > 1:
        return ""
    name, beta, clients, rate = settings.pop()
    how = f"{name}({beta:g})" if name in ("dirichlet", "quantity") else name
    return f"; {how}, {clients} clients, {rate:.0%} a round"


def _cell(value: float | None, best: bool) -> str:
    if value is None:
        return "–"
    return f"[bold]{value:.2f}[/bold]" if best else f"{value:.2f}"
