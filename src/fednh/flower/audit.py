"""The audit log of a site or a server: one JSON line per event, chained to the one before it (io/chain.py).

Only somebody who knows an earlier hash can notice that a log was rewritten. So a site sends its newest hash with every
answer, and the server writes it into its own log.

A site's log says who asked, what left, what was refused and why. A line is on disk before the answer that it describes
is sent: if it cannot be written, nothing leaves. What says nothing new, because it was said before or refused, has
lines for the first `EACH` messages of a kind and key, and then for every doubling of their number, with how many they
stand for (`times`). So nobody can fill the disk.
"""

from __future__ import annotations

import hashlib
import json
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from fednh.flower.layout import StateFolder
from fednh.io.chain import Head, append, newest_head
from fednh.io.files import write_json
from fednh.privacy.ledger import Balance
from fednh.text import one_line

LONGEST = 100_000  # characters of what a line says of a message


class AuditWriter:
    """Appends to one log. Every line has Flower's number of the `run`."""

    def __init__(self, path: Path, run: int):
        self.path, self.run = path, run

    def __call__(self, event: str, **facts: Any) -> None:
        if "sent" in facts:
            facts["sent"] = contents(facts["sent"])
        facts = {key: value for key, value in facts.items() if value not in (None, "")}
        append(self.path, event, run=self.run, **facts)


def contents(content: RecordDict) -> list[dict[str, Any]]:
    """A description of a message for the log: names, shapes, bytes and SHA-256 of every record."""
    from fednh.flower.protocol import form_of

    rows = []
    for name, record in sorted(content.items()):
        digest, size, names = hashlib.sha256(), 0, {}
        if isinstance(record, ArrayRecord):
            for key, array in sorted(record.items()):
                facts = [key, array.dtype, list(array.shape), array.stype, len(array.data)]
                digest.update(json.dumps(facts).encode() + b"\n" + array.data)
                size += len(array.data)
            with suppress(ValueError):  # an order may be malformed; its bytes are in the log all the same
                names = {name: list(shape) for name, (shape, _) in form_of(record).items()}
        else:
            for key, value in sorted(record.items()):
                text = json.dumps([key, value], default=repr).encode()
                digest.update(text + b"\n")
                size += len(text)
                names[key] = [len(value)] if isinstance(value, list) else []
        rows.append({"record": name, "bytes": size, "sha256": digest.hexdigest(), "names": names})
    return _short(rows)


