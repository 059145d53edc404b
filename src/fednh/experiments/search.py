"""The search for the best method: candidates are tried on held-out folds within a time budget.

Every trial is an ordinary run folder in which each site holds out one of its K folds (`data.folds`), so a search that
was killed goes on with the same command. Successive halving drops the half that is behind: after two folds, after all
folds, and after each further seed. For every fold the choice is made by the scores on the other folds alone, and so is
every halving before it (cross-fitting).
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fednh import extras
from fednh.backends import threads
from fednh.callbacks import Callback, SearchWatcher
from fednh.config import Config, with_settings
from fednh.data.dataset import Dataset
from fednh.errors import Ignored, Interrupted, Notice, RunError, UserError
from fednh.federated.setup import build_federation, load_data, prepared
from fednh.interrupt import Deadline
from fednh.methods.registry import find_method
from fednh.metric_names import RoundRecord
from fednh.report.load import Run, load_run
from fednh.report.sheet import Sheet, number, word
from fednh.runs.layout import AnswerLayout
from fednh.runs.model_file import Outcomes
from fednh.runs.run_folder import RunFolder, read_config
from fednh.text import duration, some

Kind = Literal["personal", "global"]
Choice = tuple[str, Kind]  # a candidate, and which of its models a site uses
Pair = tuple[int, int]  # a fold and a seed: one run of a candidate
MEMORY = "memory:"  # the name of data that a program gives
Scores = Mapping[Choice, Mapping[Pair, float]]


@dataclass(frozen=True)
class Candidate:
    """Something worth trying: settings on top of those that all share."""

    name: str  # of its run folders
    title: str
    settings: Mapping[str, Any]
    cost: float = 1.0  # of a run, in runs of FedAvg
    kinds: tuple[Kind, ...] = ("personal",)  # which of its models a site might use

    @property
    def alone(self) -> bool:
        return bool(self.settings["method.name"] == "local")

    @property
    def on_features(self) -> bool:
        return "model.frozen" in self.settings


# In the order in which they are tried, while time lasts. What every answer needs comes first: training alone, and the
# plain average. Then the methods whose personal models are best in our results on CIFAR (docs/results.md) and in the
# paper's Table 1, and those that suit small tables: FedETF and Ditto beat training alone on the breast-cancer table.
# FedRep, FedProto and CReFF are below FedAvg in both tables, and cost more.
CANDIDATES = (
    Candidate("local", "Local", {"method.name": "local"}),
    Candidate("fedavg", "FedAvg", {"method.name": "fedavg"}, kinds=("personal", "global")),
    Candidate(
        "fedavg-prior",
        "FedAvg (prior put back)",
        {"method.name": "fedavg", "personal.model": "global", "personal.prior": 1.0},
    ),
    Candidate("fedprior", "FedPrior", {"method.name": "fedprior"}, 1.2),
    Candidate("ditto", "Ditto", {"method.name": "ditto"}, 2.5),
    Candidate("fednh", "FedNH", {"method.name": "fednh"}, 1.2, ("personal", "global")),
    Candidate("fedper", "FedPer", {"method.name": "fedper"}),
    Candidate("fedetf", "FedETF", {"method.name": "fedetf"}, 1.6),
    Candidate("fedrod", "FedROD", {"method.name": "fedrod"}, 2.0),
    Candidate("fedbabu", "FedBABU", {"method.name": "fedbabu"}, 1.1),
)
# On images a pretrained body that is not trained comes first: with few samples a site it beats training from scratch,
# and a run takes seconds (docs/features.md). `rounds` is 1 where the head follows from sums.
BODY = {"model.name": "efficientnet_lite0", "model.frozen": "body"}
ON_FEATURES = tuple(
    replace(one, settings={**BODY, **one.settings}, cost=0.1)
    for one in (
        Candidate("local-features", "Local on features", {"method.name": "local"}),
        Candidate("fedavg-features", "FedAvg on features", {"method.name": "fedavg"}, kinds=("personal", "global")),
        Candidate("afl-features", "AFL on features", {"method.name": "afl", "rounds": 1}, kinds=("personal", "global")),
        Candidate(
            "fedncm-features",
            "FedNCM on features",
            {"method.name": "fedncm", "rounds": 1},
            kinds=("personal", "global"),
        ),
        Candidate(
            "fedavg-prior-features",
            "FedAvg on features (prior put back)",
            {"method.name": "fedavg", "personal.model": "global", "personal.prior": 1.0},
        ),
        Candidate(
            "fedprior-features",
            "FedPrior on features",
            {"method.name": "fedprior", "method.head_init": "means", "model.adapter": "linear"},
        ),
    )
)
# On a table a linear model is often enough, and costs little to try.
LINEAR = {"model.name": "mlp", "model.args.hidden": [32], "model.args.linear_output": True}

FIRST_FOLDS = 2  # of all candidates; what comes after is for those that are left
SEEDS = 3  # at most
# Rounds and folds, the best first: the first for which there is time with six candidates is taken.
EFFORTS = ((20, 5), (20, 3), (10, 5), (10, 3), (5, 3), (5, 2), (2, 2))
ENOUGH = 6
SEARCH_SHARE = 0.5  # of the time, for the first folds; the rest is for further folds and seeds
PAGE_SECONDS = 4.0  # of one core, for the page at the end
TIMING_ROUNDS = 2


def candidates_for(config: Config, vectors: bool, methods: Sequence[str] = ()) -> tuple[Candidate, ...]:
    """What to try on such data: candidates by these names, other methods by theirs, or all; and training alone always.

    Where the user has not chosen a model, tables also have linear models, and images features of a pretrained body,
    which come first.
    """
    known = {one.name: one for one in CANDIDATES}
    if not vectors and config.model.name == "auto" and extras.installed("backbones"):
        known = {one.name: one for one in (*ON_FEATURES, *CANDIDATES)}
    for name in methods:
        known.setdefault(
            name, Candidate(name.replace(":", "-"), find_method(name).title or name, {"method.name": name})
        )
    alone = "local" if methods else next(one.name for one in known.values() if one.alone)
    chosen = [known[name] for name in dict.fromkeys([alone, *(methods or known)])]
    if not vectors or config.model.name != "auto":
        return tuple(chosen)
    candidates = []
    for one in chosen:
        linear = replace(one, name=f"{one.name}-linear", title=f"{one.title} (linear)")
        candidates += [one, replace(linear, settings={**one.settings, **LINEAR})]
    return tuple(candidates)


# --- the choice -----------------------------------------------------------------------------------------------------


def steps(folds: int, seeds: int = SEEDS) -> list[list[Pair]]:
    """The pairs of fold and seed in the order in which they are tried; after each step half is dropped."""
    first = [(fold, 0) for fold in range(min(FIRST_FOLDS, folds))]
    rest = [(fold, 0) for fold in range(len(first), folds)]
    again = [[(fold, seed) for fold in range(folds)] for seed in range(1, seeds)]
    return [step for step in (first, rest, *again) if step]


def survivors(scores: Scores, done: Sequence[Sequence[Pair]], without: int | None = None) -> list[Choice]:
    """The choices that are left after these steps of halving, the best first; scores on the fold `without` are unseen.

    A pair counts if all that are left have it. At least two are left, so that the next step compares something. Of
    equals the first candidate is better.
    """
    left = [choice for choice in scores if not done or all(pair in scores[choice] for pair in done[0])]
    seen: list[Pair] = []
    for step in done:
        seen += [pair for pair in step if pair[0] != without]
        left = ranked(scores, left, seen)
        left = left[: max(2, ceil(len(left) / 2))]
    return left


def ranked(scores: Scores, choices: Sequence[Choice], pairs: Sequence[Pair]) -> list[Choice]:
    """The choices by their mean score over the pairs that all of them have."""
    common = [pair for pair in pairs if all(pair in scores[choice] for choice in choices)]
    return sorted(choices, key=lambda choice: -float(np.mean([scores[choice][p] for p in common] or [0.0])))


def score(run: Run, kind: Kind) -> float | None:
    """The mean over sites of accuracy and of balanced accuracy, half each, on held-out samples; None: no such model.

    Every site counts once. A site with one class says nothing and does not count.
    """
    scores = []
    for client in run.layout.clients_with_outcomes():
        outcomes = run.outcomes(client)
        assert outcomes is not None
        guessed = outcomes.personal if kind == "personal" else outcomes.shared
        if guessed is None:
            return None
        if client in run.one_class or not len(outcomes):
            continue
        right = guessed == outcomes.label
        recalls = [right[outcomes.label == c].mean() for c in np.unique(outcomes.label)]
        scores.append(50 * (right.mean() + np.mean(recalls)))
    return float(np.mean(scores)) if scores else None


@dataclass(frozen=True)
class ChosenRun(Run):
    """A run as a column of the answer: of its models the chosen one, under the settings of the overall choice."""

    kind: Kind
    body = "any"  # training alone was tried with every body: the best of it is compared

    def outcomes(self, client: int) -> Outcomes | None:
        recorded = super().outcomes(client)
        if recorded is None:
            return None
        mine = self.kind == "personal"
        guessed, confidence = (
            (recorded.personal, recorded.confidence) if mine else (recorded.shared, recorded.shared_confidence)
        )
        assert guessed is not None
        return replace(recorded, personal=guessed, shared=None, confidence=confidence, shared_confidence=None)


# --- the search -----------------------------------------------------------------------------------------------------


def make_run(
    config: Config, folder: RunFolder, data: Callable[[], Dataset], callback: Callback, stop: threading.Event
) -> None:
    """Make a run from where its folder stands to its end. Notices are silent: the first look at the data told them."""
    with folder.opened(config) as unfinished, warnings.catch_warnings():
        warnings.simplefilter("ignore", Notice)
        warnings.simplefilter("ignore", Ignored)
        if unfinished:
            federation = build_federation(config, data(), run=folder.path)
            threads.make_run(config, federation, folder, callback, stop).run()


class Budget:
    """The time of a search that began now."""

    def __init__(self, minutes: float):
        self.minutes, self.total = minutes, 60 * minutes
        self.end = time.monotonic() + self.total
        self.slowdown = 1.0  # seconds that one of a core takes, where others work on this machine

    @property
    def left(self) -> float:
        return self.end - time.monotonic()

    def reserve(self, longest: float) -> float:
        """Seconds kept for the end: training the winner on all samples, and the page."""
        return 1.5 * longest + min(PAGE_SECONDS * self.slowdown, self.total / 3)


@dataclass
class Search:
    """The runs of one search, made or found below `out`."""

    base: Config
    data: Dataset
    out: Path
    candidates: tuple[Candidate, ...]
    clock: Budget
    rounds: int  # 0: as many as the time allows
    folds: int  # 0: the same
    seeds: int  # at most
    asked: threading.Event
    watcher: SearchWatcher
    failed: dict[str, str] = field(default_factory=dict)  # candidate -> why
    _loaded: dict[tuple[str, Pair], Run] = field(default_factory=dict)
    _scores: dict[Choice, dict[Pair, float]] = field(default_factory=dict)
    _features: Dataset | None = None
    _timed: float = 0.0  # seconds of a run of FedAvg, by two rounds that were timed

    def __post_init__(self) -> None:
        self.named = {one.name: one for one in self.candidates}
        self._scores = {(one.name, kind): {} for one in self.candidates for kind in one.kinds}
        self.most_folds = self.folds or EFFORTS[0][1]
        begun = self._begun()
        self.rounds, self.folds = self._effort_of(begun[0][2]) if begun else self._effort()
        self.steps = steps(self.folds, self.seeds)
        for name, pair, folder in begun[:1]:
            folder.check(self.config(name, pair))
        self.clock.end -= sum(self._keep(*run) for run in begun if run[2].finished)

    @property
    def asked_for(self) -> dict[str, Any]:
        """What distinguishes one search of these data from another."""
        return {"minutes": self.clock.minutes, "seeds": self.seeds, "candidates": list(self.named)}

    # --- runs ----------------------------------------------------------------------------------------------------

    def folder(self, name: str, pair: Pair) -> RunFolder:
        return RunFolder(AnswerLayout(self.out).runs / f"{name}-fold{pair[0]}-seed{pair[1]}")

    def config(self, name: str, pair: Pair, **settings: Any) -> Config:
        """The settings of a run."""
        fold, seed = pair
        where = {"data.folds": self.folds, "data.fold": fold, "seed": seed, "rounds": self.rounds}
        return self._with({**where, **self.named[name].settings, **settings})

    def _with(self, settings: Mapping[str, Any]) -> Config:
        return with_settings(self.base, settings)

    def _begun(self) -> list[tuple[str, Pair, RunFolder]]:
        """The runs that are there."""
        begun = []
        for name in self.named:
            for path in sorted(AnswerLayout(self.out).runs.glob(f"{name}-fold*-seed*")):
                fold, _, seed = path.name.removeprefix(f"{name}-fold").partition("-seed")
                if RunFolder(path).started:
                    begun.append((name, (int(fold), int(seed)), RunFolder(path)))
        return begun

    def _keep(self, name: str, pair: Pair, folder: RunFolder) -> float:
        """Remember a finished run; returns the seconds that it took."""
        self._loaded[name, pair] = run = load_run(folder.path)
        for kind in self.named[name].kinds:
            if (value := score(run, kind)) is not None:
                self._scores[name, kind][pair] = value
        return float(run.summary["seconds"])

    def _effort_of(self, run: RunFolder) -> tuple[int, int]:
        """The rounds and folds of a search that has begun."""
        there = read_config(run.path)
        for what, was, now in (("rounds", there.rounds, self.rounds), ("data.folds", there.data.folds, self.folds)):
            if now and was != now:
                raise UserError(f"{self.out} was begun with {what} = {was}, not {now}; choose another --out")
        return there.rounds, int(there.data.folds or 0)

    def _effort(self) -> tuple[int, int]:
        """How many rounds and folds the time allows."""
        if self.rounds and self.folds:
            return self.rounds, self.folds
        once, again = self._time_rounds()
        for rounds, folds in ((self.rounds or rounds, self.folds or folds) for rounds, folds in EFFORTS):
            each = self._timed = once + again * rounds
            first = sum(one.cost for one in self.candidates[:ENOUGH]) * FIRST_FOLDS * each
            there = self.clock.left - self.clock.reserve(each)
            if first < SEARCH_SHARE * there and first + first / FIRST_FOLDS / 2 * (folds - FIRST_FOLDS) < there:
                return rounds, folds
        needed = 2 * FIRST_FOLDS * each + self.clock.reserve(each)
        if needed > self.clock.left:
            raise UserError(
                f"--minutes {self.clock.minutes:g} is too little time for these data: a run of {rounds} rounds takes "
                f"about {duration(each)}, and the smallest answer needs five; give --minutes "
                f"{ceil(needed / 6 + 1) / 10:g}"
            )
        return rounds, folds

    def _time_rounds(self) -> tuple[float, float]:
        """Seconds that a run takes once, and those of a round: two rounds of FedAvg, thrown away."""
        times: list[float] = []
        config = self._with({"method.name": "fedavg", "rounds": TIMING_ROUNDS})
        self.watcher.trying("how long a round takes", "", self.clock.left)
        began, busy = time.perf_counter(), time.process_time()
        with tempfile.TemporaryDirectory() as place:
            self._make(config, RunFolder(Path(place) / "timing"), _Rounds(times), self.asked)
        took, again = time.perf_counter() - began, times[-1] - times[-2]
        self.clock.slowdown = max(took / max(time.process_time() - busy, 1e-3), 1.0)
        return max(took - TIMING_ROUNDS * again, 0.0), again

    def _make(self, config: Config, folder: RunFolder, callback: Callback, stop: threading.Event) -> None:
        make_run(config, folder, lambda: self._data_for(config), callback, stop)

    def _data_for(self, config: Config) -> Dataset:
        """The samples of a run: as they are, or their features, which are computed once."""
        if config.model.frozen == "none":
            return self.data
        if self._features is None:
            given = config.data.name.startswith(MEMORY)
            self._features = prepared(config, self.data if given else load_data(config))
        return self._features

    def _seconds(self, name: str) -> float:
        """What a run of a candidate takes, by its own runs or those of others."""
        wanted = self.named[name]
        runs = [(self.named[one], run.summary["seconds"]) for (one, _), run in self._loaded.items()]
        own = [seconds for one, seconds in runs if one.name == name]
        # A run on features says little about one from scratch.
        others = [seconds / one.cost for one, seconds in runs if one.on_features == wanted.on_features]
        return float(np.mean(own or [wanted.cost * np.mean(others or [self._timed])]))

    def _try(self, name: str, pair: Pair, share: float = 1.0) -> bool:
        """Make a run, if there is time for it within this share of the time; whether it is there."""
        if (name, pair) in self._loaded:
            return True
        end = self.clock.end - self.clock.reserve(max(self._seconds(one) for one in self.named))
        if name in self.failed or time.monotonic() + self._seconds(name) > end - (1 - share) * self.clock.total:
            return False
        what = f"{self.named[name].title}, fold {pair[0] + 1} of {self.folds}, seed {pair[1]}"
        self.watcher.trying(what, self._leads(), self.clock.left)
        folder = self.folder(name, pair)
        try:
            self._make(self.config(name, pair), folder, Callback(), Deadline(end, self.asked))
        except Interrupted:
            if self.asked.is_set():
                raise
            return False
        except RunError as error:
            self.failed[name] = str(error)
            self.watcher.note(f"{self.named[name].title} is left out: {error}")
            return False
        self._keep(name, pair, folder)
        return True

    # --- the course of the search --------------------------------------------------------------------------------

    def scores(self, alone: bool) -> Scores:
        """The scores of what trains alone, or of the rest, without what failed."""
        there = {name for name, one in self.named.items() if one.alone == alone and name not in self.failed}
        return {choice: by_pair for choice, by_pair in self._scores.items() if choice[0] in there}

    def left(self, done: int) -> list[str]:
        """The candidates that the next step tries, after so many: those left for some fold, alone or together."""
        kept = {
            name
            for alone in (True, False)
            for fold in (None, *range(self.folds))
            for name, _ in survivors(self.scores(alone), self.steps[:done], fold)
        }
        return [name for name in self.named if name in kept]

    def run(self) -> None:
        """Try what there is time for."""
        needed = [next(one.name for one in self.candidates if one.alone == alone) for alone in (True, False)]
        for name in self.named:
            for pair in self.steps[0]:
                if not self._try(name, pair, 1.0 if name in needed else SEARCH_SHARE):
                    break
        if not all(survivors(self.scores(alone), self.steps[:1]) for alone in (True, False)):
            raise UserError(
                f"--minutes {self.clock.minutes:g} were over before training alone and one federated method were tried "
                f"on {len(self.steps[0])} folds; what was run is kept: the same command with more --minutes goes on"
            )
        for done, step in enumerate(self.steps[1:], 1):
            names = self.left(done)
            for pair in step:
                if not all(self._try(name, pair) for name in names if name not in self.failed):
                    return

    def choice(self, alone: bool, without: int | None = None) -> Choice:
        """The best by all folds but one."""
        return survivors(self.scores(alone), self.steps, without)[0]

    def mean(self, choice: Choice) -> float:
        """Its mean score over what it was tried on."""
        return float(np.mean(list(self._scores[choice].values())))

    def winner(self) -> Choice:
        """The best federated choice, unless training alone is better over the same folds and seeds."""
        together, alone = self.choice(False), self.choice(True)
        pairs = [pair for step in self.steps for pair in step]
        return ranked(self._scores, [alone, together], pairs)[0]

    def _leads(self) -> str:
        """What is best so far, once there is something to compare."""
        if not all(survivors(self.scores(alone), self.steps[:1]) for alone in (False, True)):
            return ""
        together, alone = self.choice(False), self.choice(True)
        return f"{self.title(together)} leads with {self.mean(together):.1f}, alone {self.mean(alone):.1f}"

    def title(self, choice: Choice) -> str:
        name, kind = choice
        title = self.named[name].title
        return f"{title} (global)" if kind == "global" else title

    # --- what came out -------------------------------------------------------------------------------------------

    def columns(self) -> tuple[list[Run], list[str]]:
        """The runs whose held-out samples took no part in their choice, and what to say about how they were chosen."""
        runs: list[Run] = []
        notes = []
        chosen = {alone: [self.choice(alone, fold) for fold in range(self.folds)] for alone in (False, True)}
        pairs = [
            p for step in self.steps for p in step if all((c[p[0]][0], p) in self._loaded for c in chosen.values())
        ]
        for alone, by_fold in chosen.items():
            overall = self.choice(alone)
            for pair in pairs:
                name, kind = by_fold[pair[0]]
                one, config = self._loaded[name, pair], self.config(overall[0], pair, **_uses(overall))
                runs.append(ChosenRun(one.path, config, one.summary, one.records, one.partition, one.environment, kind))
            used = {fold for fold, _ in pairs}
            if others := [by_fold[fold] for fold in sorted(used) if by_fold[fold] != overall]:
                what = "the best way to train alone" if alone else "the best federated model"
                names = some([self.title(other) for other in dict.fromkeys(others)])
                notes.append(
                    f"In {len(others)} of {len(used)} folds {what} by the other folds was not {self.title(overall)} "
                    f"but {names}: its predictions count there."
                )
        return runs, [_HOW, *self._smaller(pairs), *notes]

    def _smaller(self, pairs: Sequence[Pair]) -> list[str]:
        """What there was no time for."""
        notes = []
        if waiting := [one.title for one in self.candidates if not self._tried(one.name)]:
            notes.append(f"Not tried, for lack of time: {some(waiting, 20)}.")
        folds, seeds = len({fold for fold, _ in pairs}), len({seed for _, seed in pairs})
        short = folds < self.most_folds
        if short or seeds < self.seeds:
            more = "more --minutes and another --out allow more" if short else "the same with more --minutes goes on"
            notes.append(
                f"There was time for {self.rounds} rounds, {folds} of {self.most_folds} folds and {seeds} of at most "
                f"{self.seeds} seeds; {more}."
            )
        return notes

    def _tried(self, name: str) -> bool:
        return name in self.failed or all((name, pair) in self._loaded for pair in self.steps[0])

    def tried_sheet(self) -> Sheet:
        """Every model that was tried, with its score and on how much that stands, the best first."""
        tried = [choice for choice, by_pair in self._scores.items() if all(pair in by_pair for pair in self.steps[0])]
        finalists = {self.choice(alone) for alone in (True, False)}
        rows = []
        for choice in sorted(tried, key=lambda choice: (-len(self._scores[choice]), -self.mean(choice))):
            first = float(np.mean([self._scores[choice][pair] for pair in self.steps[0]]))
            count, mark = len(self._scores[choice]), "chosen" if choice in finalists else ""
            rows.append([word(self.title(choice)), number(first, "{:.1f}"), number(self.mean(choice), "{:.1f}")])
            rows[-1] += [word(count), word(mark)]
        note = (
            "Score: the mean over sites of accuracy and balanced accuracy, half each, on held-out samples; in percent. "
            f"All were tried on the same {len(self.steps[0])} folds; then half were dropped."
        )
        columns = ["model", "first folds", "all its folds", "runs", ""]
        return Sheet("tried", "What was tried", columns, rows, note)

    def train_winner(self) -> Run:
        """Train the winner on all samples of the sites: nothing is held out any more."""
        winner = self.winner()
        settings = {"rounds": self.rounds, **self.named[winner[0]].settings, **_uses(winner), "data.holdout": 0.0}
        config, folder = self._with(settings), RunFolder(self.out / "final")
        if folder.started and read_config(folder.path) != config:
            shutil.rmtree(folder.path)  # of an answer in less time, which had another winner
        if not folder.finished:
            self.watcher.trying(f"{self.title(winner)} on all samples", self._leads(), self.clock.left)
            self._make(config, folder, Callback(), self.asked)
        return load_run(folder.path)


_HOW = (
    "The intervals are of samples that took no part in the choice of the models: for every fold these were chosen by "
    "their scores on the other folds alone."
)


class _Rounds(Callback):
    """Notes when each round ends."""

    def __init__(self, times: list[float]):
        self.times = times

    def on_round(self, record: RoundRecord) -> None:
        self.times.append(time.perf_counter())


def _uses(choice: Choice) -> dict[str, Any]:
    """The settings that make the chosen model the one that a site gets."""
    return {"personal.model": "global"} if choice[1] == "global" else {}
