"""The interface between the round loop and an executor: what the loop asks for, and what comes back.

One exchange says: "these clients evaluate what the last round left, these train the next, this travels down".
Answers come back in an order that does not depend on which client was fast. The executor decides where clients run and
where their kept state is stored between rounds: backends/threads.py has threads, backends/ray.py a Ray
cluster, flower/server_app.py real sites.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, Protocol

from fednh.errors import RunError
from fednh.federated import checks
from fednh.federated.aggregate import ClientOverrides, received
from fednh.federated.client import Report
from fednh.federated.evaluate import Personal
from fednh.federated.setup import ServerSide
from fednh.runs.client_states import Store
from fednh.tree import Tree

# --- progress -------------------------------------------------------------------------------------------------------
# Progress of a run: a round's outcome, the counts of the whole run, and the watcher that receives them.


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
    lengths: dict[int, checks.Norms] = field(default_factory=dict)  # of the uploads, where they are bounded
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
    usual: checks.Norms = field(default_factory=dict)  # usual lengths of uploads, where they are bounded
    lengths: dict[str, list[checks.Norms]] = field(default_factory=dict)  # each client's last ones (JSON: by text)

    def remember(self, happened: Round) -> None:
        """Store the lengths of the accepted uploads; later ones are compared with them."""
        for client in happened.clients:
            if client in happened.lengths:
                before = self.lengths.get(str(client), [])
                self.lengths[str(client)] = [*before, happened.lengths[client]][-checks.NORM_MEMORY :]

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


# --- executor -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exchange:
    """What the loop asks for. A run of R rounds has R + 1 of these: the last one only evaluates."""

    server: Tree  # the server's state after `done` rounds
    down: Tree  # the part of it that is sent to every client ...
    done: int  # number of rounds completed
    evaluate: Sequence[int] = ()  # clients whose personal models are measured, as round `done` left them
    train: Sequence[int] = ()  # clients that train round `done` + 1
    final: bool = False  # the run ends: personal models are saved
    records: ClientOverrides = field(default_factory=dict)  # ... and what these clients receive in place of it

    def received(self, client: int) -> Tree:
        return received(self.down, self.records, client)


@dataclass(frozen=True)
class Missing:
    """Why a client that was to train has no report, as a sentence."""

    why: Literal["silent", "failed", "refused"]
    words: str
    error: Exception | None = None


Outcome = tuple[int, Report | Missing]  # a client, and its report or why there is none


class Answers(Protocol):
    """Results of one exchange. The loop asks for `people` first; a client may train only when `reports` is read."""

    def people(self) -> list[Personal]:
        """The measured personal models, by client."""

    def reports(self) -> Iterator[Outcome]:
        """Reports of the clients that trained, the largest client first; a sum's last bits depend on the order."""

    def novelty(self) -> dict[str, Any] | None:
        """How similar samples are to the global model's prototypes (novelty.py), where only clients have samples."""


class Executor(AbstractContextManager[Any], Protocol):
    """Who computes the clients of a run. Entered before the first exchange, left after the last."""

    backend: str  # its name in the run folder
    deployed: bool  # real sites: a round that cannot be used is given up with a note; otherwise it stops the run
    least: int  # uploads that a round needs
    store: Store  # what clients keep, if that is kept here: part of every checkpoint

    def open(self, books: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> ServerSide:
        """Find out what the run works on; `books` and `records` come from the checkpoint, if there is one."""

    def begin(self, initial: Tree) -> None:
        """Get ready; `initial` is the server's state before the first round. Nothing has been written yet."""

    def present(self) -> Sequence[int]:
        """The clients that can be asked now."""

    def exchange(self, asked: Exchange) -> Answers:
        """Ask the clients."""

    def commit(self, round_: int, clients: Sequence[int]) -> None:
        """The round is over and used these clients' uploads: store their kept states, discard all others."""

    def rollback(self) -> None:
        """The round was aborted: discard what clients kept in it."""

    def books(self) -> dict[str, Any]:
        """What a checkpoint must hold beside the states in `store`: plain JSON values."""

    def finished(self, rounds: int) -> dict[str, Any]:
        """All rounds are done; returns what the summary says about the clients beyond their metrics."""

    def name(self, client: int) -> str:
        """The client's name in messages."""

    def note(self, text: str, client: int | None = None, round_: int = 0) -> None:
        """Tell the user something, about this client if one is named."""
