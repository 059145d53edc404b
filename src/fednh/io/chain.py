"""Files of JSON lines, each chained to the one before it by SHA-256: a site's audit log, and its ledger.

    {"line": 3, "time": "2026-11-16T10:41:07.125Z", "event": "left", ..., "salt": RANDOM, "before": HASH OF LINE 2, ...}

A hash covers its line up to the hash itself, and so, by the chain, all lines before it. Lines are only ever added: the
file may have the file system's append-only attribute. A line that a crash cut short stays where it is, and the next
line, "torn", records it.

Whoever can write the file can also rewrite all of it, or cut lines off its end; only somebody who knows an earlier hash
can notice that. A line may quote data, such as why a file cannot be used. So each has a salt, without which somebody
who knows its hash could try out what the line might say.
"""

from __future__ import annotations

import hashlib
import json
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

from fednh.io.files import sync_path

START = "0" * 64  # what the first line has in place of the hash of the one before
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
    torn: bool = False  # what is wrong is only that the last line is cut short, as by a crash

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


def _lock(file: int, shared: bool = False) -> None:
    import fcntl  # which Windows lacks: a run that writes no log does not need it

    fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)


def append(path: Path, event: str, **facts: Any) -> Head:
    """Add a line; it is on disk when this returns. Safe with several processes at once, and against a crash."""
    if new := not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    file = os.open(path, _OPEN, 0o600)
    try:
        _lock(file)
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
        _lock(file.fileno(), shared=True)
        head, _ = _end(file.fileno())
    return head if head.line else None


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
        _lock(file.fileno(), shared=True)  # waits until a line that is being written is complete
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
        return Log(path, lines, f"line {which} is no line of a log")
    if torn:
        what = "the process was stopped while it wrote it, or somebody has cut off the end"
        return Log(path, lines, f"line {which} is cut short: {what}", torn=True)
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
