"""The audit log of a site or a server: one JSON line per event, each chained to the one before it by SHA-256.

    {"line": 3, "time": "2026-11-16T10:41:07.125Z", "event": "left", ..., "salt": RANDOM, "before": HASH OF LINE 2, ...}

A hash covers its line up to the hash itself, and so, by the chain, all lines before it. Lines are only ever added: the
file may have the file system's append-only attribute. A line that a crash cut short stays where it is, and the next
line, "torn", records it.

Whoever can write the file can also rewrite all of it, or cut lines off its end; only somebody who knows an earlier hash
can notice that. So a site sends its newest hash with every answer, and the server writes it into its own log.
A line may quote data, such as why a file cannot be used. So each has a salt, without which the server could try out
what the line might say.

A site's log says who asked, what left, what was refused and why. A line is on disk before the answer that it describes
is sent: if it cannot be written, nothing leaves. What says nothing new, because it was said before or refused, has
lines for the first `EACH` messages of a kind and key, and then for every doubling of their number, with how many they
stand for (`times`). So nobody can fill the disk.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import math
import os
import re
import secrets
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from fednh.flower.layout import StateFolder
from fednh.io.files import sync_path, write_json
from fednh.text import one_line

START = "0" * 64  # what the first line has in place of the hash of the one before
LONGEST = 100_000  # characters of what a line says of a message
_LINE = re.compile(rb'(\{"line": (\d{1,12}), .*), "hash": "([0-9a-f]{64})"\}')
_OPEN = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class Head(NamedTuple):
    """The newest line of a log; its hash covers all lines up to it."""

    line: int
    hash: str

    def __str__(self) -> str:
        return f"{self.line}:{self.hash}"

    @classmethod
    def read(cls, text: object) -> Head | None:
        """Parse `LINE:HASH`; None if the text is something else."""
        match = re.fullmatch(r"(\d{1,12}):([0-9a-f]{64})", text) if isinstance(text, str) else None
        return cls(int(match[1]), match[2]) if match else None


@dataclass(frozen=True)
class Log:
    """The lines of a log, up to the first break in its chain."""

    path: Path
    lines: list[dict[str, Any]]
    problem: str | None = None  # the first line that is wrong, and how

    @property
    def head(self) -> Head | None:
        return Head(self.lines[-1]["line"], self.lines[-1]["hash"]) if self.lines else None

    def lacks(self, known: Iterable[Head]) -> str | None:
        """Why this is not the log that once had these lines, or None."""
        have = {row["line"]: row["hash"] for row in self.lines}
        for head in sorted(known):
            if head.line not in have:
                return f"line {head.line} is missing, which the other side knows of: the end of the log was cut off"
            if have[head.line] != head.hash:
                return f"line {head.line} is not the one that the other side knows: the log was written anew"
        return None


def append(path: Path, event: str, **facts: Any) -> Head:
    """Add a line; it is on disk when this returns. Safe with several processes at once, and against a crash."""
    if new := not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    file = os.open(path, _OPEN, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file).st_mode & 0o077:
            with suppress(PermissionError):  # the mode of an append-only file cannot be changed
                os.fchmod(file, 0o600)
        content, head = _next(file, event, facts)
        while content:
            content = content[os.write(file, content) :]
        os.fsync(file)
    finally:
        os.close(file)
    if new:
        sync_path(path.parent)
    return head


def newest_head(path: Path) -> Head | None:
    """The newest line of a log; None if it has none."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        head, _ = _end(file.fileno())
    return head if head.line else None


class AuditWriter:
    """Appends to one log. Every line has Flower's number of the `run`."""

    def __init__(self, path: Path, run: int):
        self.path, self.run = path, run

    def __call__(self, event: str, **facts: Any) -> None:
        if "sent" in facts:
            facts["sent"] = contents(facts["sent"])
        facts = {key: value for key, value in facts.items() if value not in (None, "")}
        append(self.path, event, run=self.run, **facts)


def _next(file: int, event: str, facts: dict[str, Any]) -> tuple[bytes, Head]:
    """The bytes to add, and the new head."""
    last, rest = _end(file)
    last = Head(last.line + rest.count(b"\n"), last.hash)
    content = b""
    if match := _LINE.fullmatch(rest):  # only its end of line is missing
        content, last = b"\n", Head(int(match[2]), match[3].decode())
    elif rest and not rest.endswith(b"\n"):  # whole lines that are not ours are tampering: `read` reports them
        torn = {"bytes": len(rest), "sha256": hashlib.sha256(rest).hexdigest()}
        line, last = _line(Head(last.line + 1, last.hash), "torn", torn)
        content = b"\n" + line
    line, last = _line(last, event, facts)
    return content + line, last


def _line(last: Head, event: str, facts: dict[str, Any]) -> tuple[bytes, Head]:
    time = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    end = {"salt": secrets.token_hex(16), "before": last.hash}  # without the salt the server could guess what it says
    row = {"line": last.line + 1, "time": time, "event": event, **_plain(facts), **end}
    body = json.dumps(row, allow_nan=False)[:-1].encode()
    digest = hashlib.sha256(body).hexdigest()
    return body + f', "hash": "{digest}"}}\n'.encode(), Head(last.line + 1, digest)


def _plain(value: Any) -> Any:
    """A value that JSON can hold: infinite numbers and NaN become text."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _end(file: int) -> tuple[Head, bytes]:
    """The last line that has the form of a log line, and the bytes after it."""
    size, length = os.fstat(file).st_size, 4096
    while True:
        start = max(0, size - length)
        pieces = os.pread(file, size - start, start).split(b"\n")
        for at in reversed(range(1 if start else 0, len(pieces) - 1)):  # the first piece may be cut off at its start
            match = _LINE.fullmatch(pieces[at])
            if match:
                return Head(int(match[2]), match[3].decode()), b"\n".join(pieces[at + 1 :])
        if start == 0:
            return Head(0, START), b"\n".join(pieces)
        length *= 4


def read(path: Path) -> Log:
    """Read a log and check its chain line by line; lines after a break are left out."""
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # waits until a line that is being written is complete
        *raw, torn = file.read().split(b"\n")
    lines: list[dict[str, Any]] = []
    last, pieces = START, list[bytes]()  # the last good hash; text after it that is not a log line
    for number, text in enumerate(raw, 1):
        row = _row(text)
        if row is None and not _LINE.fullmatch(text):
            pieces.append(text)
            continue
        if row is None:
            return Log(path, lines, f"line {number} was changed: it does not match its own hash")
        if pieces and (row["event"], row.get("sha256")) != ("torn", hashlib.sha256(b"\n".join(pieces)).hexdigest()):
            break
        if row["line"] != number or row["before"] != last:
            return Log(path, lines, f"line {number} does not follow the one before: a line was removed, added or moved")
        lines.append(row)
        last, pieces = row["hash"], []
    which = lines[-1]["line"] + 1 if lines else 1
    if pieces:
        return Log(path, lines, f"line {which} is no line of an audit log")
    if torn:
        what = "the process was stopped while it wrote it, or somebody has cut off the end"
        return Log(path, lines, f"line {which} is cut short: {what}")
    return Log(path, lines)


def _row(text: bytes) -> dict[str, Any] | None:
    """The parsed line if it matches its own hash, else None."""
    match = _LINE.fullmatch(text)
    if not match or hashlib.sha256(match[1]).hexdigest().encode() != match[3]:
        return None
    try:
        row: dict[str, Any] = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row.get("before"), str) and isinstance(row.get("event"), str) else None


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
