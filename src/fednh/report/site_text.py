"""One sentence a site: which model to use, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fednh.report.sites import ModelKind, SiteModel, SiteRow
from fednh.report.stats import FEWEST_DISAGREEMENTS, Difference

# In this order a model is compared in words, if several methods are not at hand.
_RIVALS: dict[ModelKind, tuple[ModelKind, ...]] = {
    "personal": ("global", "local"),
    "global": ("personal", "local"),
    "local": ("personal", "global"),
}


@dataclass(frozen=True)
class SiteVerdict:
    """What a site's owner should do.

    use: one model is better than all others, or than some and not distinguishable from the rest. alike: all are equally
    good. unclear: too few samples. unknown: no intervals, or nothing to compare with. one class: nothing to learn.
    """

    kind: Literal["use", "alike", "unclear", "unknown", "one class"]
    sentence: str


def verdict(row: SiteRow, classes: Sequence[str]) -> SiteVerdict:
    """The sentence about a site."""
    first = row.leader
    if row.only_class is not None:
        name = classes[row.only_class]
        words = f"This site has one class, {name}: any model can learn to name it, so there is nothing to compare."
        return SiteVerdict("one class", words)
    if first is None:
        return SiteVerdict("unknown", "No model was measured here.")
    gaps = [(model, gap) for model, gap in _in_order(row) if gap is not None]
    if len(gaps) < len(row.rivals) or not gaps:
        return SiteVerdict("unknown", _unsure(row))
    worse = [(model, gap) for model, gap in gaps if gap.clear]
    level = [(model, gap) for model, gap in gaps if not gap.clear]
    if worse:
        return SiteVerdict("use", _use(row, first, worse, level))
    if all(gap.alike for _, gap in gaps):
        return SiteVerdict("alike", _alike(row, gaps))
    return SiteVerdict("unclear", _unclear(row, first))


def _in_order(row: SiteRow) -> list[tuple[SiteModel, Difference | None]]:
    """The rivals, first the one that a person would ask about."""
    first, found = row.leader, row.rivals
    kinds = [model.kind for model in row.models]
    if first is None or len(set(kinds)) < len(kinds):  # several methods: the strongest first
        return found
    return sorted(found, key=lambda rival: _RIVALS[first.kind].index(rival[0].kind))


def _use(
    row: SiteRow,
    first: SiteModel,
    worse: list[tuple[SiteModel, Difference]],
    level: list[tuple[SiteModel, Difference]],
) -> str:
    (rival, gap), *others = worse
    over = f"{_points(gap.points)} points over {_one(rival)} (n = {gap.n:,}, {_range(gap)})"
    if first.kind == "global" and rival.kind == "personal":
        both = f"({rival.accuracy:.1f} against {first.accuracy:.1f})"
        words = f"{_upper(_the(first))} is better here {both}: {over}"
    else:
        words = f"Use {_the(first)}: {over}"
    if others:
        words += f" and {_points(others[0][1].points)} over {_one(others[0][0])} ({_range(others[0][1])})"
    if level:
        other, gap = level[0]
        size = f"{_points(gap.points)}, {_range(gap)}" if gap.disagreements else "both are right on the same samples"
        apart = "it is as good as" if gap.alike else "too few samples to tell it from"
        words += f"; {apart} {_one(other)} ({size})"
    return f"{words}."


def _alike(row: SiteRow, gaps: list[tuple[SiteModel, Difference]]) -> str:
    widest = max((gap for _, gap in gaps), key=lambda gap: gap.high - gap.low)
    return (
        f"No model is better here: {_accuracies(row)} (n = {widest.n:,}, differences of {_range(widest)} points at "
        "most); any of them will do."
    )


def _unclear(row: SiteRow, first: SiteModel) -> str:
    rival, gap = next((model, gap) for model, gap in _in_order(row) if gap is not None and not gap.alike)
    if gap.disagreements < FEWEST_DISAGREEMENTS:  # an interval from so few says nothing
        how_many = f"{gap.disagreements} of them" if gap.disagreements else "none of them"
        why = f"{_the(first)} and {_one(rival)} differ on {how_many}"
    else:
        why = f"{_the(first)} over {_one(rival)}: {_points(gap.points)} points, {_range(gap)}"
    return f"Too few samples to tell (n = {gap.n:,}): {_accuracies(row)}; {why}."


def _unsure(row: SiteRow) -> str:
    if len(row.models) == 1:
        (model,) = row.models
        how_sure = "" if row.n is None else f" (n = {row.n:,}, {model.low:.1f} to {model.high:.1f})"
        return f"Only {_the(model)} was measured here: {model.accuracy:.1f}{how_sure}."
    return f"{_upper(_accuracies(row))}: how sure that is cannot be said here, since single samples are not recorded."


def _accuracies(row: SiteRow) -> str:
    return ", ".join(f"{model.label} {model.accuracy:.1f}" for model in row.models)


def _the(model: SiteModel) -> str:
    """For example: the personal model, the personal model of FedNH, the model trained here alone."""
    more = _variant(model)
    if model.kind == "local":
        return f"the model trained here alone{f' ({more})' if more else ''}"
    return f"the {model.kind} model{f' of {more}' if more else ''}"


def _one(model: SiteModel) -> str:
    """The same where a model was named before."""
    more = _variant(model)
    if model.kind == "local":
        return f"training alone{f' ({more})' if more else ''}"
    return f"the {model.kind} one{f' of {more}' if more else ''}"


def _variant(model: SiteModel) -> str:
    if model.kind == "local":
        return model.label.removeprefix("local only").strip()
    return model.label.removesuffix(model.kind).strip()


def _points(value: float) -> str:
    return f"{round(value, 1) + 0.0:+.1f}"  # no -0.0


def _range(gap: Difference) -> str:
    return f"{_points(gap.low)} to {_points(gap.high)}"


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]
