"""The paper's published numbers, for comparison with ours.

published.csv has Table 1 (participation 0.1), the appendix's table with participation 0.3, and the fairness table as
`fairness` (mean and standard deviation of PM(L) over clients; its means are Table 1's for Dir(0.3)).
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib import resources

from fednh.config import PRESETS, flat, load
from fednh.data.partitions.dirichlet import Dirichlet
from fednh.data.partitions.longtail import LongTail
from fednh.report.groups import PAPER_NAMES, Group, show

# Settings that distinguish groups but do not change the final metrics: where and how the run was computed, and which
# personal models were evaluated before the end.
_SAME_METRICS = ("device", "engine", "model.convolution", "on_error", "eval.clients")


@dataclass(frozen=True)
class PaperNumber:
    mean: float
    std: float


def published(group: Group, metric: str) -> PaperNumber | None:
    """The paper's number for a group's data set, method, beta and participation, if it has one."""
    how = group.runs[0].config.partition.kind
    if not isinstance(how, Dirichlet) or isinstance(how, LongTail):
        return None
    name = PAPER_NAMES.get(group.method, "")
    return _numbers().get((group.runs[0].config.data.name, name, how.beta, group.rate, metric))


def departures(group: Group) -> list[str]:
    """The settings that differ from the paper's and can change a metric, such as `rounds=20 (paper: 200)`."""
    config = group.runs[0].config
    if config.data.name not in PRESETS or group.method not in PAPER_NAMES:
        return []
    same = {
        "method.name": group.method,
        **({"partition.beta": how.beta} if isinstance(how := config.partition.kind, Dirichlet) else {}),
        "participation.rate": group.rate,
    }
    paper = flat(load(config.data.name, same).model_dump())
    return [
        f"{key}={show(value)} (paper: {show(paper.get(key))})"
        for key, value in group.settings.items()
        if value != paper.get(key) and key not in _SAME_METRICS
    ]


@cache
def _numbers() -> dict[tuple[str, str, float, float, str], PaperNumber]:
    text = resources.files("fednh.report").joinpath("published.csv").read_text(encoding="utf-8")
    return {
        (r["data"], r["method"], float(r["beta"]), float(r["participation"]), r["metric"]): PaperNumber(
            float(r["mean"]), float(r["std"])
        )
        for r in csv.DictReader(text.splitlines())
    }
