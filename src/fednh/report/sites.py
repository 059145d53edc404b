"""What each site gets out of a run: its personal model, the global one and training alone, on its held-out samples.

Runs of the same federation, which hold out the same samples, stand in one table: a row a site, a column a model. Every
metric is of samples that no model was trained on. From the predictions that a run keeps for them (runs/model_file.py)
follow the intervals, the comparison of models on the same samples, and recall, precision and confusion by class. Where
a run kept none, the accuracies of its summary are shown, without intervals.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fednh.config import flat
from fednh.data.partitions import uses
from fednh.errors import UserError, nearest
from fednh.metric_names import HELD_GM_SHARE, HELD_SHARE
from fednh.report.groups import by_variant, settings_of, varying
from fednh.report.load import Run
from fednh.report.stats import Difference, difference, wilson
from fednh.runs import fingerprint
from fednh.runs.model_file import Classes, read_model, read_outcomes
from fednh.runs.run_folder import find_client
from fednh.text import some

ModelKind = Literal["personal", "global", "local"]
Column = tuple[str, ModelKind, Run]  # its label, and the run that made its models
FEW = 10  # held-out samples of a class: with fewer, its numbers say little
_NO_SPLIT = ("data.name", "data.dir", "data.augment")  # of the data's settings: these do not decide who holds out what


@dataclass(frozen=True, eq=False)
class SiteModel:
    """One model on the held-out samples of one site."""

    label: str  # its column: "personal", "global", "local only"; with several methods "FedNH personal"
    kind: ModelKind
    accuracy: float  # in percent
    guessed: Classes | None = field(default=None, repr=False)  # (N,), the class that it takes each sample for
    low: float | None = None  # Wilson's 95% interval; None: the number of samples is not known
    high: float | None = None


@dataclass(frozen=True, eq=False)
class SiteRow:
    """One site: its models, and what can be said about the choice between them."""

    client: int
    name: str
    models: tuple[SiteModel, ...]  # in the order of the columns, without those that the site lacks
    label: Classes | None = field(default=None, repr=False)  # (N,), the true classes; None: not recorded
    trained: tuple[int, ...] = ()  # training samples by class; empty: only the site knows

    @property
    def n(self) -> int | None:
        """The number of its held-out samples; None: not known here."""
        return None if self.label is None else len(self.label)

    @property
    def only_class(self) -> int | None:
        """The class of a site that has a single one."""
        there = np.flatnonzero(self.trained)
        return int(there[0]) if len(there) == 1 else None

    def model(self, label: str) -> SiteModel | None:
        return next((model for model in self.models if model.label == label), None)

    @property
    def leader(self) -> SiteModel | None:
        """The model with the highest accuracy; of equals the first."""
        return max(self.models, key=lambda model: model.accuracy, default=None)

    def over(self, other: SiteModel) -> Difference | None:
        """How much the leader is better than another model; None: not known sample by sample."""
        first = self.leader
        if first is None or self.label is None or first.guessed is None or other.guessed is None:
            return None
        return difference(first.guessed == self.label, other.guessed == self.label)

    @property
    def rivals(self) -> list[tuple[SiteModel, Difference | None]]:
        """The other models, the best first, each with how much the leader is better."""
        others = [model for model in self.models if model is not self.leader]
        return [(model, self.over(model)) for model in sorted(others, key=lambda model: -model.accuracy)]

    @property
    def best(self) -> SiteModel | None:
        """The model that is better than every other one, as far as the intervals say so; else None.

        Each comparison has its own 95% interval. That all of them must agree makes up for there being several.
        """
        found = self.rivals
        sure = bool(found) and all(gap is not None and gap.clear for _, gap in found)
        return self.leader if sure and self.only_class is None else None


@dataclass(frozen=True, eq=False)
class SiteTable:
    """The sites of one federation."""

    runs: tuple[Run, ...]
    title: str
    classes: tuple[str, ...]
    columns: tuple[str, ...]  # labels of models
    rows: tuple[SiteRow, ...]
    lacking: tuple[str, ...]  # what is missing, and what to do about it

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that belong to the table: what is missing, who is left out of means, and what chance does."""
        counted = set(self.measured)
        single = [row.name for row in self.rows if row not in counted]
        words = f"A site with one class, which any model can name, is left out of means: {some(single)}."
        n = sum(len(row.models) > 1 and row.n is not None for row in self.measured)
        chance = f"If all models were equally good, up to {n // 20} of {n} sites would still be marked, by chance."
        return (*self.lacking, *([words] if single else []), *([chance] if n >= 20 else []))

    def row(self, site: int | str) -> SiteRow:
        """The row of a site, by its name or its number."""
        names = {row.client: row.name for row in self.rows}
        client = find_client(names, site, self.title)
        if client not in names:
            raise UserError(f"{self.title} has no client {client}{nearest(str(client), map(str, names))}")
        return next(row for row in self.rows if row.client == client)

    def has(self, site: int | str) -> bool:
        with suppress(UserError):
            self.row(site)
            return True
        return False

    def only(self, site: int | str) -> SiteTable:
        """The table with the row of this site alone."""
        return replace(self, rows=(self.row(site),))

    @property
    def measured(self) -> list[SiteRow]:
        """The sites that count in means: those with more than one class, unless none has."""
        several = [row for row in self.rows if row.only_class is None]
        return several or list(self.rows)

    def mean(self, column: str) -> float | None:
        """The mean accuracy of a model over sites, each counting once."""
        found = [model.accuracy for row in self.measured if (model := row.model(column)) is not None]
        return sum(found) / len(found) if found else None


