"""Checkpoints: the complete state of a run after a round, as safetensors and JSON, verified by checksum.

A checkpoint is a manifest, `round-000010.json`, that names the server's file and every client's with their SHA-256. It
is written last and in one step, so a manifest that exists describes files that were whole. The last two are kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from fednh.errors import UserError
from fednh.files import read_tree, sha256, write_json, write_tree
from fednh.store import Entry, Snapshot, Store
from fednh.tree import Tree

FORMAT = 1
KEEP = 2


@dataclass(frozen=True)
class Checkpoint:
    """What is needed to go on after `round`."""

    round: int
    server: Tree
    progress: dict[str, Any]  # counters and metrics so far: plain JSON values


class Checkpoints:
    """The checkpoints of one run folder."""

    def __init__(self, folder: Path, store: Store):
        self.folder, self.store = folder, store
        self._writer = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))
        self._under_way: Future[None] | None = None

    def begin(self, round_: int, server: Tree, progress: dict[str, Any]) -> None:
        """Save in the background while the next round goes on: trees never change, so nothing need be copied."""
        self.wait()
        snapshot = self.store.snapshot()
        self._under_way = self._writer.submit(self._save, round_, server, progress, snapshot)

    def wait(self) -> None:
        """Return when nothing is under way any more; what went wrong in the background is raised here."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever ended the run: what is under way is finished before the folder is given up."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()

    def save(self, round_: int, server: Tree, progress: dict[str, Any]) -> None:
        """Save, and return when it is on disk."""
        self.begin(round_, server, progress)
        self.wait()

    def _save(self, round_: int, server: Tree, progress: dict[str, Any], snapshot: Snapshot) -> None:
        """Write the state after `round_`, then drop what only older checkpoints needed."""
        name = f"server.round-{round_:06d}.safetensors"
        digest = write_tree(self.folder / name, server)
        clients = {
            str(client): {"round": round_of, "file": entry.file, "sha256": entry.sha256}
            for client, (round_of, entry) in self.store.flush(snapshot).items()
        }
        body = {
            "format": FORMAT,
            "round": round_,
            "server": {"file": name, "sha256": digest},
            "clients": clients,
            "progress": progress,
        }
        write_json(self._manifest(round_), {"sha256": _digest(body), "body": body})
        self._prune()

    def latest(self, say: Callable[[str], None], device: str = "cpu") -> Checkpoint | None:
        """Restore the newest whole checkpoint, telling about damaged ones; None when there never was one."""
        manifests = self._manifests()
        damaged: list[Path] = []
        for path in manifests:
            try:
                restored = self._restore(path, device)
            except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
                say(f"checkpoint {path.name} is damaged ({error}); trying the one before it")
                damaged.append(path)
                continue
            for bad in damaged:  # set aside, so that it does not count as one of the two that are kept
                bad.rename(bad.with_name(bad.name + ".damaged"))
            return restored
        if manifests:
            raise UserError(
                f"{self.folder}: none of the {len(manifests)} checkpoints is whole; restore the folder from a copy, or "
                f"delete it to start again from the beginning"
            )
        return None

    def _restore(self, path: Path, device: str) -> Checkpoint:
        document = json.loads(path.read_bytes())
        body = document["body"]
        if document["sha256"] != _digest(body):
            raise ValueError("the manifest's checksum does not match")
        if body["format"] != FORMAT:
            raise ValueError(f"format {body['format']} is not {FORMAT}")
        server = self.folder / body["server"]["file"]
        files = [(server, body["server"]["sha256"])]
        files += [(self.store.folder / row["file"], row["sha256"]) for row in body["clients"].values()]
        for file, digest in files:
            if sha256(file) != digest:
                raise ValueError(f"{file.name} does not match its checksum")
        self.store.restore(
            {int(k): (row["round"], Entry(row["file"], row["sha256"])) for k, row in body["clients"].items()}
        )
        return Checkpoint(body["round"], read_tree(server, device), body["progress"])

    def _prune(self) -> None:
        manifests = self._manifests()
        for path in manifests[KEEP:]:
            path.unlink(missing_ok=True)
        wanted: set[str] = set()
        servers: set[str] = set()
        for path in manifests[:KEEP]:
            try:
                body = json.loads(path.read_bytes())["body"]
                servers.add(body["server"]["file"])
                wanted |= {row["file"] for row in body["clients"].values()}
            except (ValueError, KeyError, TypeError):  # a damaged older manifest protects nothing
                continue
        for path in self.folder.glob("server.round-*.safetensors"):
            if path.name not in servers:
                path.unlink(missing_ok=True)
        self.store.prune(wanted)

    def _manifest(self, round_: int) -> Path:
        return self.folder / f"round-{round_:06d}.json"

    def _manifests(self) -> list[Path]:
        """Newest first."""
        return sorted(self.folder.glob("round-*.json"), reverse=True)


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
