"""What each site gets out of its runs: personal models, the global one and training alone, on its held-out samples.

Runs of the same federation stand in one table, whatever their seed and fold: a row a site, a column a model. Every
metric is of samples that no model was trained on, and a sample counts once, however many runs held it out. From the
predictions that a run keeps for them (runs/model_file.py) follow the intervals, the comparison of models on the same
samples (report/verdicts.py), and recall, precision and confusion by class. Where a run kept none, the accuracies of its
summary are shown, without intervals.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fednh.config import flat
from fednh.data.partitions.kinds import uses
from fednh.data.splits import FEWEST_HELD
from fednh.errors import UserError, nearest
from fednh.metric_names import HELD_GM_SHARE, HELD_SHARE
from fednh.report.groups import by_variant, varying
from fednh.report.load import Run
from fednh.report.stats import Design, accuracy_interval
from fednh.runs import fingerprint
from fednh.runs.model_file import Classes, Outcomes, Rows, read_model, read_outcomes
from fednh.runs.run_folder import display_name, find_client
from fednh.text import some

RunKey = tuple[int, int]  # seed and fold
ModelKind = Literal["personal", "global", "local", "constant"]
Column = tuple[str, ModelKind, dict[RunKey, Run]]  # its label, and the runs that made its models
FEW = 10  # held-out samples of a class: with fewer, its numbers say little
_NO_SPLIT = (
    "data.name",
    "data.dir",
    "data.augment",
    "data.fold",
    "data.size",
    "data.fit",
)  # of the data's: these do not decide whose samples are whose


@dataclass(frozen=True, eq=False)
class SiteModel:
    """One model on the held-out samples of one site."""

    label: str  # its column: "personal", "global", "local only"; with several methods "FedNH personal"
    kind: ModelKind
    accuracy: float  # in percent, mean over samples, each of them the mean over the runs that held it out
    guessed: Classes | None = field(default=None, repr=False)  # (M,), the class that it takes each sample for
    low: float | None = None  # 95% interval; None: the number of samples is not known
    high: float | None = None
    balanced: float | None = None  # mean recall over the classes that the site holds out, in percent

    @property
    def method(self) -> str:
        """Whose model it is, as far as the label says so."""
        return self.label.removesuffix(self.kind).strip()


@dataclass(frozen=True, eq=False)
class Held:
    """The held-out samples of a site in all runs: what follows is of observations, a sample in one run each."""

    label: Classes  # (M,), the true classes
    sample: Rows  # (M,), the row in the data
    group: Rows  # (M,), the group that it belongs to; without groups the sample
    seed: Rows  # (M,)
    fold: Rows  # (M,)

    @cached_property
    def n(self) -> int:
        """How many samples there are."""
        return len(np.unique(self.sample))

    @cached_property
    def designs(self) -> tuple[Design, Design]:
        """How observations belong together, for the accuracy and for the balanced accuracy."""
        runs = self.seed if len(np.unique(self.seed)) > 1 else self.fold
        sample, unit, run, label = (
            np.unique(column, return_inverse=True)[1] for column in (self.sample, self.group, runs, self.label)
        )
        return Design(sample, unit, run, np.zeros_like(sample)), Design(sample, unit, run, label)

    def same(self, other: Held) -> bool:
        """Whether both have the same observations."""
        columns = ("label", "sample", "group", "seed", "fold")
        return all(np.array_equal(getattr(self, column), getattr(other, column)) for column in columns)

    def measured(self, column: str, kind: ModelKind, guessed: Classes) -> SiteModel:
        """A model with its accuracies, and the interval of the first."""
        right = (guessed == self.label).astype(np.float64)
        plain, balanced = self.designs
        share = plain.mean(right)
        return SiteModel(
            column, kind, 100 * share, guessed, *accuracy_interval(right, plain), 100 * balanced.mean(right)
        )


@dataclass(frozen=True, eq=False)
class SiteRow:
    """One site: its models, and the samples that they were measured on."""

    client: int
    name: str
    models: tuple[SiteModel, ...]  # in the order of the columns, without those that the site lacks
    held: Held | None = field(default=None, repr=False)  # None: single samples are not recorded
    trained: tuple[int, ...] = ()  # training samples by class, of all runs; empty: only the site knows

    @property
    def n(self) -> int | None:
        """The number of its held-out samples; None: not known here."""
        return None if self.held is None else self.held.n

    @property
    def few(self) -> bool:
        """Whether its held-out samples are too few to count in means over sites."""
        return self.n is not None and self.n < FEWEST_HELD

    @property
    def only_class(self) -> int | None:
        """The class of a site that has a single one."""
        there = np.flatnonzero(self.trained)
        return int(there[0]) if len(there) == 1 else None

    @property
    def commonest(self) -> int | None:
        """The commonest class of its training samples, or of those held out where only these are known."""
        counts = self.trained or (() if self.held is None else np.bincount(self.held.label))
        return int(np.argmax(counts)) if len(counts) else None

    @property
    def constant(self) -> SiteModel | None:
        """What the commonest class as the answer to everything achieves; None: single samples are not recorded."""
        if self.held is None or self.commonest is None:
            return None
        return self.held.measured("commonest class", "constant", np.full_like(self.held.label, self.commonest))

    @property
    def chance(self) -> float | None:
        """What guessing among its classes achieves, in percent; None: they are not known."""
        there = set(np.flatnonzero(self.trained)) | set(() if self.held is None else self.held.label.tolist())
        return 100 / len(there) if there else None

    def model(self, label: str) -> SiteModel | None:
        return next((model for model in self.models if model.label == label), None)


@dataclass(frozen=True, eq=False)
class SiteTable:
    """The sites of one federation."""

    runs: tuple[Run, ...]
    title: str
    classes: tuple[str, ...]
    columns: tuple[str, ...]  # labels of models, training alone first
    rows: tuple[SiteRow, ...]
    lacking: tuple[str, ...]  # what is missing, and what to do about it

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that belong to the table: what is missing, who is left out of means, and what chance does."""
        counted = set(self.measured)
        apart = [row for row in self.rows if row not in counted]
        single, few = ([row.name for row in apart if (row.only_class is None) == few] for few in (False, True))
        words = f"A site with one class, which any model can name, is left out of means: {some(single)}."
        scarce = f"A site with fewer than {FEWEST_HELD} held-out samples is left out of means: {some(few)}."
        n = sum(len(row.models) > 1 and row.n is not None for row in self.measured)
        chance = f"If all models were equally good, up to {n // 20} of {n} sites would still be marked, by chance."
        return (*self.lacking, *([words] if single else []), *([scarce] if few else []), *([chance] if n >= 20 else []))

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
        """The sites that count in means: those with more than one class and enough samples, unless none has."""
        several = [row for row in self.rows if row.only_class is None and not row.few]
        return several or list(self.rows)

    def mean(self, column: str) -> float | None:
        """The mean accuracy of a model over sites, each counting once."""
        accuracies = [model.accuracy for row in self.measured if (model := row.model(column)) is not None]
        return sum(accuracies) / len(accuracies) if accuracies else None

    def interval(self, column: str) -> tuple[float, float] | None:
        """The 95% interval of that mean; None: single samples are not recorded."""
        models = [(row.held, row.model(column)) for row in self.measured]
        known = [(held, model.guessed) for held, model in models if held and model and model.guessed is not None]
        return _mean_interval(known) if known and len(known) == len(models) else None


