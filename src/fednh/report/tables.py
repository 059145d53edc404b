"""The tables, as Sheets and CSV: accuracy in the layout of the paper's Table 1, fairness, cost, paired comparisons.

Each groups the runs that differ only in the seed, and states n and what the spread is. A comparison with a reference
method is seed by seed, under the same settings.

The paper's numbers are in published.csv: Table 1 (participation 0.1), the appendix's table with participation 0.3, and
the fairness table as `fairness` (mean and standard deviation of PM(L) over clients; its means are Table 1's for
Dir(0.3)).
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import resources
from typing import Any

from fednh.config import PRESETS, flat, load
from fednh.data.partitions.kinds import Dirichlet, LongTail
from fednh.errors import UserError, did_you_mean
from fednh.metric_names import GM, HELD_OUT, HELD_SHARE, PM_L, POOLED, TEST_SET, best_of, std_of
from fednh.report import groups
from fednh.report.groups import PAPER_METHODS, Group, Row, TableLayout, lay_out, show
from fednh.report.load import Run, left_out, rounds_of
from fednh.report.sheet import (
    DASH,
    Cell,
    Sheet,
    measured,
    number,
    percent,
    probability,
    rank,
    rank_spread,
    size,
    span,
    word,
)
from fednh.report.sites import held_interval
from fednh.report.stats import ENOUGH_SEEDS, LEVEL, Paired, paired, spread, worst_tenth
from fednh.runs.run_folder import display_name, display_names
from fednh.text import csv_text, plural


@dataclass(frozen=True)
class Comparison:
    """One method against the reference in one metric and setting."""

    row: Row
    column: str
    group: Group
    metric: str  # the summary's name
    reference: Row
    result: Paired

    @property
    def conclusion(self) -> str:
        """The conclusion that the numbers support."""
        n, p = self.result.n, self.result.p
        side = "above" if self.result.mean > 0 else "below"
        if p is None:
            return f"{side}, untested"
        if p >= LEVEL:
            return "no difference shown" if n >= ENOUGH_SEEDS else f"unclear (n={n})"
        return side if n >= ENOUGH_SEEDS else f"maybe {side} (n={n})"


def default_reference(layout: TableLayout) -> str | None:
    """FedNH if there are runs of it, else FedAvg, else None."""
    there = {row.method for row in layout.rows}
    return next((name for name in ("fednh", "fedavg") if name in there), None)


def compare(layout: TableLayout, reference: str | None) -> list[Comparison]:
    """All comparisons with two or more seeds in common. `reference` is a method, or a row's full label."""
    chosen = reference or default_reference(layout)
    if chosen is None:
        return []
    known = {row.method for row in layout.rows} | {row.label for row in layout.rows}
    if chosen not in known:
        raise UserError(f"reference = {chosen!r} is in none of the runs{did_you_mean(chosen, known)}")
    comparisons: list[Comparison] = []
    for setting in dict.fromkeys(group.setting for group in layout.groups):
        here = [place for place in layout.by_row() if place[2].setting == setting]
        rivals = [place for place in here if chosen in (place[0].method, place[0].label)]
        if rivals:
            base = min(rivals, key=lambda place: not _by_default(place[2]))
            for metric in (*TEST_SET, *(() if _has_verdicts(base[2]) else HELD_OUT)):
                comparisons += _one_metric([place for place in here if place is not base], base, metric)
    return sorted(comparisons, key=lambda c: (layout.rows.index(c.row), layout.columns.index(c.column)))


def _one_metric(
    others: Sequence[tuple[Row, str, Group]], base: tuple[Row, str, Group], metric: str
) -> list[Comparison]:
    pairs = [(place, _differences(place[2], base[2], metric)) for place in others]
    tested = [(place, d) for place, d in pairs if len(d) >= 2]
    return [
        Comparison(row, column, group, metric, base[0], paired(d, len(tested))) for (row, column, group), d in tested
    ]


def _differences(group: Group, base: Group, metric: str) -> list[float]:
    ours, theirs = group.by_seed(metric), base.by_seed(metric)
    return [value - theirs[seed] for seed, value in ours.items() if seed in theirs]


def _has_verdicts(reference: Group) -> bool:
    """Whether the comparison with training alone on held-out samples is the sites' own (report/verdicts.py)."""
    return reference.method == "local" and any(
        run.names and run.layout.clients_with_outcomes() for run in reference.runs
    )


