"""The verdict on a site: whether federating helps it, with which model, and how sure that is.

Two comparisons a site, each in accuracy and in balanced accuracy (the mean recall over its classes): the best federated
model against training alone, and the personal against the global model of the best method. Their four intervals hold
together: the chance that any of them misses the truth is at most 5% a site.

Which model is best is chosen by cross-fitting: for the samples of one part and one seed, on the samples of the other
parts and of the other seeds. So the choice is paid for, and a method that is bad, which is never chosen, changes
nothing. The parts are the folds of the runs or, without data.folds, five parts of the held-out samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np

from fednh.data.splits import fold_of
from fednh.report.sites import Held, SiteModel, SiteRow, SiteTable
from fednh.report.stats import Floats, Gain, Numbers, estimate, together
from fednh.seeding import numpy_rng
from fednh.text import some

Kind = Literal["federate", "alone", "alike", "unclear", "nothing learned", "one class", "unknown"]
PARTS = 5  # of the held-out samples, where the runs have no folds


@dataclass(frozen=True)
class SiteVerdict:
    """What federating does for a site.

    federate, alone: the one is better than the other. alike: surely no difference that matters. unclear: too few
    samples, or accuracy and balanced accuracy contradict each other. nothing learned: no model is better than always
    answering the commonest class. one class: nothing to learn. unknown: single samples, or training alone, are lacking.
    """

    site: str
    kind: Kind
    sentence: str
    n: int | None = None  # held-out samples
    model: str | None = None  # the best federated model, by the label of its column
    gain: Gain | None = None  # best federated minus alone, in points of accuracy
    balanced_gain: Gain | None = None  # the same in points of balanced accuracy
    use: str | None = None  # the model to use, where that is clear


@lru_cache(maxsize=64)
def verdicts(table: SiteTable) -> list[SiteVerdict]:
    """One verdict a site, in the order of the table's rows."""
    return [verdict(row, table.classes) for row in table.rows]


def headline(site_verdicts: Sequence[SiteVerdict]) -> str:
    """What federating does over all sites, in one sentence."""
    words = {
        "federate": "Federating helps",
        "alone": "Training alone is better",
        "alike": "Federating makes no difference",
        "unclear": "Too few samples to tell",
        "nothing learned": "No model has learned anything",
        "one class": "There is one class only",
        "unknown": "It is not known whether federating helps",
    }
    counts, parts = Counter(each.kind for each in site_verdicts), list[str]()
    for kind, text in words.items():
        if counts[kind]:  # type: ignore[index]
            names = [each.site for each in site_verdicts if each.kind == kind]
            text = text if not parts else text[:1].lower() + text[1:]
            parts.append(f"{text} at {_how_many(len(names), len(site_verdicts), names)}")
    return f"{'; '.join(parts)}." if parts else "No site was measured."


def _how_many(here: int, of: int, names: Sequence[str]) -> str:
    if here == of:
        return "every site" if of > 1 else names[0]
    return f"{here} of {of} sites ({some(names, 4)})"


def verdict(row: SiteRow, classes: Sequence[str]) -> SiteVerdict:
    """What can be said about one site."""
    if row.only_class is not None:
        name = classes[row.only_class]
        words = f"This site has one class, {name}: any model can learn to name it, so there is nothing to compare."
        return SiteVerdict(row.name, "one class", words, row.n)
    if not row.models:
        return SiteVerdict(row.name, "unknown", "No model was measured here.", row.n)
    if row.held is None or any(model.guessed is None for model in row.models):
        words = f"{_accuracies(row)}: how sure that is cannot be said here, since single samples are not recorded."
        return SiteVerdict(row.name, "unknown", words, row.n)
    compared = _compared(row, row.held)
    if len(idle := _idle(row, row.held)) == len(row.models):
        words = f"No model has learned anything here: none is better than {_constant(row, classes, n=True)}."
        return replace(compared, kind="nothing learned", sentence=words, use=None)
    if idle:
        words = f"{compared.sentence} Not better than {_constant(row, classes)}: {some(idle, 4)}."
        return replace(compared, sentence=words, use=None if compared.use in idle else compared.use)
    return compared


# --- comparisons ---------------------------------------------------------------------------------------------------


