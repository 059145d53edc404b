"""The command that starts a method of one's own: a file that runs, and its tests."""

from __future__ import annotations

import keyword
import re
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from fednh.cli.app import app
from fednh.errors import UserError


@app.command("new-method")
def new_method(
    name: Annotated[str, typer.Argument(help="Of the method: my_method or MyMethod.")],
    out: Annotated[Path, typer.Option(help="The folder for the two files.")] = Path(),
) -> None:
    """Write a small method that runs, and its tests, to be changed into yours."""
    module, cls = names(name)
    _check_free(module)
    files = {out / f"{module}.py": "method.py.txt", out / f"test_{module}.py": "test_method.py.txt"}
    for path in files:
        if path.exists():
            raise UserError(f"{path} exists already; choose another name or --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
        for path, template in files.items():
            text = resources.files("fednh.cli").joinpath("templates", template).read_text(encoding="utf-8")
            with path.open("x", encoding="utf-8") as file:
                file.write(text.replace("{module}", module).replace("{Class}", cls))
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror}") from error
    there = "" if out.resolve() == Path.cwd() else f"cd {out} && "
    typer.echo(f"written: {' '.join(map(str, files))}")
    typer.echo(f"run it:  {there}fednh run --method {module}:{cls} --rounds 5")
    typer.echo(f"test it: {there}python -m pytest test_{module}.py")


def names(name: str) -> tuple[str, str]:
    """The module and the class: MyMethod, my_method and my-method are all (my_method, MyMethod)."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|-", "_", name)
    module = words.lower()
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", module) or keyword.iskeyword(module) or len(module) > 60:
        raise UserError(
            f"{name!r} cannot name a method; use letters, digits and underscores, as in my_method or MyMethod"
        )
    cls = name if re.fullmatch(r"[A-Z][A-Za-z0-9]*", name) else "".join(w[0].upper() + w[1:] for w in words.split("_"))
    return module, cls


def _check_free(module: str) -> None:
    """A file that hides an installed module would break whatever imports that."""
    from fednh.methods import METHODS

    if module in METHODS:
        raise UserError(f"{module!r} is a method of this library already; choose another name")
    found = find_spec(module)
    if found is not None and Path(str(found.origin)).parent != Path.cwd():
        raise UserError(f"{module!r} is the name of a Python module that is installed; choose another name")
