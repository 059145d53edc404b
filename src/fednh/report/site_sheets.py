"""The tables about sites as Sheets, and as CSV: which model is best where, and how it does on each class."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from fednh.report.cells import DASH, number, word
from fednh.report.sheet import Cell, Sheet
from fednh.report.site_words import verdict
from fednh.report.sites import FEW, SiteModel, SiteRow, SiteTable, class_table

_CSV = ["federation", "site", "client", "n", "model", "accuracy", "low", "high", "best", "sentence"]


def sheets(table: SiteTable, classes: bool = False) -> list[Sheet]:
    """Which model to use at every site, the figures behind it and, if they are asked for, those of each class."""
    more = [sheet for row in table.rows if (sheet := class_sheet(table, row)) is not None] if classes else []
    return [advice_sheet(table), site_sheet(table), *more]


def advice_sheet(table: SiteTable) -> Sheet:
    """A sentence a site."""
    rows = [[word(row.name), word(verdict(row, table.classes).sentence)] for row in table.rows]
    note = (
        "Points: differences of accuracy in percent, on samples that the site held out; in brackets how many they are, "
        "and a 95% interval (paired bootstrap over samples)."
    )
    return Sheet("advice", f"Which model to use; {table.title}", ["site", "which model to use"], rows, note)


def site_sheet(table: SiteTable) -> Sheet:
    """A row a site, a column a model: its accuracy on the site's held-out samples, with a 95% interval."""
    cells = [[word(row.name), _count(row), *(_accuracy(row, c) for c in table.columns)] for row in table.rows]
    if len(table.measured) > 1:
        means = [number(table.mean(column), "{:.1f}") for column in table.columns]
        cells.append([word(f"mean of {len(table.measured)} sites"), Cell(DASH), *means])
    note = (
        "Accuracy in percent on samples that the site held out: no model was trained on them. In brackets Wilson's 95% "
        "interval. Bold: better than every other model, by a paired bootstrap over the same samples."
    )
    title = f"Models on the sites' held-out samples; {table.title}"
    return Sheet("sites", title, ["site", "n", *table.columns], cells, " ".join([note, *table.notes]))


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
        figures = [number(value, "{:.1f}") for c in same for value in (c.recall, c.precision)]
        cells.append([word(first.name), trained, held, *figures])
    note = (
        "Recall: the share of a class's held-out samples that the model recognises; precision: the share of samples "
        f"taken for the class that are of it. *: fewer than {FEW} held-out samples, so its figures say little."
    )
    columns = ["class", "training", "held-out", *heads]
    return Sheet("classes", f"Classes of {row.name}; {table.title}", columns, cells, note)


def to_csv(tables: Sequence[SiteTable]) -> str:
    """A line for each site and model; numbers are not rounded, unknown values are empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_CSV)
    for table in tables:
        for row in table.rows:
            sentence = verdict(row, table.classes).sentence
            for model in row.models:
                best = "" if row.n is None else int(row.best is model)
                figures = (model.label, model.accuracy, model.low, model.high, best, sentence)
                writer.writerow([table.title, row.name, row.client, row.n, *figures])
    return out.getvalue()


def _count(row: SiteRow) -> Cell:
    return Cell(DASH) if row.n is None else Cell(f"{row.n:,}", row.n)


def _accuracy(row: SiteRow, column: str) -> Cell:
    model = row.model(column)
    if model is None:
        return Cell(DASH)
    return Cell(f"{model.accuracy:.1f}{_interval(model)}", model.accuracy, 1 if row.best is model else 0)


def _interval(model: SiteModel) -> str:
    return "" if model.low is None or model.high is None else f" ({model.low:.1f} to {model.high:.1f})"
