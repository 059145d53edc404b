"""Commands that use trained models: predict, evaluate, personalise, export."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal

import typer

from fednh import extras
from fednh.cli.app import app, console_for_people, print_sheets
from fednh.cli.options import OFFERED, set_option, set_values
from fednh.errors import UserError
from fednh.text import plural

if TYPE_CHECKING:
    from fednh.inference.metrics import Assessment
    from fednh.inference.personalize import Personalised
    from fednh.report.sheet import Sheet

ModelPath = Annotated[Path, typer.Argument(metavar="MODEL", help="A model file, or a run folder: its global model.")]
ClientOption = Annotated[
    str | None,
    typer.Option(help="Of a run folder: this client's personal model, by its number or its site's name."),
]
SiteOption = Annotated[
    str | None, typer.Option(help="The same by the site's name first; for sites whose names are numbers.")
]
DataOption = Annotated[
    str,
    typer.Option(
        help="A data set by name, or a source of your own, as in `fednh run`.", autocompletion=OFFERED["data"]
    ),
]
FormatOption = Annotated[Literal["table", "json"], typer.Option("--format", help="json is for machines.")]
Settings = Annotated[list[str] | None, set_option("How to read the data, e.g. data.label=kind.")]
WeightsOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Of a model with a frozen body: its weights, where they are not found."),
]


SAMPLES = {
    "held": "the samples that the run held out",
    "test": "test samples",
    "train": "training samples",
    "all": "all samples",
}


@app.command()
def predict(
    model: ModelPath,
    paths: Annotated[
        list[Path], typer.Argument(metavar="INPUT...", help="Images, folders of them, .npz, .csv, .parquet.")
    ],
    top: Annotated[int, typer.Option(min=1, help="How many classes to name.")] = 1,
    form: Annotated[
        Literal["table", "csv", "json"], typer.Option("--format", help="csv and json are for machines.")
    ] = "table",
    reject: Annotated[
        str | None, typer.Option(metavar="COS", help="Mark inputs less similar than this to any class: 0.6, auto, 1%.")
    ] = None,
    client: ClientOption = None,
    site: SiteOption = None,
    weights: WeightsOption = None,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write to this file.")] = None,
) -> None:
    """Name the class of every input. Exit code 1: some could not be read; they are named, the others are done."""
    from fednh.inference.metrics import records, to_csv, to_json, to_lines
    from fednh.inference.model import load_model

    text = _text_settings(set_values(settings))
    used = load_model(model, _chosen(model, client, site), weights)
    threshold = None if reject is None else used.threshold(reject)
    top = min(top, len(used.classes))
    failed: list[str] = []

    def tell(sentence: str) -> None:
        failed.append(sentence)
        typer.echo(f"fednh: {sentence}", err=True)

    done = used.batches(paths, tell, text)
    predictions = (records(batch, scores, used.classes, top, threshold) for batch, scores in done)
    if form == "json":
        lines = to_json(predictions)
    elif form == "csv":
        lines = to_csv(predictions, top, used.method.cosine, threshold is not None)
    else:
        lines = to_lines(predictions)
    with _output_file(out) as file:
        for line in lines:
            file.write(line)
    if failed:
        raise typer.Exit(1)


@app.command()
def evaluate(
    model: ModelPath,
    data: Annotated[
        str | None,
        typer.Option(
            help="As in `fednh run`; default: the data of the model's own run.", autocompletion=OFFERED["data"]
        ),
    ] = None,
    split: Annotated[
        Literal["held", "test", "train", "all"] | None,
        typer.Option(help="Which of its samples; default: those that the run held out, if it did, else the test set."),
    ] = None,
    form: FormatOption = "table",
    client: ClientOption = None,
    site: SiteOption = None,
    weights: WeightsOption = None,
    settings: Settings = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Also write evaluation.json, .svg and .png to this folder.")
    ] = None,
) -> None:
    """Measure a model on labelled data: precision, recall, F1, confusion, calibration."""
    from fednh.callbacks.screen import slow_evaluation
    from fednh.inference.eval_data import select_eval_samples
    from fednh.inference.metrics import assess
    from fednh.inference.model import load_model

    if out is not None:
        extras.need("report", "a drawn evaluation")
    used = load_model(model, _chosen(model, client, site), weights)
    chosen = select_eval_samples(used.card, model, data, split, set_values(settings))
    if chosen.warning:
        typer.echo(f"fednh: warning: {chosen.warning}", err=True)
    result = assess(used, chosen.x, chosen.y, slow_evaluation())
    owner = {"client": used.card.client, **({} if used.card.site is None else {"site": used.card.site})}
    samples = {"data": chosen.data, "split": chosen.split, "trained_on": chosen.trained_on}
    record = {"model": str(model), **owner, **samples, **result.record()}
    if out is not None:
        _write_evaluation(out, record, result)
    if form == "json":
        typer.echo(json.dumps(record, indent=2))
        return
    _print_assessment(result, f"{chosen.data}, {SAMPLES[chosen.split]}:")
    if out is not None:
        typer.echo(f"written to {out}: evaluation.json, evaluation.svg, evaluation.png")


@app.command()
def personalize(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    data: DataOption,
    epochs: Annotated[int | None, typer.Option(min=1, help="Local epochs; default: the run's.")] = None,
    holdout: Annotated[
        float | None, typer.Option(min=0.01, max=0.9, help="Share held out; default: the test set, else 0.2.")
    ] = None,
    site: Annotated[str | None, typer.Option(help="Of a source that holds several sites: this one.")] = None,
    weights: WeightsOption = None,
    network: Annotated[
        str | None, typer.Option(help="The site's, where the run's clients have different ones.")
    ] = None,
    settings: Settings = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The folder to write to; default: RUN-personal.")
    ] = None,
    form: FormatOption = "table",
) -> None:
    """Make a personal model for a site that never took part, and compare it with the global and a local one."""
    from fednh.inference.personalize import empty_folder
    from fednh.inference.personalize import personalize as train
    from fednh.runs.layout import MODEL

    folder = empty_folder(out or run.with_name(f"{run.resolve().name}-personal"))
    made = train(run, data, epochs, holdout, set_values(settings), site, weights, network)
    if known := made.comparison["held_out_trained_on"]:
        words = f"the run was trained on {known:,} of the {made.comparison['held_out']:,} samples to compare on"
        typer.echo(f"fednh: warning: {words}, so the global and the personalised model look too good", err=True)
    sheet, made.comparison["verdict"] = _newcomer_sheet(made, site or data)
    made.write(folder)
    if form == "json":
        typer.echo(json.dumps(made.comparison, indent=2))
    else:
        print_sheets(sheet)
        typer.echo(made.comparison["verdict"])
        typer.echo(str(folder / MODEL))


@app.command()
def export(
    model: ModelPath,
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")],
    client: ClientOption = None,
    site: SiteOption = None,
    weights: WeightsOption = None,
) -> None:
    """Write a model as ONNX, preprocessing included; it is checked against the original before it is kept."""
    from fednh.inference.export import export as write
    from fednh.inference.model import load_model

    facts = write(load_model(model, _chosen(model, client, site), weights), out)
    typer.echo(f"{facts['file']}: agrees within {facts['difference']:.1e} on {facts['samples']} {facts['checked_on']}")


def _chosen(run: Path, client: str | None, site: str | None) -> int | str | None:
    """The client of --client or --site: the first takes a number as a number, the second as a name if there is one."""
    if client is None or site is not None:
        if client is not None:
            raise UserError("--client and --site mean the same: give one of them")
        return site
    if not (client.isascii() and client.isdigit() and str(int(client)) == client):
        return client
    from fednh.runs.run_folder import read_names

    names = read_names(run) if run.is_dir() else {}
    if client in names.values() and names.get(int(client)) != client:
        words = f"--client {client} is taken as a number, the site {names.get(int(client), '?')}"
        typer.echo(f"fednh: warning: {words}; the site called {client} is --site {client}", err=True)
    return int(client)


def _text_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The --set options of `predict`: how text files are written; everything else is in the model's card."""
    from fednh.config import load

    known = ("data.encoding", "data.separator", "data.decimal")
    if others := [key for key in settings if key not in known]:
        words = f"only {', '.join(known[:-1])} and {known[-1]} can be set"
        raise UserError(f"--set {others[0]}: inputs are read as the model's card says; {words}")
    data = load(None, settings).data
    return {key.removeprefix("data."): getattr(data, key.removeprefix("data.")) for key in settings}