@dataclass(frozen=True)
class ClassRow:
    """One class at one site: how many held-out samples it has, and what a model makes of them."""

    name: str
    n: int
    correct: int
    guesses: int  # held-out samples that the model takes for this class
    trained: int | None  # training samples of the class at this site; None: only the site knows

    @property
    def few(self) -> bool:
        return self.n < FEW

    @property
    def recall(self) -> float | None:
        return 100 * self.correct / self.n if self.n else None

    @property
    def precision(self) -> float | None:
        return 100 * self.correct / self.guesses if self.guesses else None


def site_tables(runs: Sequence[Run]) -> list[SiteTable]:
    """A table for every federation whose runs measured held-out samples; other seeds hold out other samples."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        if run.has(HELD_SHARE):
            found.setdefault(_split(run), []).append(run)
    tables = [_table(same) for same in found.values()]
    return [table for table in tables if table.rows]


def own_table(model: Path, outcomes: Path) -> SiteTable:
    """What a real site knows about itself alone: from its personal model's card and its own outcomes."""
    _, card = read_model(model)
    found, name = read_outcomes(outcomes), card.site or f"client {card.client}"
    guesses: dict[ModelKind, Classes | None] = {"personal": found.personal, "global": found.shared}
    models = tuple(_measured(kind, kind, guess, found.label) for kind, guess in guesses.items() if guess is not None)
    row = SiteRow(card.client or 0, name, models, found.label)
    method = card.method.get("name")
    columns = tuple(model.label for model in models)
    return SiteTable((), f"{method} at {name}", card.classes, columns, (row,), ())


def class_table(row: SiteRow, model: SiteModel, classes: Sequence[str]) -> list[ClassRow]:
    """The classes that a site has, or that one of its models sees there: the same for all of its models.

    Empty where single samples are not recorded.
    """
    if row.label is None or model.guessed is None:
        return []
    table, trained = confusion(row, model, len(classes)), row.trained or (None,) * len(classes)
    columns = [row.label, *(other.guessed for other in row.models if other.guessed is not None)]
    seen = np.unique(np.concatenate([*columns, np.flatnonzero(row.trained)]))
    n, right, guesses = table.sum(1), table.diagonal(), table.sum(0)
    return [ClassRow(classes[c], int(n[c]), int(right[c]), int(guesses[c]), trained[c]) for c in map(int, seen)]


def confusion(row: SiteRow, model: SiteModel, classes: int) -> NDArray[np.int64]:  # (C, C)
    """How many samples of each class (rows) a model takes for each class (columns)."""
    assert row.label is not None
    assert model.guessed is not None
    table: NDArray[np.int64] = np.bincount(row.label * classes + model.guessed, minlength=classes * classes)
    return table.reshape(classes, classes)


# --- how the tables are made ---------------------------------------------------------------------------------------


def _split(run: Run) -> str:
    """A key of what decides who holds out what: the data's content, how they are divided, the seed."""
    data = dict((fingerprint.read(run.path) or {}).get("data") or {"name": run.summary["data"]})
    content = {key: value for key, value in data.items() if key not in ("path", "bytes")}
    settings = {
        key: value
        for key, value in flat(run.config.model_dump(mode="json")).items()
        if _decides(key, run.config.partition.name)
    }
    return json.dumps([content, settings, run.config.seed, run.partition], sort_keys=True, default=str)


def _decides(key: str, partition: str) -> bool:
    section, _, name = key.partition(".")
    if section == "partition":
        return name == "name" or uses(partition, name)
    return section == "data" and key not in _NO_SPLIT


