"""The command-line application that the other modules add commands to, and what they share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

import fednh

if TYPE_CHECKING:
    from click import Context
    from rich.console import Console

    from fednh.report.sheet import Sheet

PANELS = {  # of `fednh --help`
    "Run": ("recommend", "run", "resume", "sweep", "watch", "inspect", "features", "spiral"),
    "Compare": ("table", "compare", "learning-curve", "figure", "report"),
    "Use a model": ("predict", "evaluate", "personalize", "export"),
    "Federate": ("federation", "attack"),
    "About": ("methods", "partitions", "datasets", "data", "prototypes", "new-method", "notebooks"),
}


class PanelGroup(TyperGroup):
    """Shows the commands in PANELS."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        for panel, names in PANELS.items():
            for name in names:
                self.commands[name].rich_help_panel = panel  # type: ignore[attr-defined]

    def list_commands(self, ctx: Context) -> list[str]:
        return [name for names in PANELS.values() for name in names]


app = typer.Typer(
    name="fednh",
    cls=PanelGroup,
    help="Personalised federated learning on class-imbalanced clients: FedNH and the methods it is measured against.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def _top(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(f"fednh {fednh.__version__}")
        raise typer.Exit


def print_sheets(*sheets: Sheet) -> None:
    """Print tables for people, as wide as the terminal; several have blank lines between them."""
    from fednh.report.sheet import to_rich

    console = console_for_people()
    for sheet in sheets:
        console.print(to_rich(sheet, console.width), *([""] if len(sheets) > 1 else []))


def console_for_people(stderr: bool = False) -> Console:
    """Rich output: as wide as the terminal, and 120 columns where there is none."""
    from rich.console import Console

    console = Console(stderr=stderr)
    if not console.is_terminal:
        console.width = 120
    return console