@dataclass(frozen=True)
class ClassRow:
    """One class at one site: how many held-out samples it has, and what a model makes of them."""

    name: str
    n: int
    correct: float  # a sample that several runs held out counts by the share of them in which it is right
    guesses: float  # held-out samples that the model takes for this class
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
    """A table for every federation whose runs measured held-out samples, over all seeds and folds.

    Clients that are not sites are others with every seed, which has a table of its own.
    """
    by_split: dict[str, list[Run]] = {}
    for run in runs:
        if run.has(HELD_SHARE):
            by_split.setdefault(_split(run), []).append(run)
    tables = [_table(same) for same in by_split.values()]
    return [table for table in tables if table.rows]


def own_table(model: Path, outcomes: Path) -> SiteTable:
    """What a real site knows about itself alone: from its personal model's card and its own outcomes."""
    _, card = read_model(model)
    name, method = card.site or f"client {card.client}", card.method.get("name")
    row = single_row(name, read_outcomes(outcomes), client=card.client or 0)
    columns = tuple(model.label for model in row.models)
    return SiteTable((), f"{method} at {name}", card.classes, columns, (row,), ())


def single_row(
    name: str, outcomes: Outcomes, alone: Classes | None = None, trained: Sequence[int] = (), client: int = 0
) -> SiteRow:
    """The row of one site from its outcomes in one run; `alone` are the guesses of a model trained there alone."""
    held = _held({(0, 0): outcomes})
    guesses: list[tuple[str, ModelKind, Classes | None]] = [
        *(("personal", "personal", outcomes.personal), ("global", "global", outcomes.shared)),
        ("local only", "local", alone),
    ]
    models = (held.measured(label, kind, guessed) for label, kind, guessed in guesses if guessed is not None)
    return SiteRow(client, name, tuple(models), held, tuple(trained))


