"""How many samples does a site need? Held-out accuracy against the training samples of a site, federated and alone.

Every size is `data.limit` of ordinary run folders: a method and `local`, with the same seeds. The held-out samples of a
seed are the same for all sizes, and a smaller set of training samples is part of every larger one, so sizes and models
are compared sample by sample. Intervals are over samples (or their groups) and seeds (report/stats.py). Natural sites
count alike; of drawn clients, which are others with every seed, all held-out samples count together.

Run folders are all that is remembered: the same command goes on after an interruption, and further sizes or seeds reuse
what is finished.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fednh.callbacks import Callback, SearchWatcher
from fednh.config import Config, load
from fednh.data.dataset import Dataset
from fednh.data.splits import DEFAULT_SHARE
from fednh.errors import Interrupted, RunError, UserError
from fednh.experiments.search import make_run
from fednh.experiments.sweep import Planned, locked
from fednh.federated.setup import build_federation, divide, load_data
from fednh.interrupt import Deadline, Stop
from fednh.io.files import write_bytes, write_json
from fednh.methods.registry import find_method
from fednh.report.load import Run, load_run
from fednh.report.sheet import Cell, Sheet, number, word
from fednh.report.stats import Design, Estimate, Floats, Gain, Numbers, accuracy_interval, estimate, together
from fednh.runs.layout import CurveLayout, run_name
from fednh.runs.run_folder import RunFolder
from fednh.text import plural, some

SIZES = (10, 20, 50, 100, 200)
KINDS = ("local only", "personal", "global")
SHARED = {"eval.every": 0, "checkpoint.every": 10}  # settings of all runs, unless given


class Accuracy(NamedTuple):
    """In percent, with its 95% interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class CurvePoint:
    """One number of training samples a site."""

    samples: int
    held_out: int  # samples, of all sites and seeds
    seeds: int
    fewer: int  # sites, of any seed, that have fewer training samples and train on all
    accuracy: Mapping[str, Accuracy]  # of KINDS, those that there are
    gain: Gain  # the personal models minus training alone; its interval holds together with all others


@dataclass(frozen=True)
class LearningCurve:
    """What the runs of a learning curve say."""

    path: Path
    data: str
    method: str  # its title
    noun: str  # site or client
    points: list[CurvePoint]
    sentences: list[str]
    notes: list[str]

    def sheet(self) -> Sheet:
        """The table."""
        kinds = [kind for kind in KINDS if any(kind in point.accuracy for point in self.points)]
        columns = [f"samples a {self.noun}", "held out", "seeds", *kinds, "personal - local"]
        rows = []
        for point in self.points:
            cells = [_interval(point.accuracy[kind]) if kind in point.accuracy else number(None) for kind in kinds]
            gain = Accuracy(point.gain.points, point.gain.low, point.gain.high)
            counts = [word(point.samples), word(point.held_out), word(point.seeds)]
            rows.append([*counts, *cells, _interval(gain, "{:+.1f}")])
        weighing = "the mean over sites" if self.noun == "site" else "of all held-out samples"
        note = (
            f"Accuracy in percent on held-out samples, {weighing}, with 95% intervals over samples and seeds; the same "
            "samples for all sizes of a seed. The intervals of the differences, in points, hold together."
        )
        return Sheet("learning-curve", f"{self.method} and training alone; {self.data}", columns, rows, note)

    def table(self) -> list[list[Any]]:
        """The numbers: a row for each size and kind of model."""
        return [
            [point.samples, kind, *value, point.held_out, point.seeds]
            for point in self.points
            for kind, value in point.accuracy.items()
        ]


def _interval(value: Accuracy, form: str = "{:.1f}") -> Cell:
    mean, low, high = (form.format(each) for each in value)
    return Cell(f"{mean} ({low} to {high})", value.mean)


# --- the runs --------------------------------------------------------------------------------------------------------


def plan(source: str | None, given: Mapping[str, Any], sizes: Sequence[int], seeds: int, out: Path) -> list[Planned]:
    """A run of the method and one alone for each size, those of the first seed first."""
    runs = []
    for seed in range(seeds):
        for size in sizes:
            for alone in (False, True):
                settings = {**SHARED, **given, "data.limit": size, "seed": seed}
                if alone:
                    settings = {key: value for key, value in settings.items() if not key.startswith("method.")}
                    settings["method.name"] = "local"
                config = load(source, settings)
                name = run_name(config, {"data.limit": size})
                runs.append(Planned(name, config, RunFolder(CurveLayout(out).runs / name)))
    return runs


