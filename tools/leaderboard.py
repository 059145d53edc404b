"""docs/leaderboard.md: methods in rows, accuracy and cost in columns that sort, from what `results/` holds.

`python -m tools.results --page` writes it with the other pages.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import groupby

from fednh.config import load
from fednh.config.options import flat
from fednh.metric_names import HELD_GM_POOLED, HELD_POOLED, TEST_SET, best_of
from fednh.report.load import Run
from fednh.runs.run_folder import display_name

EARLY, FULL = 40, 200  # rounds at which the paper's protocol is shown
GLOBAL = ("fedavg", "fedprox", "scaffold")  # whose global model PFLlib measures
# PFLlib's benchmark page, CIFAR-100, Dirichlet(0.1), its CNN, 20 clients; the best round of three runs.
PFLLIB = {
    "feddbe": 64.39,
    "gpfl": 61.86,
    "fedcp": 59.56,
    "fedala": 55.92,
    "fedbabu": 55.02,
    "ditto": 52.87,
    "fedproto": 52.70,
    "fedrep": 52.39,
    "fedrod": 50.94,
    "fedper": 49.63,
    "fedprox": 31.99,
    "fedavg": 31.89,
}
INTRO = """---
hide: [toc]
---
# Leaderboard

All methods of which `results/` has runs, by accuracy and by cost. Click a heading to sort by it. `make results`
continues the runs and writes this page. A row with other settings than the preset's names them.

Seconds are those of a round's clients on the machine that computed it, which often did other work as well: compare them
roughly. Bytes are what one client receives and sends in a round.
"""


def page(paper: Sequence[Run], pfllib: Sequence[Run]) -> str:
    """The page, of runs by the paper's protocol and by PFLlib's."""
    parts = [INTRO]
    for data in sorted({run.config.data.name for run in paper}):
        rows = [_paper_row(runs) for runs in _by_settings([run for run in paper if run.config.data.name == data])]
        parts.append(
            f"## {data.upper().replace('CIFAR', 'CIFAR-')} by the paper's protocol\n\n"
            f"100 clients, Dirichlet(0.3), 10 clients a round; in percent. After {EARLY} rounds PM is that of the "
            f"round's ten clients, after {FULL} that of all clients that took part."
        )
        heads = [f"{label}, {rounds}" for rounds in (EARLY, FULL) for label in TEST_SET.values()]
        parts.append(_table(["method", "n", *heads, *COSTS], rows))
    parts.append(_pfllib(pfllib))
    return "\n\n".join(parts)


COSTS = ("seconds a round", "MB down", "MB up")


def _by_settings(runs: Sequence[Run]) -> list[list[Run]]:
    """The runs of one method with the same settings, whatever their seed."""

    return [list(group) for _, group in groupby(sorted(runs, key=_name), _name)]


def _name(run: Run) -> str:
    changed = [f"{key.rpartition('.')[2]} {value}" for key, value in _changed(run).items()]
    return display_name(run.method) + (f" ({', '.join(changed)})" if changed else "")


def _changed(run: Run) -> dict[str, object]:
    """The settings of method, server and personal models that are not the preset's."""
    usual = flat(load(run.config.data.name, {"method.name": run.method}).model_dump())
    mine = flat(run.config.model_dump())
    return {
        key: mine[key]
        for key in usual
        if key.startswith(("method.", "server.", "personal.")) and mine.get(key, usual[key]) != usual[key]
    }


def _paper_row(runs: Sequence[Run]) -> list[str]:
    early = [
        [record.get(metric) for run in runs for record in run.records if record["round"] == EARLY]
        for metric in TEST_SET
    ]
    late = [[run.summary.get(metric) for run in runs if run.config.rounds == FULL] for metric in TEST_SET]
    return [_name(runs[0]), str(len(runs)), *map(_mean, [*early, *late]), *_costs(runs)]


def _costs(runs: Sequence[Run]) -> list[str]:
    """Seconds a round, and megabytes that one client receives and sends."""

    def each(value: Callable[[Run], float]) -> str:
        return f"{statistics.mean(map(value, runs)):.2f}"

    def answers(run: Run) -> int:
        return max(1, sum(len(record["clients"]) for record in run.records))

    return [
        each(lambda run: float(run.summary["client_seconds"]) / len(run.records)),
        each(lambda run: float(run.summary["bytes_down"]) / answers(run) / 1e6),
        each(lambda run: float(run.summary["bytes_up"]) / answers(run) / 1e6),
    ]


def _pfllib(runs: Sequence[Run]) -> str:
    """The second leaderboard, with published numbers of methods that were not run yet."""
    text = (
        "## CIFAR-100 by PFLlib's protocol\n\n20 clients, Dirichlet(0.1), all in each of 2,000 rounds, PFLlib's CNN "
        "(preset `pfllib`; [what differs](reproduce.md#pfllibs-protocol)): the share of all clients' held-out samples "
        "that are classified correctly, in percent. The best round is chosen on the samples that it is measured on; "
        "PFLlib publishes that number.\n\n"
    )
    groups = {group[0].method: group for group in _by_settings(runs)}
    rows = []
    for method in sorted({*groups, *PFLLIB}, key=lambda name: -PFLLIB.get(name, 0)):
        metric, group = HELD_GM_POOLED if method in GLOBAL else HELD_POOLED, groups.get(method, [])
        best, last = ([run.summary.get(key) for run in group] for key in (best_of(metric), metric))
        published = f"{PFLLIB[method]:.2f}" if method in PFLLIB else "–"
        rows.append(
            [
                display_name(method),
                str(len(group)),
                _mean(best),
                _mean(last),
                published,
                *(_costs(group) if group else "–––"),
            ]
        )
    done = f"{len(groups)} methods have been run." if groups else "None of ours has been run at this length yet."
    return (
        text + _table(["method", "n", "best round", "last round", "PFLlib, best round", *COSTS], rows) + f"\n\n{done}\n"
    )


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.mean(known):.2f}" if known else "–"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (heads, [":--", *["--:"] * (len(heads) - 1)], *rows)]
    return '<div class="sortable" markdown>\n\n' + "\n".join(lines) + "\n\n</div>"
