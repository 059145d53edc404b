"""Commands about what there is: methods, partitions, data sets, prototypes; and files to start from."""

from __future__ import annotations

import json
import keyword
import re
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from fednh.cli.app import app, console_for_people
from fednh.cli.options import OFFERED, DataDir
from fednh.errors import UserError


@app.command("new-method")
def new_method(
    name: Annotated[str, typer.Argument(help="Of the method: my_method or MyMethod.")],
    out: Annotated[Path, typer.Option(help="The folder for the two files.")] = Path(),
) -> None:
    """Write a small method that runs, and its tests, to be changed into yours."""
    module, cls = names(name)
    _check_free(module)
    files = {out / f"{module}.py": "method.py.txt", out / f"test_{module}.py": "test_method.py.txt"}
    for path in files:
        if path.exists():
            raise UserError(f"{path} exists already; choose another name or --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
        for path, template in files.items():
            text = resources.files("fednh.cli").joinpath("templates", template).read_text(encoding="utf-8")
            with path.open("x", encoding="utf-8") as file:
                file.write(text.replace("{module}", module).replace("{Class}", cls))
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror}") from error
    change_folder = "" if out.resolve() == Path.cwd() else f"cd {out} && "
    typer.echo(f"written: {' '.join(map(str, files))}")
    typer.echo(f"run it:  {change_folder}fednh run --method {module}:{cls} --rounds 5")
    typer.echo(f"test it: {change_folder}python -m pytest test_{module}.py")


