"""Commands that train: start a run, go on with one."""

from __future__ import annotations

import os
import shlex
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fednh.cli.app import app, console_for_people, print_sheets
from fednh.cli.options import (
    Address,
    Backend,
    ConfigOrPreset,
    Given,
    Quiet,
    Setting,
    Short,
    Track,
    set_values,
    with_short_options,
)
from fednh.config.options import SHORT_OPTIONS
from fednh.errors import Interrupted
from fednh.interrupt import Stop
from fednh.text import plural

if TYPE_CHECKING:
    from rich.console import Console

    from fednh.backends import RunMaker
    from fednh.config import Config
    from fednh.runs.run_folder import RunFolder


@app.command()
@with_short_options
def run(
    *,
    source: ConfigOrPreset = None,
    given: Annotated[Given, Short(*SHORT_OPTIONS)],
    out: Annotated[Path | None, typer.Option(help="The run folder; default: a new one below runs/.")] = None,
    settings: Setting = None,
    track: Track = None,
    backend: Backend = "simulator",
    address: Address = None,
    quiet: Quiet = False,
) -> None:
    """Run one method on one federation, and write a run folder."""
    from fednh.config import load
    from fednh.runs.layout import new_folder

    config = load(source, given | set_values(settings))
    _execute(config, out or new_folder(config), track or [], quiet, backend, address)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of an interrupted or finished run.")],
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Let it end after this many rounds in all; also beyond its planned end.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=0, help="Clients trained at once; the result is the same.")] = None,
    track: Track = None,
    backend: Backend = "simulator",
    address: Address = None,
    quiet: Quiet = False,
) -> None:
    """Go on with an interrupted run, or beyond the end of a finished one, as if it had never stopped.

    The result is what one run of that many rounds, without any interruption, would have given.
    """
    from fednh.runs.run_folder import read_config

    config = read_config(folder)
    if workers is not None:
        config = config.model_copy(update={"workers": workers})
    if rounds is not None:
        config = config.model_copy(update={"rounds": rounds})
    _execute(config, folder, track or [], quiet, backend, address, extend=rounds is not None)


def _execute(
    config: Config,
    out: Path,
    track: list[str],
    quiet: bool,
    backend: str,
    address: str | None,
    extend: bool = False,
) -> None:
    """Start, continue, or recognise as finished the run in `out`."""
    from fednh.backends import run_maker
    from fednh.callbacks.trackers import check as check_trackers
    from fednh.runs.run_folder import RunFolder, read_summary

    console = console_for_people(stderr=quiet)  # with --quiet, standard output has the folder and nothing else
    check_trackers(track)
    make = run_maker(backend, address)
    folder = RunFolder(out)
    try:
        with stop_on_signal() as stop, folder.opened(config, backend, extend) as unfinished:
            if unfinished:
                _train(config, folder, make, track, console, quiet, stop)
            else:
                console.print(f"{out} is finished already", highlight=False, soft_wrap=True)
    except Interrupted:
        again = f"fednh resume {out}" + ("" if backend == "simulator" else f" --backend {backend}")
        kept = f"continue with: {again}" if config.checkpoint.every else "checkpoint.every = 0: not saved"
        typer.echo(f"fednh: interrupted after round {folder.rounds_written()}; {kept}", err=True)
        raise typer.Exit(130) from None
    _tell_losses(console, read_summary(out))
    if not quiet:
        from fednh.report.load import load_runs
        from fednh.report.tables import comparison_sheet

        print_sheets(comparison_sheet(load_runs([out])))
        _tell_how_to_answer(config, out)
        typer.echo("run folder:")
    typer.echo(str(out))


def _train(
    config: Config,
    folder: RunFolder,
    make: RunMaker,
    track: list[str],
    console: Console,
    quiet: bool,
    stop: threading.Event,
) -> None:
    """The run in a locked folder, from where it stands to its end."""
    from fednh.callbacks import CallbackList
    from fednh.callbacks.screen import screen_for
    from fednh.callbacks.trackers import Tracking
    from fednh.federated.setup import build_federation

    federation = build_federation(config, run=folder.path)
    name = f"{config.method['name']} on {federation.dataset.name}"
    with (
        screen_for(console, config.rounds, name, quiet) as screen,
        Tracking(track, folder, config, screen.on_note) as tracking,
    ):
        for note in (*federation.dataset.notes, *federation.dataset.warnings):
            screen.on_note(note)
        make(config, federation, folder, CallbackList([screen, tracking]), stop).run()


def _tell_losses(console: Console, summary: dict[str, Any]) -> None:
    """Report uploads and clients that the run left out, if any."""
    losses = {"refused": ("upload", "not finite and refused"), "failed": ("client", "skipped after an error")}
    from fednh.runs.layout import RunLayout

    for key, (noun, words) in losses.items():
        if number := summary.get(key):
            what = f"{plural(number, noun)} {'was' if number == 1 else 'were'} {words}"
            console.print(f"{what}; {RunLayout.metrics_file} says when and whose", style="yellow", highlight=False)


def _tell_how_to_answer(config: Config, out: Path) -> None:
    """For natural sites without a run alone beside this one: how to find out what federating gives each of them."""
    from fednh.config import as_options, difference
    from fednh.runs.run_folder import RunFolder, read_config

    natural, data = config.partition.kind.natural, config.data
    if not natural or config.method["name"] == "local" or data.name.startswith("memory:"):
        return
    beside = [path for path in out.absolute().parent.iterdir() if RunFolder(path).finished]
    others = [read_config(path, finished=True) for path in beside]
    if not any(one.method["name"] == "local" and one.data.name == data.name for one in others):
        read = {key: value for key, value in difference(config).items() if key.startswith("data.")}
        command = shlex.join(["fednh", "recommend", *as_options(read), "--out", "answer"])
        typer.echo(f"what federating gives each site, and with which method: {command}")


@contextmanager
def stop_on_signal(
    message: str = "fednh: stopping after the clients that are at work; once more to stop at once",
    insist: bool = True,
) -> Iterator[threading.Event]:
    """The first Ctrl-C or SIGTERM asks the run to stop and save; a second one ends it at once, if one may `insist`."""
    stop = Stop()

    def ask(signum: int, _: object) -> None:
        if stop.is_set() and insist:
            os._exit(130)
        stop.set()
        typer.echo(message, err=True)

    before: dict[int, Callable[..., Any] | int | None] = {
        s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
