"""A file of JSON lines that only grows, and marks that name what it held at one time, by length and checksum.

Writing costs what is added, however long the file is. A crash while writing leaves lines behind the last mark; the
next `append` cuts them off.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fednh.storage.files import make_folder, sync_path


@dataclass(frozen=True)
class Mark:
    """The first `bytes` of a journal, and their SHA-256."""

    bytes: int
    sha256: str


class Journal:
    """One journal, as far as this process has read or written it."""

    def __init__(self, path: Path):
        self.path = path
        self._end, self._sum = 0, hashlib.sha256()

    def append(self, lines: Iterable[dict[str, Any]]) -> Mark:
        """Add lines behind the last mark; when it returns they are on disk."""
        content = b"".join((json.dumps(line, allow_nan=False) + "\n").encode() for line in lines)
        new = not self.path.exists()
        make_folder(self.path.parent)
        with self.path.open("wb" if new else "r+b") as file:
            file.truncate(self._end)
            file.seek(self._end)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if new:
            sync_path(self.path.parent)
        self._end += len(content)
        self._sum.update(content)
        return Mark(self._end, self._sum.hexdigest())

    def read(self, mark: Mark) -> list[dict[str, Any]]:
        """The lines up to a mark; ValueError if their checksum does not match."""
        content = self._read(mark)
        return [json.loads(line) for line in content.splitlines()]

    def go_on_from(self, mark: Mark) -> None:
        """Let the next `append` write behind this mark."""
        self._end, self._sum = mark.bytes, hashlib.sha256(self._read(mark))

    def _read(self, mark: Mark) -> bytes:
        if mark.bytes == 0:
            return b""
        with self.path.open("rb") as file:
            content = file.read(mark.bytes)
        if hashlib.sha256(content).hexdigest() != mark.sha256:
            raise ValueError(f"{self.path.name} does not match its checksum")
        return content
