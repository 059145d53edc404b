"""Runs that are under way, as a table for a terminal and as plain values for scripts."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fednh.metric_names import HELD_OUT, TEST_SET
from fednh.report.sheet import DASH
from fednh.runs.run_status import STATES, RunState, RunStates
from fednh.text import duration

SHOWN = {"train_loss": "loss", **TEST_SET, **HELD_OUT}
_STYLES = {"running": "bold cyan", "stopped": "yellow", "failed": "bold red", "finished": "green"}


def watch(console: Console, runs: RunStates, every: float, stop: threading.Event) -> None:
    """The table again and again, until `stop` is set; the last one stays on the screen."""
    with Live(table(runs), console=console, auto_refresh=False) as live:
        while not stop.wait(every):
            live.update(table(runs), refresh=True)
        live.vertical_overflow = "visible"  # longer than the screen: while it is live the end is cut off
        live.update(table(runs), refresh=True)


def plain(runs: RunStates) -> list[dict[str, Any]]:
    """A dictionary for every run."""
    return [
        {
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
        for state in runs.look()
    ]


def table(runs: RunStates) -> Table | Text:
    """For a terminal; metrics that no run has and notes that none needs are left out."""
    states = runs.look()
    if not states:
        return Text(f"no run below {', '.join(map(str, runs.folders))} yet")
    counts = Counter(state.state for state in states)
    headline = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
    metrics = [key for key in SHOWN if any(state.latest(key) is not None for state in states)]
    notes = any(state.note for state in states)
    made = Table(pad_edge=False, title=headline, title_justify="left", title_style="")
    for name in ("run", "state", "round", *(SHOWN[key] for key in metrics), "time", *(["note"] if notes else [])):
        if name in ("run", "note"):
            made.add_column(name, overflow="fold")
        else:
            made.add_column(name, justify="left" if name in ("state", "time") else "right", no_wrap=True)
    for state in states:
        rounds = DASH if state.rounds is None else f"{state.round}/{state.rounds}"
        values = [_number(state.latest(key), 3 if key == "train_loss" else 1) for key in metrics]
        rest = [rounds, *values, _when(state), *([state.note] if notes else [])]
        made.add_row(Text(runs.name(state.path)), Text(state.state, _STYLES[state.state]), *map(Text, rest))
    if any(state.state in ("stopped", "failed") for state in states):
        made.caption, made.caption_justify = "A stopped or failed run goes on with: fednh resume RUN", "left"
    return made


def _when(state: RunState) -> str:
    """Time left of a running one, time taken by a finished one, and how long ago the others did something."""
    if state.state == "finished":
        return DASH if state.seconds_taken is None else f"took {duration(state.seconds_taken)}"
    if state.state == "running":
        return "not known yet" if state.seconds_left is None else f"{duration(state.seconds_left)} left"
    return DASH if state.seconds_since is None else f"{duration(state.seconds_since)} ago"


def _number(value: float | None, digits: int) -> str:
    return DASH if value is None else f"{value:.{digits}f}"
