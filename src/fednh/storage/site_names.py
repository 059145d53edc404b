"""The names of a run's clients, and how one is found by its name.

Natural sites and those of a real federation have names. A number always means a client; text means the site that has
exactly this name and otherwise, if it is a whole number, the client with that number.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from operator import index
from pathlib import Path
from typing import Any, SupportsIndex

from fednh.errors import UserError, nearest
from fednh.storage.layout import RunLayout
from fednh.storage.run_folder import read_partition


def names_of(partition: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[int, str]:
    """The clients' names, where they have some; the sites of a real federation are in its summary alone."""
    found = dict(enumerate(partition.get("sites", ())))
    rows = (*([] if partition.get("counts") else summary.get("sites", ())), *summary.get("clients", ()))
    return found | {row["client"]: row["site"] for row in rows if "site" in row}


def read_names(run: Path) -> dict[int, str]:
    """The names in a run folder."""
    try:
        summary = json.loads(RunLayout(run).summary_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        summary = {}
    return names_of(read_partition(run) or {}, summary)


def find_client(names: Mapping[int, str], wanted: int | str, where: str | Path, clients: Iterable[int] = ()) -> int:
    """The client with this name or number; what is neither among the names nor a number is refused.

    `clients` are those that have what is looked for, and `where` says where: the error lists them.
    """
    if isinstance(wanted, SupportsIndex) and not isinstance(wanted, bool):
        return index(wanted)
    if not isinstance(wanted, str):
        raise UserError(f"{where}: a client is chosen by its whole number or its site's name, not by {wanted!r}")
    for client, name in names.items():
        if name == wanted:
            return client
    if wanted.isascii() and wanted.isdigit():
        return int(wanted)
    if not names:
        raise UserError(f"the clients of {where} have no names: choose one by its number instead of {wanted!r}")
    known = [names[client] for client in sorted(clients) if client in names] or list(names.values())
    raise UserError(f"{where} has no site {wanted!r}{nearest(wanted, known)}")
