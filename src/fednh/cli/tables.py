"""Commands that compare finished runs: methods with each other, and the models of each site."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fednh.cli.app import app, print_sheets
from fednh.cli.options import RunFolders
from fednh.errors import UserError

if TYPE_CHECKING:
    from fednh.report.sheet import Sheet
    from fednh.report.sites import SiteTable


TableFormat = Literal["rich", "markdown", "latex", "csv"]


@app.command()
def table(
    folders: RunFolders,
    form: Annotated[
        TableFormat, typer.Option("--format", help="latex wants booktabs; csv has a line a metric.")
    ] = "rich",
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
    from fednh.report.site_tables import advice_sheet
    from fednh.report.sites import site_tables
    from fednh.report.tables import records, to_csv

    runs = load_runs(folders)
    if form == "csv":
        typer.echo(to_csv(records(runs, reference, paper), paper), nl=False)
        return
    if short:
        sheets = [tables.comparison_sheet(runs)]
    else:
        sheets = [*tables.result_sheets(runs, paper), tables.cost_sheet(runs)]
        sheets += [sheet for sheet in [tables.paired_sheet(runs, reference)] if sheet.rows]
        if reference is not None and reference.lower() == "local":
            sheets += [advice_sheet(sites) for sites in site_tables([run for run in runs if run.names])]
    show(sheets, form)


def show(sheets: Sequence[Sheet], form: TableFormat) -> None:
    """Print tables in one of the forms that Sheets have."""
    from fednh.report.sheet import to_latex, to_markdown

    if form == "rich":
        print_sheets(*sheets)
        return
    write = to_markdown if form == "markdown" else to_latex
    typer.echo("\n".join(write(sheet) for sheet in sheets), nl=False)


@app.command()
def compare(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="Run folders, folders of them, or the state of a federation's site."),
    ],
    site: Annotated[
        str | None, typer.Option(help="This site alone, by its name or number, and each of its classes.")
    ] = None,
    form: Annotated[TableFormat, typer.Option("--format", help="csv has a line for every site and model.")] = "rich",
) -> None:
    """Say for every site which model to use: its personal one, the global one, or one trained there alone.

    All metrics are of samples that the site held out. A run of the method local beside the others adds what a site
    could do alone.
    """
    from fednh.report import site_tables as site_sheets
    from fednh.report.load import load_runs
    from fednh.report.sites import site_tables

    own = {folder: _at_a_site(folder) for folder in folders}
    runs = [folder for folder, of_site in own.items() if not of_site]
    tables = [table for of_site in own.values() for table in of_site]
    tables += site_tables(load_runs(runs)) if runs else []
    if not tables:
        raise UserError(
            f"{', '.join(map(str, folders))}: no run measured samples that its clients held out; run again with "
            "--set data.holdout=0.2"
        )
    chosen = tables if site is None else _of(tables, site)
    if form == "csv":
        typer.echo(site_sheets.to_csv(chosen), nl=False)
        return
    show([sheet for table in chosen for sheet in site_sheets.sheets(table, classes=site is not None)], form)


def _at_a_site(folder: Path) -> list[SiteTable]:
    """What a site of a real federation keeps about itself, if that is the folder's."""
    from fednh.flower.layout import StateFolder
    from fednh.report.sites import own_table

    return [own_table(kept.personal_model, kept.outcomes_file) for kept in StateFolder(folder).measured()]


def _of(tables: list[SiteTable], site: str) -> list[SiteTable]:
    """The tables that have the site, with its row alone."""
    rows = [table.only(site) for table in tables if table.has(site)]
    return rows or [tables[0].only(site)]  # which names the sites that there are