def _compared(row: SiteRow, held: Held) -> SiteVerdict:
    """Best federated against alone, and personal against global of the best method."""
    joint = [model for model in row.models if model.kind != "local"]
    alone = [model for model in row.models if model.kind == "local"]
    right = {kind: [_right(model, held) for model in models] for kind, models in (("joint", joint), ("alone", alone))}
    choice, questions = _Choice(held), dict[str, Floats]()
    if joint and alone:
        questions["alone"] = choice.fitted(right["joint"]) - choice.fitted(right["alone"])
    if (apart := _personal_minus_global(joint, right["joint"])) is not None:
        questions["global"] = choice.fitted(right["joint"], apart)
    best = {
        kind: models[choice.best(right[kind])].label for kind, models in (("joint", joint), ("alone", alone)) if models
    }
    estimates = [estimate(x, design) for x in questions.values() for design in held.designs]
    gains = iter(together(estimates))
    pairs = {name: (next(gains), next(gains)) for name in questions}
    unsure = (
        "seeds" if len(np.unique(held.seed)) > 1 and any(each.of_runs > 0.5 for each in estimates[:2]) else "samples"
    )
    return _told(row, best, pairs, unsure)


def _right(model: SiteModel, held: Held) -> Floats:  # (M,)
    """1 where the model takes a sample for what it is."""
    assert model.guessed is not None
    return np.equal(model.guessed, held.label).astype(np.float64)


def _personal_minus_global(models: Sequence[SiteModel], right: Sequence[Floats]) -> list[Floats] | None:
    """For every federated model what its method's personal model has over its global one; None: some lacks one."""
    both = {(model.method, model.kind): each for model, each in zip(models, right, strict=True)}
    if not models or any((m.method, kind) not in both for m in models for kind in ("personal", "global")):
        return None
    return [both[m.method, "personal"] - both[m.method, "global"] for m in models]


class _Choice:
    """Chooses a model by the mean of accuracy and balanced accuracy, on other samples than it is then judged by."""

    def __init__(self, held: Held):
        self.label, self.part = np.unique(held.label, return_inverse=True)[1], _parts(held)
        self.seed = np.unique(held.seed, return_inverse=True)[1]
        self.shape = int(self.part.max()) + 1, int(self.seed.max()) + 1, int(self.label.max()) + 1
        self.cell = np.ravel_multi_index((self.part, self.seed, self.label), self.shape)

    def best(self, right: Sequence[Floats]) -> int:
        """The best model on all samples; of equals the first."""
        count = self._count(np.ones(len(self.cell))).sum(axis=(0, 1))
        return int(np.argmax([_score(self._count(x).sum(axis=(0, 1)), count) for x in right]))

    def fitted(self, right: Sequence[Floats], values: Sequence[Floats] | None = None) -> Floats:  # (M,)
        """At every observation the value of the model that is best on the other parts and seeds; its hit by default."""
        count = self._others(np.ones(len(self.cell)))  # (P, K, C)
        chosen = np.argmax([_score(self._others(x), count) for x in right], axis=0)  # (P, K)
        return np.asarray(
            np.stack(right if values is None else values)[chosen[self.part, self.seed], np.arange(len(self.cell))]
        )

    def _count(self, x: Floats) -> Floats:  # (P, K, C)
        sums: Floats = np.bincount(self.cell, x, int(np.prod(self.shape))).astype(np.float64)
        return sums.reshape(self.shape)

    def _others(self, x: Floats) -> Floats:  # (P, K, C)
        """For every part and seed the sums over the other parts of the other seeds; a single seed is its own."""
        whole = self._count(x)
        other_parts: Floats = whole.sum(axis=0, keepdims=True) - whole
        other_seeds: Floats = other_parts.sum(axis=1, keepdims=True) - other_parts
        return other_parts if self.shape[1] == 1 else other_seeds


def _score(right: Floats, count: Floats) -> Floats:
    """Accuracy plus balanced accuracy, from numbers by class (the last axis)."""
    there = np.maximum(count, 1)
    plain = right.sum(axis=-1) / np.maximum(count.sum(axis=-1), 1)
    return np.asarray(plain + (right / there).sum(axis=-1) / np.maximum((count > 0).sum(axis=-1), 1))


def _parts(held: Held) -> Numbers:  # (M,)
    """The part of the samples that every observation belongs to."""
    if len(np.unique(held.fold)) > 1:
        return np.unique(held.fold, return_inverse=True)[1]
    _, first, sample = np.unique(held.sample, return_index=True, return_inverse=True)
    groups = None if np.array_equal(held.group, held.sample) else held.group[first]
    part = fold_of(held.label[first].astype(np.int64), groups, PARTS, numpy_rng(0, "parts"))
    return np.unique(part, return_inverse=True)[1][sample]


