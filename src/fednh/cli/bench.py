"""The command that measures speed and memory on this machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

import fednh
from fednh.cli.app import app
from fednh.errors import UserError


@app.command()
def bench(
    quick: Annotated[bool, typer.Option("--quick", help="Smaller measurements of memory and scale.")] = False,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="The results as JSON.")] = None,
) -> None:
    """Measure speed and memory on this machine, as ratios against goals. Needs the source tree, and an idle machine."""
    root = Path(fednh.__file__).parents[2]
    if not (root / "benchmarks" / "__main__.py").is_file():
        raise UserError("fednh bench needs the source tree with its benchmarks/; clone it and run `make bench` there")
    if out is not None and not out.absolute().parent.is_dir():
        raise UserError(f"{out}: there is no folder {out.absolute().parent}; make it first or choose another --out")
    arguments = ["--quick"] if quick else []
    arguments += [] if out is None else ["--out", str(out.absolute())]
    raise typer.Exit(subprocess.run([sys.executable, "-m", "benchmarks", *arguments], cwd=root).returncode)
