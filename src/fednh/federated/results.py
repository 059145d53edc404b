"""What a round and a run have come to: the frozen result of a round, and the counts that every checkpoint holds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

from fednh.errors import RunError
from fednh.federated import checks
from fednh.federated.client import ClientResult
from fednh.federated.plan import RoundPlan
from fednh.tree import Tree, select, size


@dataclass(frozen=True)
class RoundResult:
    """What came out of a round's training; its metrics arrive with the next exchange."""

    round: int
    clients: tuple[int, ...]  # whose uploads were used
    dropped: tuple[int, ...]  # who never reported
    refused: tuple[int, ...]  # whose uploads could not be used
    failed: tuple[int, ...]  # whose training raised an error, where the round goes on without it
    bytes_up: int
    bytes_down: int
    processed: int  # training samples of all that reported
    train_loss: float | None  # mean over the samples behind the used uploads
    gradient_norms: Mapping[int, float]  # by client, with diagnostics.gradient_norm
    norms: Mapping[int, checks.Norms]  # of the used uploads, where they are bounded
    lost: str = ""  # why the round changed nothing, where a bad round is skipped
    late: Mapping[int, int] = field(default_factory=dict)  # those of `clients` that were late: by how many rounds

    def record(self, seconds: float) -> dict[str, Any]:
        """The round's line of metrics.jsonl."""
        norms = [self.gradient_norms[client] for client in sorted(self.gradient_norms)]
        measured = {"gradient_norm": math.fsum(norms) / len(norms), "gradient_norms": norms} if norms else {}
        return {
            "round": self.round,
            "train_loss": self.train_loss,
            "seconds": round(seconds, 4),
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "clients": sorted(self.clients),
            "dropped": sorted(self.dropped),
            "refused": sorted(self.refused),
            "failed": sorted(self.failed),
            **measured,
            **({"late": {str(client): age for client, age in sorted(self.late.items())}} if self.late else {}),
            **({"lost": self.lost} if self.lost else {}),
        }


class RoundBuilder:
    """Counts a round's client results; `done` makes the frozen result."""

    def __init__(self, plan: RoundPlan, bytes_down: int, parts: Sequence[str] = ()):
        """`parts` of the used uploads are kept in `recorded`, in the order of `clients`."""
        self.plan, self.bytes_down, self.bytes_up, self.parts = plan, bytes_down, 0, parts
        self.clients, self.dropped = list[int](), list(plan.dropped)
        self.refused, self.failed = list[int](), list[int]()
        self.recorded: list[Tree] = []
        self.processed, self.samples, self.loss_sum = 0, 0, 0.0
        self.gradient_norms: dict[int, float] = {}
        self.norms: dict[int, checks.Norms] = {}
        self.late: dict[int, int] = {}

    def use(self, result: ClientResult) -> None:
        """Count a client whose upload is used, or those of whose uploads it is the sum. The upload is not kept here."""
        upload = result.upload or {}
        self.clients += result.together or (result.client,)
        if result.age:
            self.late[result.client] = result.age
        self.bytes_up += size(upload) if result.bytes_up is None else result.bytes_up
        if self.parts:
            self.recorded.append(select(upload, *self.parts))
        if result.samples is not None and result.loss_sum is not None:
            self.samples += result.samples
            self.loss_sum += result.loss_sum
        if result.gradient_norm is not None and math.isfinite(result.gradient_norm):
            self.gradient_norms[result.client] = result.gradient_norm

    def leave_out(self, result: ClientResult) -> None:
        """Count a client whose upload is missing or refused."""
        rows = {"silent": self.dropped, "failed": self.failed}
        rows.get(result.status, self.refused).append(result.client)

    def done(self, lost: str = "", used: bool = False) -> RoundResult:
        """The round's result; of a lost round no upload counts, unless its uploads were `used` and changed nothing."""
        given_up = bool(lost) and not used
        return RoundResult(
            self.plan.round,
            clients=() if given_up else tuple(self.clients),
            dropped=tuple(self.dropped),
            refused=tuple(self.refused),
            failed=tuple(self.failed),
            bytes_up=0 if given_up else self.bytes_up,
            bytes_down=self.bytes_down,
            processed=self.processed,
            train_loss=self.loss_sum / self.samples if self.samples and not given_up else None,
            gradient_norms={} if given_up else self.gradient_norms,
            norms=self.norms,
            lost=lost,
            late={} if given_up else self.late,
        )


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
    typical_norms: checks.Norms = field(default_factory=dict)  # of uploads, where they are bounded
    past_norms: dict[str, list[checks.Norms]] = field(default_factory=dict)  # of each client (JSON: by text)

    @property
    def members(self) -> set[int]:
        """The clients that took part so far."""
        return {client for record in self.records for client in record["clients"]}

    def add(self, result: RoundResult, seconds: float, spent: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Count a round that was trained, and what it has `spent` of a privacy budget."""
        self.round = result.round
        self.samples += result.processed
        self.seconds += seconds
        self.records.append({**result.record(seconds), **spent})
        for client in result.clients:
            if client in result.norms:
                before = self.past_norms.get(str(client), [])
                self.past_norms[str(client)] = [*before, result.norms[client]][-checks.NORM_MEMORY :]

    def totals(self) -> dict[str, Any]:
        """The run's costs and losses, for its summary."""
        return {
            **{key: sum(r[key] for r in self.records) for key in ("bytes_up", "bytes_down")},
            **{key: sum(len(r[key]) for r in self.records) for key in ("dropped", "refused", "failed")},
            "samples": self.samples,
            "seconds": round(self.seconds, 3),
            "client_seconds": round(self.client_seconds, 3),
            "eval_seconds": round(self.eval_seconds, 3),
            # None: nothing was trained
            "samples_per_second": round(self.samples / max(self.client_seconds, 1e-9), 1) if self.samples else None,
        }

    def split(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """What changes from round to round, as plain values, and the closed records, which never change again."""
        return asdict(replace(self, records=self.records[self.closed :])), self.records[: self.closed]

    @classmethod
    def joined(cls, values: Mapping[str, Any], closed: Sequence[dict[str, Any]]) -> tuple[Progress, dict[str, Any]]:
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
