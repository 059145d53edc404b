"""Groups of runs, for tables and figures: runs that differ only in the seed are one group.

A seed counts once in a group, however often it was run. A table has a row for each method of a block (a data set
and a participation rate) and a column for each partition. Where that would put two groups into one place, their
rows say in which settings they differ. A figure shows one setting: the groups that differ in the method alone.

Long-tailed runs also have groups of classes by size. Their thresholds are those of the long-tail literature (Liu et
al., "Large-Scale Long-Tailed Recognition in an Open World", CVPR 2019): many have more than 100 training samples, few
have fewer than 20. Where that leaves one of the three empty, as in CIFAR-10 with an imbalance factor of 100, the
classes are cut into thirds by their size instead.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fednh.data.partitions.kinds import PARTITIONS, LongTail
from fednh.methods import METHODS
from fednh.report.load import Run
from fednh.report.sheet import percent
from fednh.runs.run_folder import display_name, display_names
from fednh.text import plural

# The methods in the order of the paper's Table 1; FedUH is in Figure 2 only.
PAPER_METHODS = (
    *("local", "fedavg", "fedper", "ditto", "fedrep", "fedproto"),
    *("creff", "fedbabu", "fedrod", "feduh", "fednh"),
)
# Settings that the blocks and columns of a table show; a column shows those that its partition uses.
_LAID_OUT = (
    "participation.rate",
    "partition.name",
    *sorted({f"partition.{setting}" for kind in PARTITIONS.values() for setting in kind.shown}),
)


# Settings whose values are names that people have better words for.
_NAMED = ("data.name", "method.name", "model.name")


@dataclass(frozen=True)
class Group:
    """Runs with the same settings, one for each seed."""

    runs: tuple[Run, ...]
    settings: dict[str, Any]  # all that decide the metrics, by dotted name
    repeated: int = 0  # further runs of the same settings and seed, left out

    @property
    def n(self) -> int:
        """The number of seeds; the folds of a seed count as one run."""
        return len(seeds(self.runs))

    @property
    def method(self) -> str:
        return self.runs[0].method

    @property
    def data(self) -> str:
        return str(self.runs[0].summary["data"])

    @property
    def rate(self) -> float:
        return self.runs[0].config.participation.rate

    @property
    def clients(self) -> int:
        return self.runs[0].clients

    @property
    def natural(self) -> bool:
        return self.runs[0].natural

    @property
    def column(self) -> str:
        return "sites" if self.natural else self.runs[0].config.partition.kind.column()

    @property
    def task(self) -> dict[str, Any]:
        """Settings that are not the method's."""
        return {k: v for k, v in self.settings.items() if not k.startswith("method.")}

    @property
    def shared(self) -> dict[str, Any]:
        """Settings that are not the method's and that no block or column shows."""
        return {k: v for k, v in self.task.items() if k not in _LAID_OUT}

    @property
    def hyper(self) -> dict[str, Any]:
        """The method's own settings."""
        return {k: v for k, v in self.settings.items() if k.startswith("method.") and k != "method.name"}

    @property
    def setting(self) -> str:
        """A key of everything but the method: groups with the same key can be compared seed by seed."""
        return _key({"column": self.column, "rate": self.rate, "data": self.data, **self.shared})

    def values(self, metric: str) -> list[float]:
        """A metric of the summary, one for each seed that has it."""
        return list(self.by_seed(metric).values())

    def by_seed(self, metric: str) -> dict[int, float]:
        """A metric of the summary by seed: the mean over the folds that have it."""
        seeds: dict[int, list[float]] = {}
        for run in self.runs:
            if (value := run.summary.get(metric)) is not None:
                seeds.setdefault(run.config.seed, []).append(float(value))
        return {seed: sum(values) / len(values) for seed, values in seeds.items()}

    def by_client(self, metric: str) -> list[list[float]]:
        """A metric of each client that has it and counts in means, one list for each seed that has any."""
        return [values for run in self.runs if (values := list(run.counted(metric).values()))]


