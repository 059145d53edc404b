"""The commands that answer a question with runs of their own: which method for these sites, how many samples a site.

And what a person sees meanwhile.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from fednh.callbacks import SearchWatcher
from fednh.cli.app import app, console_for_people
from fednh.cli.options import (
    OFFERED,
    ConfigOrPreset,
    Given,
    Short,
    set_option,
    set_values,
    short,
    with_short_options,
)
from fednh.cli.run import stop_on_signal
from fednh.errors import UserError
from fednh.text import duration

if TYPE_CHECKING:
    from fednh.experiments.recommend import Recommendation


class SearchLines(SearchWatcher):
    """Plain lines: what is tried, what leads, and how much time is left."""

    def __init__(self, console: Console):
        self.console = console

    def trying(self, what: str, leads: str, left: float) -> None:
        words = [what, *([leads] if leads else []), f"{duration(max(left, 0))} left"]
        self.note("; ".join(words))

    def note(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


class SearchBar(SearchLines):
    """One bar for the time, with what is tried now and what leads."""

    def __init__(self, console: Console, minutes: float):
        super().__init__(console)
        self.progress = Progress(
            BarColumn(bar_width=16),
            TextColumn("{task.fields[left]} left"),
            TextColumn("{task.description}", markup=False),
            console=console,
        )
        self.total = 60 * minutes
        self.task = self.progress.add_task("", total=self.total, left=duration(self.total))

    def __enter__(self) -> SearchBar:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def trying(self, what: str, leads: str, left: float) -> None:
        words = f"{what}; {leads}" if leads else what
        left = max(left, 0)
        self.progress.update(self.task, completed=self.total - left, description=words, left=duration(left))


@app.command()
@with_short_options
def recommend(
    *,
    source: ConfigOrPreset = None,
    given: Annotated[Given, Short(short("data", required=True), "data_dir", "rounds", "epochs", "device", "workers")],
    minutes: Annotated[float, typer.Option(help="About how long it may take.")] = 10.0,
    methods: Annotated[
        str, typer.Option("--method", metavar="A,B", help="Try these, and training alone; default: a selection.")
    ] = "",
    seeds: Annotated[int, typer.Option(min=1, help="At most so many seeds.")] = 3,
    settings: Annotated[
        list[str] | None,
        set_option("A setting that holds for everything that is tried.", offered=OFFERED["setting"]),
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder of the answer: its runs, models and page.")] = Path("answer"),
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but the folder.")] = False,
) -> None:
    """Find out what federating gives each site, and with which method.

    Tries what is worth trying on folds of the sites' samples, says how sure the answer is, and trains the best on all
    samples. The same command goes on after an interruption.
    """
    from fednh.config import load
    from fednh.errors import Interrupted
    from fednh.experiments.recommend import ADAPTED, SHARED, find

    chosen = {**given, **set_values(settings)}
    config = load(source, {**SHARED, **chosen})
    names = [name.strip() for name in methods.split(",") if name.strip()]
    console = console_for_people(stderr=quiet)
    watcher = SearchWatcher() if quiet else SearchLines(console)
    if console.is_terminal and not quiet:
        watcher = SearchBar(console, minutes)
    try:
        with stop_on_signal() as stop, watcher:
            known = {*chosen, *(() if source is None else ADAPTED)}
            answer = find(config, out, minutes, names, seeds, known, watcher=watcher, stop=stop)
    except Interrupted:
        typer.echo("fednh: interrupted; the same command goes on", err=True)
        raise typer.Exit(130) from None
    if not quiet:
        _tell_answer(console, answer)
    typer.echo(str(out))


def _tell_answer(console: Console, answer: Recommendation) -> None:
    """One sentence for all, one a site, the table, the page, the models and the command."""
    from fednh.report.sheet import to_rich
    from fednh.report.site_tables import site_sheet
    from fednh.runs.layout import AnswerLayout

    console.print(to_rich(answer.tried, console.width))
    console.print(to_rich(site_sheet(answer.table), console.width))
    lines = [answer.headline, *(f"{one.site}: {one.sentence}" for one in answer.sites), "", *answer.notes, ""]
    models = AnswerLayout(answer.path).models
    lines += [f"best over all sites: {answer.winner}; its models, trained on all samples: {models}"]
    lines += [f"page: {answer.report}", f"to train them again: {answer.command}"]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


# --- learning curve --------------------------------------------------------------------------------------------------


@app.command("learning-curve")
@with_short_options
def learning_curve(
    *,
    source: ConfigOrPreset = None,
    given: Annotated[
        Given,
        Short(
            *("method", "data", "data_dir"),
            short("partition", help="See `fednh partitions`; default: the natural sites, if there are."),
            *("clients", "beta", "rounds", "epochs", "device", "workers"),
        ),
    ],
    samples: Annotated[
        str, typer.Option(metavar="N,M", help="Training samples of every site; those with fewer use all.")
    ] = "10,20,50,100,200",
    seeds: Annotated[int, typer.Option(min=1, help="So many seeds, from 0.")] = 3,
    minutes: Annotated[
        float | None, typer.Option(help="Begin no run after so long, and tell what is finished; default: no limit.")
    ] = None,
    settings: Annotated[
        list[str] | None, set_option("A setting that holds for all runs.", offered=OFFERED["setting"])
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder for runs, numbers and figure.")] = Path("learning-curve"),
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but the folder.")] = False,
) -> None:
    """Find out how many samples a site needs: accuracy against training samples, federated and alone.

    Runs the method and `local` with so many training samples a site, on the same held-out samples, and says how sure
    the differences are. The same command goes on after an interruption; further sizes and seeds reuse what is finished.
    """
    from fednh import extras
    from fednh.errors import Interrupted
    from fednh.experiments.learning_curve import find
    from fednh.report.sheet import to_rich
    from fednh.runs.layout import CurveLayout

    extras.need("report", "a figure or report")
    words = [word.strip() for word in samples.split(",")]
    if not all(word.isascii() and word.isdigit() for word in words):
        raise UserError(f"--samples {samples!r} should be numbers of training samples, such as 10,20,50")
    console = console_for_people(stderr=quiet)
    watcher = SearchWatcher() if quiet else SearchLines(console)
    try:
        with stop_on_signal() as stop:
            chosen = {**given, **set_values(settings)}
            curve = find(source, chosen, [int(word) for word in words], seeds, out, minutes, watcher, stop)
    except Interrupted:
        typer.echo("fednh: interrupted; the same command goes on", err=True)
        raise typer.Exit(130) from None
    if not quiet:
        console.print(to_rich(curve.sheet(), console.width))
        layout = CurveLayout(out)
        files = f"figure: {layout.figure} (and .png, .csv); runs: {layout.runs}"
        lines = [*curve.sentences, "", *curve.notes, files]
        console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    typer.echo(str(out))
