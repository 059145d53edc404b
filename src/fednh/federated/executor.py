"""The interface between the round loop and an executor: what the loop asks for, and what comes back.

One exchange says: "these clients evaluate what the last round left, these train the next, this travels down".
Results come back in an order that does not depend on which client was fast. The executor decides where clients run and
where their kept state is stored between rounds: backends/threads.py has threads, backends/ray.py a Ray cluster,
flower/server_app.py real sites.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from fednh.federated.aggregate import ClientOverrides
from fednh.federated.client import ClientResult
from fednh.federated.evaluate import Personal
from fednh.federated.setup import ServerSide
from fednh.privacy.private_data import Mechanisms
from fednh.runs.client_states import Store
from fednh.tree import Tree


@dataclass(frozen=True)
class RoundPolicy:
    """What the loop does when something is missing or wrong: real sites need another policy than simulated clients."""

    min_uploads: int = 1  # uploads that a round needs
    norm_bound: float = 0.0  # how many times longer than usual an upload may be; 0: no limit
    bad_round: Literal["stop", "skip"] = "stop"  # a round that cannot be used ends the run, or changes nothing
    client_error: Literal["stop", "skip"] = "stop"  # an error at a client ends the run, or the round goes on without it
    evaluate: Literal["sampled", "present"] = (
        "sampled"  # after the last round: `eval.final` clients, or all that are there
    )
    simulated: bool = True  # noise and participants may come from the run's seed, which real sites would know
    trusts_counts: bool = True  # whether numbers of samples may weigh uploads: real sites report them themselves


@dataclass(frozen=True)
class RoundTask:
    """What the loop asks for. A run of R rounds has R + 1 of these: the last one only evaluates."""

    server: Tree  # the server's state after `done` rounds
    down: Tree  # the part of it that is sent to clients, to each the view of its own network ...
    done: int  # number of rounds completed
    evaluate: Sequence[int] = ()  # clients whose personal models are measured, as round `done` left them
    train: Sequence[int] = ()  # clients that train round `done` + 1
    final: bool = False  # the run ends: personal models are saved
    mechanisms: Mechanisms | None = None  # noise in all that simulated clients release; a real site knows its own
    overrides: ClientOverrides = field(default_factory=dict)  # ... and what these clients receive in place of it
    back_to: int | None = None  # the run may go back to what clients kept after this round


class Replies(Protocol):
    """What clients reply in one exchange. The loop asks for metrics first; clients may train when results are read."""

    def personal_metrics(self) -> list[Personal]:
        """The measured personal models, by client."""

    def results(self) -> Iterator[ClientResult]:
        """Results of the clients that trained, the largest client first; a sum's last bits depend on the order."""

    def similarity(self) -> dict[str, Any] | None:
        """How similar samples are to the global model's prototypes (similarity.py), where only clients have samples."""


class Executor(AbstractContextManager[Any], Protocol):
    """Who computes the clients of a run. Entered before the first exchange, left after the last."""

    backend: str  # its name in the run folder
    policy: RoundPolicy
    store: Store  # what clients keep, if that is kept here: part of every checkpoint

    def open(self, extras: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> ServerSide:
        """Find out what the run works on; `extras` and `records` come from the checkpoint, if there is one."""

    def begin(self, initial: Tree) -> None:
        """Get ready; `initial` is the server's state before the first round. Nothing has been written yet."""

    def present(self) -> Sequence[int]:
        """The clients that can be asked now."""

    def ask(self, task: RoundTask) -> Replies:
        """Ask the clients."""

    def commit(self, round_: int, clients: Sequence[int]) -> None:
        """The round is over and used these clients' uploads: store their kept states, discard all others."""

    def rollback(self) -> None:
        """The round was aborted: discard what clients kept in it."""

    def go_back(self, round_: int, store: Store) -> None:
        """From now on clients have what they kept after this round; `store` has what of it is kept here."""

    def checkpoint_extras(self) -> dict[str, Any]:
        """What a checkpoint must hold beside the states in `store`: plain JSON values."""

    def finished(self, rounds: int) -> dict[str, Any]:
        """All rounds are done; returns what the summary says about the clients beyond their metrics."""

    def name(self, client: int) -> str:
        """The client's name in messages."""

    def note(self, text: str, client: int | None = None, round_: int = 0) -> None:
        """Tell the user something, about this client if one is named."""
