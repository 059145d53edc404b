"""The command that runs many, a product of settings, one run folder each; and what a person sees meanwhile."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from fednh.cli.app import app, console_for_people, print_sheets
from fednh.cli.options import (
    OFFERED,
    Address,
    Backend,
    ConfigOrPreset,
    Given,
    Short,
    Track,
    set_option,
    set_texts,
    short,
    with_short_options,
)
from fednh.cli.run import stop_on_signal
from fednh.config.options import SHORT_OPTIONS
from fednh.errors import UserError
from fednh.text import duration, plural

if TYPE_CHECKING:
    from fednh.experiments.sweep import Planned, SweepOutcome
    from fednh.report.sheet import Sheet


MOST_WARNINGS = 10  # different ones that the end of a sweep repeats


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

    def update(self, active: Sequence[Planned]) -> None:
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
        self._say(f"{run.name}: {f'going on, {at} of' if at else 'starting,'} {plural(run.config.rounds, 'round')}")

    def ended(self, run: Planned, seconds: float, problem: str | None) -> None:
        super().ended(run, seconds, problem)
        what = f"failed: {problem}" if problem else f"done in {duration(seconds)}"
        self._say(f"{run.name}: {what}; {self.done} of {plural(self.runs, 'run')} done, {self.left([])}")

    def interrupted(self, run: Planned) -> None:
        at, rounds = run.folder.rounds_written(), plural(run.config.rounds, "round")
        self._say(f"{run.name}: interrupted, {at} of {rounds} there")

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

    def update(self, active: Sequence[Planned]) -> None:
        for run in active:
            self.progress.update(self.tasks[run.name], completed=run.folder.rounds_written())
        words = f"{self.done} of {plural(self.runs, 'run')} done, {self.left(active)}"
        self.progress.update(self.all, completed=self.rounds(active)[0], words=words)


def sweep_screen(console: Console, plan: Sequence[Planned], quiet: bool) -> SilentSweep:
    """The right display for where the output goes."""
    if quiet:
        return SilentSweep(console, plan)
    return SweepBar(console, plan) if console.is_terminal else SweepLines(console, plan)


# --- the command ---------------------------------------------------------------------------------------------------


@app.command()
@with_short_options
def sweep(
    *,
    source: ConfigOrPreset = None,
    varied: Annotated[
        Given,
        Short(
            short("method", several=True, metavar="A,B|all", help="Methods; see `fednh methods`."),
            short("beta", several=True, metavar="X,Y", help="Of the Dirichlet distribution."),
            short("seed", several=True, metavar="N,M", help="Seeds; tables average over them."),
        ),
    ],
    settings: Annotated[
        list[str] | None,
        set_option(
            "Any setting, one value or several, e.g. method.rho=0.1,0.9 or model.args.hidden=[16,8],[32]. "
            "A hyper-parameter is given to the methods that have it; none has it: an error. Repeatable.",
            metavar="KEY=X,Y",
            offered=OFFERED["setting"],
        ),
    ] = None,
    others: Annotated[Given, Short("data", "data_dir", "partition", "clients", "participation", "rounds", "epochs")],
    folds: Annotated[
        int | None,
        typer.Option(min=2, help="Every client's samples in so many folds; each run holds out one of them."),
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder that the run folders go to.")] = Path("sweep"),
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at the same time; default: 1, on Ray as many as there is room for.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Clients trained at once in each run; default: cores, on Ray slots, / jobs."),
    ] = None,
    track: Track = None,
    backend: Backend = "simulator",
    address: Address = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan; no run.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but the folder.")] = False,
) -> None:
    """Run every combination of the given methods, betas, seeds and settings; `fednh table` compares them.

    The same command again skips what is finished, goes on with what was interrupted and tries again what failed.
    """
    from fednh.backends import run_maker
    from fednh.callbacks.trackers import check as check_trackers
    from fednh.experiments.sweep import check, combine, execute, locked, place_of, share

    named = set_texts(settings)
    axes = _axes(varied | others, named)
    if folds is not None:
        axes |= {"data.folds": [folds], "data.fold": range(folds)}
    check_trackers(track or [])
    run_maker(backend, address)  # refuses what cannot be
    plan = combine(source, axes, [*named, "data.fold"], out)
    console = console_for_people()
    with nullcontext() if dry_run else locked(out):
        check(plan)
        pending = sum(not run.folder.finished for run in plan)
        with stop_on_signal() as stop, place_of(backend, address, plan) as place:
            at_once, each = share(jobs, workers, pending, place.slots)
            if dry_run:
                print_sheets(_plan_sheet(plan, at_once, each))
                return
            with sweep_screen(console, plan, quiet) as screen:
                outcome = execute(plan, at_once, each, track or [], screen, stop, place)
    _tell(outcome, plan, out, quiet)


def _axes(given: Given, named: Mapping[str, str]) -> dict[str, Sequence[Any]]:
    """Setting -> its values, from short options and --set."""
    from fednh.experiments.sweep import values
    from fednh.methods.registry import listed

    if given.get("method.name") == "all":
        given["method.name"] = ",".join(name for name, cls in listed() if isinstance(cls, type))
    for key in named:
        if key in given:
            flag = next(option.flag for option in SHORT_OPTIONS.values() if option.key == key)
            raise UserError(f"{key} is given twice: with {flag} and with --set")
        if key == "workers":
            raise UserError("workers is not a setting of a sweep; use --workers")
    paths = ("data.name", "data.dir")  # they may have commas
    short_options = {key: [value] if key in paths else values(str(value)) for key, value in given.items()}
    return {**short_options, **{key: values(text) for key, text in named.items()}}


def _plan_sheet(plan: Sequence[Planned], jobs: int, workers: int) -> Sheet:
    from fednh.report.sheet import Sheet, word

    rows = []
    for run in plan:
        if run.folder.finished:
            state = "finished: skipped"
        elif run.folder.rounds_written():
            state = f"goes on, {run.folder.rounds_written()} of {plural(run.config.rounds, 'round')} there"
        else:
            state = f"new, {plural(run.config.rounds, 'round')}"
        rows.append([word(run.name), word(state)])
    pending = sum(not run.folder.finished for run in plan)
    note = f"Runs at a time: {jobs}; workers in each: {workers}. A sweep estimates its time while it runs."
    return Sheet("plan", f"{plural(len(plan), 'run')}, {pending} to do", ["run", "state"], rows, note)


def _tell(outcome: SweepOutcome, plan: Sequence[Planned], out: Path, quiet: bool) -> None:
    """The end of a sweep: what came out, what failed and why, and the exit code."""
    from fednh.report.load import load_runs
    from fednh.report.tables import result_sheets
    from fednh.runs.layout import SweepLayout

    done = [run.folder.path for run in plan if run.folder.finished]
    if done and not quiet and not outcome.interrupted:
        print_sheets(*(sheet for sheet in result_sheets(load_runs(done)) if sheet.name != "fairness"))
        now, before = plural(len(outcome.finished), "run"), len(outcome.skipped)
        typer.echo(f"{now} finished now, {before} before. All: fednh table {out}")
    for warning, logs in list(outcome.warnings.items())[:MOST_WARNINGS]:
        typer.echo(f"fednh: {plural(len(logs), 'finished run')} said: {warning} (for example {logs[0]})", err=True)
    if (more := len(outcome.warnings) - MOST_WARNINGS) > 0:
        typer.echo(f"fednh: and {plural(more, 'other sentence')}, in {SweepLayout(out).notes}/*.log", err=True)
    for name, why in outcome.failed.items():
        typer.echo(f"fednh: {name} failed: {why} (its output: {SweepLayout(out).log_file(name)})", err=True)
    if outcome.interrupted:
        typer.echo(
            f"fednh: interrupted; {len(done)} of {plural(len(plan), 'run')} finished, the same command goes on",
            err=True,
        )
        raise typer.Exit(130)
    if outcome.failed:
        typer.echo(
            f"fednh: {len(outcome.failed)} of {plural(len(plan), 'run')} failed; the same command tries again", err=True
        )
        raise typer.Exit(1)
    if quiet:
        typer.echo(str(out))