@dataclass(frozen=True)
class Row:
    """One row of a table, as its first columns identify it."""

    data: str
    rate: float
    method: str
    name: str  # of the method, for people
    apart: str = ""  # the settings in which it differs from other rows of its method

    @property
    def label(self) -> str:
        return f"{self.name}, {self.apart}" if self.apart else self.name


@dataclass(frozen=True)
class TableLayout:
    """Which group is in which row and column."""

    rows: list[Row]
    columns: list[str]
    places: dict[tuple[Row, str], Group]

    def by_row(self) -> Iterable[tuple[Row, str, Group]]:
        for row in self.rows:
            for column in self.columns:
                if (row, column) in self.places:
                    yield row, column, self.places[row, column]

    @property
    def groups(self) -> list[Group]:
        return list(self.places.values())


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """One group for each setting; a seed counts once: of its runs the one that recorded most, else the first given."""
    by_setting: dict[str, list[Run]] = {}
    for run in runs:
        by_setting.setdefault(run.setting, []).append(run)
    groups = []
    for same in by_setting.values():
        keys = sorted({run.repeat for run in same})
        chosen = tuple(max((run for run in same if run.repeat == key), key=_recorded) for key in keys)
        groups.append(Group(chosen, same[0].settings, len(same) - len(chosen)))
    return groups