def class_table(row: SiteRow, model: SiteModel, classes: Sequence[str]) -> list[ClassRow]:
    """The classes that a site has, or that one of its models sees there: the same for all of its models.

    Empty where single samples are not recorded.
    """
    if row.held is None or model.guessed is None:
        return []
    table, trained = confusion(row, model, len(classes)), row.trained or (None,) * len(classes)
    columns = [row.held.label, *(other.guessed for other in row.models if other.guessed is not None)]
    seen = np.unique(np.concatenate([*columns, np.flatnonzero(row.trained)]))
    n, right, guesses = table.sum(1), table.diagonal(), table.sum(0)
    return [ClassRow(classes[c], round(n[c]), float(right[c]), float(guesses[c]), trained[c]) for c in map(int, seen)]


def confusion(row: SiteRow, model: SiteModel, classes: int) -> NDArray[np.float64]:  # (C, C)
    """How many samples of each class (rows) a model takes for each class (columns); each sample counts once."""
    assert row.held is not None
    assert model.guessed is not None
    weight = row.held.n * row.held.designs[0].weight
    table: NDArray[np.float64] = np.bincount(row.held.label * classes + model.guessed, weight, classes**2).astype(float)
    return table.reshape(classes, classes)


def held_interval(run: Run) -> tuple[float, float, int] | None:
    """The 95% interval of a run's mean accuracy over clients of personal models on held-out samples, and their number.

    None: single samples are not recorded.
    """
    outcomes = [run.outcomes(client) for client in run.counted(HELD_SHARE)]
    known = [each for each in outcomes if each is not None and len(each)]
    if not known or len(known) < len(outcomes):
        return None
    return *_mean_interval([(_held({(0, 0): each}), each.personal) for each in known]), sum(map(len, known))


def _mean_interval(sites: Sequence[tuple[Held, Classes]]) -> tuple[float, float]:
    """The 95% interval of a mean accuracy over sites, each counting once; seeds are the same at all."""
    site = np.repeat(np.arange(len(sites)), [len(guessed) for _, guessed in sites])
    sample, group, seed, fold, right = (
        np.concatenate(columns)
        for columns in zip(
            *((h.sample, h.group, h.seed, h.fold, h.label == guessed) for h, guessed in sites), strict=True
        )
    )
    rows, units = (np.unique((site, column), axis=1, return_inverse=True)[1].ravel() for column in (sample, group))
    run = np.unique(seed if len(np.unique(seed)) > 1 else fold, return_inverse=True)[1]
    return accuracy_interval(right.astype(np.float64), Design(rows, units, run, site))


