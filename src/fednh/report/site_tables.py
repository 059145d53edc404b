"""The tables about sites: which model each should use and how sure that is, class by class.

As Sheets and CSV for the command line, as sections of the report, and as data for its explorer. sites.py has the
numbers; this decides which of them are shown.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fednh.report.load import Run
from fednh.report.sheet import DASH, Cell, Sheet, number, spread_sample, word
from fednh.report.sites import FEW, ClassRow, SiteModel, SiteRow, SiteTable, class_table, confusion, site_tables
from fednh.report.verdicts import SiteVerdict, verdicts
from fednh.text import csv_text

HOW = (
    "Points: percent of the n samples that the site held out, the best federated model minus training alone on the "
    "same samples; balanced: its classes alike. In brackets 95% intervals that hold together, over samples and seeds. "
    "The best model is chosen on other samples than those that it is compared on (cross-fitting)."
)
_CSV = ["federation", "site", "client", "n", "model", "accuracy", "low", "high", "best", "sentence"]


def sheets(table: SiteTable, classes: bool = False) -> list[Sheet]:
    """Which model to use at every site, the metrics behind it and, if they are asked for, those of each class."""
    more = [sheet for row in table.rows if (sheet := class_sheet(table, row)) is not None] if classes else []
    return [advice_sheet(table), site_sheet(table), *more]


def advice_sheet(table: SiteTable) -> Sheet:
    """A sentence a site."""
    rows = [[word(verdict.site), word(verdict.sentence)] for verdict in verdicts(table)]
    return Sheet("advice", f"Does federating help? {table.title}", ["site", "verdict"], rows, HOW)


def site_sheet(table: SiteTable) -> Sheet:
    """A row a site, a column a model: its accuracy on the site's held-out samples, with a 95% interval."""
    cells = [
        [word(row.name), number(row.n, "{:,}"), *_baselines(row), *(_accuracy(row, c, verdict) for c in table.columns)]
        for row, verdict in zip(table.rows, verdicts(table), strict=True)
    ]
    if len(table.measured) > 1:
        means = [_mean(table, column) for column in table.columns]
        cells.append([word(f"mean of {len(table.measured)} sites"), Cell(DASH), Cell(DASH), Cell(DASH), *means])
    note = (
        "Accuracy in percent on samples that the site held out: no model was trained on them. In brackets a 95% "
        "interval. Commonest class: always that of the site's training samples; chance: one guess among its classes. "
        "Bold: the model to use, where that is clear."
    )
    title = f"Models on the sites' held-out samples; {table.title}"
    return Sheet(
        "sites",
        title,
        ["site", "n", "commonest class", "chance", *table.columns],
        cells,
        " ".join([note, *table.notes]),
    )


def class_sheet(table: SiteTable, row: SiteRow) -> Sheet | None:
    """The classes of one site: recall and precision of every model; None where single samples are not recorded."""
    known = [model for model in row.models if model.guessed is not None]
    if not known:
        return None
    heads = [f"{model.label} {what}" if len(known) > 1 else what for model in known for what in ("recall", "precision")]
    cells = []
    for same in zip(*(class_table(row, model, table.classes) for model in known), strict=True):
        first = same[0]
        trained = Cell(DASH) if first.trained is None else word(first.trained)
        held = Cell(f"{first.n:,}{'*' if first.few else ''}", first.n)
        rates = [number(value, "{:.1f}") for c in same for value in (c.recall, c.precision)]
        cells.append([word(first.name), trained, held, *rates])
    note = (
        "Recall: the share of a class's held-out samples that the model recognises; precision: the share of samples "
        f"taken for the class that are of it. *: fewer than {FEW} held-out samples, so its numbers say little."
    )
    columns = ["class", "training", "held-out", *heads]
    return Sheet("classes", f"Classes of {row.name}; {table.title}", columns, cells, note)


def to_csv(tables: Sequence[SiteTable]) -> str:
    """A line for each site and model; numbers are not rounded, unknown values are empty."""
    lines: list[Sequence[object]] = [_CSV]
    for table in tables:
        for row, verdict in zip(table.rows, verdicts(table), strict=True):
            for model in row.models:
                best = None if row.n is None else int(verdict.use == model.label)
                metrics = (model.label, model.accuracy, model.low, model.high, best, verdict.sentence)
                lines.append([table.title, row.name, row.client, row.n, *metrics])
    return csv_text(lines)


def _baselines(row: SiteRow) -> list[Cell]:
    constant = row.constant
    return [number(None if constant is None else constant.accuracy, "{:.1f}"), number(row.chance, "{:.1f}")]


def _accuracy(row: SiteRow, column: str, verdict: SiteVerdict) -> Cell:
    model = row.model(column)
    if model is None:
        return Cell(DASH)
    return Cell(f"{model.accuracy:.1f}{_interval(model)}", model.accuracy, 1 if verdict.use == column else 0)


def _mean(table: SiteTable, column: str) -> Cell:
    mean, known = table.mean(column), table.interval(column)
    return number(mean, "{:.1f}" if known is None else f"{{:.1f}} ({known[0]:.1f} to {known[1]:.1f})")


def _interval(model: SiteModel) -> str:
    return "" if model.low is None or model.high is None else f" ({model.low:.1f} to {model.high:.1f})"


# --- the HTML report -----------------------------------------------------------------------------------------------