def _idle(row: SiteRow, held: Held) -> list[str]:
    """The models that are not better than the commonest class as the answer to everything.

    Their accuracy is no higher, and their balanced accuracy is not clearly higher.
    """
    constant = row.constant
    if constant is None:
        return []
    base, (_, balanced) = _right(constant, held), held.designs
    idle = []
    for model in row.models:
        if model.accuracy <= constant.accuracy:
            (gain,) = together([estimate(_right(model, held) - base, balanced)])
            idle += [] if gain.low > 0 else [model.label]
    return idle


# --- sentences -----------------------------------------------------------------------------------------------------


def _told(row: SiteRow, best: dict[str, str], pairs: dict[str, tuple[Gain, Gain]], unsure: str) -> SiteVerdict:
    """The verdict that the comparisons allow, with its sentence; `unsure` is what there are too few of, if any."""
    model = best.get("joint")
    outcome = SiteVerdict(row.name, "unknown", "", row.n, model)
    own = _own(pairs.get("global"), model)
    if "alone" not in pairs:
        words = f"{_accuracies(row)} (n = {row.n:,}): what training alone achieves is not known."
        return replace(outcome, sentence=f"{words}{own}")
    plain, balanced = pairs["alone"]
    outcome = replace(outcome, gain=plain, balanced_gain=balanced)
    numbers = (
        f"{_points(plain)} points against training alone ({_range(plain)}, n = {row.n:,}); balanced {_shown(balanced)}"
    )
    signs = {int(np.sign(gain.low)) for gain in (plain, balanced) if gain.clear}
    if signs == {1, -1}:
        words = f"Accuracy and balanced accuracy contradict each other: {model} is at {numbers}."
        return replace(outcome, kind="unclear", sentence=f"{words}{own}")
    if not signs and plain.alike and balanced.alike:
        words = f"Federating makes no difference that matters: {model} is at {numbers}."
        return replace(outcome, kind="alike", sentence=f"{words}{own}")
    if not signs:
        return replace(outcome, kind="unclear", sentence=f"Too few {unsure} to tell: {model} is at {numbers}.{own}")
    doubt = _doubt(plain, balanced)
    if signs == {1}:
        return replace(outcome, kind="federate", use=model, sentence=f"Federate: {model} is at {numbers}.{doubt}{own}")
    words = f"Train alone: the best federated model, {model}, is at {numbers}.{doubt}"
    return replace(outcome, kind="alone", use=best["alone"], sentence=words)


def _doubt(plain: Gain, balanced: Gain) -> str:
    """What to say where only one of the two measures decides, and the other points elsewhere."""
    if plain.points * balanced.points >= 0:
        return ""
    decides, other = ("accuracy", "balanced accuracy") if plain.clear else ("balanced accuracy", "accuracy")
    return f" That is in {decides}; {other} points the other way, not clearly."


def _own(pair: tuple[Gain, Gain] | None, model: str | None) -> str:
    """Whether the personal or the global model of the best method is better, where that is clear."""
    if pair is None or model is None:
        return ""
    clear = [(gain, where) for gain, where in zip(pair, ("", "balanced "), strict=True) if gain.clear]
    if not clear or len({gain.points > 0 for gain, _ in clear}) > 1:
        return ""
    gain, where = clear[0]
    better, worse = ("personal", "global") if gain.points > 0 else ("global", "personal")
    return f" Its {better} model is better than the {worse} one: personal over global {where}{_shown(gain)}."


def _constant(row: SiteRow, classes: Sequence[str], n: bool = False) -> str:
    assert row.constant is not None
    assert row.commonest is not None
    many = f", n = {row.n:,}" if n else ""
    return f"always answering {classes[row.commonest]} ({row.constant.accuracy:.1f}%{many})"


def _accuracies(row: SiteRow) -> str:
    text = ", ".join(f"{model.label} {model.accuracy:.1f}" for model in row.models)
    return text[:1].upper() + text[1:]


def _points(gain: Gain) -> str:
    return _signed(gain.points)


def _shown(gain: Gain) -> str:
    return f"{_points(gain)} ({_range(gain)})"


def _range(gain: Gain) -> str:
    return f"{_signed(gain.low)} to {_signed(gain.high)}"


def _signed(value: float) -> str:
    return f"{round(value, 1) + 0.0:+.1f}"  # no -0.0