# --- how the tables are made ---------------------------------------------------------------------------------------


def _split(run: Run) -> str:
    """A key of whose samples are whose: the data's content and how they are divided, for sites whatever the seed."""
    data = dict((fingerprint.read(run.path) or {}).get("data") or {"name": run.summary["data"]})
    unread = {"path", "bytes"}
    if "rows" in data:  # images, which runs may have read at different sizes: files and labels say which they are
        data["sites"] = {name: site["samples"] for name, site in data.get("sites", {}).items()}
        unread = {"inputs", "test_samples", "scale", "bytes"}
    content = {key: value for key, value in data.items() if key not in unread}
    settings = {
        key: value
        for key, value in flat(run.config.model_dump(mode="json")).items()
        if _decides(key, run.config.partition.name)
    }
    who = run.names or run.config.seed
    # A gain over training alone from scratch would be that of a pretrained body, not of federating.
    return json.dumps([content, settings, run.body, run.partition["classes"], who], sort_keys=True, default=str)


def _decides(key: str, partition: str) -> bool:
    section, _, name = key.partition(".")
    if section == "partition":
        return name == "name" or uses(partition, name)
    return section == "data" and key not in _NO_SPLIT


def _table(runs: Sequence[Run]) -> SiteTable:
    variants = {label: {run.repeat: run for run in same} for label, same in by_variant(runs).items()}
    variants, notes = _comparable(variants)
    chosen = [run for same in variants.values() for run in same.values()]
    columns = _columns(variants)
    clients = sorted({client for run in chosen for client in run.by_client(HELD_SHARE)})
    rows = [_row(client, columns, notes) for client in clients]
    measured = {model.label for row in rows for model in row.models}
    notes += _lacking([next(iter(same.values())) for same in variants.values()])
    return SiteTable(
        tuple(chosen),
        ", ".join([display_name(chosen[0].summary["data"]), *_repeats(chosen)]),
        tuple(chosen[0].partition["classes"]),
        tuple(label for label, *_ in sorted(columns, key=lambda column: column[1] != "local") if label in measured),
        tuple(rows),
        tuple(dict.fromkeys(notes)),
    )


def _repeats(runs: Sequence[Run]) -> list[str]:
    """The seeds and folds of runs, in words."""
    seeds, folds = (sorted(set(numbers)) for numbers in zip(*(run.repeat for run in runs), strict=True))
    words = [f"seed {seeds[0]}" if len(seeds) == 1 else f"{len(seeds)} seeds"]
    if (whole := runs[0].config.data.folds) is not None:
        words.append(f"{whole} folds" if len(folds) == whole else f"{len(folds)} of {whole} folds")
    return words


Variants = dict[str, dict[RunKey, Run]]  # label of a variant -> its runs


def _comparable(variants: Variants) -> tuple[Variants, list[str]]:
    """The runs that every variant has, and what is left out: models are compared on the same samples."""
    kept, notes = dict(variants), list[str]()
    while not (shared := set.intersection(*(set(same) for same in kept.values()))):
        fewest = min(kept, key=lambda label: (len(kept[label]), next(iter(kept[label].values())).method != "local"))
        notes.append(f"{fewest} was run with other seeds or folds than the others: it is left out.")
        del kept[fewest]
    if known := [run for same in kept.values() for run in same.values() if _lacks_rows(run)]:
        shared = {min(run.repeat for run in known)} if len(shared) > 1 else shared
        if any(len(same) > 1 for same in kept.values()):
            words = "was made before runs recorded which samples they hold out, so those of two seeds cannot be matched"
            notes.append(f"{known[0].path} {words}: only seed {min(shared)[0]} counts.")
    elif more := {key for same in kept.values() for key in same} - shared:
        notes.append(f"Seeds and folds that not all methods have are left out: {len(more)} of {len(more | shared)}.")
    comparable = {label: {key: same[key] for key in sorted(shared) if key in same} for label, same in kept.items()}
    return {label: same for label, same in comparable.items() if same}, notes


