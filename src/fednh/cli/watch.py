"""The command that looks at runs while they are under way."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from fednh.cli.app import app, console_for_people
from fednh.interrupt import Stop


@app.command()
def watch(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUNS...", help="Folders of runs, sweeps or federations, or above them.")
    ],
    once: Annotated[bool, typer.Option("--once", help="Print the table once; so it is where there is no terminal.")] = (
        False
    ),
    json: Annotated[bool, typer.Option("--json", help="Print it once, as a JSON list with an object a run.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 2.0,
) -> None:
    """Show how far runs are: round, metrics, time left, and whether they run, stopped, failed or finished.

    It reads run folders and nothing else, so it can be started and ended (Ctrl-C) at any time.
    """
    from fednh.cli import watch_screen
    from fednh.runs.run_status import RunStates

    runs, console = RunStates(folders), console_for_people()
    if json:
        import json as encoder

        typer.echo(encoder.dumps(watch_screen.plain(runs), indent=2))
    elif once or not console.is_terminal:
        console.print(watch_screen.table(runs))
    else:
        watch_screen.watch(console, runs, every, _until_stopped())


def _until_stopped() -> Stop:
    """Set by Ctrl-C or SIGTERM, which end watching: there is nothing to save and nothing to say."""
    stop = Stop()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    return stop
