"""Arguments and options that several commands have: written once, with what a shell offers behind them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fednh.cli import completion

_SOURCE = "A set by name, or folder:, csv:, npz:...; see `fednh datasets`."

ConfigOrPreset = Annotated[
    str | None,
    typer.Argument(
        metavar="[CONFIG-OR-PRESET]",
        help="A TOML file, or a preset; none: digits.",
        autocompletion=completion.config,
    ),
]
Method = Annotated[str | None, typer.Option(help="See `fednh methods`.", autocompletion=completion.method)]
Methods = Annotated[
    str | None,
    typer.Option(metavar="A,B|all", help="Methods; see `fednh methods`.", autocompletion=completion.methods),
]
Data = Annotated[str | None, typer.Option(help=_SOURCE, autocompletion=completion.data)]
RequiredData = Annotated[str, typer.Option(help=_SOURCE, autocompletion=completion.data)]
DataDir = Annotated[Path | None, typer.Option(help="Where data sets lie.")]
Partition = Annotated[
    str | None,
    typer.Option(help="How samples are divided; see `fednh partitions`.", autocompletion=completion.partition),
]
Setting = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any setting, e.g. method.rho=0.7.",
        autocompletion=completion.setting,
    ),
]
Track = Annotated[
    list[str] | None,
    typer.Option(
        help="Also write to tensorboard, mlflow or wandb (extras). Repeatable.", autocompletion=completion.tracker
    ),
]