def _by_default(group: Group) -> bool:
    """Whether the method's own settings are its defaults; among several variants that one is the reference."""
    method = group.runs[0].config.build_method()
    return method == type(method)()


# --- the paper's numbers --------------------------------------------------------------------------------------------

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
    return published_number(group.runs[0].config.data.name, group.method, how.beta, group.rate, metric)


def published_number(data: str, method: str, beta: float, rate: float, metric: str) -> PaperNumber | None:
    """The paper's number for a data set, a method by its name in configs, beta and participation, if it has one."""
    name = display_name(method) if method in PAPER_METHODS else ""
    return _numbers().get((data, name, beta, rate, metric))


def departures(group: Group) -> list[str]:
    """The settings that differ from the paper's and can change a metric, such as `rounds=20 (paper: 200)`."""
    config = group.runs[0].config
    if config.data.name not in PRESETS or group.method not in PAPER_METHODS:
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


# --- tables --------------------------------------------------------------------------------------------------------

_ACCURACY_WORDS = (
    "GM: global model; PM(V), PM(L): personal models, owned classes alike or by their share, mean over clients"
)


@dataclass(frozen=True)
class Metric:
    """One metric of a group: its heading, the source of its values, and the paper's counterpart."""

    name: str
    values: Callable[[Group], list[float]]
    spread_of: str | None = None  # a spread over clients: the heading of its mean, which is ranked first
    paper: str | None = None
    paper_prints: str = "mean"  # or "std": the paper's metric is the spread that it prints


def _by_size(group: Group, size: str) -> list[float]:
    return [row[size] for row in groups.accuracy_by_size(group.runs) if size in row]


def _worst_tenths(group: Group, metric: str) -> list[float]:
    return [worst_tenth(values) for values in group.by_client(metric)]


ACCURACY = tuple(Metric(label, partial(Group.values, metric=key), paper=label) for key, label in TEST_SET.items())
FAIRNESS = (
    Metric(TEST_SET[PM_L], partial(Group.values, metric=PM_L), paper="fairness"),
    Metric("spread", partial(Group.values, metric=std_of(PM_L)), TEST_SET[PM_L], "fairness", paper_prints="std"),
    Metric("worst 10%", partial(_worst_tenths, metric=PM_L)),
)
HELD_OUT_METRICS = (
    *(Metric(label, partial(Group.values, metric=key)) for key, label in HELD_OUT.items()),
    Metric("spread", partial(Group.values, metric=std_of(HELD_SHARE)), spread_of=HELD_OUT[HELD_SHARE]),
    Metric("worst 10%", partial(_worst_tenths, metric=HELD_SHARE)),
)
CLASS_SIZE = (
    Metric(TEST_SET[GM], partial(Group.values, metric=GM)),
    *(Metric(f"GM {size}", partial(_by_size, size=size)) for size in groups.SIZES),
)
POOLED_METRICS = tuple(
    Metric(f"{model}, {when}", partial(Group.values, metric=key))
    for metric, model in zip(POOLED, ("PM", "GM"), strict=True)
    for key, when in ((metric, "last round"), (best_of(metric), "best round"))
)
_MEAN_FIRST = "A lower spread is more even, but the higher mean comes first: only with the highest mean is it marked."
_HELD_WORDS = (
    "On samples that every client holds out of its own data: of its personal model, and of the global one on the same "
    "samples. Own accuracy: the share that is right; all classes alike: the mean over its classes; mean over clients"
)


def accuracy_sheet(runs: Sequence[Run], paper: bool = False) -> Sheet:
    """Method by data set, participation and partition: GM, PM(V) and PM(L), as in the paper's Table 1."""
    return _metrics("accuracy", "Test accuracy in percent", f"{_ACCURACY_WORDS}.", ACCURACY, lay_out(runs), paper)


def fairness_sheet(runs: Sequence[Run], paper: bool = False) -> Sheet:
    """Fairness: mean and spread of PM(L) over clients."""
    words = (
        f"PM(L): mean over clients; spread: standard deviation of PM(L) over clients. {_MEAN_FIRST} "
        "Worst 10%: mean PM(L) of the tenth of clients with the lowest."
    )
    return _metrics("fairness", "Fairness: PM(L) over clients, in percent", words, FAIRNESS, lay_out(runs), paper)


