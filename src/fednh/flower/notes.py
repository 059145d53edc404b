"""federation.log: the server's notes about its sites, one JSON line each, `{"time": ..., "text": ...}`.

Notes quote what sites sent. Written as JSON, no such text can break a line and forge another note.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

from fednh.core.progress import check_lost
from fednh.storage.layout import RunLayout
from fednh.words import one_line

WAITING = "waiting for sites"  # how the note begins that too few sites are there


def add(run: Path, text: str) -> None:
    """Add a note to a run folder's log."""
    line = {"time": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}", "text": one_line(text)}
    with RunLayout(run).log_file.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, ensure_ascii=False) + "\n")


def sentence(line: bytes) -> str:
    """The text of a line, safe to print; earlier versions wrote plain text after the time."""
    try:
        return one_line(str(json.loads(line)["text"]))
    except (ValueError, TypeError, KeyError, RecursionError):
        return one_line(line.decode(errors="replace")[20:])


def check_end(run: Path) -> None:
    """Raise if a finished run has rounds that changed nothing: such a run is not a success."""
    check_lost(json.loads(RunLayout(run).summary_file.read_text(encoding="utf-8")))
