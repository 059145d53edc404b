"""What a person sees while a run goes on: a progress bar on a terminal, plain lines on a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from fednh.callbacks import Callback, Phase
from fednh.metric_names import HELD_MACRO, HELD_OUT, HELD_SHARE, TEST_SET, RoundRecord
from fednh.text import duration, plural


class Silent(Callback):
    """Prints only warnings: refused uploads, damaged checkpoints, empty rounds."""

    def __init__(self, console: Console):
        self.console = console

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def on_note(self, text: str) -> None:
        self.console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)


class _Clock:
    """Clients a second and time left, from the rounds seen by this process."""

    def __init__(self, rounds: int):
        self.rounds, self.started, self.seen, self.clients = rounds, time.perf_counter(), 0, 0

    def line(self, record: RoundRecord) -> tuple[str, str]:
        self.seen += 1
        self.clients += len(record["clients"])
        elapsed = time.perf_counter() - self.started
        left = elapsed / self.seen * (self.rounds - record["round"])
        return f"{self.clients / elapsed:.1f} clients/s", f"{duration(left)} left"


class Throttle:
    """A timer: `over` is true when nothing was printed for so long that a run may seem to hang."""

    def __init__(self, seconds: float = 10.0):
        self.seconds, self.last = seconds, time.monotonic()

    def over(self) -> bool:
        now = time.monotonic()
        if now - self.last < self.seconds:
            return False
        self.last = now
        return True


def progress_words(phase: Phase, done: int, total: int) -> str:
    """What a run is at, within a round."""
    if phase == "training":
        return f"training: {done} of {plural(total, 'client')}"
    return f"evaluating: {done / max(total, 1):.0%} of {plural(total, 'sample')}"


def slow_evaluation(seconds: float = 10.0) -> Callable[[int, int], None]:
    """Returns a callback that prints the progress of an evaluation to standard error every few seconds."""
    throttle = Throttle(seconds)

    def tell(done: int, total: int) -> None:
        if throttle.over():
            print(progress_words("evaluating", done, total), file=sys.stderr, flush=True)

    return tell


class RunLines(Silent):
    """One plain line a round."""

    def __init__(self, console: Console, rounds: int, name: str):
        super().__init__(console)
        self.clock, self.rounds, self.name, self.throttle = _Clock(rounds), rounds, name, Throttle()

    def on_progress(self, phase: Phase, done: int, total: int) -> None:
        if self.throttle.over():  # a long round should not look like a hang
            self.console.print(progress_words(phase, done, total), markup=False, highlight=False)

    def on_round(self, record: RoundRecord) -> None:
        self.throttle = Throttle()
        words = [f"{self.name} round {record['round']}/{self.rounds}", *metric_words(record), *self.clock.line(record)]
        self.console.print("  ".join(words), markup=False, highlight=False, soft_wrap=True)


class RunBar(Silent):
    """A progress bar with the latest metrics."""

    def __init__(self, console: Console, rounds: int, name: str):
        super().__init__(console)
        self.clock, self.latest, self.throttle = _Clock(rounds), dict[str, Any](), Throttle()
        self.progress = Progress(
            TextColumn("[bold]{task.description}[/bold]"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[metrics]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self.task = self.progress.add_task(name, total=rounds, metrics="")

    def __enter__(self) -> RunBar:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def on_round(self, record: RoundRecord) -> None:
        self.latest |= {key: value for key, value in record.items() if value is not None}
        words = [*metric_words({**record, **self.latest}), *self.clock.line(record)]
        self.progress.update(self.task, completed=record["round"], metrics="  ".join(words))
        self.throttle = Throttle()

    def on_progress(self, phase: Phase, done: int, total: int) -> None:
        if phase == "evaluating" or self.throttle.over():  # short rounds show the metrics of the last one instead
            self.progress.update(self.task, metrics=progress_words(phase, done, total))


def metric_words(record: Mapping[str, Any]) -> list[str]:
    """The metrics of a round in words, those that it has."""
    words = [] if record["train_loss"] is None else [f"loss {record['train_loss']:.3f}"]
    shown = {**TEST_SET, **{key: HELD_OUT[key] for key in (HELD_SHARE, HELD_MACRO)}}
    for key, name in shown.items():
        if record.get(key) is not None:
            words.append(f"{name} {record[key]:.1f}")
    return words if record.get("epsilon") is None else [*words, f"epsilon {record['epsilon']:.2f}"]


def screen_for(console: Console, rounds: int, name: str, quiet: bool) -> Silent:
    """The right display for where the output goes."""
    if quiet:
        return Silent(console)
    return RunBar(console, rounds, name) if console.is_terminal else RunLines(console, rounds, name)