def _lacks_rows(run: Run) -> bool:
    first = next(iter(run.layout.clients_with_outcomes()), None)
    return first is not None and (outcomes := run.outcomes(first)) is not None and outcomes.sample is None


def _columns(variants: Variants) -> list[Column]:
    """The models that runs may have made: a run of Local makes what each site can do alone."""
    methods = {label: next(iter(same.values())).method for label, same in variants.items()}
    several = sum(method != "local" for method in methods.values()) > 1
    columns: list[Column] = []
    for label, same in sorted(variants.items(), key=lambda item: methods[item[0]] == "local"):
        if methods[label] == "local":
            words = label.partition(" ")[2]
            columns.append((f"local only {words}".strip(), "local", same))
        else:
            before = f"{label} " if several else ""
            columns += [(f"{before}personal", "personal", same), (f"{before}global", "global", same)]
    return columns


def _row(client: int, columns: Sequence[Column], notes: list[str]) -> SiteRow:
    held: Held | None = None
    models: list[SiteModel] = []
    every = {run.path: run for _, _, runs in columns for run in runs.values()}
    opened = {path: run.outcomes(client) for path, run in every.items()}
    for column, kind, runs in columns:
        by_run = {key: outcomes for key, run in runs.items() if (outcomes := opened[run.path]) is not None}
        if not by_run:
            values = [value for run in runs.values() if (value := _accuracy(run, client, kind)) is not None]
            models += [SiteModel(column, kind, sum(values) / len(values))] if values else []
            continue
        here = _held(by_run)
        held = here if held is None else held
        guessed = [each.shared if kind == "global" else each.personal for each in by_run.values()]
        if not held.same(here):
            run = next(iter(runs.values()))
            notes.append(f"{run.path} held out other samples of {run.client_name(client)}: they are not compared.")
        elif all(one is not None for one in guessed):
            models.append(held.measured(column, kind, np.concatenate([one for one in guessed if one is not None])))
    counts = [run.partition["counts"][client] for run in every.values() if client < len(run.partition["counts"])]
    trained = tuple(int(value) for value in np.ceil(np.mean(counts, axis=0))) if counts else ()
    return SiteRow(client, next(iter(every.values())).client_name(client), tuple(models), held, trained)


def _held(by_run: Mapping[RunKey, Outcomes]) -> Held:
    """The observations of one site in these runs."""
    rows = [np.arange(len(each)) if each.sample is None else each.sample for each in by_run.values()]
    groups = [row if each.group is None else each.group for row, each in zip(rows, by_run.values(), strict=True)]
    sizes = [len(each) for each in by_run.values()]
    seed, fold = (np.repeat(numbers, sizes) for numbers in zip(*by_run, strict=True))
    label = np.concatenate([each.label for each in by_run.values()])
    return Held(label, np.concatenate(rows), np.concatenate(groups), seed, fold)


def _accuracy(run: Run, client: int, kind: ModelKind) -> float | None:
    """The accuracy that the summary has."""
    return run.by_client(HELD_GM_SHARE if kind == "global" else HELD_SHARE).get(client)


def _lacking(runs: Sequence[Run]) -> list[str]:
    """What is missing, and what to do about it."""
    notes = [_without_outcomes(run) for run in runs if not run.layout.clients_with_outcomes()]
    first, apart = runs[0], varying([run.settings for run in runs])
    if others := [key for key in apart if not key.startswith("method.") and key not in _NO_SPLIT]:
        notes.append(f"The runs differ in more than the method: {some(others)}.")
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
