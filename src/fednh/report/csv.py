"""The tables as CSV for programs: one line for each method, setting and metric."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fednh.metric_names import HELD_OUT, HELD_SHARE, PM_L, POOLED, TEST_SET, best_of, std_of
from fednh.report.groups import SIZES, Group, Row, accuracy_by_size, lay_out, long_tailed, show
from fednh.report.load import Run
from fednh.report.stats import spread
from fednh.report.tables import compare, published
from fednh.text import csv_text

REPORTED = (
    *(*TEST_SET, std_of(PM_L), *HELD_OUT, std_of(HELD_SHARE), *POOLED, *map(best_of, POOLED)),
    *("seconds", "client_seconds", "bytes_up", "bytes_down"),
)
COLUMNS = ["data", "partition", "beta", "clients", "participation", "rounds", "method", "settings", "metric"]
COLUMNS += ["n", "mean", "std", "seeds"]
PAIRED = ["reference", "pairs", "difference", "low", "high", "effect", "test", "p", "p_holm"]
PAPER = ["paper_mean", "paper_std", "paper_difference"]
_PRINTED = {**TEST_SET, std_of(PM_L): "fairness"}


def records(runs: Sequence[Run], reference: str | None = None, paper: bool = False) -> list[dict[str, Any]]:
    """One record for each method, setting and metric; numbers are not rounded, unknown values are None."""
    layout = lay_out(runs)
    pairs = {(c.row, c.column, c.metric): c for c in compare(layout, reference)}
    found = []
    for row, column, group in layout.by_row():
        how = group.runs[0].config.partition
        setting = {
            "data": group.data,
            "partition": how.name,
            "beta": getattr(how.kind, "beta", None),
            "clients": group.clients,
            "participation": group.rate,
            "rounds": group.settings["rounds"],
            "method": group.method,
            "settings": "; ".join(_settings(row, group)),
        }
        seen = {metric: group.values(metric) for metric in REPORTED} | _by_size(group)
        for metric, by_seed in seen.items():
            value = spread(by_seed)
            if value is None:
                continue
            record = {**setting, "metric": metric, "n": value.n, "mean": value.mean, "std": value.std}
            record["seeds"] = " ".join(str(run.config.seed) for run in group.runs)
            pair = pairs.get((row, column, metric))
            if pair is not None:
                r = pair.result
                values = (pair.reference.label, r.n, r.mean, r.low, r.high, r.effect, r.test, r.p, pair.corrected)
                record |= dict(zip(PAIRED, values, strict=True))
            theirs = published(group, _PRINTED[metric]) if paper and metric in _PRINTED else None
            if theirs is not None and metric == std_of(PM_L):  # the paper's spread over clients is its metric here
                record |= {"paper_mean": theirs.std, "paper_difference": value.mean - theirs.std}
            elif theirs is not None:
                record |= dict(zip(PAPER, (theirs.mean, theirs.std, value.mean - theirs.mean), strict=True))
            found.append(record)
    return found


def to_csv(found: Sequence[dict[str, Any]], paper: bool = False) -> str:
    """Records as CSV, with the same columns whatever the runs are."""
    columns = [*COLUMNS, *PAIRED, *(PAPER if paper else [])]
    return csv_text([columns, *([record.get(column) for column in columns] for record in found)])


def _by_size(group: Group) -> dict[str, list[float]]:
    """GM of classes with many, medium and few training samples, of long-tailed runs."""
    if not all(map(long_tailed, group.runs)):
        return {}
    rows = accuracy_by_size(group.runs)
    return {f"gm_{size}": [row[size] for row in rows if size in row] for size in SIZES}


def _settings(row: Row, group: Group) -> list[str]:
    """Settings that have no column of their own: those that distinguish the row, the partition's and the method's."""
    kind, samples = group.runs[0].config.partition.kind, group.settings.get("eval.samples")
    found = row.apart.split(", ") if row.apart else []
    found += [f"eval.samples={samples}"] if samples else []
    found += [_setting(key, getattr(kind, key)) for key in kind.shown if key != "beta"]
    return list(dict.fromkeys([*found, *(_setting(key, value) for key, value in group.hyper.items())]))


def _setting(key: str, value: Any) -> str:
    return f"{key.removeprefix('method.')}={show(value)}"