def find(
    source: str | None,
    given: Mapping[str, Any],
    sizes: Sequence[int],
    seeds: int,
    out: Path,
    minutes: float | None = None,
    watcher: SearchWatcher | None = None,
    stop: threading.Event | None = None,
) -> LearningCurve:
    """Make the runs that are missing, and say what they show; `given` are settings by dotted name.

    After `minutes` no further run is begun, and what is finished is told.
    """
    watch, asked = watcher or SearchWatcher(), stop or Stop()
    if not sizes or min(sizes) < 1:
        raise UserError("--samples should be numbers of training samples, such as 10,20,50")
    if minutes is not None and not minutes > 0:
        raise UserError(f"minutes = {minutes:g} should be more than 0")
    config, data, settings = _prepared(source, given)
    sizes, notes = _possible(sorted(set(sizes)), config, data)
    runs = plan(source, settings, sizes, seeds, out)
    for run in runs:
        run.folder.check(run.config)
    until = asked if minutes is None else Deadline(time.monotonic() + 60 * minutes, asked)
    with locked(out):
        build_federation(runs[0].config, data)  # tells what there is to know about the data
        for words in (*data.notes, *data.warnings):
            watch.note(words)
        notes += _make(runs, data, until, asked, watch)
        curve = _curve(out, config, data, runs, notes)
        _write(curve)
    return curve


def _prepared(source: str | None, given: Mapping[str, Any]) -> tuple[Config, Dataset, dict[str, Any]]:
    """The config without a limit, its data, and the settings with natural sites and held-out samples, if not given."""
    settings = dict(given)
    config = load(source, settings)
    if config.method["name"] == "local":
        raise UserError("method.name = 'local' is what a method is compared with; choose another with --method")
    if config.data.limit is not None:
        raise UserError("data.limit is what a learning curve varies; give --samples")
    data = load_data(config)
    if source is None and data.sites and not any(key.startswith("partition.") for key in settings):
        settings["partition.name"] = "site"
    if len(data.y_test) and config.data.holdout is None and config.data.folds is None:
        settings["data.holdout"] = DEFAULT_SHARE
    config = load(source, settings)
    if config.data.holdout == 0:
        raise UserError("data.holdout = 0 leaves nothing to measure on; a learning curve needs held-out samples")
    return config, data, settings


def _possible(sizes: Sequence[int], config: Config, data: Dataset) -> tuple[list[int], list[str]]:
    """The sizes of which some site has more, and a sentence about the others; the first of these means all samples."""
    largest = max(map(len, divide(data, config)[0]))
    kept = [size for size in sizes if size < largest]
    above = [size for size in sizes if size >= largest]
    if not above:
        return kept, []
    if len(above) == 1:
        return [*kept, *above], []
    words = f"No {_noun(config)} has more than {largest} training samples: {some([str(size) for size in above[1:]], 8)}"
    return [*kept, above[0]], [f"{words} would be the same as {above[0]}."]


def _make(
    runs: Sequence[Planned], data: Dataset, until: threading.Event, asked: threading.Event, watch: SearchWatcher
) -> list[str]:
    """Make what is not finished, while there is time; returns sentences about what is missing."""
    notes, began, done = [], time.monotonic(), 0
    missing = [run for run in runs if not run.folder.finished]
    for at, run in enumerate(missing):
        if until.is_set():
            break
        left = (time.monotonic() - began) / at * (len(missing) - at) if at else 0.0
        watch.trying(f"run {len(runs) - len(missing) + at + 1} of {len(runs)}, {run.name}", "", left)
        try:
            make_run(run.config, run.folder, lambda: data, Callback(), until)
        except Interrupted:
            if asked.is_set():
                raise
            break
        except RunError as error:
            notes.append(f"{run.name} failed: {error}; the same command tries again.")
        done = at + 1
    if asked.is_set():
        raise Interrupted
    if late := len(missing) - done:
        notes.append(f"There was no time for {late} of {plural(len(runs), 'run')}; the same command goes on.")
    return notes


