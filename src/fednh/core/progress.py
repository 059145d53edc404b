"""Progress of a run: a round's outcome, the counts of the whole run, and the watcher that receives them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Protocol

from fednh.core import outliers
from fednh.errors import RunError


class Watcher(Protocol):
    """Receives the progress of a run."""

    def round_done(self, record: dict[str, Any]) -> None: ...
    def training(self, done: int, total: int) -> None: ...  # clients of the round
    def evaluating(self, done: int, total: int) -> None: ...  # in samples; called from any thread
    def note(self, text: str) -> None: ...


@dataclass
class Round:
    """What happened in one round."""

    round: int
    bytes_down: int
    dropped: list[int]  # who never reported
    picked: list[int] = field(default_factory=list)
    clients: list[int] = field(default_factory=list)  # whose uploads were used
    refused: list[int] = field(default_factory=list)  # whose uploads could not be used
    failed: list[int] = field(default_factory=list)  # whose training raised an error, with on_error = "skip"
    weights: list[int] = field(default_factory=list)  # training samples behind each used upload
    bytes_up: int = 0
    processed: int = 0  # training samples of all that reported
    samples: int = 0  # those behind the used uploads
    loss_sum: float = 0.0
    gradient_norms: dict[int, float] = field(default_factory=dict)  # by client, with diagnostics.gradient_norm
    lengths: dict[int, outliers.Lengths] = field(default_factory=dict)  # of the uploads, where they are bounded
    lost: str = ""  # why the round changed nothing, in a deployment

    def lose(self, why: str) -> None:
        """Discard the round's uploads; nothing of it counts."""
        self.lost, self.clients, self.weights, self.gradient_norms = why, [], [], {}
        self.bytes_up, self.samples, self.loss_sum = 0, 0, 0.0

    def record(self, seconds: float) -> dict[str, Any]:
        """The round's line of metrics.jsonl."""
        norms = [self.gradient_norms[client] for client in sorted(self.gradient_norms)]
        looked = {"gradient_norm": math.fsum(norms) / len(norms), "gradient_norms": norms} if norms else {}
        return {
            "round": self.round,
            "train_loss": self.loss_sum / self.samples if self.samples else None,
            "seconds": round(seconds, 4),
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "clients": sorted(self.clients),
            "dropped": sorted(self.dropped),
            "refused": sorted(self.refused),
            "failed": sorted(self.failed),
            **looked,
            **({"lost": self.lost} if self.lost else {}),
        }


@dataclass
class Progress:
    """What a run has counted so far: part of every checkpoint."""

    round: int = 0
    records: list[dict[str, Any]] = field(default_factory=list)
    closed: int = 0  # how many records are complete (evaluated, if due) and written
    samples: int = 0
    seconds: float = 0.0  # wall time of everything
    client_seconds: float = 0.0  # of waiting for clients: their work, without what the server does with it
    eval_seconds: float = 0.0
    usual: outliers.Lengths = field(default_factory=dict)  # usual lengths of uploads, where they are bounded
    lengths: dict[str, list[outliers.Lengths]] = field(default_factory=dict)  # each client's last ones (JSON: by text)

    def remember(self, happened: Round) -> None:
        """Store the lengths of the accepted uploads; later ones are compared with them."""
        for client in happened.clients:
            if client in happened.lengths:
                before = self.lengths.get(str(client), [])
                self.lengths[str(client)] = [*before, happened.lengths[client]][-outliers.MEMORY :]

    def totals(self) -> dict[str, Any]:
        """The run's costs and losses, for its summary."""
        return {
            "bytes_up": sum(r["bytes_up"] for r in self.records),
            "bytes_down": sum(r["bytes_down"] for r in self.records),
            "dropped": sum(len(r["dropped"]) for r in self.records),
            "refused": sum(len(r["refused"]) for r in self.records),
            "failed": sum(len(r["failed"]) for r in self.records),
            "samples": self.samples,
            "seconds": round(self.seconds, 3),
            "client_seconds": round(self.client_seconds, 3),
            "eval_seconds": round(self.eval_seconds, 3),
            "samples_per_second": round(self.samples / max(self.client_seconds, 1e-9), 1),
        }

    def split(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """What changes from round to round, as plain values, and the closed records, which never change again."""
        return asdict(replace(self, records=self.records[self.closed :])), self.records[: self.closed]

    @classmethod
    def joined(cls, values: dict[str, Any], closed: list[dict[str, Any]]) -> tuple[Progress, dict[str, Any]]:
        """Read a checkpoint: the run's progress, and the other values in it."""
        known = {each.name for each in fields(cls)}
        own = {key: value for key, value in values.items() if key in known}
        rest = {key: value for key, value in values.items() if key not in known}
        return cls(**{**own, "records": [*closed, *own["records"]]}), rest


def check_lost(summary: Mapping[str, Any]) -> None:
    """Raise if some of a deployment's rounds changed nothing: the run is not what was asked for."""
    if lost := summary.get("lost"):
        named = ", ".join(map(str, lost[:20])) + (", ..." if len(lost) > 20 else "")
        raise RunError(
            f"{len(lost)} of {summary['rounds']} rounds changed nothing (round {named}); federation.log in the run "
            f"folder says why"
        )
