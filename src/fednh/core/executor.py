"""The interface between the round loop and an executor: what the loop asks for, and what comes back.

One exchange says: "these clients evaluate what the last round left, these train the next, this travels down".
Answers come back in an order that does not depend on which client was fast. The executor decides where clients run and
where their kept state is stored between rounds: executors/pool.py has threads, executors/cluster.py a Ray
cluster, flower/executor.py real sites.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from fednh.core.client import Report
from fednh.core.evaluate import Personal
from fednh.core.federation import ServerSide
from fednh.core.records import Records, received
from fednh.core.tree import Tree
from fednh.storage.client_states import Store


@dataclass(frozen=True)
class Exchange:
    """What the loop asks for. A run of R rounds has R + 1 of these: the last one only evaluates."""

    server: Tree  # the server's state after `done` rounds
    down: Tree  # the part of it that is sent to every client ...
    done: int  # number of rounds completed
    evaluate: Sequence[int] = ()  # clients whose personal models are measured, as round `done` left them
    train: Sequence[int] = ()  # clients that train round `done` + 1
    final: bool = False  # the run ends: personal models are saved
    records: Records = field(default_factory=dict)  # ... and what these clients receive in place of it

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