MOST_SITES = 1000  # with a row on the page; of more, a sample has one
MOST_LINES = 20_000  # of the CSV file inside the page; `fednh compare --format csv` writes all
MOST_ROWS = 1500  # a longer table by class is left to the explorer and the CSV file
_RATES = ("recall", "precision")


def site_sections(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One entry for each federation of natural sites, for the template."""
    sections: list[dict[str, Any]] = []
    for table in site_tables([run for run in runs if run.names]):
        name = f"sites-{len(sections)}" if sections else "sites"
        pairs = sorted(zip(table.rows, verdicts(table), strict=True), key=lambda pair: _first_accuracy(pair[0]))
        here = {row.client for row, _ in spread_sample(pairs, MOST_SITES)}
        shown = [(row, advice) for row, advice in zip(table.rows, verdicts(table), strict=True) if row.client in here]
        some = replace(table, rows=tuple(row for row, _ in shown))
        whole = len(table.rows) * len(table.columns) <= MOST_LINES
        by_class = class_page_sheet(some, f"{name}-classes")
        entry = {
            "id": name,
            "title": table.title,
            "sure": any(row.n is not None for row in table.rows),
            "table": table,
            "rows": [_row(row, table, advice) for row, advice in shown],
            "all": len(table.rows),
            "means": [table.mean(column) for column in table.columns],
            "left_out": len(table.rows) - len(table.measured),
            "file": to_csv([table if whole else some]),
            "whole_file": whole,
            "classes": by_class,
            "classes_file": class_page_sheet(some, f"{name}-classes", apart=True),
            "too_long": len(by_class.rows) > MOST_ROWS,
        }
        sections.append(entry)
    return sections


def _first_accuracy(row: SiteRow) -> float:
    return row.models[0].accuracy if row.models else -1.0


def class_page_sheet(table: SiteTable, name: str, apart: bool = False) -> Sheet:
    """Recall and precision of every class at every site, for each model; `apart` gives each a column, for a file."""
    rates = [f": {rate}" for rate in _RATES] if apart else [""]
    columns = ["site", "class", "training samples", "held-out samples", *(["few"] if apart else [])]
    rows = []
    for row in table.rows:
        models = _by_class(row, table)
        for at, some in enumerate(next(iter(models.values()), [])):
            cells = [word(row.name), word(some.name), number(some.trained, "{:,}"), *_held(some, apart)]
            for column in table.columns:
                one = models[column][at] if column in models else None
                both = [number(getattr(one, rate, None), "{:.1f}") for rate in _RATES]
                cells += both if apart else [Cell(" / ".join(cell.text for cell in both), both[0].value)]
            rows.append(cells)
    note = (
        "Recall / precision of each model in percent. Recall: how many of the class's held-out samples the model "
        "recognises; precision: how many of those that it takes for the class are of it. few: fewer than "
        f"{FEW} held-out samples, which say little."
    )
    columns += [f"{column}{rate}" for column in table.columns for rate in rates]
    return Sheet(name, f"Class by class; {table.title}", columns, rows, note)


def explored(runs: Sequence[Run], clients: Collection[int]) -> dict[str, Any] | None:
    """For runs of one setting and seed: these clients' held-out samples by class, and what is taken for what."""
    tables = site_tables(runs)
    if not tables:
        return None
    table = tables[0]
    return {"models": list(table.columns), "clients": dict(_clients(table, set(clients)))}


def _clients(table: SiteTable, clients: Collection[int]) -> Iterator[tuple[int, dict[str, Any]]]:
    for row, verdict in zip(table.rows, verdicts(table), strict=True):
        if row.client in clients:
            yield row.client, _client(row, table, verdict)


def _client(row: SiteRow, table: SiteTable, verdict: SiteVerdict) -> dict[str, Any]:
    models = _by_class(row, table)
    classes = next(iter(models.values()), [])
    shown = []
    for label, by_class in models.items():
        model = row.model(label)
        assert model is not None
        counts = confusion(row, model, len(table.classes))
        rates = {rate: [_rounded(getattr(one, rate)) for one in by_class] for rate in _RATES}
        cells = [round(float(value), 1) for t, p in np.argwhere(counts) for value in (t, p, counts[t, p])]
        shown.append({"label": label, **rates, "confusion": cells})
    return {
        "n": row.n,
        "leader": verdict.use or verdict.model,
        "says": verdict.sentence if table.runs[0].names else None,
        "classes": [table.classes.index(one.name) for one in classes],
        "held": [one.n for one in classes],
        "few": [one.few for one in classes],
        "models": shown,
    }


def _by_class(row: SiteRow, table: SiteTable) -> dict[str, list[ClassRow]]:
    """For each model whose predictions are recorded the classes of the site: the same classes for all of them."""
    tables = {model.label: class_table(row, model, table.classes) for model in row.models}
    return {label: classes for label, classes in tables.items() if classes}


def _row(row: SiteRow, table: SiteTable, verdict: SiteVerdict) -> dict[str, Any]:
    models = [row.model(column) for column in table.columns]
    shown = {"row": row, "models": models, "best": verdict.use, "verdict": verdict}
    return {**shown, "says": verdict.sentence, "kind": verdict.kind}


def _held(one: ClassRow, apart: bool) -> list[Cell]:
    few = "few" if one.n and one.few else ""
    return [Cell(str(one.n)), Cell(few)] if apart else [Cell(f"{one.n:,} {few}".strip(), float(one.n))]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)
