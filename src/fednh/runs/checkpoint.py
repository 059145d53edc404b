"""Checkpoints: the complete state of a run after a round, as safetensors and JSON, verified by checksum.

A checkpoint is a manifest, `round-000010.json`, that names the server's file and a mark in the journal, which lists
the clients' files and the finished rounds' records. All have their SHA-256. The manifest is written last and in one
step, so one that exists describes files that were whole. The last two are kept. Each adds to the journal what has
changed since the one before: its cost does not depend on how many clients have ever taken part.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from fednh.errors import UserError
from fednh.io.files import make_folder, read_tree, sha256, sync_path, write_bytes, write_json, write_tree
from fednh.runs.client_states import Changes, Saved, Store
from fednh.runs.layout import CheckpointLayout, RunLayout, client_state
from fednh.tree import Tree

# --- journal --------------------------------------------------------------------------------------------------------
# A file of JSON lines that only grows, and marks that name what it held at one time, by length and checksum.
#
# Writing costs what is added, however long the file is. A crash while writing leaves lines behind the last mark; the
# next `append` cuts them off.


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
        content = self.read_bytes(mark)
        return [json.loads(line) for line in content.splitlines()]

    def truncate_to(self, mark: Mark) -> None:
        """Let the next `append` write behind this mark."""
        self._end, self._sum = mark.bytes, hashlib.sha256(self.read_bytes(mark))

    def read_bytes(self, mark: Mark) -> bytes:
        """The same as they lie in the file."""
        if mark.bytes == 0:
            return b""
        with self.path.open("rb") as file:
            content = file.read(mark.bytes)
        if hashlib.sha256(content).hexdigest() != mark.sha256:
            raise ValueError(f"{self.path.name} does not match its checksum")
        return content


# --- checkpoint -----------------------------------------------------------------------------------------------------


FORMAT = 2
KEEP = 2
DAMAGE = (OSError, ValueError, KeyError, TypeError, SafetensorError)


@dataclass(frozen=True)
class Checkpoint:
    """What is needed to resume after `round`."""

    round: int
    server: Tree
    progress: dict[str, Any]  # counters so far: plain JSON values
    log: list[dict[str, Any]] = field(default_factory=list)  # append-only records


class Checkpoints(CheckpointLayout):
    """The checkpoints of one run folder."""

    def __init__(self, folder: Path, store: Store):
        super().__init__(folder)
        self.store = store
        self.journal = Journal(self.journal_file)
        self._logged = 0  # how much of the log is in the journal
        self._changes: Changes = {}  # kept until they are written: a save that fails loses none
        self._outdated: list[Path] = []  # client files that only the older of the kept checkpoints needs
        self._writer = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))
        self._under_way: Future[None] | None = None

    def begin(self, round_: int, server: Tree, progress: dict[str, Any], log: Sequence[dict[str, Any]] = ()) -> None:
        """Save in the background while the next round goes on: trees never change, so nothing need be copied.

        `log` is append-only: only the entries that are new since the last checkpoint are written.
        """
        self.wait()
        self._changes |= self.store.changes()
        self._under_way = self._writer.submit(self._save, round_, server, progress, log[self._logged :])

    def wait(self) -> None:
        """Wait for the save in the background; an error in it is raised here."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        """However the run ended, a save in progress is finished before the folder is unlocked."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()

    def save(self, round_: int, server: Tree, progress: dict[str, Any], log: Sequence[dict[str, Any]] = ()) -> None:
        """Save, and return when it is on disk."""
        self.begin(round_, server, progress, log)
        self.wait()

    def _save(self, round_: int, server: Tree, progress: dict[str, Any], log: Sequence[dict[str, Any]]) -> None:
        """Write the state after `round_`, then drop what only older checkpoints needed."""
        manifest = self.manifest(round_)
        file = self.server_of(manifest)
        digest = write_tree(file, server)
        saved = self.store.flush(self._changes)
        states = [{"client": s.client, "round": s.round, "sha256": s.sha256} for s in saved]
        mark = self.journal.append([*states, *({"log": entry} for entry in log)])
        self._logged += len(log)
        self._changes = {}
        body = {
            "format": FORMAT,
            "round": round_,
            "server": {"file": file.name, "sha256": digest},
            "journal": asdict(mark),
            "progress": progress,
        }
        again = manifest.exists()
        write_json(manifest, {"sha256": _digest(body), "body": body})
        self._prune()
        if not again:  # only the checkpoint before the last needed these, and it is gone
            for path in self._outdated:
                path.unlink(missing_ok=True)
            self._outdated = []
        self._outdated += [self.store.path(s.client, s.replaces) for s in saved if s.replaces is not None]

    def copy(self, round_: int, to: RunLayout) -> None:
        """Copy the checkpoint of a round, with what clients had kept by then, into a folder that `latest` reads.

        Its manifest comes last, so a copy that has one is whole. Files are linked where the disk can: none of them is
        ever changed.
        """
        body = _body(self.manifest(round_))
        content = self.journal.read_bytes(Mark(**body["journal"]))
        there, server = CheckpointLayout(to.checkpoints), self.path / body["server"]["file"]
        there.manifest(round_).unlink(missing_ok=True)
        files = [(server, there.path / server.name)]
        for state in _newest(map(json.loads, content.splitlines())):
            file = self.store.path(state.client, state.round)
            files.append((file, to.clients / file.name))
        for folder in (to.checkpoints, to.clients):
            make_folder(folder)
        for file, copy in files:
            copy.unlink(missing_ok=True)
            _link(file, copy)
        write_bytes(there.journal_file, content)
        for folder in (to.clients, to.checkpoints):
            sync_path(folder)
        write_bytes(there.manifest(round_), self.manifest(round_).read_bytes())

    def latest(self, say: Callable[[str], None], device: str = "cpu") -> Checkpoint | None:
        """Restore the newest intact checkpoint and report damaged ones; None if there never was a checkpoint."""
        manifests = self.manifests()
        damaged: list[Path] = []
        for path in manifests:
            try:
                restored = self._restore(path, device)
            except DAMAGE as error:
                say(f"checkpoint {path.name} is damaged ({error}); trying the one before it")
                damaged.append(path)
                continue
            for bad in damaged:  # set aside, so that it does not count as one of the two that are kept
                bad.rename(bad.with_name(bad.name + ".damaged"))
            return restored
        if manifests:
            raise UserError(
                f"{self.path}: none of the {len(manifests)} checkpoints is whole; restore the folder from a copy, or "
                f"delete it to start again from the beginning"
            )
        return None

    def _restore(self, path: Path, device: str) -> Checkpoint:
        body = _body(path)
        mark = Mark(**body["journal"])
        lines = self.journal.read(mark)
        states = _newest(lines)
        server = self.path / body["server"]["file"]
        files = [(server, body["server"]["sha256"])]
        files += [(self.store.path(s.client, s.round), s.sha256) for s in states]
        for file, digest in files:
            if sha256(file) != digest:
                raise ValueError(f"{file.name} does not match its checksum")
        restored = Checkpoint(
            body["round"], read_tree(server, device), body["progress"], [line["log"] for line in lines if "log" in line]
        )
        self.store.restore(states)
        self.journal.truncate_to(mark)
        self._logged = len(restored.log)
        current = {self.store.path(s.client, s.round) for s in states}
        self._outdated = [file for file in self._needed_before(path) if file not in current]
        self.store.sweep(current | set(self._outdated))
        return restored

    def _needed_before(self, path: Path) -> list[Path]:
        """The client files of the checkpoint before this one, if there is one."""
        for before in [p for p in self.manifests() if p < path][:1]:
            try:
                states = _newest(self.journal.read(Mark(**_body(before)["journal"])))
                return [self.store.path(s.client, s.round) for s in states]
            except DAMAGE:  # a damaged checkpoint needs no files
                pass
        return []

    def _prune(self) -> None:
        manifests = self.manifests()
        for path in manifests[KEEP:]:
            path.unlink(missing_ok=True)
        for path in set(self.servers()) - set(map(self.server_of, manifests[:KEEP])):
            path.unlink(missing_ok=True)


