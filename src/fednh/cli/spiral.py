"""The command that makes the paper's motivating example."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fednh import extras
from fednh.cli.app import app


@app.command()
def spiral(
    out: Annotated[Path, typer.Option(help="Where runs, figures and numbers go.")] = Path("runs/spiral"),
    seed: Annotated[int, typer.Option(min=0, help="Everything random derives from it.")] = 0,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of the runs with one client.")] = 201,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of the runs with 100 clients.")] = 100,
) -> None:
    """Train the paper's motivating example and draw its Figures 1 and 2; says whether its claims are seen."""
    import json

    extras.need("report", "the spiral")
    from fednh.experiments import spiral as example
    from fednh.experiments.spiral_figures import figure1, figure2
    from fednh.report.figures import style
    from fednh.storage.files import write_bytes

    example.train(out, seed, epochs, rounds, lambda name: typer.echo(f"training {name}", err=True))
    seen = example.look(out)
    found = example.numbers(seen)
    judged = example.claims(found)
    text = example.verdict(judged)
    result = {"seed": seed, "epochs": epochs, "rounds": rounds, **found, "claims": judged, "text": text}
    write_bytes(out / "spiral.json", (json.dumps(result, indent=2) + "\n").encode())
    with style.theme():
        for name, figure in (("figure1", figure1(seen)), ("figure2", figure2(seen))):
            for kind in ("svg", "png"):
                style.save(figure, out / f"{name}.{kind}")
    typer.echo(text)
    typer.echo(f"{out}/figure1.svg, figure2.svg (and .png), spiral.json")
