"""What a person sees while a sweep goes on: how many runs are done, which are at work, and the time left."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from fednh.experiments.sweep import Planned
from fednh.words import duration


class SilentSweep:
    """Counts runs and prints nothing."""

    def __init__(self, console: Console, plan: Sequence[Planned]):
        self.console = console
        self.runs = len(plan)
        self.pending = [run for run in plan if not run.folder.finished]
        self.before = {run.name: min(run.folder.rounds_written(), run.config.rounds) for run in self.pending}
        self.ended_runs: set[str] = set()
        self.done = self.runs - len(self.pending)
        self.began = time.perf_counter()

    def __enter__(self) -> SilentSweep:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def started(self, run: Planned) -> None:
        pass

    def ended(self, run: Planned, seconds: float, problem: str | None) -> None:
        self.ended_runs.add(run.name)
        self.done += problem is None

    def interrupted(self, run: Planned) -> None:
        """The run was asked to stop and has saved what it had."""

    def look(self, active: Sequence[Planned]) -> None:
        pass

    def rounds(self, active: Sequence[Planned]) -> tuple[int, int]:
        """Rounds done by this sweep, and rounds that it began with to do."""
        total = sum(run.config.rounds - self.before[run.name] for run in self.pending)
        ended = sum(r.config.rounds - self.before[r.name] for r in self.pending if r.name in self.ended_runs)
        return ended + sum(max(r.folder.rounds_written() - self.before[r.name], 0) for r in active), total

    def left(self, active: Sequence[Planned]) -> str:
        """Time left, if all rounds take as long as those so far."""
        done, total = self.rounds(active)
        if not done:
            return "time left not known yet"
        return f"about {duration((time.perf_counter() - self.began) / done * (total - done))} left"


class SweepLines(SilentSweep):
    """Plain lines: when a run starts, and when it ends."""

    def started(self, run: Planned) -> None:
        at = self.before[run.name]
        self._say(f"{run.name}: {f'going on, {at} of' if at else 'starting,'} {run.config.rounds} rounds")

    def ended(self, run: Planned, seconds: float, problem: str | None) -> None:
        super().ended(run, seconds, problem)
        what = f"failed: {problem}" if problem else f"done in {duration(seconds)}"
        self._say(f"{run.name}: {what}; {self.done} of {self.runs} runs done, {self.left([])}")

    def interrupted(self, run: Planned) -> None:
        self._say(f"{run.name}: interrupted, {run.folder.rounds_written()} of {run.config.rounds} rounds there")

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


class SweepBar(SilentSweep):
    """A bar for the sweep and one for each run at work."""

    def __init__(self, console: Console, plan: Sequence[Planned]):
        super().__init__(console, plan)
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f} rounds"),
            TextColumn("{task.fields[words]}", markup=False),
            TimeElapsedColumn(),
            console=console,
        )
        self.all = self.progress.add_task("sweep", total=self.rounds([])[1], words="")
        self.tasks: dict[str, TaskID] = {}

    def __enter__(self) -> SweepBar:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def started(self, run: Planned) -> None:
        self.tasks[run.name] = self.progress.add_task(f"  {run.name}", total=run.config.rounds, words="")

    def ended(self, run: Planned, seconds: float, problem: str | None) -> None:
        super().ended(run, seconds, problem)
        self.progress.remove_task(self.tasks.pop(run.name))
        if problem:
            self.progress.console.print(f"{run.name}: failed: {problem}", style="yellow", markup=False)

    def interrupted(self, run: Planned) -> None:
        self.progress.remove_task(self.tasks.pop(run.name))
        self.progress.console.print(f"{run.name}: interrupted", markup=False)

    def look(self, active: Sequence[Planned]) -> None:
        for run in active:
            self.progress.update(self.tasks[run.name], completed=run.folder.rounds_written())
        words = f"{self.done} of {self.runs} runs done, {self.left(active)}"
        self.progress.update(self.all, completed=self.rounds(active)[0], words=words)


def sweep_screen(console: Console, plan: Sequence[Planned], quiet: bool) -> SilentSweep:
    """The right display for where the output goes."""
    if quiet:
        return SilentSweep(console, plan)
    return SweepBar(console, plan) if console.is_terminal else SweepLines(console, plan)