def _short(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same without names if they are too long for a line, or as one record if there are too many."""
    if len(json.dumps(rows)) <= LONGEST:
        return rows
    plain = [{**record, "names": {}} for record in rows]
    if len(text := json.dumps(plain)) <= LONGEST:
        return plain
    total = sum(record["bytes"] for record in rows)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return [{"record": f"{len(rows)} records", "bytes": total, "sha256": digest, "names": {}}]


# --- a site's events ------------------------------------------------------------------------------------------------


log = logging.getLogger("flwr")
LEDGER = "ledger"  # key in a line: the newest line of the ledger of privacy, as it was when the answer left
HEAD = "audit"  # key in a reply's record `said`: the newest line of the site's log
EACH = 100  # messages of a kind that have a line each, though they ask for nothing new


class MessageCounter:
    """Counts, on disk, messages that asked for nothing new."""

    def __init__(self, file: Path):
        self._file, self._lock = file, FileLock(file.with_suffix(".lock"))

    def add(self, kind: str, number: int = 1) -> int:
        """Count a message; returns for how many a line is to be written now: 0 if for none."""
        with self._lock:
            known = self._read()
            known[kind] = count = max(0, known.get(kind, 0) + number)
            write_json(self._file, known)
        if count <= EACH:
            return 1
        doublings = count // EACH
        at_doubling = count % EACH == 0 and doublings & (doublings - 1) == 0
        return count // 2 if at_doubling else 0

    def _read(self) -> dict[str, int]:
        with suppress(OSError, ValueError, AttributeError):
            return {str(key): int(value) for key, value in json.loads(self._file.read_text()).items()}
        return {}  # none yet; a damaged one counts anew


class SiteEvents:
    """Writes the lines about one message."""

    def __init__(self, home: Path, site: str, message: Message):
        data, folder = message.metadata, StateFolder(home)
        self.path, self.kind = folder.audit_file(site), data.message_type[:50]
        self._counter = MessageCounter(folder.tally(site))
        group = int(data.group_id) if data.group_id.isdecimal() and len(data.group_id) < 20 else 0
        self.facts: dict[str, Any] = {"own": site, "kind": self.kind, "round": group, "run": data.run_id}
        self.by = f"node {data.src_node_id}, which has not proven who it is"
        self._counted = ""  # as which kind it was counted
        self._asked: dict[str, Any] | None = None  # of a line that is not written yet
        self.times = 1  # the messages that its lines stand for; 0: it has none

    def asked(self, key: str, federation: str, content: RecordDict) -> None:
        """Log an order that the federation's server has signed with this key."""
        self.by, self.facts["federation"] = f"the server, key {key}", federation[:100]
        self._asked = {"by": self.by, "got": contents(content)}
        self._count(f"{self.kind}, key {key}")
        if self.times:
            self._write_asked()

    def new(self) -> None:
        """What the message asks for was not said before: it has lines of its own, whatever its number."""
        self._counter.add(self._counted, -1)
        self.times = 1
        if self._asked is not None:
            self._write_asked()

    def spent(self, balance: Balance | None) -> None:
        """What the lines about this message say of the site's ledger of privacy."""
        if balance is not None:
            self.facts |= {**balance.told(), LEDGER: str(balance.head or "")}

    def settled(self, head: Head) -> None:
        """The ledger has a new line beside payments: the lines about this message name it, and there are some."""
        self.facts[LEDGER] = str(head)
        if not self.times:
            self.new()

    def left(self, content: RecordDict) -> RecordDict:
        """Log an answer; returns it with the hash of its line."""
        if not self.times:
            return with_head(content, newest_head(self.path))
        event, greeting = ("joined", {"told": _greeting(content)}) if self.kind == "query" else ("left", {})
        facts = {**self._facts(), **greeting, "to": self.by, "sent": contents(content)}
        return with_head(content, append(self.path, event, **facts))

    def refused(self, why: str, content: RecordDict) -> RecordDict:
        """Log a refusal; `content`, which tells the server, is sent even if the log cannot be written."""
        try:
            if not self._counted:
                self._count("unproven")
            if not self.times:
                return with_head(content, newest_head(self.path))
            facts = {**self._facts(), "by": self.by, "why": one_line(why), "sent": contents(content)}
            head = append(self.path, "refused", **facts)
        except OSError as error:
            log.error("the audit log cannot be written: %s", error)
            return content
        return with_head(content, head)

    def _count(self, kind: str) -> None:
        self._counted, self.times = kind, self._counter.add(kind)

    def _write_asked(self) -> None:
        append(self.path, "asked", **self._facts(), **(self._asked or {}))
        self._asked = None

    def _facts(self) -> dict[str, Any]:
        return self.facts if self.times == 1 else {**self.facts, "times": self.times}


def log_refusal(home: Path, site: str, kind: str, by: str, why: str) -> None:
    """Log a refusal that did not come from reading a message: an app that is not approved, work that was killed."""
    folder = StateFolder(home)
    if times := MessageCounter(folder.tally(site)).add(kind):
        more = {} if times == 1 else {"times": times}
        append(folder.audit_file(site), "refused", own=site, by=by, why=one_line(why), **more)


def with_head(content: RecordDict, head: Head | None) -> RecordDict:
    if head is None:
        return content
    said = content["said"]
    assert isinstance(said, ConfigRecord)
    return RecordDict({**content, "said": ConfigRecord({**said, HEAD: str(head)})})


def head_of(content: RecordDict) -> str | None:
    """The newest line of a site's log, as stated in its reply."""
    said = content.get("said")
    head = Head.read(said.get(HEAD)) if isinstance(said, ConfigRecord) else None
    return None if head is None else str(head)


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
