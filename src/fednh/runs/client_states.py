"""Where clients' states live between their rounds: in memory up to a budget, on disk beyond it.

Each state on disk is a file of its own, named by client and round and never overwritten: so a checkpoint is a list of
clients and rounds, and a round that was not finished can be discarded. Nothing here loops over all clients: the cost
of a round depends on the clients that took part in it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from fednh.io.files import read_tree, sync_path, write_tree
from fednh.runs.layout import client_state
from fednh.tree import Tree, compact, size


@dataclass(frozen=True)
class Saved:
    """A state that is safely on disk, and the round of the state that it replaces in checkpoints."""

    client: int
    round: int
    sha256: str
    replaces: int | None = None


@dataclass(slots=True, eq=False)
class _Slot:
    round: int
    bytes: int
    tree: Tree | None  # None: only on disk
    sha256: str | None = None  # None: only in memory
    shared: bool = False  # a checkpoint refers to it: its file is deleted with the checkpoint
    replaces: int | None = None


Changes = dict[int, tuple[_Slot, Tree | None]]


class Store:
    """`get` and `put` by client number; `put` takes effect at the next `commit`; `rollback` discards it.

    A client that never took part has what `newcomer` says.
    """

    def __init__(self, folder: Path, budget: int, newcomer: Callable[[int], Tree], device: str = "cpu"):
        self.folder, self.budget, self.newcomer, self.device = folder, budget, newcomer, device
        self._slots: dict[int, _Slot] = {}
        self._pending: dict[int, _Slot] = {}
        self._changed: dict[int, _Slot] = {}  # committed since the last `changes`
        self._resident: dict[tuple[int, int], _Slot] = {}  # (client, round) in memory, those unused for longest first
        self._in_memory = 0
        self._lock = threading.Lock()

    @property
    def members(self) -> list[int]:
        """The clients that took part so far."""
        return sorted(self._slots)

    def get(self, client: int) -> Tree:
        """A client's committed state; for one that never took part, the state from `enroll`."""
        with self._lock:
            slot = self._slots.get(client)
            if slot is None:
                return self.newcomer(client)
            tree = slot.tree
        return tree if tree is not None else read_tree(self.path(client, slot.round), self.device)

    def put(self, client: int, tree: Tree, round_: int) -> None:
        own = compact(tree)
        with self._lock:
            if client in self._pending:
                self._forget(client, self._pending.pop(client))
            slot = _Slot(round_, size(own), own)
            self._pending[client] = self._resident[client, round_] = slot
            self._in_memory += slot.bytes
            self._shrink()

    def commit(self, clients: Iterable[int] | None = None) -> None:
        """The round is over: `get` now returns what was put; if `clients` is given, only theirs."""
        with self._lock:
            if clients is not None:
                for client in self._pending.keys() - set(clients):
                    self._forget(client, self._pending.pop(client))
            for client, slot in self._pending.items():
                if (old := self._slots.get(client)) is not None:
                    slot.replaces = old.round if old.shared else old.replaces
                    self._forget(client, old)
            self._slots |= self._pending
            self._changed |= self._pending
            self._pending = {}

    def rollback(self) -> None:
        """The round was aborted: discard what was put since the last commit."""
        with self._lock:
            for client, slot in self._pending.items():
                self._forget(client, slot)
            self._pending = {}

    def changes(self) -> Changes:
        """The states committed since the last call, as they are now; what is committed later does not change them."""
        with self._lock:
            for slot in self._changed.values():
                slot.shared = True
            taken: Changes = {client: (slot, slot.tree) for client, slot in self._changed.items()}
            self._changed = {}
            return taken

    def flush(self, changes: Changes) -> list[Saved]:
        """Write the changes durably to disk; states no longer needed in memory are released.

        It may run in a thread of its own while later rounds go on: trees are values, so the changes stay as they were.
        """
        for client, (slot, tree) in changes.items():
            if slot.sha256 is None:
                assert tree is not None
                slot.sha256 = self._write(client, slot.round, tree)
            changes[client] = slot, None
            del tree
        saved = []
        for client, (slot, _) in changes.items():
            assert slot.sha256 is not None
            sync_path(self.path(client, slot.round))
            saved.append(Saved(client, slot.round, slot.sha256, slot.replaces))
        if saved:
            sync_path(self.folder)
            sync_path(self.folder.parent)  # the folder itself is made with the first state
        return saved

    def restore(self, states: Iterable[Saved]) -> None:
        """Start from states on disk."""
        self._slots = {s.client: _Slot(s.round, 0, None, s.sha256, shared=True) for s in states}

    def sweep(self, keep: set[Path]) -> None:
        """Delete all files but these: leftovers of rounds that were never finished."""
        if self.folder.exists():
            for path in self.folder.iterdir():
                if path not in keep:
                    path.unlink(missing_ok=True)

    def path(self, client: int, round_: int) -> Path:
        """Where the state of a client after a round is, once it is on disk."""
        return client_state(self.folder, client, round_)

    def _shrink(self) -> None:
        """Move the states that were unused for longest to disk until the rest fits the budget."""
        while self._in_memory > self.budget:
            (client, round_), slot = next(iter(self._resident.items()))
            if slot.sha256 is None:
                assert slot.tree is not None
                slot.sha256 = self._write(client, round_, slot.tree)
            self._release(client, slot)

    def _write(self, client: int, round_: int, tree: Tree) -> str:
        return write_tree(self.path(client, round_), tree, sync=False)

    def _forget(self, client: int, slot: _Slot) -> None:
        """This state is no longer needed; delete its file too, unless a checkpoint needs it."""
        self._release(client, slot)
        if slot.sha256 is not None and not slot.shared:
            self.path(client, slot.round).unlink(missing_ok=True)

    def _release(self, client: int, slot: _Slot) -> None:
        if slot.tree is not None:
            del self._resident[client, slot.round]
            self._in_memory -= slot.bytes
            slot.tree = None
