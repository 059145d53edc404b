"""Who takes part: sites by name and number, the nodes that speak for them, and the task that they agreed on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fednh.data import scaling
from fednh.flower.messages import Hello, Task


@dataclass
class Member:
    """One site, as the server remembers it: part of every checkpoint."""

    number: int
    site: str
    rounds: list[int] = field(default_factory=list)  # in which its upload was taken
    key: str = ""  # its public key; empty where nothing is signed

    @property
    def last(self) -> int:
        return self.rounds[-1] if self.rounds else 0

    def since(self, horizon: int) -> int:
        """The oldest of its states that a server which goes back to round `horizon` may ask for."""
        return max((r for r in self.rounds if r <= horizon), default=0)


class Membership:
    """Members by number. Which node is which site is known while the server runs, and asked again after a restart."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] = (), records: Iterable[Mapping[str, Any]] = ()):
        """From a checkpoint's rows, and the records of its rounds, which list the clients that took part."""
        self.members = {row["number"]: Member(row["number"], row["site"], key=row.get("key", "")) for row in rows}
        for record in records:
            for client in record["clients"]:
                self.members[client].rounds.append(record["round"])
        self._node: dict[int, int] = {}  # client -> node
        self._client: dict[int, int] = {}  # node -> client

    def __iter__(self) -> Iterator[Member]:
        """Members in the order of their numbers."""
        return iter([member for _, member in sorted(self.members.items())])

    def rows(self) -> list[dict[str, Any]]:
        """The members as a checkpoint stores them."""
        return [{"number": member.number, "site": member.site, "key": member.key} for member in self]

    def knows(self, node: int) -> bool:
        return node in self._client

    def node(self, client: int) -> int:
        return self._node[client]

    def nodes(self, site: str) -> list[int]:
        """The node of a site, if it has one."""
        return [node for client, node in self._node.items() if self.site(client) == site]

    def site(self, client: int) -> str:
        return self.members[client].site

    def present(self, online: set[int]) -> list[int]:
        """The clients whose nodes are online."""
        return sorted(client for client, node in self._node.items() if node in online)

    def admit(self, arrivals: Sequence[tuple[int, Hello]]) -> list[str]:
        """Admit nodes that introduced themselves; new sites are numbered in the order of their names. Returns notes."""
        told = []
        for node, hello in sorted(arrivals, key=lambda row: row[1].site):
            client = self._number(hello)
            if self.members.setdefault(client, Member(client, hello.site, key=hello.key)).site != hello.site:
                told.append(
                    f"site {hello.site} has part {client}, which site {self.site(client)} has already; it is left out"
                )
                continue
            before = self._node.get(client)
            if before is not None and before != node:
                self._client.pop(before, None)
                told.append(f"site {hello.site} came back as another node; the new node replaces the old one")
            self._node[client], self._client[node] = node, client
        return told

    def _number(self, hello: Hello) -> int:
        if hello.number >= 0:
            return hello.number
        known = [member.number for member in self.members.values() if member.site == hello.site]
        return known[0] if known else max(self.members, default=-1) + 1


def agree(tasks: Sequence[Task]) -> Task:
    """The task that most of the first sites have, with one scaling of inputs for all sites."""
    (common, _), *_ = Counter(_form(task) for task in tasks).most_common(1)
    alike = [task for task in tasks if _form(task) == common]
    one = scaling.agreed([scaling.Scaling(task.mean, task.std) for task in alike])
    return replace(alike[0], mean=one.mean, std=one.std)


def number_problem(hello: Hello, parts: int) -> str | None:
    """Why a site cannot have the number that it claims, or None."""
    if hello.task.divided and not 0 <= hello.number < parts:
        return f"it says that it has part {hello.number} of {parts}; parts are numbered from 0 (partition.clients)"
    if not hello.task.divided and hello.number != -1:
        return "it has data of its own, so the server numbers it, but it gives itself a number"
    return None


def disagreement(agreed: Task, task: Task) -> str | None:
    """Why a site with this data cannot take part, or None."""
    if task.classes != agreed.classes:
        return (
            f"its classes are {', '.join(task.classes)}, not {', '.join(agreed.classes)}; set data.classes to all of "
            f"them in the federation's config"
        )
    if task.divided != agreed.divided:
        return "it has data of its own and others a part of one set, or the other way round"
    if task.preprocessing != agreed.preprocessing:
        return f"its samples are made by {task.preprocessing}, not by {agreed.preprocessing}"
    if _form(task) != _form(agreed):
        return f"its samples have shape {task.shape} and scale {task.scale:g}, not {agreed.shape} and {agreed.scale:g}"
    return None


def _form(task: Task) -> tuple[Any, ...]:
    form = task.shape, task.scale, len(task.mean), len(task.std), task.preprocessing
    return task.divided, task.classes, *form