def read_state(folder: Path, round_: int) -> tuple[Tree, dict[int, Path]] | None:
    """The server's state after a round and the files of what clients kept, from its checkpoint; None: there is none.

    Nothing is changed: the run may be going on, or somebody else's.
    """
    layout = CheckpointLayout(folder)
    manifest = layout.manifest(round_)
    if not manifest.exists():
        return None
    try:
        body = _body(manifest)
        lines = Journal(layout.journal_file).read(Mark(**body["journal"]))
        server = folder / body["server"]["file"]
        if sha256(server) != body["server"]["sha256"]:
            raise ValueError(f"{server.name} does not match its checksum")
        kept = {s.client: client_state(folder.parent / RunLayout.clients, s.client, s.round) for s in _newest(lines)}
        return read_tree(server), kept
    except DAMAGE as error:
        raise UserError(f"{manifest} cannot be read ({error}); choose another round") from error


def _body(manifest: Path) -> dict[str, Any]:
    document = json.loads(manifest.read_bytes())
    body: dict[str, Any] = document["body"]
    if document["sha256"] != _digest(body):
        raise ValueError("the manifest's checksum does not match")
    if body["format"] != FORMAT:
        raise ValueError(f"format {body['format']} is not {FORMAT}")
    return body


def _link(file: Path, copy: Path) -> None:
    try:
        os.link(file, copy)
    except OSError:  # a file system without hard links
        shutil.copyfile(file, copy)
        sync_path(copy)


def _newest(lines: Iterable[dict[str, Any]]) -> list[Saved]:
    """Every client's latest state."""
    saved = {line["client"]: Saved(line["client"], line["round"], line["sha256"]) for line in lines if "client" in line}
    return [saved[client] for client in sorted(saved)]


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
