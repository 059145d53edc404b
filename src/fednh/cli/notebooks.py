"""The command that hands out the notebooks: copies to open, run and change."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from fednh.cli.app import app
from fednh.errors import UserError

NAMES = ("ten-minutes.ipynb", "your-own-data.ipynb", "write-a-method.ipynb")


@app.command()
def notebooks(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="The folder to write them to.")] = Path("notebooks"),
) -> None:
    """Write the notebooks that teach fednh: a first result, your own data, a method of your own."""
    from fednh.storage.files import write_bytes

    taken = [folder / name for name in NAMES if (folder / name).exists()]
    if taken:
        raise UserError(f"{taken[0]} exists already and may have been changed; choose another folder")
    for name in NAMES:
        content = resources.files("fednh.cli").joinpath("notebooks", name).read_bytes()
        try:
            write_bytes(folder / name, content)
        except OSError as error:
            raise UserError(f"{folder} cannot be written: {error.strerror}; choose another folder") from error
        typer.echo(str(folder / name))
    typer.echo("open them with Jupyter (pip install jupyterlab) or an editor that knows notebooks", err=True)
