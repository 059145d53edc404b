"""Where clients' states live between their rounds: in memory up to a budget, on disk beyond it.

Each state on disk is a file of its own, named by client and round and never overwritten: so a checkpoint is a list of
file names, and a round that was not finished can be forgotten.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fednh.files import read_tree, sync_path, write_tree
from fednh.tree import Tree, size


@dataclass(frozen=True)
class Entry:
    """A state on disk: the file's name and checksum."""

    file: str
    sha256: str


@dataclass
class _Slot:
    round: int
    bytes: int
    tree: Tree | None  # None: only on disk
    entry: Entry | None = None  # None: only in memory
    synced: bool = False


Snapshot = dict[int, tuple[_Slot, Tree | None]]


class Store:
    """`get` and `put` by client number; `put` counts from the next `commit`, and `rollback` forgets it."""

    def __init__(self, folder: Path, budget: int, newcomer: Tree, device: str = "cpu"):
        self.folder, self.budget, self.newcomer, self.device = folder, budget, newcomer, device
        self._slots: dict[int, _Slot] = {}
        self._pending: dict[int, _Slot] = {}
        self._in_memory = 0
        self._lock = threading.Lock()

    @property
    def members(self) -> list[int]:
        """The clients that took part so far."""
        return sorted(self._slots)

    def get(self, client: int) -> Tree:
        """A client's committed state; for one that never took part, what it would enrol with."""
        with self._lock:
            slot = self._slots.get(client)
            if slot is None:
                return self.newcomer
            tree, entry = slot.tree, slot.entry
        if tree is not None:
            return tree
        assert entry is not None
        return read_tree(self.folder / entry.file, self.device)

    def put(self, client: int, tree: Tree, round_: int) -> None:
        with self._lock:
            self._pending[client] = _Slot(round_, size(tree), tree)
            self._in_memory += size(tree)
            self._shrink()

    def commit(self) -> None:
        """The round is over: what was put is now what `get` gives."""
        with self._lock:
            for client, slot in self._pending.items():
                old = self._slots.pop(client, None)  # popped, so that the order of `_slots` is that of last use
                if old is not None:
                    self._release(old)
                self._slots[client] = slot
            self._pending = {}

    def rollback(self) -> None:
        """The round was broken off: forget what was put since the last commit."""
        with self._lock:
            for slot in self._pending.values():
                self._release(slot)
            self._pending = {}

    def snapshot(self) -> Snapshot:
        """The committed states as they are now; what is committed later does not change it."""
        with self._lock:
            return {client: (slot, slot.tree) for client, slot in sorted(self._slots.items())}

    def flush(self, snapshot: Snapshot) -> dict[int, tuple[int, Entry]]:
        """Write down for good what a snapshot holds only in memory; returns each one's round and file.

        It may run in a thread of its own while later rounds go on: trees are values, so the snapshot stays as it was.
        """
        written: dict[int, tuple[int, Entry]] = {}
        for client, (slot, tree) in snapshot.items():
            if slot.entry is None:
                assert tree is not None
                slot.entry = self._write(client, slot.round, tree)
            written[client] = slot.round, slot.entry
        fresh = [slot for slot, _ in snapshot.values() if not slot.synced]
        for slot in fresh:
            assert slot.entry is not None
            sync_path(self.folder / slot.entry.file)
            slot.synced = True
        if fresh:
            sync_path(self.folder)
        return written

    def restore(self, entries: dict[int, tuple[int, Entry]]) -> None:
        """Start from states on disk: client -> (round, entry)."""
        self._slots = {k: _Slot(round_, 0, None, entry, True) for k, (round_, entry) in entries.items()}

    def prune(self, keep: Iterable[str]) -> None:
        """Delete state files that are neither in `keep` nor current."""
        with self._lock:
            current = {slot.entry.file for slot in self._everything() if slot.entry is not None}
            wanted = current | set(keep)
            if self.folder.exists():
                for path in self.folder.iterdir():
                    if path.name not in wanted:
                        path.unlink(missing_ok=True)

    def _everything(self) -> Iterator[_Slot]:
        yield from self._slots.values()
        yield from self._pending.values()

    def _shrink(self) -> None:
        """Move the states that were unused for longest to disk until the rest fits the budget."""
        for client, slot in [*self._slots.items(), *self._pending.items()]:
            if self._in_memory <= self.budget:
                return
            if slot.tree is not None:
                slot.entry = slot.entry or self._write(client, slot.round, slot.tree)
                self._release(slot)

    def _write(self, client: int, round_: int, tree: Tree) -> Entry:
        name = f"client-{client:06d}.round-{round_:06d}.safetensors"
        return Entry(name, write_tree(self.folder / name, tree, sync=False))

    def _release(self, slot: _Slot) -> None:
        if slot.tree is not None:
            self._in_memory -= slot.bytes
            slot.tree = None
