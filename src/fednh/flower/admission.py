"""Admission: the server asks unknown nodes who they are, and admits those whose data fits the federation.

`Membership` is who takes part: sites by name and number, and the nodes that speak for them. `Admission` also has the
task that they agreed on, and the sites that wait to be admitted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import MessageType
from flwr.serverapp import Grid

from fednh.config import Config
from fednh.config.schema import ModelConfig
from fednh.data import scaling
from fednh.errors import RunError
from fednh.federated.setup import frozen_recipe
from fednh.flower import audit, protocol
from fednh.flower.layout import WAITING
from fednh.flower.protocol import NOTICE, Hello, Index, Name, Newest, SiteProblem, Task, content_of, describe_error
from fednh.flower.signing import Identity, fingerprint_of_pem, ssh_fingerprint
from fednh.flower.site_config import for_sites
from fednh.flower.transport import GREETING, FetchError, Mailbox, Reply, Request, StrictModel
from fednh.models.backbone import ONNX, PINNED, Recipe
from fednh.privacy.ledger import Balance


class MemberRow(StrictModel):
    """One site in a checkpoint."""

    number: Index
    site: Name
    key: str  # its public key
    network: Name = ""  # that it has chosen, where sites have different ones
    ledger: Newest = ""


@dataclass
class Member:
    """One site, as the server remembers it: part of every checkpoint."""

    number: int
    site: str
    rounds: list[int] = field(default_factory=list)  # in which it trained what was taken
    key: str = ""  # its public key
    network: str = ""  # that it has chosen; empty: it has the one that it is dealt
    ledger: str = ""  # the newest line of its ledger of privacy that it has told
    spent: Balance | None = None  # what it has come to, as the site says

    @property
    def last(self) -> int:
        return self.rounds[-1] if self.rounds else 0

    def since(self, horizon: int) -> int:
        """The oldest of its states that a server which goes back to round `horizon` may ask for."""
        return max((r for r in self.rounds if r <= horizon), default=0)


@dataclass(frozen=True)
class Arrival:
    """A node that has introduced itself, and the public key that signed its greeting."""

    node: int
    hello: Hello
    key: str


class Membership:
    """Members by number. Which node is which site is known while the server runs, and asked again after a restart."""

    def __init__(self, rows: Iterable[MemberRow] = (), records: Iterable[Mapping[str, Any]] = ()):
        """From a checkpoint's rows, and the records of its rounds, which list the clients that took part."""
        self.members = {
            row.number: Member(row.number, row.site, key=row.key, network=row.network, ledger=row.ledger)
            for row in rows
        }
        for record in records:
            for client in record["clients"]:
                self.members[client].rounds.append(record["round"] - record.get("late", {}).get(str(client), 0))
        self._node: dict[int, int] = {}  # client -> node
        self._client: dict[int, int] = {}  # node -> client

    def __iter__(self) -> Iterator[Member]:
        """Members in the order of their numbers."""
        return iter([member for _, member in sorted(self.members.items())])

    def rows(self) -> list[dict[str, Any]]:
        """The members as a checkpoint stores them."""
        rows = [
            MemberRow(number=each.number, site=each.site, key=each.key, network=each.network, ledger=each.ledger)
            for each in self
        ]
        return [row.model_dump() for row in rows]

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

    def admit(self, arrivals: Sequence[Arrival]) -> list[str]:
        """Admit nodes that introduced themselves; new sites are numbered in the order of their names. Returns notes."""
        notes = []
        for arrival in sorted(arrivals, key=lambda each: each.hello.site):
            node, hello = arrival.node, arrival.hello
            client = self._number(hello)
            new = Member(client, hello.site, key=arrival.key, network=hello.network)
            if self.members.setdefault(client, new).site != hello.site:
                notes.append(
                    f"site {hello.site} has part {client}, which site {self.site(client)} has already; it is left out"
                )
                continue
            if (known := self.members[client].network) != hello.network:
                notes.append(
                    f"site {hello.site} comes with the network {hello.network or 'that it is dealt'}, and took part "
                    f"with {known or 'the one that it was dealt'}; it is left out"
                )
                continue
            before = self._node.get(client)
            if before is not None and before != node:
                self._client.pop(before, None)
                notes.append(f"site {hello.site} came back as another node; the new node replaces the old one")
            self._node[client], self._client[node] = node, client
        return notes

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
    return alike[0].model_copy(update={"mean": one.mean, "std": one.std})


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
    if problem := body_problem(agreed.body, task.body):
        return problem
    if task.preprocessing != agreed.preprocessing:
        return f"its samples are made by {task.preprocessing}, not by {agreed.preprocessing}"
    if _form(task) != _form(agreed):
        return f"its samples have shape {task.shape} and scale {task.scale:g}, not {agreed.shape} and {agreed.scale:g}"
    return None


