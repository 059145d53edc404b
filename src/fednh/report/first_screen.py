"""The first screen of the report: one sentence that answers, and a dot with an interval for each site or method.

With sites the question is what federating gives each of them: the best federated model minus training alone. In a study
of methods it is which method is best: each one minus the best, seed by seed, once for the personal models and once for
the global model. Their intervals hold for all pairs of methods together (Student's t, Bonferroni), so that the best one
may be picked after looking.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from matplotlib.ticker import MaxNLocator

from fednh.metric_names import GM, HELD_GM_SHARE, HELD_SHARE, PM_L
from fednh.report.groups import by_setting, by_variant, seeds
from fednh.report.load import Run
from fednh.report.sheet import spread_sample
from fednh.report.sites import SiteTable, site_tables
from fednh.report.stats import sd
from fednh.report.verdicts import SiteVerdict, headline, verdicts
from fednh.runs.run_folder import display_name

Repeats = Mapping[tuple[int, int], float]  # (seed, fold) -> a metric of that run
MOST_DOTS = 400  # sites in one plot; of more, a sample from the one that loses most to the one that gains most
MOST_SETTINGS = 4  # plots on the first screen; the tables have the others
# The metric that decides, and what it is called: on a test set that all share, or on samples that clients held out.
_PERSONAL = {
    PM_L: "Personal models, on their owners' mix of classes",
    HELD_SHARE: "Personal models, on their owners' own samples",
}
_GLOBAL = {GM: "Global model, all classes alike", HELD_GM_SHARE: "Global model, on the clients' own samples"}


@dataclass(frozen=True)
class Dot:
    """One row of a plot, in points; an unknown interval or difference is None."""

    label: str
    text: str  # the numbers, or why there are none
    points: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def side(self) -> Literal["above", "below", "level"]:
        """On which side of zero the whole interval lies."""
        if self.low is None or self.high is None:
            return "level"
        return "above" if self.low > 0 else "below" if self.high < 0 else "level"


@dataclass(frozen=True)
class Plot:
    """Dots on one axis, in the order of their rows."""

    title: str
    dots: Sequence[Dot]
    sentence: str = ""  # what it shows, where there are several plots

    @property
    def ticks(self) -> list[float]:
        """Round numbers along the axis, zero and all intervals between the first and the last of them."""
        ends = [0.0, *(end for dot in self.dots for end in (dot.points, dot.low, dot.high) if end is not None)]
        low, high = min(ends), max(ends)
        ticks = MaxNLocator(nbins=5, steps=[1, 2, 5, 10]).tick_values(low, max(high, low + 1))
        return [float(tick) for tick in ticks]

    def place(self, points: float) -> float:
        """How far along the axis this is, in percent."""
        first, *_, last = self.ticks
        return 100 * (points - first) / (last - first)


@dataclass(frozen=True)
class FirstScreen:
    """What a person sees first."""

    title: str
    sentence: str
    plots: Sequence[Plot]
    note: str  # what dots and intervals are, and what is lacking


def answer(runs: Sequence[Run]) -> FirstScreen:
    """What these runs answer: about sites where they held out samples of their own, else about methods."""
    tables = site_tables([run for run in runs if run.names])
    if any(each.gain is not None for table in tables for each in verdicts(table)):
        return _of_sites(runs, tables)
    study = _of_methods(runs)
    if tables:
        words = " ".join(headline(verdicts(table)) for table in tables)
        lacks = " ".join(dict.fromkeys(note for table in tables for note in table.lacking))
        return FirstScreen(
            study.title,
            f"{study.sentence} {words}",
            study.plots,
            f"{study.note} {lacks}",
        )
    if all(run.natural for run in runs):
        lacks = "This is about methods: what each site gets can be said of samples of its own (data.holdout = 0.2)."
        return FirstScreen(study.title, study.sentence, study.plots, f"{study.note} {lacks}")
    return study


def _data(runs: Sequence[Run]) -> str:
    return and_words(list(dict.fromkeys(display_name(run.summary["data"]) for run in runs)))


def and_words(words: Sequence[str]) -> str:
    """Words as people list them: a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def signed(points: float) -> str:
    return f"{round(points, 1) + 0.0:+.1f}"  # no -0.0


# --- sites ---------------------------------------------------------------------------------------------------------


def _of_sites(runs: Sequence[Run], tables: Sequence[SiteTable]) -> FirstScreen:
    plots = []
    for table in tables:
        advice = verdicts(table)
        several = len(tables) > 1
        title = "Best federated model minus training alone, in points"
        name = f"{table.title}: {title[:1].lower()}{title[1:]}" if several else title
        shown = spread_sample(sorted(advice, key=_points), MOST_DOTS) if len(advice) > MOST_DOTS else advice
        plots.append(Plot(name, [_site_dot(each) for each in shown], headline(advice) if several else ""))
    sites = {row.name for table in tables for row in table.rows}
    sentence = " ".join(dict.fromkeys(headline(verdicts(table)) for table in tables))
    note = (
        "Right of zero federating is better. Dots: accuracy on samples that the site held out, no model was trained on "
        "them; lines: intervals that hold together at 95% for all that is compared at a site."
    )
    return FirstScreen(f"{_data(runs)}: does federating help its {len(sites)} sites?", sentence, plots, note)


def _points(advice: SiteVerdict) -> float:
    return advice.gain.points if advice.gain is not None else 0.0


