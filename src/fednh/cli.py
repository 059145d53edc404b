"""The command line. Heavy imports stay inside the commands, so that `fednh --help` answers at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import fednh
from fednh.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from fednh.config import Config

app = typer.Typer(
    name="fednh",
    help="Personalised federated learning on class-imbalanced clients: FedNH and the methods it is measured against.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="Get data sets.", no_args_is_help=True)
app.add_typer(data_app, name="data")


@app.callback(invoke_without_command=True)
def _top(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(f"fednh {fednh.__version__}")
        raise typer.Exit


@app.command()
def run(
    source: Annotated[
        str | None, typer.Argument(metavar="[CONFIG-OR-PRESET]", help="A TOML file, or a preset; none: digits.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="See `fednh methods`.")] = None,
    data: Annotated[str | None, typer.Option(help="A data set by name, or npz:PATH. See `fednh datasets`.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where data sets lie.")] = None,
    partition: Annotated[str | None, typer.Option(help="dirichlet, iid, classes, shards or quantity.")] = None,
    beta: Annotated[float | None, typer.Option(help="Of the Dirichlet distribution; smaller is more uneven.")] = None,
    clients: Annotated[int | None, typer.Option(help="How many clients there are.")] = None,
    participation: Annotated[float | None, typer.Option(help="The share of clients picked in a round.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Communication rounds.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Local epochs a round.")] = None,
    seed: Annotated[int | None, typer.Option(help="Everything random derives from it.")] = None,
    workers: Annotated[int | None, typer.Option(help="Clients trained at once; default: one per core.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...")] = None,
    out: Annotated[Path | None, typer.Option(help="The run folder; default: a new one below runs/.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting, e.g. method.rho=0.7.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but the run folder.")] = False,
) -> None:
    """Run one method on one federation, and write a run folder."""
    from fednh.config import load

    overrides: dict[str, Any] = {
        "method.name": method,
        "data.name": None if data is None else _absolute(data),
        "data.dir": None if data_dir is None else str(data_dir.expanduser().absolute()),
        "partition.name": partition,
        "partition.beta": beta,
        "partition.clients": clients,
        "participation.rate": participation,
        "rounds": rounds,
        "train.epochs": epochs,
        "seed": seed,
        "workers": workers,
        "device": device,
    }
    given = {key: value for key, value in overrides.items() if value is not None} | _settings(settings or [])
    config = load(source, given)
    _execute(config, out or _new_folder(config), quiet)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of an interrupted run.")],
    workers: Annotated[int | None, typer.Option(help="Clients trained at once; the result is the same.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but the run folder.")] = False,
) -> None:
    """Go on with an interrupted run; the result is what it would have been without the interruption."""
    from fednh.runs import read_config

    config = read_config(folder)
    if workers is not None:
        config = config.model_copy(update={"workers": workers})
    _execute(config, folder, quiet)


@app.command()
def table(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders of them.")],
) -> None:
    """Compare finished runs."""
    from fednh.report.table import comparison, find_runs

    _console().print(comparison(find_runs(folders)))


@app.command()
def methods() -> None:
    """List the methods with their hyper-parameters and papers."""
    import dataclasses

    from fednh.methods import METHODS

    console = _console()
    for name, cls in METHODS.items():
        summary = (cls.__doc__ or "").strip().partition("\n\n")[0]
        console.print(f"[bold]{name}[/bold]  {summary}", highlight=False)
        fields = [f"{field.name} = {field.default}" for field in dataclasses.fields(cls)]
        console.print(f"    settings: {', '.join(fields) or 'none'}", highlight=False, style="cyan")
        console.print(f"    {cls.cite}", highlight=False, style="dim")


@app.command()
def datasets(data_dir: Annotated[Path | None, typer.Option(help="Where data sets lie.")] = None) -> None:
    """List the data sets, and whether they are here."""
    from rich.table import Table

    from fednh.data.sources import available, default_folder

    folder = default_folder() if data_dir is None else data_dir.expanduser()
    rows = Table("name", "what", "here", "where", pad_edge=False, title=f"Data folder: {folder}", title_justify="left")
    for name, description, present, where in available(folder):
        rows.add_row(name, description, "[green]yes[/green]" if present else "no", where)
    rows.add_row("npz:PATH", "a file of x_train, y_train, x_test, y_test", "", "")
    _console().print(rows)


@data_app.command("get")
def data_get(
    name: Annotated[str, typer.Argument(help="cifar10, cifar100, tinyimagenet, fashion_mnist or mnist.")],
    data_dir: Annotated[Path | None, typer.Option(help="Where to put it.")] = None,
) -> None:
    """Download a data set's canonical archive, checked against its known checksum; resumes what was broken off."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from fednh.data.download import get
    from fednh.data.sources import default_folder

    folder = default_folder() if data_dir is None else data_dir.expanduser()
    with Progress(
        TextColumn(name), BarColumn(), DownloadColumn(), TransferSpeedColumn(), console=_console(stderr=True)
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

    from fednh.files import write_tree
    from fednh.prototypes import separated

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


def main() -> None:
    """Entry point: a UserError is one sentence on stderr and exit code 2; what is not foreseen names itself."""
    try:
        app()
    except UserError as error:
        _fail(str(error), 2)
    except OSError as error:
        _fail(f"{error.filename or 'the file system'}: {error.strerror or error}", 2)
    except MemoryError:
        _fail("out of memory; use fewer --workers, a smaller train.batch_size or store.memory", 1)
    except Exception as error:
        if os.environ.get("FEDNH_DEBUG"):
            raise
        _fail(f"{type(error).__name__}: {error} (set FEDNH_DEBUG=1 to see where)", 1)


def _fail(sentence: str, code: int) -> None:
    typer.echo(f"fednh: {' '.join(sentence.split())}", err=True)
    sys.exit(code)


def _execute(config: Config, out: Path, quiet: bool) -> None:
    """Start, continue, or recognise as finished the run in `out`."""
    from fednh.federation import build_federation
    from fednh.report.table import comparison
    from fednh.report.terminal import watcher
    from fednh.runs import RunFolder
    from fednh.simulate import Interrupted, Simulation

    console = _console()
    folder = RunFolder(out)
    folder.check(config)
    if folder.finished:
        console.print(f"{out} is finished already", highlight=False, soft_wrap=True)
    else:
        federation = build_federation(config)
        name = f"{config.method['name']} on {federation.dataset.name}"
        with _stop_on_signal() as stop, folder, watcher(console, config.rounds, name, quiet) as screen:
            simulation = Simulation(config, federation, folder, screen, stop)
            folder.begin(config)
            try:
                simulation.run()
            except Interrupted:
                kept = (
                    f"continue with: fednh resume {out}"
                    if config.checkpoint.every
                    else "checkpoint.every = 0: not saved"
                )
                typer.echo(f"fednh: interrupted after round {simulation.progress.round}; {kept}", err=True)
                raise typer.Exit(130) from None
    if not quiet:
        console.print(comparison([out]))
        typer.echo("run folder:")
    typer.echo(str(out))


@contextmanager
def _stop_on_signal() -> Iterator[threading.Event]:
    """The first Ctrl-C or SIGTERM asks the run to stop and save; a second one ends it at once."""
    stop = threading.Event()

    def ask(signum: int, _: object) -> None:
        if stop.is_set():
            os._exit(130)
        stop.set()
        typer.echo("fednh: stopping after the clients that are at work; once more to stop at once", err=True)

    before: dict[int, Callable[..., Any] | int | None] = {
        s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _settings(words: list[str]) -> dict[str, Any]:
    from fednh.config import parse_value

    settings = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key.strip():
            raise UserError(f"--set {word!r} should be KEY=VALUE, for example --set method.rho=0.7")
        settings[key.strip()] = parse_value(value.strip())
    return settings


def _absolute(data: str) -> str:
    """npz:PATH with the path made absolute, so that the written config works from anywhere."""
    kind, colon, path = data.partition(":")
    return f"{kind}:{Path(path).expanduser().absolute()}" if colon and path else data


def _new_folder(config: Config) -> Path:
    """runs/<data>-<method>-<partition>-seed<n>, with a number behind it if that is taken."""
    how = config.partition
    spread = f"{how.name}{how.beta:g}" if how.name in ("dirichlet", "quantity") else how.name
    data = Path(config.data.name.partition(":")[2]).stem if ":" in config.data.name else config.data.name
    name = f"{data}-{config.method['name']}-{spread}-seed{config.seed}"
    for number in range(1, 100_000):
        path = Path("runs") / (name if number == 1 else f"{name}-{number}")
        if not path.exists():
            return path
    raise UserError("runs/ is full; choose a folder with --out")


def _console(stderr: bool = False) -> Console:
    from rich.console import Console

    console = Console(stderr=stderr)
    if not console.is_terminal:
        console.width = 120
    return console