def body_problem(agreed: Recipe | None, body: Recipe | None) -> str | None:
    """Why features of this frozen body do not fit those of the agreed one, or None; a dimension of 0 is not known."""
    if agreed is None or body is None:
        return None if agreed is body else "only its samples are features of a frozen body, or only those of others"
    if body.sha256 != agreed.sha256:
        return f"the weights of its frozen body have the SHA-256 {body.sha256}, not {agreed.sha256}"
    theirs = body.model_copy(update={"dim": body.dim if agreed.dim else 0, "file": agreed.file})
    key = next((key for key, value in theirs if value != getattr(agreed, key)), None)
    return (
        None if key is None else f"the {key} of its frozen body is {getattr(body, key)!r}, not {getattr(agreed, key)!r}"
    )


def network_problem(model: ModelConfig, hello: Hello) -> str | None:
    """Why a site cannot have the network that it has chosen, or none, or None."""
    if hello.network:
        listed = model.differs and hello.network in model.names
        return None if listed else f"it has chosen the network {hello.network!r}, which is not in model.name"
    if isinstance(model.name, dict) and hello.site not in model.name:
        return "model.name has no network for it, and it has chosen none (network = of its site.toml)"
    return None


def _form(task: Task) -> tuple[Any, ...]:
    form = task.shape, task.scale, len(task.mean), len(task.std), task.preprocessing
    return task.divided, task.classes, *form


SENT = 3  # times that weights are sent to one node
AGAIN = 10.0  # seconds until a node that cannot take part is asked again
REMINDER = 60.0  # seconds between two notes that sites are missing


