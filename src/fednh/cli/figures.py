"""Commands that draw: single figures of finished runs, the whole report, and the paper's motivating example."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from fednh import extras
from fednh.cli.app import app, console_for_people
from fednh.cli.options import OFFERED, RunFolders
from fednh.errors import UserError, did_you_mean


@app.command()
def figure(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[NAME] DIR...",
            help="A figure, 'all' (the default), or 'list': which ones are possible; then run folders.",
            autocompletion=OFFERED["figure"],
        ),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="A .svg, .pdf or .png file; a folder for 'all'.")
    ] = None,
    clients: Annotated[
        str | None,
        typer.Option(help="Numbers or sites, such as 0,1 (partition: up to eight; representations: two)."),
    ] = None,
    classes: Annotated[str | None, typer.Option(help="Class names, such as bear,leopard (representations).")] = None,
    x: Annotated[str, typer.Option(help="round, bytes or seconds (curves).")] = "round",
    groups: Annotated[
        Path | None, typer.Option(help='Super-classes, as JSON {"group": ["class", ...]} (similarity).')
    ] = None,
    setting: Annotated[str | None, typer.Option(help="The swept setting, such as method.rho (sensitivity).")] = None,
    base: Annotated[
        float | None, typer.Option(help="The value to compare with; default: lowest (sensitivity).")
    ] = None,
    shots: Annotated[str, typer.Option(help="Few-shot is below the first, many-shot above the second.")] = "20,100",
) -> None:
    """Draw a figure from finished runs, or list those that the runs allow."""
    extras.need("report", "a figure or report")
    from fednh.report.figures import FIGURES, Choice, FigureUnavailable, style, write_figure, write_possible
    from fednh.report.load import load_runs

    known = ("list", "all", *FIGURES)
    name, folders = (words[0], words[1:]) if words[0] in known else ("all", words)
    if name not in words and not Path(words[0]).exists():
        raise UserError(f"there is no figure and no folder {words[0]!r}{did_you_mean(words[0], known)}")
    if not folders:
        raise UserError(f"{name}: of which runs? Give their folders: fednh figure {name} DIR...")
    bounds = _two_numbers(shots, "--shots")
    choice = Choice(_split(clients), _split(classes), x, groups, setting, base, bounds)
    runs = load_runs([Path(folder) for folder in folders])
    if name in ("list", "all"):
        console = console_for_people()
        into = None if name == "list" else (out or Path("figures"))
        for kind, where, reason in write_possible(runs, choice, into):
            answer = f"no: {reason}" if reason else ("yes" if where is None else str(where))
            console.print(f"{kind:16} {answer}", highlight=False, markup=False, soft_wrap=True)
        return
    target = out or Path(f"{name}.svg")
    if target.suffix.lower().removeprefix(".") not in style.FORMATS:
        raise UserError(f"{target}: a figure is written as .svg, .pdf or .png")
    try:
        for path, caption in write_figure(FIGURES[name], runs, choice, target):
            typer.echo(f"{path}\n  {caption}")
    except FigureUnavailable as error:
        raise UserError(f"{name} cannot be drawn from these runs: {error}") from error


@app.command()
def report(
    folders: RunFolders,
    out: Annotated[Path, typer.Option("--out", "-o", help="The .html or .pdf file to write.")] = Path("report.html"),
    title: Annotated[str | None, typer.Option(help="What stands at its top; default: the question it answers.")] = None,
    paper: Annotated[bool, typer.Option("--paper", help="Set the paper's numbers beside those that match.")] = False,
    groups: Annotated[Path | None, typer.Option(help="Super-classes for the similarity figure, as JSON.")] = None,
) -> None:
    """Write one file about finished runs: settings, tables, figures, clients. HTML needs no network, PDF Chromium."""
    extras.need("report", "a figure or report")
    from fednh.io.files import atomic_write
    from fednh.report.html import write_report
    from fednh.report.load import load_runs
    from fednh.text import size

    printer = _pdf_printer(out)
    runs = load_runs(folders)
    if printer is None:
        write_report(runs, out, title, paper, groups)
    else:
        with atomic_write(out) as draft, TemporaryDirectory() as place:
            page = Path(place) / "report.html"
            write_report(runs, page, title, paper, groups)
            _print_pdf(printer, page, draft)
    typer.echo(f"{out} ({size(out.stat().st_size)})")


def _pdf_printer(out: Path) -> str | None:
    """The browser that prints a report as PDF, where `out` is one; None: it is HTML."""
    if out.suffix.lower() in (".html", ".htm"):
        return None
    if out.suffix.lower() != ".pdf":
        raise UserError(f"{out}: a report is written as .html or .pdf")
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        raise UserError(f"{out}: Chromium prints a report as PDF and is not installed; write .html and print that")
    return browser


def _print_pdf(browser: str, page: Path, draft: Path) -> None:
    """Print a page that was written by us, which needs no network and no sandbox."""
    profile = page.with_name("profile")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-pdf-header-footer"]
    command = [browser, *flags, f"--user-data-dir={profile}", f"--print-to-pdf={draft.absolute()}", page.as_uri()]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(f"{browser} did not print the report within five minutes; write .html and print that") from None
    if not draft.exists():
        reason = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
        raise UserError(f"{browser} cannot print the report ({reason}); write .html and print that")


def _split(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(word.strip() for word in text.split(","))


def _two_numbers(text: str, option: str) -> tuple[int, int]:
    try:
        first, second = (int(word) for word in text.split(","))
    except ValueError:
        raise UserError(f"{option} {text!r} should be two whole numbers, such as 20,100") from None
    return first, second


@app.command()
def spiral(
    out: Annotated[Path, typer.Option(help="Where runs, figures and numbers go.")] = Path("runs/spiral"),
    seed: Annotated[int, typer.Option(min=0, help="Everything random derives from it.")] = 0,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of the runs with one client.")] = 201,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of the runs with 100 clients.")] = 100,
) -> None:
    """Train the paper's motivating example and draw its Figures 1 and 2; says whether its claims are seen."""
    extras.need("report", "the spiral")
    from fednh.experiments import spiral as example
    from fednh.io.files import write_bytes
    from fednh.report.figures import style

    example.train(out, seed, epochs, rounds, lambda name: typer.echo(f"training {name}", err=True))
    seen = example.load_example(out)
    numbers = example.numbers(seen)
    judged = example.claims(numbers)
    text = example.verdict(judged)
    result = {"seed": seed, "epochs": epochs, "rounds": rounds, **numbers, "claims": judged, "text": text}
    write_bytes(out / "spiral.json", (json.dumps(result, indent=2) + "\n").encode())
    with style.theme():
        for name, figure in (("figure1", example.figure1(seen)), ("figure2", example.figure2(seen))):
            for kind in ("svg", "png"):
                style.save(figure, out / f"{name}.{kind}")
    typer.echo(text)
    typer.echo(f"{out}/figure1.svg, figure2.svg (and .png), spiral.json")