def held_out_sheet(runs: Sequence[Run]) -> Sheet:
    """Accuracy on the clients' own held-out samples: not comparable with metrics on a balanced test set."""
    words = f"{_HELD_WORDS}; spread and worst 10%: of own accuracy over clients. {_MEAN_FIRST}"
    words += left_out(runs)
    return _metrics(
        "held-out", "Accuracy on held-out samples in percent", words, HELD_OUT_METRICS, lay_out(runs), False
    )


def class_size_sheet(runs: Sequence[Run]) -> Sheet:
    """GM of classes with many, medium and few training samples, of long-tailed runs."""
    layout = lay_out(runs)
    words = f"GM by the size of classes, their training samples over all clients. {_sizes(layout)}"
    return _metrics("class-size", "Test accuracy in percent by class size", words, CLASS_SIZE, layout, False)


def pooled_sheet(runs: Sequence[Run]) -> Sheet:
    """Accuracy on the held-out samples of all clients together, after the last and after the best round."""
    words = (
        "Correct samples of all clients over all samples that they hold out, so a large client counts for more; PM: "
        "personal models, GM: the global model. The best round is chosen among those that measured the same clients as "
        "the last (all rounds, if all clients take part in each) and on these same samples, which flatters a little; "
        "PFLlib publishes this number."
    )
    return _metrics(
        "pooled", "Accuracy on all held-out samples together in percent", words, POOLED_METRICS, lay_out(runs), False
    )


def network_sheet(runs: Sequence[Run]) -> Sheet:
    """The metrics of the clients of each network, where clients have different ones."""
    layout = lay_out(runs)
    metrics = {key: words for key, words in (TEST_SET | HELD_OUT).items() if any(run.has(key) for run in runs)}
    rows = []
    for row, column, group in layout.by_row():
        of_runs = [run.summary["networks"] for run in group.runs]
        for name in of_runs[0]:
            values = {key: [its[name][key] for its in of_runs if its[name].get(key) is not None] for key in metrics}
            cells = [word(name), measured(spread([its[name]["clients"] for its in of_runs]), "{:.0f}")]
            rows.append(
                [*_lead_cells(layout, row, column), *cells, *(measured(spread(each)) for each in values.values())]
            )
    columns = [*_lead(layout, partition=True), "method", "network", "clients", *metrics.values()]
    note = f"Means over the clients of a network; GM is that of the network's global model. {_counts(layout)}"
    return Sheet("network", "Accuracy in percent by network" + _common(layout), columns, rows, note)


def result_sheets(runs: Sequence[Run], paper: bool = False) -> list[Sheet]:
    """Accuracy and fairness on the test set, and accuracy on held-out samples; each for the runs that have it."""
    tested, held = [run for run in runs if run.has(*TEST_SET)], [run for run in runs if run.has(*HELD_OUT)]
    if not tested and not held:
        tested = list(runs)
    tailed = [run for run in tested if groups.long_tailed(run)]
    sheets = [accuracy_sheet(tested, paper)] if tested else []
    sheets += [class_size_sheet(tailed)] if tailed else []
    sheets += [fairness_sheet(tested, paper)] if tested else []
    together = [run for run in held if run.has(*POOLED) and not run.natural]
    differing = [run for run in runs if run.has("networks")]
    sheets += [held_out_sheet(held)] if held else []
    sheets += [pooled_sheet(together)] if together else []
    return [*sheets, network_sheet(differing)] if differing else sheets


def cost_sheet(runs: Sequence[Run]) -> Sheet:
    """Time and communicated bytes of a run, also relative to FedAvg with the same settings if there are such runs."""
    layout = lay_out(runs)
    base = {group.setting: group for group in layout.groups if group.method == "fedavg"}
    columns = [*_lead(layout, partition=True), "method", "seconds", "client seconds"]
    columns += ["up a round", "down a round", "up in all", "down in all"]
    columns += ["seconds / FedAvg", "client seconds / FedAvg", "bytes / FedAvg"] if base else []
    rows = []
    for row, column, group in layout.by_row():
        cells = _lead_cells(layout, row, column)
        cells += [measured(spread(group.values(key)), "{:.1f}") for key in ("seconds", "client_seconds")]
        cells += [size(_mean(_bytes_a_round(group, key))) for key in ("bytes_up", "bytes_down")]
        cells += [size(_mean(group.values(key))) for key in ("bytes_up", "bytes_down")]
        rows.append(cells + (_beside(group, base.get(group.setting)) if base else []))
    *fewer, most = sorted({int(run.environment["workers"]) for group in layout.groups for run in group.runs})
    workers = "".join(f"{number} or " for number in fewer) + plural(most, "worker")
    note = (
        "Client seconds: wall time of waiting for the clients' work, without aggregation and evaluation. Times hold "
        f"for the machine they were measured on, with {workers} a run, and grow when "
        f"other work shares its cores. Bytes: what the round's clients send up and receive. {_counts(layout)}"
    )
    return Sheet("cost", "Cost" + _common(layout), columns, rows, note)


