"""Commands that look at finished runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fednh.cli.app import app, console_for_people


@app.command()
def table(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders of them.")],
) -> None:
    """Compare finished runs."""
    from fednh.report.load import find_runs
    from fednh.report.table import comparison

    console_for_people().print(comparison(find_runs(folders)))
