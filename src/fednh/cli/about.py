"""Commands about what there is: methods, partitions, data sets, prototypes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fednh.cli import completion
from fednh.cli.app import app, console_for_people
from fednh.cli.options import DataDir
from fednh.errors import UserError

data_app = typer.Typer(help="Get data sets.", no_args_is_help=True)
app.add_typer(data_app, name="data")


@app.command()
def methods() -> None:
    """List the methods, also those of installed packages, with their hyper-parameters and papers."""
    import dataclasses

    from rich.markup import escape

    from fednh.methods.registry import listed

    console = console_for_people()
    for name, cls in listed():
        if not isinstance(cls, type):
            console.print(f"[bold]{escape(name)}[/bold]  [red]{escape(str(cls))}[/red]", highlight=False)
            continue
        summary = (cls.__doc__ or "").strip().partition("\n\n")[0]
        console.print(f"[bold]{escape(name)}[/bold]  {escape(summary)}", highlight=False)
        fields = ", ".join(f"{f.name} = {f.default}" for f in dataclasses.fields(cls)) or "none"
        console.print(f"    settings: {escape(fields)}", highlight=False, style="cyan", soft_wrap=True)
        console.print(f"    {escape(getattr(cls, 'cite', ''))}", highlight=False, style="dim")
        for patent in cls.patents:
            notice = f"    patent notice: {escape(patent)} may concern it; see NOTICE"
            console.print(notice, highlight=False, style="yellow")


@app.command()
def partitions() -> None:
    """List the ways to divide samples among clients, with their settings."""
    import dataclasses

    from fednh.data.partitions import PARTITIONS

    console = console_for_people()
    for name, kind in PARTITIONS.items():
        console.print(f"[bold]{name}[/bold]  {kind.help}", highlight=False)
        fields = ", ".join(f"{field.name} = {field.default}" for field in dataclasses.fields(kind))
        console.print(f"    settings: {fields}", highlight=False, style="cyan")


@app.command()
def datasets(data_dir: DataDir = None) -> None:
    """List the data sets, and whether they are here."""
    from rich.table import Table

    from fednh.data.sources import available, listing
    from fednh.storage.cache import data_folder

    folder = data_folder(data_dir)
    rows = Table("name", "what", "here", "where", pad_edge=False, title=f"Data folder: {folder}", title_justify="left")
    for name, description, present, where in available(folder):
        rows.add_row(name, description, "[green]yes[/green]" if present else "no", where)
    for form, description, _, where in listing():
        rows.add_row(form, description, "", where)
    console_for_people().print(rows)


@data_app.command("get")
def data_get(
    name: Annotated[
        str,
        typer.Argument(help="A published set; `fednh datasets` lists them.", autocompletion=completion.published),
    ],
    data_dir: Annotated[Path | None, typer.Option(help="Where to put it.")] = None,
) -> None:
    """Download a data set's canonical archive, checked against its known checksum; resumes what was broken off."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from fednh.data.published.download import get
    from fednh.storage.cache import data_folder

    folder = data_folder(data_dir)
    with Progress(
        TextColumn(name), BarColumn(), DownloadColumn(), TransferSpeedColumn(), console=console_for_people(stderr=True)
    ) as bar:
        task = bar.add_task(name, total=None, visible=False)
        told = get(name, folder, lambda done, total: bar.update(task, completed=done, total=total, visible=True))
    typer.echo(told)


@app.command()
def prototypes(
    classes: Annotated[int, typer.Option(help="C, the number of prototypes.")],
    dim: Annotated[int, typer.Option(help="d, the dimension of the space.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the prototypes to this safetensors file.")] = None,
) -> None:
    """Spread C unit prototypes as far apart as possible in d dimensions: Eq. (1) of the paper."""
    import json

    from fednh.methods.prototypes import separated
    from fednh.storage.files import write_tree

    found = separated(classes, dim)
    facts = {
        "classes": classes,
        "dim": dim,
        "min_distance": None if classes == 1 else found.min_distance,
        "max_cosine": None if classes == 1 else found.max_cosine,
        "how": found.how,
    }
    if out is not None:
        try:
            write_tree(out, {"prototypes": found.points}, {"how": found.how})
        except OSError as error:
            raise UserError(f"{out} cannot be written: {error.strerror}") from error
    if as_json:
        typer.echo(json.dumps(facts))
        return
    for key, value in facts.items():
        typer.echo(f"{key:13} {value:.6f}" if isinstance(value, float) else f"{key:13} {value}")
    if out is not None:
        typer.echo(f"written to    {out}")