# --- the answer ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Measured:
    """The held-out samples of one size and seed, of all clients, and what each kind of model made of them."""

    sample: Numbers  # (M,), its row in the data
    group: Numbers  # (M,)
    client: Numbers  # (M,)
    right: dict[str, Floats]  # kind -> (M,), 1 where the model is right
    fewer: int = 0  # clients that train on fewer samples than the limit


@dataclass(frozen=True, eq=False)
class _Size:
    """All seeds of one size together."""

    by_seed: Mapping[int, _Measured]
    natural: bool

    @property
    def kinds(self) -> list[str]:
        """The kinds of models that all seeds have."""
        return [kind for kind in KINDS if all(kind in one.right for one in self.by_seed.values())]

    @cached_property
    def design(self) -> Design:
        each = list(self.by_seed.values())
        seed = np.repeat(np.arange(len(each)), [len(one.sample) for one in each])
        sample, group, client = (
            np.unique(np.concatenate([getattr(one, name) for one in each]), return_inverse=True)[1]
            for name in ("sample", "group", "client")
        )
        return Design(sample, group, seed, client if self.natural else 0 * client)

    def right(self, kind: str) -> Floats:  # (M,)
        return np.concatenate([one.right[kind] for one in self.by_seed.values()])

    def accuracy(self, kind: str) -> Accuracy:
        right = self.right(kind)
        return Accuracy(100 * self.design.mean(right), *accuracy_interval(right, self.design))

    def of_seeds(self, seeds: Sequence[int]) -> _Size:
        return _Size({seed: self.by_seed[seed] for seed in seeds}, self.natural)


def measured(federated: Run, alone: Run) -> _Measured:
    """The held-out samples of two runs, which must be the same."""
    samples, groups, clients = list[Numbers](), list[Numbers](), list[Numbers]()
    right: dict[str, list[Floats]] = {kind: [] for kind in KINDS}
    both = federated.layout.clients_with_outcomes().keys() & alone.layout.clients_with_outcomes().keys()
    for client in sorted(both):
        one, other = federated.outcomes(client), alone.outcomes(client)
        assert one is not None
        assert other is not None
        if one.sample is None or other.sample is None or not np.array_equal(one.sample, other.sample):
            raise UserError(f"{federated.path} and {alone.path} held out other samples; choose another --out")
        samples.append(one.sample)
        groups.append(one.sample if one.group is None else one.group)
        clients.append(np.full(len(one), client))
        guesses = {"local only": other.personal, "personal": one.personal, "global": one.shared}
        for kind, guessed in guesses.items():
            if guessed is not None:
                right[kind].append((guessed == one.label).astype(np.float64))
    if not samples:
        raise UserError(f"{federated.path} held out no samples; a learning curve needs some (data.holdout)")
    limit = federated.config.data.limit or 0
    fewer = sum(sum(row) < limit for row in federated.partition["counts"])
    there = {kind: np.concatenate(parts) for kind, parts in right.items() if len(parts) == len(samples)}
    return _Measured(np.concatenate(samples), np.concatenate(groups), np.concatenate(clients), there, fewer)


def _curve(out: Path, config: Config, data: Dataset, runs: Sequence[Planned], notes: list[str]) -> LearningCurve:
    finished = {
        (run.config.data.limit or 0, run.config.seed, run.config.method["name"] == "local"): run
        for run in runs
        if run.folder.finished
    }
    sizes: dict[int, dict[int, _Measured]] = {}
    for size, seed, alone in finished:
        if not alone and (size, seed, True) in finished:
            pair = (finished[size, seed, which].folder.path for which in (False, True))
            sizes.setdefault(size, {})[seed] = measured(*map(load_run, pair))
    if not sizes:
        raise UserError("no size was finished, with the method and alone; give more --minutes")
    natural, method = config.partition.kind.natural, config.method["name"]
    together_ = {size: _Size(dict(sorted(sizes[size].items())), natural) for size in sorted(sizes)}
    title, noun = find_method(method).title or find_method(method).__name__, _noun(config)
    points, sentences = answer(together_, title, noun)
    for point in points:
        if point.fewer:
            several = plural(point.fewer, noun)
            notes = [*notes, f"With {point.samples}, up to {several} had fewer training samples and used all."]
    return LearningCurve(out, data.name, title, noun, points, sentences, notes)


