"""Commands that look at finished runs."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fednh.cli.app import app, console_for_people

if TYPE_CHECKING:
    from fednh.report.sheet import Sheet


class TableFormat(StrEnum):
    RICH = "rich"
    MARKDOWN = "markdown"
    LATEX = "latex"
    CSV = "csv"


@app.command()
def table(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Run folders, or folders of them.")],
    form: Annotated[TableFormat, typer.Option("--format", help="latex wants booktabs; csv has a line a figure.")] = (
        TableFormat.RICH
    ),
    paper: Annotated[bool, typer.Option("--paper", help="Set the paper's numbers beside those that match.")] = False,
    short: Annotated[bool, typer.Option("--short", help="One row a run, nothing averaged.")] = False,
    reference: Annotated[
        str | None, typer.Option(help="The method that the others are compared with; default: fednh, else fedavg.")
    ] = None,
) -> None:
    """Compare finished runs: accuracy, fairness, cost and, with two or more seeds, each method with a reference.

    Runs that differ in the seed alone are averaged; all others keep a row that says in what they differ.
    """
    from fednh.report import tables
    from fednh.report.load import load_runs
    from fednh.report.records import records, to_csv

    runs = load_runs(folders)
    if form is TableFormat.CSV:
        typer.echo(to_csv(records(runs, reference, paper), paper), nl=False)
        return
    if short:
        sheets = [tables.comparison_sheet(runs)]
    else:
        sheets = [*tables.result_sheets(runs, paper), tables.cost_sheet(runs)]
        sheets += [sheet for sheet in [tables.paired_sheet(runs, reference)] if sheet.rows]
    show(sheets, form)


def show(sheets: Sequence[Sheet], form: TableFormat) -> None:
    """Print tables in one of the forms that Sheets have."""
    from fednh.report.render import to_latex, to_markdown, to_rich

    if form is TableFormat.RICH:
        console = console_for_people()
        for sheet in sheets:
            console.print(to_rich(sheet, console.width), "")
        return
    write = to_markdown if form is TableFormat.MARKDOWN else to_latex
    typer.echo("\n".join(write(sheet) for sheet in sheets), nl=False)