def paired_sheet(runs: Sequence[Run], reference: str | None = None) -> Sheet:
    """Each method against a reference (default: FedNH, else FedAvg), seed by seed; no rows without two seeds."""
    layout = lay_out(runs)
    comparisons = compare(layout, reference)
    columns = [*_lead(layout, partition=True), "method", "metric", "n", "difference", "95% interval"]
    columns += ["effect d", "p", "reading"]
    if not comparisons:
        note = "Nothing to compare: it takes two methods with the same settings and at least two seeds in common."
        return Sheet("paired", "Paired comparison", columns, [], note)
    rows = [[*_lead_cells(layout, c.row, c.column), *_paired_cells(c)] for c in comparisons]
    names = ", ".join(dict.fromkeys(c.reference.label for c in comparisons))
    return Sheet(
        "paired",
        f"Paired comparison with {names}{_common(layout)}",
        columns,
        rows,
        _sampled(layout) + _paired_note(comparisons),
    )


def comparison_sheet(runs: Sequence[Run]) -> Sheet:
    """A short table: one row per run, nothing averaged."""
    tested, held = any(run.has(*TEST_SET) for run in runs), any(run.has(*HELD_OUT) for run in runs)
    keys = {**TEST_SET, std_of(PM_L): "fairness"} if tested or not held else {}
    keys |= HELD_OUT if held else {}
    private = any("epsilon" in run.summary for run in runs)
    rows = [
        [
            *(word(display_name(name)) for name in (run.method, run.summary["data"])),
            *(word(value) for value in (run.config.seed, rounds_of(run))),
            *(_with_interval(run) if key == HELD_SHARE else number(run.summary.get(key)) for key in keys),
            *[number(run.summary.get("epsilon"))] * private,
            number(run.summary["samples_per_second"] or None, "{:,.0f}"),  # earlier runs: 0 where nothing was trained
        ]
        for run in runs
    ]
    place = {key: at for at, key in enumerate(keys, start=4)}
    for key, at in place.items():
        rank_spread(rows, at, place[PM_L], places=1) if key == std_of(PM_L) else rank(rows, at, places=1)
    words = f"{_ACCURACY_WORDS}; fairness: standard deviation of PM(L) over clients. {_MEAN_FIRST}"
    layout = lay_out(runs)
    words = f"{words} {_sampled(layout)}".rstrip()
    note = " ".join(
        [words] * (GM in keys) + [f"{_HELD_WORDS}. In brackets a 95% interval over samples.{left_out(runs)}"] * held
    )
    columns = ["method", "data", "seed", "rounds", *keys.values(), *["epsilon"] * private, "samples/s"]
    title = "Test accuracy in percent" if GM in keys else "Accuracy on held-out samples in percent"
    return Sheet("comparison", title + _common(layout, data=False), columns, rows, note)


def _with_interval(run: Run) -> Cell:
    """A run's accuracy on held-out samples with its interval and their number, where single samples are recorded."""
    mean = run.summary.get(HELD_SHARE)
    known = None if mean is None else held_interval(run)
    if known is None or mean is None:
        return number(mean)
    low, high, n = known
    return Cell(f"{mean:.2f} ({low:.1f} to {high:.1f}, n = {n:,})", float(mean))


# --- accuracy and fairness -----------------------------------------------------------------------------------------