class Admission:
    """The known sites, the task they agreed on, and the sites that wait to be admitted."""

    def __init__(
        self,
        config: Config,
        grid: Grid,
        mailbox: Mailbox,
        tell: Callable[..., None],  # takes a sentence and, for the audit log, the site it is about
        events: audit.AuditWriter,
        toml: str,
        timeout: float,
        identity: Identity,
    ):
        self.config, self.grid, self.mailbox, self.tell, self.identity = config, grid, mailbox, tell, identity
        self.events = events
        self.toml, self.hello_request, self.timeout = toml, protocol.hello_request(toml), timeout
        self.body = frozen_recipe(for_sites(config)) if config.model.frozen != "none" else None
        self._sent: Counter[int] = Counter()  # node -> how often weights were sent to it
        self.membership = Membership()
        self.task: Task | None = None
        self._arrivals: list[Arrival] = []
        self._noted: set[str] = set()
        self._again: dict[int, float] = {}  # node -> when to ask it again, if it could not take part

    def note_once(self, text: str, **who: Any) -> None:
        if text not in self._noted:
            self._noted.add(text)
            self.tell(text, **who)

    def wait_for_sites(self, enough: int, wait: float) -> Task:
        """Wait until `enough` sites with fitting data have introduced themselves; returns the task they agree on.

        RunError if they have not after `wait` seconds.
        """
        noted_at, last, deadline = 0.0, "", time.monotonic() + wait
        while True:
            self.query_new_nodes(set(self.grid.get_node_ids()))
            self.mailbox.poll()
            here = {arrival.hello.site for arrival in self._arrivals}
            if len(here) >= enough and (task := self._agreed(enough)):
                self.task = task
                self.admit_arrivals()
                return task
            note = f"{WAITING}: {len(here)} of {enough} are here ({', '.join(sorted(here)) or 'none'})"
            if note != last or time.monotonic() - noted_at > REMINDER:
                noted_at, last = time.monotonic(), note
                self.tell(note)
            if time.monotonic() > deadline:
                raise RunError(f"{note}, and federation.wait = {wait:g} s are over; start the same run again later")

    def _agreed(self, enough: int) -> Task | None:
        """The task that enough of the present sites share; else None, and a note on each site that does not fit."""
        rows = sorted(self._arrivals, key=lambda each: each.hello.site)
        usable = [each for each in rows if body_problem(self.body, each.hello.task.body) is None]
        task = self.task or agree([each.hello.task for each in usable or rows])
        if len({self._place(each.hello) for each in self._fitting(task, rows, silent=True)}) >= enough:
            return task
        self._fitting(task, rows)
        return None

    def _fitting(self, task: Task, arrivals: Sequence[Arrival], silent: bool = False) -> list[Arrival]:
        """The sites whose data fits; unless `silent`, a note on each of the others."""
        fitting = []
        for each in arrivals:
            if (problem := self._problem(task, each.hello)) is None:
                fitting.append(each)
            elif not silent:
                site = each.hello.site
                self.note_once(f"site {site} cannot take part: {problem}", site=site, node=each.node)
        return fitting

    @staticmethod
    def _place(hello: Hello) -> int | str:
        return hello.number if hello.number >= 0 else hello.site

    def _problem(self, task: Task, hello: Hello) -> str | None:
        other_body = body_problem(self.body, hello.task.body) or network_problem(self.config.model, hello)
        return other_body or disagreement(task, hello.task) or number_problem(hello, self.config.partition.clients)

    def query_new_nodes(self, online: set[int]) -> None:
        """Ask unknown nodes who they are."""
        met = self.mailbox.asked() | {each.node for each in self._arrivals}
        met |= {node for node, then in self._again.items() if then > time.monotonic()}
        strangers = [node for node in sorted(online - met) if not self.membership.knows(node)]
        if strangers:
            self.events("asked", kind="query", nodes=strangers, sent=self.hello_request)
        requests = [(Request(node, MessageType.QUERY, GREETING), self.hello_request) for node in strangers]
        self.mailbox.send(requests, self.timeout)

    def admit_arrivals(self) -> None:
        """Admit the sites that introduced themselves, if their data fits."""
        assert self.task is not None
        fitting, self._arrivals = self._fitting(self.task, self._arrivals), []
        for note in self.membership.admit(fitting):
            self.tell(note)
        for each in fitting:
            if self.membership.knows(each.node):
                facts = {"site": each.hello.site, "node": each.node, "key": ssh_fingerprint(each.key)}
                self.events("joined", **facts, head=each.hello.audit)

    def on_hello(self, request: Request, reply: Reply) -> None:
        """Handle a site's introduction."""
        try:
            arrival = self._arrival(request, reply)
        except Exception as error:  # whatever reading it raises is that site's problem, not the server's
            if isinstance(error, SiteProblem) and error.room and self._send_weights(request.node, error.room):
                return
            self._again[request.node] = time.monotonic() + min(AGAIN, self.timeout)
            who, facts = self._describe_node(request.node, reply)
            self.note_once(f"{who} cannot take part: {describe_error(error)}", **facts)
            return
        site = arrival.hello.site
        if problem := self.identity.bind_key(site, arrival.key):
            if problem not in self._noted:
                claimants = [other.node for other in self._arrivals if other.hello.site == site]
                self._notify({request.node, *claimants, *self.membership.nodes(site)}, problem)
            self.note_once(problem, site=site, node=request.node, key=ssh_fingerprint(arrival.key))
            return
        self._arrivals.append(arrival)

    def _send_weights(self, node: int, room: int) -> bool:
        """Send a node the weights that it lacks; False if they are larger than it takes, or not to be sent."""
        model = self.config.model
        if self.body is None or model.weights is None or model.name in PINNED or model.network.startswith(ONNX):
            return False
        file = Path(model.weights)
        if (size := file.stat().st_size) > room:
            note = f"node {node} takes weights of up to {room:,} bytes, and {file} has {size:,} (allow.weights)"
            self.note_once(note, node=node)
            return False
        self._sent[node] += 1
        if self._sent[node] > SENT:
            return False
        self.tell(f"sending the weights of the frozen body, {size:,} bytes, to node {node}")
        content = protocol.hello_request(self.toml, file.read_bytes())
        self.events("asked", kind="query", nodes=[node], sent=content)
        self.mailbox.send([(Request(node, MessageType.QUERY, GREETING), content)], self.timeout)
        return True

    def _arrival(self, request: Request, reply: Reply) -> Arrival:
        """Read a newcomer's introduction, and verify its signature."""
        content = content_of(reply)
        protocol.check_problem(content)
        content, site, key = self.identity.verify_reply(request, content)
        hello = Hello.read(content)
        if hello.site != site:
            raise ValueError("it signs for one site and speaks for another")
        return Arrival(request.node, hello, key)

    def _describe_node(self, node: int, reply: Reply) -> tuple[str, dict[str, Any]]:
        """What is known of a node that has not proven who it is: as text, and as facts for the audit log."""
        key = next((fingerprint_of_pem(info.public_key) for info in self.grid.get_nodes() if info.node_id == node), "")
        owner = self.identity.owner(key) if key else None
        known = f"node {node}, key {key}" if key else f"node {node}"
        facts = {"node": node, "key": key}
        if owner is not None:
            return f"site {owner} ({known})", {**facts, "site": owner}
        name = "" if isinstance(reply, FetchError) or reply.has_error() else protocol.claimed_name(reply.content)
        if name:
            return f"a site that calls itself {name} ({known})", {**facts, "says": name}
        return f"a site ({known})", facts

    def _notify(self, nodes: set[int], text: str) -> None:
        """Send sites a notice for their own logs."""
        notice = protocol.notice(text)
        self.mailbox.send([(Request(node, NOTICE, GREETING), notice) for node in sorted(nodes)], self.timeout)