def by_setting(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs that differ only in method and seed, by a label that distinguishes the settings; a seed counts once."""
    settings: dict[str, list[Run]] = {}
    for alike in _by(group_runs(runs), lambda g: _words(g.runs[0])):
        for group, words in zip(alike, apart([g.task for g in alike]), strict=True):
            settings.setdefault(", ".join([_words(group.runs[0]), *words]), []).extend(group.runs)
    return settings


def by_variant(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs that differ only in the seed, each seed once; the label has the settings in which a method's runs differ."""
    variants: dict[str, list[Run]] = {}
    names = display_names(run.method for run in runs)
    for same in sorted(_by(group_runs(runs), lambda g: g.method), key=lambda groups: method_order(groups[0].method)):
        same.sort(key=lambda g: repr(g.hyper))
        for group, words in zip(same, apart([g.settings for g in same]), strict=True):
            variants[" ".join([names[group.method], *words])] = list(group.runs)
    return variants


def seeds(runs: Iterable[Run]) -> list[int]:
    return sorted({run.config.seed for run in runs})


def lay_out(runs: Sequence[Run]) -> TableLayout:
    """Arrange the runs in rows and columns, one group per place."""
    groups = group_runs(runs)
    places: dict[tuple[Row, str], Group] = {}
    names = display_names(group.method for group in groups)
    for block in _by(groups, lambda g: (g.data, g.rate)):
        shared = dict(zip(map(id, block), apart([g.shared for g in block]), strict=True))
        for same in _by(block, lambda g: g.method):
            for group, words in zip(same, apart([g.hyper for g in same]), strict=True):
                label = ", ".join([*shared[id(group)], *words])
                places[Row(group.data, group.rate, group.method, names[group.method], label), group.column] = group
    rows = sorted({row for row, _ in places}, key=_row_order)
    columns = sorted({column for _, column in places}, key=lambda c: _column_order(c, groups))
    return TableLayout(rows, columns, places)


def _recorded(run: Run) -> int:
    """The number of values in a run's records: a run that was evaluated more often has more."""
    return sum(map(len, run.records))


def _words(run: Run) -> str:
    """For example: digits, Dirichlet(0.3), 20 clients, 50% a round; or hospitals, 4 sites, 100% a round."""
    how, rate = run.config.partition, run.config.participation.rate
    clients = plural(run.clients, "site" if run.natural else "client")
    divided = clients if run.natural else f"{how.kind.words()}, {clients}"
    return f"{display_name(run.summary['data'])}, {divided}, {percent(rate)} a round"


def apart(settings: Sequence[Mapping[str, Any]], form: str = "{key}={value}") -> list[list[str]]:
    """For each of these settings the words that tell it from the others; none where they are all the same."""
    keys = varying(settings)
    names = {key: display_names(str(one.get(key)) for one in settings) for key in keys if key in _NAMED}
    return [
        [
            form.format(key=_short(key), value=names[key][str(one.get(key))] if key in names else show(one.get(key)))
            for key in keys
        ]
        for one in settings
    ]


def varying(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys whose values are not the same everywhere."""
    keys = {key: None for one in settings for key in one}
    return [key for key in keys if len({_key(one.get(key)) for one in settings}) > 1]


def _by(groups: Iterable[Group], key: Any) -> list[list[Group]]:
    by_key: dict[Any, list[Group]] = {}
    for group in groups:
        by_key.setdefault(key(group), []).append(group)
    return list(by_key.values())


def method_order(name: str) -> tuple[int, str]:
    """A sort key: the methods of the paper's Table 1, then our other methods, then methods by import path."""
    order = list(dict.fromkeys([*PAPER_METHODS, *METHODS]))
    return (order.index(name) if name in order else len(order)), name


def _row_order(row: Row) -> tuple[Any, ...]:
    return row.data, row.rate, method_order(row.method), _natural(row.apart)


def _natural(text: str) -> list[tuple[float, str]]:
    """A sort key that puts `rounds=20` before `rounds=100`."""
    parts = []
    for word in text.split(", "):
        key, _, value = word.partition("=")
        try:
            parts.append((float(value), key))
        except ValueError:
            parts.append((float("inf"), word))
    return parts


def _column_order(column: str, groups: Iterable[Group]) -> tuple[str, list[float], str]:
    how = next(g for g in groups if g.column == column).runs[0].config.partition.kind
    return how.name, [getattr(how, setting) for setting in how.shown], column


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _short(key: str) -> str:
    return key.removeprefix("method.").replace("partition.clients", "clients")


def show(value: Any) -> str:
    """A setting's value as text."""
    if isinstance(value, float):
        return f"{value:g}"
    return "default" if value is None else str(value).replace(", ", " ")


# --- classes by size -----------------------------------------------------------------------------------------------

SIZES = ("many", "medium", "few")
MANY, FEW = 100, 20  # above the one, below the other


def long_tailed(run: Run) -> bool:
    """Whether a run has classes to tell apart by size, and accuracies of them."""
    if not isinstance(run.config.partition.kind, LongTail) or not len(run.counts):
        return False
    return len(run.summary.get("per_class") or ()) >= len(SIZES)


def class_totals(runs: Sequence[Run]) -> NDArray[np.float64]:  # (C,)
    """Training samples of every class over all clients, mean over runs."""
    totals: NDArray[np.float64] = np.mean([run.counts.sum(axis=0) for run in runs], axis=0)
    return totals


def by_size(totals: NDArray[np.float64]) -> tuple[dict[str, list[int]], bool]:
    """Size -> its classes, largest first; and whether they are thirds, since a threshold would leave a size empty."""
    order = np.argsort(-totals, kind="stable")
    cuts = [int((totals > MANY).sum()), int((totals >= FEW).sum())]
    parts = np.split(order, cuts)
    thirds = not all(map(len, parts))
    if thirds:
        parts = np.array_split(order, len(SIZES))
    return {size: part.tolist() for size, part in zip(SIZES, parts, strict=True)}, thirds


def accuracy_by_size(runs: Sequence[Run]) -> list[dict[str, float]]:
    """GM by size, the mean accuracy of its classes, for each of these runs, which differ in the seed alone."""
    sizes, _ = by_size(class_totals(runs))
    rows = []
    for run in runs:
        per_class = run.summary["per_class"]
        values = {size: [per_class[c] for c in classes if per_class[c] is not None] for size, classes in sizes.items()}
        rows.append({size: float(np.mean(row)) for size, row in values.items() if row})
    return rows
