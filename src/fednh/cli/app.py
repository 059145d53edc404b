"""The command-line application that the other modules add commands to, and what they share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

import fednh

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    name="fednh",
    help="Personalised federated learning on class-imbalanced clients: FedNH and the methods it is measured against.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def _top(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(f"fednh {fednh.__version__}")
        raise typer.Exit


def console_for_people(stderr: bool = False) -> Console:
    """Rich output: as wide as the terminal, and 120 columns where there is none."""
    from rich.console import Console

    console = Console(stderr=stderr)
    if not console.is_terminal:
        console.width = 120
    return console
