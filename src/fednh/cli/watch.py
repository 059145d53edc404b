"""The command that looks at runs while they are under way: as a table for people, as plain values for scripts."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fednh.cli.app import app, console_for_people
from fednh.interrupt import Stop
from fednh.metric_names import HELD_OUT, TEST_SET
from fednh.text import duration

if TYPE_CHECKING:
    from rich.console import Console, Group

    from fednh.runs.run_status import RunState, RunStates

SHOWN = {"train_loss": "loss", **TEST_SET, **HELD_OUT}
_MOST_TABLES = 3  # that one table of many columns becomes on a narrow terminal
_STYLES = {"running": "bold cyan", "stopped": "yellow", "failed": "bold red", "finished": "green"}


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
    from rich.live import Live

    from fednh.runs.run_status import RunStates

    runs, console = RunStates(folders), console_for_people()
    if json:
        import json as encoder

        typer.echo(encoder.dumps([plain(state) for state in runs.look()], indent=2))
    elif once or not console.is_terminal:
        console.print(overview(runs, console.width))
    else:
        stop = _until_stopped()
        with Live(fitted(runs, console), console=console, auto_refresh=False) as live:
            while not stop.wait(every):
                live.update(fitted(runs, console), refresh=True)
            live.vertical_overflow = "visible"  # longer than the screen: while it is live the end is cut off
            live.update(overview(runs, console.width), refresh=True)


def _until_stopped() -> Stop:
    """Set by Ctrl-C or SIGTERM, which end watching: there is nothing to save and nothing to say."""
    stop = Stop()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    return stop


def plain(state: RunState) -> dict[str, Any]:
    """The state of a run as plain values."""
    return {
        "run": str(state.path),
        "state": state.state,
        "round": state.round,
        "rounds": state.rounds,
        "metrics": {key: state.latest(key) for key in SHOWN if state.latest(key) is not None},
        "seconds_left": state.seconds_left,
        "seconds_since": state.seconds_since,
        "seconds_taken": state.seconds_taken,
        "note": state.note,
    }


def fitted(runs: RunStates, console: Console) -> Group:
    """The table as long as the terminal allows: finished runs are left out first, those with the oldest end first."""
    from fednh.runs.run_status import STATES

    states = runs.look()
    order = sorted(states, key=lambda state: (STATES.index(state.state), state.seconds_since or 0.0))
    kept = len(states)
    while True:
        shown = set(map(id, order[:kept]))
        table = overview(runs, console.width, [state for state in states if id(state) in shown], states)
        too_long = len(console.render_lines(table)) - console.height
        if too_long <= 0 or not kept:
            return table
        kept = max(kept - max(too_long // _MOST_TABLES, 1), 0)


def overview(
    runs: RunStates, width: int, shown: Sequence[RunState] | None = None, states: Sequence[RunState] | None = None
) -> Group:
    """For a terminal of this width: a table of the runs, and below it what is to be said of single ones.

    Metrics that no run has are left out; of `states` only those `shown` have a row.
    """
    from rich.console import Group
    from rich.text import Text

    from fednh.report.sheet import Cell, Sheet, number, to_rich, word
    from fednh.runs.run_status import STATES

    states = runs.look() if states is None else states
    shown = states if shown is None else shown
    if not states:
        return Group(Text(f"no run below {', '.join(map(str, runs.folders))} yet"))
    counts = Counter(state.state for state in states)
    headline = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
    metrics = [key for key in SHOWN if any(state.latest(key) is not None for state in shown)]
    sheet = Sheet("runs", headline, ["run", "state", "round", "time", *(SHOWN[key] for key in metrics)])
    notes = [f"{runs.name(state.path)}: {state.note}" for state in shown if state.note]
    for state in shown:
        rounds = number(state.round, f"{{:.0f}}/{state.rounds}") if state.rounds is not None else number(None)
        values = [number(state.latest(key), "{:.3f}" if key == "train_loss" else "{:.1f}") for key in metrics]
        style = Cell(state.state, STATES.index(state.state), style=_STYLES[state.state])
        sheet.rows.append([word(runs.name(state.path)), style, rounds, Cell(_when(state)), *values])
    if left_out := Counter(state.state for state in states) - Counter(state.state for state in shown):
        rest = ", ".join(f"{left_out[state]} {state}" for state in STATES if left_out[state])
        notes.append(f"Not shown: {rest}; fednh watch --once shows all.")
    if counts["stopped"] or counts["failed"]:
        notes.append("A stopped or failed run goes on with: fednh resume RUN")
    return to_rich(replace(sheet, note="\n".join(notes)), width)


def _when(state: RunState) -> str:
    """Time left of a running one, time taken by a finished one, and how long ago the others did something."""
    from fednh.report.sheet import DASH

    unknown = "not known yet" if state.state == "running" else DASH
    seconds, words = {
        "finished": (state.seconds_taken, "took {}"),
        "running": (state.seconds_left, "{} left"),
    }.get(state.state, (state.seconds_since, "{} ago"))
    return unknown if seconds is None else words.format(duration(seconds))
