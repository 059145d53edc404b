"""Tables of sites with names in them that must not leave a site."""

from __future__ import annotations

from pathlib import Path
from typing import Any

NAMES = ["Anna Ode", "Bert Ulm", "Cora Ims", "Dora Eck", "Emil Uhr"]
AGREED = {"data.columns": {"age": "number", "blood": ["A", "B"]}, "data.classes": ["healthy", "ill"]}
RULES = {"columns": "age, blood", "label": "diagnosis"}


def tables(folder: Path) -> dict[int, dict[str, Any]]:
    """Two sites with a name, an age and a blood group in every row."""
    nodes: dict[int, dict[str, Any]] = {}
    for k, site in enumerate(("north", "south")):
        rows = [
            f"{NAMES[(i + k) % 5]},{20 + i},{'AB'[i % 2]},{['healthy', 'ill'][(i // 3) % 2]},note {NAMES[i % 5]} {i}"
            for i in range(30)
        ]
        (folder / f"{site}.csv").write_text("\n".join(["patient,age,blood,diagnosis,note", *rows, ""]))
        nodes[k + 1] = {"data": f"csv:{folder}/{site}.csv", "site": site, **RULES}
    return nodes