def _table(runs: Sequence[Run]) -> SiteTable:
    variants = {label: same[0] for label, same in by_variant(runs).items()}
    columns, notes = _columns(variants), list[str]()
    clients = sorted({client for run in variants.values() for client in run.by_client(HELD_SHARE)})
    rows = [_row(client, columns, notes) for client in clients]
    there = {model.label for row in rows for model in row.models}
    notes += _lacking(list(variants.values()))
    return SiteTable(
        tuple(variants.values()),
        f"{runs[0].summary['data']}, seed {runs[0].config.seed}",
        tuple(runs[0].partition["classes"]),
        tuple(label for label, *_ in columns if label in there),
        tuple(rows),
        tuple(dict.fromkeys(notes)),
    )


def _columns(variants: dict[str, Run]) -> list[Column]:
    """The models that runs may have made: a run of Local makes what each site can do alone."""
    several = sum(run.method != "local" for run in variants.values()) > 1
    found: list[Column] = []
    for label, run in sorted(variants.items(), key=lambda item: item[1].method == "local"):
        if run.method == "local":
            words = label.partition(" ")[2]
            found.append((f"local only {words}".strip(), "local", run))
        else:
            before = f"{label} " if several else ""
            found += [(f"{before}personal", "personal", run), (f"{before}global", "global", run)]
    return found


def _row(client: int, columns: Sequence[Column], notes: list[str]) -> SiteRow:
    label: Classes | None = None
    models: list[SiteModel] = []
    opened = {run.path: run.outcomes(client) for _, _, run in columns}
    for column, kind, run in columns:
        outcomes = opened[run.path]
        if outcomes is None:
            if (value := _accuracy(run, client, kind)) is not None:
                models.append(SiteModel(column, kind, value))
            continue
        label = outcomes.label if label is None else label
        guessed = outcomes.shared if kind == "global" else outcomes.personal
        if not np.array_equal(outcomes.label, label):
            notes.append(f"{run.path} held out other samples of {run.client_name(client)}: they are not compared.")
        elif guessed is not None:
            models.append(_measured(column, kind, guessed, label))
    known = [run for _, _, run in columns if client < len(run.partition["counts"])]
    trained = tuple(known[0].partition["counts"][client]) if known else ()
    return SiteRow(client, columns[0][2].client_name(client), tuple(models), label, trained)


def _measured(column: str, kind: ModelKind, guessed: Classes, label: Classes) -> SiteModel:
    right, n = int((guessed == label).sum()), len(label)
    return SiteModel(column, kind, 100 * right / n, guessed, *wilson(right, n))


def _accuracy(run: Run, client: int, kind: ModelKind) -> float | None:
    """The accuracy that the summary has."""
    key = HELD_GM_SHARE if kind == "global" else HELD_SHARE
    found: list[float | None] = [row.get(key) for row in run.summary["clients"] if row["client"] == client]
    return found[0] if found else None


def _lacking(runs: Sequence[Run]) -> list[str]:
    """What is missing, and what to do about it."""
    notes = [_without_outcomes(run) for run in runs if not run.layout.clients_with_outcomes()]
    first, apart = runs[0], varying([settings_of(run) for run in runs])
    if others := [key for key in apart if not key.startswith("method.") and key not in _NO_SPLIT]:
        notes.append(f"The runs differ in more than the method, so this is no comparison of methods: {some(others)}.")
    if all(run.method != "local" for run in runs) and first.partition["counts"]:
        alone = shlex.quote(str(first.path.with_name(f"{first.path.resolve().name}-local")))
        lacks = "What a site could do alone is not among the runs"
        if first.config.data.name.startswith("memory:"):
            notes.append(f"{lacks}: run the method local on the same data.")
        else:
            notes.append(f"{lacks}; `{_again(first)} --method local --out {alone}` adds it.")
    return notes


def _without_outcomes(run: Run) -> str:
    if run.environment.get("backend") == "flower":
        return (
            f"The sites of {run.path} kept what happened to their single samples: these are the accuracies that they "
            "sent, without numbers of samples, so there are no intervals and no model is marked; `fednh compare STATE` "
            "at a site, on the folder that its site.toml calls state, has them."
        )
    return (
        f"{run.path} was made before runs kept what happened to held-out samples: there are no intervals, and no model "
        f"is marked; run it again with `{_again(run)} --out NEW`."
    )


def _again(run: Run) -> str:
    return f"fednh run {shlex.quote(str(run.layout.config_file))}"
