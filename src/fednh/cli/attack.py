"""The command that attacks a run's uploads: what a curious server learns from them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from fednh.cli.app import app, print_sheets
from fednh.errors import UserError


@app.command()
def attack(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or a federation's folder.")],
    attacks: Annotated[
        str, typer.Option(metavar="LIST", help="Which of classes, membership, images.")
    ] = "classes,membership,images",
    clients: Annotated[
        str | None, typer.Option(metavar="LIST", help="Clients by number or site, such as 0,3; default: the first few.")
    ] = None,
    number: Annotated[int, typer.Option(min=1, help="How many clients, unless --clients names them.")] = 3,
    round_: Annotated[int, typer.Option("--round", min=1, help="The round whose uploads are attacked.")] = 1,
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Let clients train on N of their samples.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Samples that stand for those of the sites, as in `fednh run`.")
    ] = None,
    public: Annotated[
        int | None, typer.Option(min=4, help="Public samples that the server has; default: as time allows.")
    ] = None,
    audit: Annotated[
        bool, typer.Option("--audit", help="Audit the run's noise with canaries, in place of attacks.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the attacks' own draws.")] = 0,
    minutes: Annotated[float, typer.Option(min=0.01, help="Of computing for each client, roughly.")] = 5.0,
    form: Annotated[
        Literal["table", "json", "csv"], typer.Option("--format", help="json and csv are for machines.")
    ] = "table",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="A folder for attack.json, .csv, .html and pictures.")
    ] = None,
) -> None:
    """Attack uploads of a run: which classes a client has, who is a member, and what its samples look like.

    The uploads of a round are computed again from the run's seeds; the server knows all but the client's samples.
    """
    from fednh.attacks import canaries, sheet, suite
    from fednh.attacks.target import open_run

    settings = suite.Settings(
        [name.strip() for name in attacks.split(",") if name.strip()], seed, minutes, public, limit
    )
    settings.check()
    if out is not None and out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file, not a folder; choose another folder")
    wanted = None if clients is None else [name.strip() for name in clients.split(",") if name.strip()]
    targets = open_run(run, wanted, number, round_, limit, data)
    if audit:
        audits = canaries.audit(targets[0].config, targets[0].before.mechanisms, seed)
        if form == "table":
            print_sheets(sheet.audit_table(audits))
        else:
            typer.echo(json.dumps([asdict(each) for each in audits], indent=2))
        if not all(each.passed for each in audits):
            raise typer.Exit(1)
        return
    outcome = suite.attack(targets, settings, lambda words: typer.echo(f"fednh: {words}", err=True))
    if form == "json":
        typer.echo(json.dumps(outcome.record(), indent=2))
    elif form == "csv":
        typer.echo(sheet.to_csv(outcome), nl=False)
    else:
        print_sheets(sheet.table(outcome))
    if out is not None:
        files = sheet.write(outcome, out, targets[0].fed.net.shape)
        typer.echo(f"written to {out}: {', '.join(path.name for path in files)}", err=True)