def _metrics(name: str, title: str, words: str, metrics: Sequence[Metric], layout: TableLayout, paper: bool) -> Sheet:
    shown: list[tuple[str, Metric, bool]] = []  # partition, metric, whether it is the paper's number
    for column in layout.columns:
        here = [group for _, c, group in layout.by_row() if c == column]
        for metric in metrics:
            shown.append((column, metric, False))
            if paper and metric.paper and any(published(group, metric.paper) for group in here):
                shown.append((column, metric, True))
    uneven, before = len({group.n for group in layout.groups}) > 1, len(_lead(layout)) + 1
    rows = []
    for row in layout.rows:
        cells = _lead_cells(layout, row)
        for column, metric, printed in shown:
            group = layout.places.get((row, column))
            if group is None:
                cells.append(Cell(DASH))
            elif printed:
                cells.append(_printed(group, metric))
            else:
                cells.append(measured(spread(metric.values(group)), say_n=uneven))
        rows.append(cells)
    place = {(column, metric.name): at for at, (column, metric, printed) in enumerate(shown, before) if not printed}
    for block in dict.fromkeys((row.data, row.rate) for row in layout.rows):
        rivals = [cells for row, cells in zip(layout.rows, rows, strict=True) if (row.data, row.rate) == block]
        for column, metric, printed in shown:
            if metric.spread_of and not printed:
                rank_spread(rivals, place[column, metric.name], place[column, metric.spread_of])
            elif not printed:
                rank(rivals, place[column, metric.name])
    several = len(layout.columns) > 1
    heads = [
        (f"{column} " if several else "") + metric.name + (", paper (diff.)" if printed else "")
        for column, metric, printed in shown
    ]
    scope = " of each data set and participation" if _lead(layout) else ""
    sampled = "" if metrics in (HELD_OUT_METRICS, POOLED_METRICS) else _sampled(layout)
    note = f"{words} {sampled}{_counts(layout)} Bold: best{scope}; underlined: second."
    if any(printed for *_, printed in shown):
        note += f" {_paper_note(layout)}"
    return Sheet(name, title + _common(layout), [*_lead(layout), "method", *heads], rows, note)


def _sizes(layout: TableLayout) -> str:
    """How many classes of which size there are, and by which rule, for each data set and partition."""
    counts = {}
    for group in layout.groups:
        sizes, thirds = groups.by_size(totals := groups.class_totals(group.runs))
        here = [f"{size} {len(classes)} ({span(totals[classes])} samples)" for size, classes in sizes.items()]
        rule = "thirds by size, since one of many, medium and few would be empty" if thirds else ""
        counts[f"{display_name(group.data)}, {group.column}"] = f"{', '.join(here)}{f'; {rule}' if rule else ''}"
    rule_text = f"Many: more than {groups.MANY}, few: fewer than {groups.FEW}, medium: between."
    return " ".join([rule_text, *(f"{where}: {words}." for where, words in counts.items())])


def _printed(group: Group, metric: Metric) -> Cell:
    theirs, ours = published(group, metric.paper or ""), spread(metric.values(group))
    if theirs is None:
        return Cell(DASH)
    value = theirs.std if metric.paper_prints == "std" else theirs.mean
    text = f"{value:.2f}" if metric.paper == "fairness" else f"{value:.2f} ± {theirs.std:.2f}"
    text += "" if ours is None else f" ({ours.mean - value:+.2f})"
    return Cell(text + ("*" if departures(group) else ""), value)


def _paper_note(layout: TableLayout) -> str:
    note = "Paper: as published, mean ± standard deviation of three runs; in brackets ours minus theirs."
    apart = list(dict.fromkeys(d for g in layout.groups if published(g, "PM(L)") for d in departures(g)))
    return f"{note} *: with other settings than the paper's: {'; '.join(apart)}." if apart else note


# --- cost ----------------------------------------------------------------------------------------------------------


def _bytes_a_round(group: Group, key: str) -> list[float]:
    return [run.summary[key] / run.summary["rounds"] for run in group.runs]


def _beside(group: Group, base: Group | None) -> list[Cell]:
    if base is None:
        return [Cell(DASH)] * 3
    ratios = [_ratio(_mean(group.values(key)), _mean(base.values(key))) for key in ("seconds", "client_seconds")]
    traffic = [
        _mean([u + d for u, d in zip(g.values("bytes_up"), g.values("bytes_down"), strict=True)]) for g in (group, base)
    ]
    return [number(ratio, "{:.2f}") for ratio in [*ratios, _ratio(*traffic)]]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _ratio(value: float, base: float) -> float | None:
    return value / base if base else None