def _site_dot(advice: SiteVerdict) -> Dot:
    gain, n = advice.gain, "" if advice.n is None else f", n = {advice.n:,}"
    if gain is None:
        return Dot(advice.site, f"{advice.kind}{n}")
    text = f"{signed(gain.points)} ({signed(gain.low)} to {signed(gain.high)}{n})"
    return Dot(advice.site, text, gain.points, gain.low, gain.high)


# --- methods -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Contest:
    """The methods of one setting in one metric: the best and how far behind the others are."""

    plot: Plot
    best: str
    mean: float
    behind: Sequence[str]  # surely
    level: Sequence[str]  # those that cannot be told from the best
    n: int  # seeds that all have


def _of_methods(runs: Sequence[Run]) -> FirstScreen:
    settings = by_setting(runs)
    contests = {label: _contests(by_variant(group)) for label, group in settings.items()}
    first = {label: each[0] for label, each in contests.items() if each}
    methods = list(dict.fromkeys(display_name(run.method) for run in runs))
    question = f"which of {len(methods)} methods is best?" if len(methods) > 2 else f"{' or '.join(methods)}?"
    title = f"{_data(runs)}: {methods[0] if len(methods) == 1 else question}"
    if not first:
        return FirstScreen(title, "Nothing was measured.", [], "")
    several = len(settings) > 1
    plots = []
    for label in list(first)[:MOST_SETTINGS]:
        for contest in contests[label]:
            if len(contest.plot.dots) == 1:
                continue
            name = f"{label}. {contest.plot.title}" if several else contest.plot.title
            plots.append(Plot(name, contest.plot.dots, _sentence(contest) if several else ""))
    if several:
        leaders = Counter(contest.best for contest in first.values())
        parts = [f"{name} in {count}" for name, count in leaders.most_common()]
        sentence = f"The best personal models, over {len(first)} settings: {', '.join(parts)}."
    else:
        sentence = _sentence(next(iter(first.values())))
    more = len(first) - MOST_SETTINGS
    note = _note(seeds(runs), plots)
    note += f" {more} more settings are in the tables." if more > 0 else ""
    return FirstScreen(title, sentence, plots, note)


def _contests(variants: Mapping[str, Sequence[Run]]) -> list[_Contest]:
    """The personal models first, then the global model; each where it was measured."""
    contests = []
    for metrics in (_PERSONAL, _GLOBAL):
        for metric, title in metrics.items():
            values = {
                label: {run.repeat: float(run.summary[metric]) for run in same if run.has(metric)}
                for label, same in variants.items()
            }
            measured = {label: repeats for label, repeats in values.items() if repeats}
            if measured:
                contests.append(_contest(title, measured))
                break
    return contests


def _contest(title: str, values: Mapping[str, Repeats]) -> _Contest:
    means = {label: float(np.mean(list(repeats.values()))) for label, repeats in values.items()}
    order = sorted(means, key=lambda label: -means[label])
    best, pairs = order[0], len(order) * (len(order) - 1) // 2
    dots = [_dot(label, means[label], values[label], values[best], pairs) for label in order[1:]]
    first = Dot(best, f"{means[best]:.1f}%{', the best' if dots else ''}", 0.0)
    behind = [dot.label for dot in dots if dot.side == "below"]
    level = [dot.label for dot in dots if dot.side != "below"]
    name = f"{title}: points behind {best}" if dots else title
    n = min(len(repeats) for repeats in values.values())
    return _Contest(Plot(name, [first, *dots]), best, means[best], behind, level, n)


def _dot(label: str, mean: float, ours: Repeats, theirs: Repeats, pairs: int) -> Dot:
    """A method minus the best, over the seeds that both have."""
    gaps = np.array([ours[key] - theirs[key] for key in sorted(set(ours) & set(theirs))])
    if not len(gaps):
        return Dot(label, f"{mean:.1f}%, with other seeds")
    points = float(gaps.mean())
    if len(gaps) == 1:
        return Dot(label, f"{mean:.1f}% ({signed(points)})", points)
    from scipy.special import stdtrit  # takes a moment to import

    half = float(stdtrit(len(gaps) - 1, 1 - 0.05 / 2 / pairs)) * sd(gaps) / len(gaps) ** 0.5
    low, high = points - half, points + half
    return Dot(label, f"{mean:.1f}% ({signed(low)} to {signed(high)})", points, max(low, -100.0), min(high, 100.0))


def _sentence(contest: _Contest) -> str:
    if not contest.behind and not contest.level:
        return f"{contest.best}: {contest.mean:.1f}% of samples are named rightly by personal models."
    lead = f"{contest.best} has the best personal models ({contest.mean:.1f}%)"
    if contest.n == 1:
        return f"{lead}, but one seed cannot tell methods apart: run more."
    if not contest.level:
        return f"{lead}: surely better than {and_words(contest.behind)}."
    doubt = f"{and_words(contest.level)} cannot be told from it with {contest.n} seeds"
    if not contest.behind:
        return f"{lead}, but {doubt}."
    return f"{lead}: surely better than {and_words(contest.behind)}; {doubt}."


def _note(known: Sequence[int], plots: Sequence[Plot]) -> str:
    if not plots:
        return ""
    if len(known) == 1:
        return "Accuracy in percent, in brackets and as dots the difference in points. One seed: no intervals."
    return (
        f"Mean accuracy in percent over {len(known)} seeds. Dots: the mean difference, seed by seed; lines and "
        "brackets: 95% intervals that hold for all pairs of methods together."
    )
