"""A disk that forgets: what a power cut would leave of the files below a folder, at every moment of some work.

Nothing is guaranteed but what was synced: a file's content by fsync of the file, its name by fsync of its folder. Two
kinds of disk are modelled, the two ends of what file systems do:
  strict   keeps what was synced, and nothing else: no new name, no rename, no removal
  loose    keeps every name, rename and removal at once, but of contents only what was synced
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

State = dict[str, bytes | None]  # what is there, by path: contents; None for a folder


class Disk:
    """Watches os.fsync, os.replace and os.unlink below `root`, without syncing really."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch):
        self.root, self.events = root, list[tuple[str, str]]()
        self.strict, self.loose = [dict[str, bytes | None]()], [dict[str, bytes | None]()]  # different states, in order
        self._content: dict[int, bytes] = {}  # by inode, as synced
        self._names: dict[int, dict[str, int]] = {}  # of folders, by inode, as synced
        self._pinned: dict[int, int] = {}  # open descriptors: so that no inode number is used twice
        self._lock = threading.RLock()
        monkeypatch.setattr(os, "fsync", self._fsync)
        monkeypatch.setattr(os, "replace", self._watched("rename", os.replace, 1))
        monkeypatch.setattr(os, "unlink", self._watched("unlink", os.unlink, 0))

    def close(self) -> None:
        for descriptor in self._pinned.values():
            os.close(descriptor)

    def _fsync(self, descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        with self._lock:
            if not path.is_relative_to(self.root):
                return
            there = os.fstat(descriptor)
            self._pin(there.st_ino, path)
            if stat.S_ISDIR(there.st_mode):
                names = self._names[there.st_ino] = {entry.name: entry.inode() for entry in os.scandir(path)}
                for name, inode in names.items():
                    self._pin(inode, path / name)
            else:
                self._content[there.st_ino] = path.read_bytes()
            self._note("fsync", path)

    def _watched(self, what: str, real: Callable[..., Any], at: int) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            with self._lock:
                done = real(*args, **more)
                path = Path(args[at]).absolute()
                if path.is_relative_to(self.root):
                    self._note(what, path)
                return done

        return call

    def _note(self, what: str, path: Path) -> None:
        self.events.append((what, path.relative_to(self.root).as_posix()))
        for states, state in ((self.strict, self._synced(self.root.stat().st_ino)), (self.loose, self._named())):
            if state != states[-1]:
                states.append(state)

    def _synced(self, folder: int, prefix: str = "") -> State:
        found: State = {}
        for name, inode in self._names.get(folder, {}).items():
            if stat.S_ISDIR(os.fstat(self._pinned[inode]).st_mode):
                found |= {prefix + name: None, **self._synced(inode, f"{prefix}{name}/")}
            else:
                found[prefix + name] = self._content.get(inode, b"")
        return found

    def _named(self) -> State:
        return {
            path.relative_to(self.root).as_posix(): None
            if path.is_dir()
            else self._content.get(path.stat().st_ino, b"")
            for path in sorted(self.root.rglob("*"))
        }

    def _pin(self, inode: int, path: Path) -> None:
        if inode not in self._pinned:
            self._pinned[inode] = os.open(path, os.O_PATH)


def put(state: State, root: Path) -> None:
    """Make the files of a state."""
    root.mkdir(parents=True)
    for name, content in state.items():
        if content is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(content)
