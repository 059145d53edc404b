"""Super-classes: groups of related classes. CIFAR-100's twenty are in the package, others come from a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from fednh.errors import UserError

SHIPPED = ("cifar100",)


def load_groups(data: str, classes: Sequence[str], file: Path | None = None) -> dict[str, list[int]] | None:
    """group -> indices of its classes, every class once; None if no groups are known for the data set."""
    if file is not None:
        named, where = _read(file), str(file)
    elif data in SHIPPED:
        text = resources.files("fednh").joinpath("report", "groups", f"{data}.json").read_text(encoding="utf-8")
        named, where = json.loads(text), f"the groups of {data}"
    else:
        return None
    place = {name: i for i, name in enumerate(classes)}
    grouped = [name for members in named.values() for name in members]
    for name in grouped:
        if name not in place:
            raise UserError(f"{where}: {name!r} is not a class of {data}")
        if grouped.count(name) > 1:
            raise UserError(f"{where}: {name!r} stands in more than one group")
    missing = [name for name in classes if name not in grouped]
    if missing:
        raise UserError(f"{where}: class {missing[0]!r} stands in no group")
    return {group: [place[name] for name in members] for group, members in named.items()}


def _read(file: Path) -> dict[str, list[str]]:
    try:
        named = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as JSON: {error}") from error
    lists = isinstance(named, dict) and all(isinstance(members, list) for members in named.values())
    if not lists or not all(isinstance(name, str) for members in named.values() for name in members):
        raise UserError(f'{file} must look like {{"group": ["class", "class"], ...}}')
    return dict(named)
