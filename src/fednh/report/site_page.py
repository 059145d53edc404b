"""The report on sites: which model each should use and how sure that is, class by class; and what the explorer shows.

The numbers are those of sites.py; this decides what of them stands on the page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from fednh.report import site_sheets
from fednh.report.cells import DASH, number, word
from fednh.report.load import Run
from fednh.report.sheet import Cell, Sheet
from fednh.report.site_words import verdict
from fednh.report.sites import FEW, ClassRow, SiteRow, SiteTable, class_table, confusion, site_tables

MOST_ROWS = 1500  # a longer table by class is left to the explorer and the CSV file
_RATES = ("recall", "precision")
_ALONE = {"personal": "the personal model", "global": "the global model", "local": "the model trained there alone"}


def site_sections(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One entry for each federation of natural sites and each seed, for the template."""
    found: list[dict[str, Any]] = []
    for table in site_tables([run for run in runs if run.names]):
        name = f"sites-{len(found)}" if found else "sites"
        by_class = class_sheet(table, f"{name}-classes")
        entry = {
            "id": name,
            "title": table.title,
            "again": any(one["table"].runs[0].summary["data"] == table.runs[0].summary["data"] for one in found),
            "digest": digest(table),
            "sure": any(row.n is not None for row in table.rows),
            "table": table,
            "rows": [_row(row, table) for row in table.rows],
            "means": [table.mean(column) for column in table.columns],
            "left_out": len(table.rows) - len(table.measured),
            "file": site_sheets.to_csv([table]),
            "classes": by_class,
            "classes_file": class_sheet(table, f"{name}-classes", apart=True),
            "too_long": len(by_class.rows) > MOST_ROWS,
        }
        found.append(entry)
    return found


def digest(table: SiteTable) -> str:
    """How many sites should use what: what a person wants to know of two hundred sites."""
    verdicts = [(row, verdict(row, table.classes).kind) for row in table.rows]
    kinds: Counter[str] = Counter(kind for _, kind in verdicts)
    use: Counter[str] = Counter(row.leader.kind for row, kind in verdicts if kind == "use" and row.leader is not None)
    first = " is the one to use"
    told = []
    for kind in _ALONE:
        if use[kind]:
            told.append(f"{_ALONE[kind]}{first} at {_sites(use[kind])}")
            first = ""
    others = {
        "alike": "all models are equally good at",
        "unclear": "there are too few samples to tell at",
        "one class": "there is only one class at",
        "unknown": "it is not known how sure the numbers are at",
    }
    told += [f"{words} {_sites(kinds[kind])}" for kind, words in others.items() if kinds[kind]]
    sentence = "; ".join(told)
    return f"{sentence[:1].upper()}{sentence[1:]}."


def class_sheet(table: SiteTable, name: str, apart: bool = False) -> Sheet:
    """Recall and precision of every class at every site, for each model; `apart` gives each a column, for a file."""
    rates = [f": {rate}" for rate in _RATES] if apart else [""]
    columns = ["site", "class", "training samples", "held-out samples", *(["few"] if apart else [])]
    rows = []
    for row in table.rows:
        models = _by_class(row, table)
        for at, some in enumerate(next(iter(models.values()), [])):
            cells = [word(row.name), word(some.name), _count(some.trained), *_held(some, apart)]
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


def explored(runs: Sequence[Run]) -> dict[str, Any] | None:
    """For runs of one setting and seed: every client's held-out samples by class, and what is taken for what."""
    tables = site_tables(runs)
    if not tables:
        return None
    table = tables[0]
    return {"models": list(table.columns), "clients": {row.client: _client(row, table) for row in table.rows}}


def _client(row: SiteRow, table: SiteTable) -> dict[str, Any]:
    models = _by_class(row, table)
    classes = next(iter(models.values()), [])
    told = []
    for label, found in models.items():
        model = row.model(label)
        assert model is not None
        counts = confusion(row, model, len(table.classes))
        rates = {rate: [_rounded(getattr(one, rate)) for one in found] for rate in _RATES}
        cells = [int(value) for t, p in np.argwhere(counts) for value in (t, p, counts[t, p])]
        told.append({"label": label, **rates, "confusion": cells})
    return {
        "n": row.n,
        "leader": row.leader.label if row.leader is not None else None,
        "says": verdict(row, table.classes).sentence if table.runs[0].names else None,
        "classes": [table.classes.index(one.name) for one in classes],
        "held": [one.n for one in classes],
        "few": [one.few for one in classes],
        "models": told,
    }


def _by_class(row: SiteRow, table: SiteTable) -> dict[str, list[ClassRow]]:
    """For each model whose predictions are recorded the classes of the site: the same classes for all of them."""
    found = {model.label: class_table(row, model, table.classes) for model in row.models}
    return {label: classes for label, classes in found.items() if classes}


def _row(row: SiteRow, table: SiteTable) -> dict[str, Any]:
    best = row.best
    models = [row.model(column) for column in table.columns]
    said = verdict(row, table.classes)
    return {
        "row": row,
        "models": models,
        "best": best.label if best else None,
        "says": said.sentence,
        "kind": said.kind,
    }


def _count(value: int | None) -> Cell:
    return Cell(DASH) if value is None else Cell(f"{value:,}", float(value))


def _held(one: ClassRow, apart: bool) -> list[Cell]:
    few = "few" if one.n and one.few else ""
    return [Cell(str(one.n)), Cell(few)] if apart else [Cell(f"{one.n:,} {few}".strip(), float(one.n))]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _sites(count: int) -> str:
    return "1 site" if count == 1 else f"{count} sites"