def answer(sizes: Mapping[int, _Size], method: str, noun: str) -> tuple[list[CurvePoint], list[str]]:
    """The points of the curve, and a sentence for each question; all intervals of differences hold together."""
    questions: list[Estimate] = [
        estimate(size.right("personal") - size.right("local only"), size.design) for size in sizes.values()
    ]
    largest = list(sizes)[-2:]
    seeds = [seed for seed in sizes[largest[0]].by_seed if seed in sizes[largest[-1]].by_seed]
    if len(largest) == 2 and seeds:
        before, after = (sizes[size].of_seeds(seeds) for size in largest)
        questions += [estimate(after.right(kind) - before.right(kind), after.design) for kind in KINDS[1::-1]]
    gains = together(questions)
    points = [
        CurvePoint(
            samples=number_,
            held_out=int(size.design.sample.max()) + 1,
            seeds=len(size.by_seed),
            fewer=max(one.fewer for one in size.by_seed.values()),
            accuracy={kind: size.accuracy(kind) for kind in size.kinds},
            gain=gain,
        )
        for (number_, size), gain in zip(sizes.items(), gains, strict=False)
    ]
    sentences = [
        f"With {point.samples} samples a {noun} {method}'s personal models are "
        f"{_ahead(point.gain)} training alone ({_bounds(point.gain)}, {_number_of(point)})."
        for point in points
    ]
    sentences.append(_reached(points, noun))
    for gain, who in zip(gains[len(points) :], ("personal models", "models trained alone"), strict=False):
        verb = "gain" if gain.points >= 0 else "lose"
        sure = "" if gain.clear else "; that is not clear"
        words = f"From {largest[0]} to {largest[1]} samples a {noun} {who} {verb} {abs(gain.points):.1f} points"
        sentences.append(f"{words} ({_bounds(gain)}{sure}).")
    return points, sentences


def _ahead(gain: Gain) -> str:
    if gain.alike:
        return f"{gain.points:+.1f} points, no difference that matters, against"
    words = f"{abs(gain.points):.1f} points {'ahead of' if gain.points >= 0 else 'behind'}"
    return words if gain.clear else f"not clearly better or worse ({gain.points:+.1f} points) than"


def _bounds(gain: Gain) -> str:
    return f"95% interval {gain.low:+.1f} to {gain.high:+.1f}"


def _number_of(point: CurvePoint) -> str:
    return f"n = {point.held_out} held-out samples, {plural(point.seeds, 'seed')}"


def _reached(points: Sequence[CurvePoint], noun: str) -> str:
    """From how many samples on training alone has the accuracy that personal models have with the fewest."""
    first = points[0]
    target = first.accuracy["personal"].mean
    have = f"the {target:.1f}% that personal models have with {first.samples} samples a {noun}"
    enough = [point.samples for point in points if point.accuracy["local only"].mean >= target]
    if not enough:
        return f"Training alone does not reach {have}, not even with {points[-1].samples} (estimates, no test)."
    return f"Training alone reaches {have} with {enough[0]} (estimates, no test)."


def _noun(config: Config) -> str:
    return "site" if config.partition.kind.natural else "client"


def _write(curve: LearningCurve) -> None:
    """The numbers as JSON and CSV, and the figure."""
    from fednh.report.figures import style, to_csv
    from fednh.report.figures.learning_curve import draw

    layout = CurveLayout(curve.path)
    facts = {"data": curve.data, "method": curve.method, "sentences": curve.sentences, "notes": curve.notes}
    points = [
        {
            "samples": point.samples,
            "held_out": point.held_out,
            "seeds": point.seeds,
            "accuracy": {kind: value._asdict() for kind, value in point.accuracy.items()},
            "gain": {"points": point.gain.points, "low": point.gain.low, "high": point.gain.high},
        }
        for point in curve.points
    ]
    write_json(layout.answer_file, {**facts, "points": points})
    with style.theme():
        drawing = draw(curve.method, curve.noun, curve.table())
        for file in (layout.figure, layout.picture):
            style.save(drawing.figure, file)
    write_bytes(layout.numbers, to_csv(drawing).encode())