# --- paired comparisons --------------------------------------------------------------------------------------------


def _paired_cells(c: Comparison) -> list[Cell]:
    r = c.result
    return [
        word((TEST_SET | HELD_OUT)[c.metric]),
        word(r.n),
        number(r.mean, "{:+.2f}"),
        Cell(f"{r.low:+.2f} to {r.high:+.2f}", r.low),
        number(r.effect, "{:+.2f}"),
        probability(r.p),
        word(c.conclusion),
    ]


def _paired_note(comparisons: Sequence[Comparison]) -> str:
    n = min(c.result.n for c in comparisons)
    note = (
        "Differences are method minus reference, seed by seed. p: Student's paired t-test, which assumes normal "
        "differences; it and the interval are corrected alike for the methods compared in one setting and metric "
        "(Bonferroni). Effect d: mean difference / its standard deviation. Seeds stand for other partitions, picks and "
        "initial weights of the same data, not for other data. Untested: the difference was the same on every seed."
    )
    if n >= ENOUGH_SEEDS:
        return note
    return (
        f"{note} With n = {n}, a large p does not show that two methods are equal, and a small one rests on {n} "
        "differences: look at the interval, and run more seeds before claiming anything."
    )


# --- titles, first columns and notes ------------------------------------------------------------------------------


def _lead(layout: TableLayout, partition: bool = False) -> list[str]:
    """The columns before the method: those with more than one value."""
    several = {
        "data": len({row.data for row in layout.rows}) > 1,
        "participation": len({row.rate for row in layout.rows}) > 1,
        "partition": partition and len(layout.columns) > 1,
    }
    return [name for name, there in several.items() if there]


def _lead_cells(layout: TableLayout, row: Row, column: str = "") -> list[Cell]:
    names = display_names(row.data for row in layout.rows)
    cells = {
        "data": word(names[row.data]),
        "participation": Cell(percent(row.rate), row.rate),
        "partition": word(column),
    }
    return [cells[name] for name in _lead(layout, bool(column))] + [word(_label(layout, row))]


def _label(layout: TableLayout, row: Row) -> str:
    """The row's name, with what its runs have spent where that is not in the title."""
    said = dict.fromkeys(_spent(group) for (place, _), group in layout.places.items() if place == row)
    shared = len({_spent(group) for group in layout.groups}) == 1
    return "; ".join([row.label, *(words for words in said if words and not shared)])


def _common(layout: TableLayout, data: bool = True) -> str:
    """The settings that all groups share, for the title."""
    if not layout.groups:
        return ""
    facts = [
        {display_name(group.data) for group in layout.groups} if data else set(),
        {group.column for group in layout.groups if not group.natural},
        {plural(group.clients, "site" if group.natural else "client") for group in layout.groups},
        {f"{percent(group.rate)} a round" for group in layout.groups},
        {plural(group.settings["rounds"], "round") for group in layout.groups} if data else set(),
        {_spent(group) for group in layout.groups},
    ]
    words = [word for fact in facts if len(fact) == 1 and (word := fact.pop())]
    return f"; {', '.join(words)}" if words else ""


def _spent(group: Group) -> str:
    """What a group's runs have spent at most, where they have privacy."""
    spent = [run.summary["epsilon"] for run in group.runs if "epsilon" in run.summary]
    privacy = group.runs[0].config.privacy
    return f"epsilon {max(spent):.2f} a {privacy.level}, delta {privacy.delta:g}" if spent else ""


def _sampled(layout: TableLayout) -> str:
    """Say it where models were evaluated on a part of the test set."""
    numbers = sorted({n for group in layout.groups for run in group.runs if (n := run.summary.get("test_samples"))})
    some = "" if all(group.settings.get("eval.samples") for group in layout.groups) else "some runs: "
    words = "GM and PM are measured on a seeded sample of the test set with equal numbers of every class"
    return f"{words} (eval.samples; {some}n = {', '.join(map(str, numbers))}). " if numbers else ""


def _counts(layout: TableLayout) -> str:
    sizes = sorted({group.n for group in layout.groups})
    repeated = sum(group.repeated for group in layout.groups)
    twice = f" Left out: {plural(repeated, 'run')} with settings and seed of another one." if repeated else ""
    if sizes == [1]:
        return f"n = 1 seed: no spread is known.{twice}"
    n = f"n = {sizes[0]}" if len(sizes) == 1 else f"n = {sizes[0]} to {sizes[-1]}"
    return f"Mean ± standard deviation (n - 1) over {n} seeds.{twice}"