@contextmanager
def _output_file(path: Path | None) -> Iterator[IO[str]]:
    """Standard output, or a file that gets its name once it is whole."""
    if path is None:
        yield sys.stdout
        return
    from fednh.io.files import atomic_write

    with atomic_write(path) as place, place.open("w", encoding="utf-8", newline="") as file:
        yield file


def _write_evaluation(folder: Path, record: dict[str, Any], result: Assessment) -> None:
    from fednh.io.files import write_json
    from fednh.report.figures import style
    from fednh.report.figures.similarity import draw_assessment

    write_json(folder / "evaluation.json", record)
    with style.theme():
        figure = draw_assessment(result)
        for ending in ("svg", "png"):
            style.save(figure, folder / f"evaluation.{ending}")


def _print_assessment(result: Assessment, title: str) -> None:
    from fednh.report.sheet import Sheet, number, word

    console = console_for_people()
    rows = [
        [
            word(c.name),
            *(number(100 * rate, "{:.1f}") for rate in (c.precision, c.recall, c.f1)),
            number(c.support, "{:,}"),
        ]
        for c in result.classes
    ]
    columns = ["class", "precision", "recall", "F1", "support"]
    print_sheets(Sheet("classes", title, columns, rows))
    words = [
        f"accuracy {100 * result.accuracy:.1f}%",
        f"balanced {100 * result.balanced_accuracy:.1f}%",
        f"macro F1 {100 * result.macro_f1:.1f}%",
        f"ECE {100 * result.ece:.1f}%",
        f"{result.samples:,} samples",
    ]
    console.print("  ".join(words), highlight=False)
    worst = sorted(
        (
            (n, result.classes[i].name, result.classes[j].name)
            for i, row in enumerate(result.confusion)
            for j, n in enumerate(row)
            if i != j and n
        ),
        key=lambda mistake: -mistake[0],
    )[:3]
    if worst:
        confused = "; ".join(f"{truth} taken for {guess} {plural(n, 'time')}" for n, truth, guess in worst)
        console.print(f"most often confused: {confused}", highlight=False, markup=False)


