"""Class names as numbers, in the order that they are agreed in or sorted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from fednh.data.dataset import Labels
from fednh.errors import UserError


def alike(names: Iterable[str], what: str) -> list[str]:
    """One sentence on all names that differ only in case or blanks, or none."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault("".join(name.split()).casefold(), []).append(name)
    pairs = [" and ".join(map(repr, same)) for same in found.values() if len(same) > 1]
    more = f" and {len(pairs) - 8} more" if len(pairs) > 8 else ""
    words = f"{what} that differ only in case or blanks: {', '.join(pairs[:8])}{more}"
    return [f"{words}; if they mean the same, write them alike"] if pairs else []


def numbered(names: Sequence[str], agreed: Sequence[str], where: str) -> tuple[Labels, tuple[str, ...]]:
    """Class names as numbers, and the classes in their order: as agreed, else sorted (numbers as numbers)."""
    found = set(names)
    classes = tuple(agreed) or tuple(in_order(found))
    if len(set(classes)) < len(classes):
        raise UserError(f"data.classes names a class twice: {', '.join(classes)}")
    if strangers := in_order(found - set(classes)):
        raise UserError(f"{where} holds the class {strangers[0]!r}, which is not one of data.classes")
    if len(classes) < 2:
        raise UserError(
            f"{where} holds only the class {classes[0]!r}; training needs at least two, and a site that has one names "
            "all in data.classes"
        )
    number = {name: k for k, name in enumerate(classes)}
    return np.array([number[name] for name in names], np.int64), classes


def in_order(names: set[str]) -> list[str]:
    """Sorted; as numbers where all are."""
    numbers = all(n.isdecimal() and n.isascii() for n in names)
    return sorted(names, key=lambda n: (int(n) if numbers else 0, n))