# --- CSV for programs ----------------------------------------------------------------------------------------------

_CSV_METRICS = (
    *(*TEST_SET, std_of(PM_L), *HELD_OUT, std_of(HELD_SHARE), *POOLED, *map(best_of, POOLED)),
    *("seconds", "client_seconds", "bytes_up", "bytes_down", "epsilon"),
)
_CSV_COLUMNS = ["data", "partition", "beta", "clients", "participation", "rounds", "method", "settings", "metric"]
_CSV_COLUMNS += ["n", "mean", "std", "seeds"]
_CSV_PAIRED = ["reference", "pairs", "difference", "low", "high", "effect", "p"]
_CSV_PAPER = ["paper_mean", "paper_std", "paper_difference"]
_PRINTED = {**TEST_SET, std_of(PM_L): "fairness"}


def records(runs: Sequence[Run], reference: str | None = None, paper: bool = False) -> list[dict[str, Any]]:
    """One record for each method, setting and metric; numbers are not rounded, unknown values are None."""
    layout = lay_out(runs)
    pairs = {(c.row, c.column, c.metric): c for c in compare(layout, reference)}
    lines = []
    for row, column, group in layout.by_row():
        how = group.runs[0].config.partition
        setting = {
            "data": group.data,
            "partition": "site" if group.natural else how.name,
            "beta": None if group.natural else getattr(how.kind, "beta", None),
            "clients": group.clients,
            "participation": group.rate,
            "rounds": group.settings["rounds"],
            "method": group.method,
            "settings": "; ".join(_row_settings(row, group)),
        }
        seen = {metric: group.values(metric) for metric in _CSV_METRICS} | _size_records(group)
        for metric, by_seed in seen.items():
            value = spread(by_seed)
            if value is None:
                continue
            record = {**setting, "metric": metric, "n": value.n, "mean": value.mean, "std": value.std}
            record["seeds"] = " ".join(str(run.config.seed) for run in group.runs)
            pair = pairs.get((row, column, metric))
            if pair is not None:
                r = pair.result
                values = (pair.reference.label, r.n, r.mean, r.low, r.high, r.effect, r.p)
                record |= dict(zip(_CSV_PAIRED, values, strict=True))
            theirs = published(group, _PRINTED[metric]) if paper and metric in _PRINTED else None
            if theirs is not None and metric == std_of(PM_L):  # the paper's spread over clients is its metric here
                record |= {"paper_mean": theirs.std, "paper_difference": value.mean - theirs.std}
            elif theirs is not None:
                record |= dict(zip(_CSV_PAPER, (theirs.mean, theirs.std, value.mean - theirs.mean), strict=True))
            lines.append(record)
    return lines


def to_csv(lines: Sequence[dict[str, Any]], paper: bool = False) -> str:
    """Records as CSV, with the same columns whatever the runs are."""
    columns = [*_CSV_COLUMNS, *_CSV_PAIRED, *(_CSV_PAPER if paper else [])]
    return csv_text([columns, *([record.get(column) for column in columns] for record in lines)])


def _size_records(group: Group) -> dict[str, list[float]]:
    """GM of classes with many, medium and few training samples, of long-tailed runs."""
    if not all(map(groups.long_tailed, group.runs)):
        return {}
    rows = groups.accuracy_by_size(group.runs)
    return {f"gm_{size}": [row[size] for row in rows if size in row] for size in groups.SIZES}


def _row_settings(row: Row, group: Group) -> list[str]:
    """Settings that have no column of their own: those that distinguish the row, the partition's and the method's."""
    kind, samples = group.runs[0].config.partition.kind, group.settings.get("eval.samples")
    words = row.apart.split(", ") if row.apart else []
    words += [f"eval.samples={samples}"] if samples else []
    words += [_setting(key, getattr(kind, key)) for key in kind.shown if key != "beta"]
    return list(dict.fromkeys([*words, *(_setting(key, value) for key, value in group.hyper.items())]))


def _setting(key: str, value: Any) -> str:
    return f"{key.removeprefix('method.')}={show(value)}"