def names(name: str) -> tuple[str, str]:
    """The module and the class: MyMethod, my_method and my-method are all (my_method, MyMethod)."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|-", "_", name)
    module = words.lower()
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", module) or keyword.iskeyword(module) or len(module) > 60:
        raise UserError(
            f"{name!r} cannot name a method; use letters, digits and underscores, as in my_method or MyMethod"
        )
    cls = name if re.fullmatch(r"[A-Z][A-Za-z0-9]*", name) else "".join(w[0].upper() + w[1:] for w in words.split("_"))
    return module, cls


def _check_free(module: str) -> None:
    """A file that hides an installed module would break whatever imports that."""
    from fednh.methods import METHODS

    if module in METHODS:
        raise UserError(f"{module!r} is a method of this library already; choose another name")
    installed = find_spec(module)
    if installed is not None and Path(str(installed.origin)).parent != Path.cwd():
        raise UserError(f"{module!r} is the name of a Python module that is installed; choose another name")


NAMES = ("ten-minutes.ipynb", "your-own-data.ipynb", "write-a-method.ipynb")


@app.command()
def notebooks(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="The folder to write them to.")] = Path("notebooks"),
) -> None:
    """Write the notebooks that teach fednh: a first result, your own data, a method of your own."""
    from fednh.io.files import write_bytes

    taken = [folder / name for name in NAMES if (folder / name).exists()]
    if taken:
        raise UserError(f"{taken[0]} exists already and may have been changed; choose another folder")
    for name in NAMES:
        content = resources.files("fednh.cli").joinpath("notebooks", name).read_bytes()
        try:
            write_bytes(folder / name, content)
        except OSError as error:
            raise UserError(f"{folder} cannot be written: {error.strerror}; choose another folder") from error
        typer.echo(str(folder / name))
    typer.echo("open them with Jupyter (pip install jupyterlab) or an editor that knows notebooks", err=True)


data_app = typer.Typer(help="Get data sets.", no_args_is_help=True)
app.add_typer(data_app, name="data")


@app.command()
def methods(
    chosen: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME...]", help="Only these; default: all.", autocompletion=OFFERED["method"]),
    ] = None,
) -> None:
    """List the methods, also those of installed packages, with their hyper-parameters and papers."""
    import dataclasses

    from rich.markup import escape

    from fednh.methods.registry import find_method, listed

    console = console_for_people()
    for name, cls in [(name, find_method(name)) for name in chosen] if chosen else listed():
        if not isinstance(cls, type):
            console.print(f"[bold]{escape(name)}[/bold]  [red]{escape(str(cls))}[/red]", highlight=False)
            continue
        summary = (cls.__doc__ or "").strip().partition("\n\n")[0]
        console.print(f"[bold]{escape(name)}[/bold]  {escape(summary)}", highlight=False)
        fields = ", ".join(f"{f.name} = {f.default}" for f in dataclasses.fields(cls)) or "none"
        console.print(f"    settings: {escape(fields)}", highlight=False, style="cyan", soft_wrap=True)
        console.print(f"    {escape(getattr(cls, 'cite', ''))}", highlight=False, style="dim")
        if cls.training_free:
            note = "    trains nothing: one round with every client, unless rounds and participation.rate are set"
            console.print(note, highlight=False, style="dim", soft_wrap=True)
        for patent in cls.patents:
            notice = f"    patent notice: {escape(patent)} may concern it; see NOTICE"
            console.print(notice, highlight=False, style="yellow")


@app.command()
def partitions() -> None:
    """List the ways to divide samples among clients, with their settings."""
    import dataclasses

    from fednh.data.partitions.kinds import PARTITIONS

    console = console_for_people()
    for name, kind in PARTITIONS.items():
        console.print(f"[bold]{name}[/bold]  {kind.help}", highlight=False)
        fields = ", ".join(f"{field.name} = {field.default}" for field in dataclasses.fields(kind))
        console.print(f"    settings: {fields}", highlight=False, style="cyan")


@app.command()
def datasets(data_dir: DataDir = None) -> None:
    """List the data sets, and whether they are here."""
    from rich.table import Table

    from fednh.data.sources.registry import available, listing
    from fednh.io.cache import data_folder

    folder = data_folder(data_dir)
    rows = Table("name", "what", "here", "where", pad_edge=False, title=f"Data folder: {folder}", title_justify="left")
    for name, description, present, where, sites in available(folder):
        whose = f"; natural sites: {sites}" if sites else ""
        rows.add_row(name, description + whose, "[green]yes[/green]" if present else "no", where)
    for form, description, _, where, _ in listing():
        rows.add_row(form, description, "", where)
    console_for_people().print(rows)


@data_app.command("get")
def data_get(
    name: Annotated[
        str,
        typer.Argument(help="A published set; `fednh datasets` lists them.", autocompletion=OFFERED["published"]),
    ],
    data_dir: Annotated[Path | None, typer.Option(help="Where to put it.")] = None,
) -> None:
    """Download a data set's canonical archive, checked against its known checksum; resumes what was broken off."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from fednh.data.sources.registry import download
    from fednh.io.cache import data_folder

    folder = data_folder(data_dir)
    with Progress(
        TextColumn(name), BarColumn(), DownloadColumn(), TransferSpeedColumn(), console=console_for_people(stderr=True)
    ) as bar:
        task = bar.add_task(name, total=None, visible=False)
        outcome = download(
            name, folder, lambda done, total: bar.update(task, completed=done, total=total, visible=True)
        )
    typer.echo(outcome)


@app.command()
def prototypes(
    classes: Annotated[int, typer.Option(help="C, the number of prototypes.")],
    dim: Annotated[int, typer.Option(help="d, the dimension of the space.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the prototypes to this safetensors file.")] = None,
) -> None:
    """Spread C unit prototypes as far apart as possible in d dimensions: Eq. (1) of the paper."""
    from fednh.io.files import write_tree
    from fednh.models.prototypes import separated

    solution = separated(classes, dim)
    facts = {
        "classes": classes,
        "dim": dim,
        "min_distance": None if classes == 1 else solution.min_distance,
        "max_cosine": None if classes == 1 else solution.max_cosine,
        "how": solution.how,
    }
    if out is not None:
        try:
            write_tree(out, {"prototypes": solution.points}, {"how": solution.how})
        except OSError as error:
            raise UserError(f"{out} cannot be written: {error.strerror}") from error
    if as_json:
        typer.echo(json.dumps(facts))
        return
    for key, value in facts.items():
        typer.echo(f"{key:13} {value:.6f}" if isinstance(value, float) else f"{key:13} {value}")
    if out is not None:
        typer.echo(f"written to    {out}")