def _newcomer_sheet(made: Personalised, name: str) -> tuple[Sheet, str]:
    """The models of a newcomer with the intervals of their accuracies, and the sentence on which one to use."""
    from fednh.report.sheet import Sheet, number, word
    from fednh.report.sites import single_row
    from fednh.report.verdicts import verdict

    facts, classes = made.comparison, tuple(made.card["classes"])
    trained = [facts["classes"].get(each, 0) for each in classes]
    row = single_row(name, made.outcomes, made.alone, trained)
    cells = [
        [
            word(m.label),
            number(m.accuracy, "{:.1f}"),
            word(f"{m.low:.1f} to {m.high:.1f}"),
            number(m.balanced, "{:.1f}"),
        ]
        for m in row.models
    ]
    note = [
        f"{plural(facts['held_out'], 'held-out sample')}; trained on {facts['trained_on']:,} for "
        f"{plural(facts['epochs'], 'epoch')}, lr {facts['lr']:g}.",
        *([f"{facts['method']} makes no global model."] if facts["global"] is None else []),
        *([f"Classes without a sample here: {', '.join(facts['lacks'])}."] if facts["lacks"] else []),
    ]
    columns = ["model", "accuracy, %", "95% interval", "mean over its classes, %"]
    title = f"Models on the held-out samples of {name}"
    return Sheet("newcomer", title, columns, cells, " ".join(note)), verdict(row, classes).sentence
