"""The settings that the kinds of a registry declare: the fields of their dataclasses, with ranges and defaults."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, fields
from typing import Any, get_type_hints


def declared(kinds: Iterable[Any], what: str) -> dict[str, tuple[Any, Any]]:
    """Name -> type with its range, and default; kinds that share a setting must agree on it.

    `what` says in errors what the kinds are.
    """
    found: dict[str, tuple[Any, Any]] = {}
    for kind in kinds:
        hints = get_type_hints(kind, include_extras=True)
        for field in fields(kind):
            if field.default is MISSING:
                raise TypeError(f"{kind.__name__}.{field.name} needs a default")
            mine = hints[field.name], field.default
            if found.setdefault(field.name, mine) != mine:
                raise TypeError(f"{kind.__name__}.{field.name} is not as in another {what}")
    return found
