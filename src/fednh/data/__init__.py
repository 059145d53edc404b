"""Data sets: where they come from, how they are divided, and how their samples become batches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, fields
from typing import Any, get_type_hints


def declared_settings(kinds: Iterable[Any], what: str) -> dict[str, tuple[Any, Any]]:
    """The fields of the dataclasses of a registry: name -> type with its range, and default.

    Kinds that share a setting must agree on it; `what` says in errors what the kinds are.
    """
    declared: dict[str, tuple[Any, Any]] = {}
    for kind in kinds:
        hints = get_type_hints(kind, include_extras=True)
        for field in fields(kind):
            if field.default is MISSING:
                raise TypeError(f"{kind.__name__}.{field.name} needs a default")
            mine = hints[field.name], field.default
            if declared.setdefault(field.name, mine) != mine:
                raise TypeError(f"{kind.__name__}.{field.name} is not as in another {what}")
    return declared
