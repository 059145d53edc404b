"""What a site writes into its audit log: who asked, what left, what was refused and why.

A line is on disk before the answer that it describes is sent: if it cannot be written, nothing leaves. The answer
carries the hash of that line, and the server keeps it, so that nobody can cut lines off the log unnoticed.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict

from fednh.flower import audit
from fednh.words import one_line

log = logging.getLogger("flwr")
HEAD = "audit"  # key in a reply's record `said`: the newest line of the site's log


class SiteEvents:
    """Writes the lines about one message."""

    def __init__(self, path: Path, site: str, message: Message):
        data = message.metadata
        self.path, self.kind = path, data.message_type[:50]
        group = int(data.group_id) if data.group_id.isdecimal() else 0
        self.facts: dict[str, Any] = {"own": site, "kind": self.kind, "round": group, "run": data.run_id}
        self.by = f"node {data.src_node_id}, which has not proven who it is"

    def asked(self, by: str, federation: str, content: RecordDict) -> None:
        """Log an order that the federation's server has signed."""
        self.by, self.facts["federation"] = by, federation
        audit.append(self.path, "asked", **self.facts, by=by, got=audit.contents(content))

    def left(self, content: RecordDict) -> RecordDict:
        """Log an answer; returns it with the hash of its line."""
        event, told = ("joined", {"told": _greeting(content)}) if self.kind == "query" else ("left", {})
        return with_head(
            content, audit.append(self.path, event, **self.facts, **told, to=self.by, sent=audit.contents(content))
        )

    def refused(self, why: str, content: RecordDict) -> RecordDict:
        """Log a refusal; `content`, which tells the server, is sent even if the log cannot be written."""
        try:
            head = audit.append(
                self.path, "refused", **self.facts, by=self.by, why=one_line(why), sent=audit.contents(content)
            )
        except OSError as error:
            log.error("the audit log cannot be written: %s", error)
            return content
        return with_head(content, head)


def with_head(content: RecordDict, head: audit.Head) -> RecordDict:
    said = content["said"]
    assert isinstance(said, ConfigRecord)
    return RecordDict({**content, "said": ConfigRecord({**said, HEAD: str(head)})})


def head_of(content: RecordDict) -> str | None:
    """The newest line of a site's log, as stated in its reply."""
    said = content.get("said")
    found = audit.Head.read(said.get(HEAD)) if isinstance(said, ConfigRecord) else None
    return None if found is None else str(found)


def _greeting(content: RecordDict) -> dict[str, Any]:
    """What a greeting discloses about the site's data."""
    said = content["said"]
    assert isinstance(said, ConfigRecord)
    task = json.loads(str(said["task"]))
    columns = json.loads(task["preprocessing"]).get("columns", [])
    return {
        "classes": task["classes"],
        "columns": {column["name"]: len(column.get("values", [])) for column in columns},
        "statistics": len(task["mean"]),
    }
