"""Admission: the server asks unknown nodes who they are, and admits those whose data fits the federation."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from flwr.app import MessageType
from flwr.serverapp import Grid

from fednh.config import Config
from fednh.errors import RunError
from fednh.flower import audit, messages
from fednh.flower.audit_events import head_of
from fednh.flower.bounds import GREETING
from fednh.flower.identity import Identity
from fednh.flower.keys import fingerprint, fingerprint_of_pem
from fednh.flower.mailbox import Letter, Mailbox, Reply
from fednh.flower.membership import Membership, agree, disagreement, number_problem
from fednh.flower.messages import NOTICE, Hello, Task
from fednh.flower.notes import WAITING
from fednh.flower.parcels import Broken
from fednh.flower.replies import content_of, why

AGAIN = 10.0  # seconds until a node that cannot take part is asked again
REMINDER = 60.0  # seconds between two notes that sites are missing


class Reception:
    """The known sites, the task they agreed on, and the sites that wait to be admitted."""

    def __init__(
        self,
        config: Config,
        grid: Grid,
        mailbox: Mailbox,
        tell: Callable[..., None],  # takes a sentence and, for the audit log, the site it is about
        events: audit.Writer,
        toml: str,
        timeout: float,
        identity: Identity | None,
    ):
        self.config, self.grid, self.mailbox, self.tell, self.identity = config, grid, mailbox, tell, identity
        self.events = events
        self.question, self.timeout = messages.question(toml), timeout
        self.membership = Membership()
        self.task: Task | None = None
        self._arrivals: list[tuple[int, Hello]] = []
        self._told: set[str] = set()
        self._again: dict[int, float] = {}  # node -> when to ask it again, if it could not take part

    def once(self, words: str, **who: Any) -> None:
        if words not in self._told:
            self._told.add(words)
            self.tell(words, **who)

    def gather(self, enough: int, aloud: bool, wait: float) -> Task:
        """Wait until `enough` sites with fitting data have introduced themselves; returns the task they agree on.

        RunError if they have not after `wait` seconds.
        """
        told, last, deadline = 0.0, "", time.monotonic() + wait
        while True:
            self.greet(set(self.grid.get_node_ids()))
            self.mailbox.rest()
            here = {hello.site for _, hello in self._arrivals}
            if len(here) >= enough and (task := self._agreed(enough)):
                self.task = task
                self.welcome()
                return task
            words = f"{WAITING}: {len(here)} of {enough} are here ({', '.join(sorted(here)) or 'none'})"
            if aloud and (words != last or time.monotonic() - told > REMINDER):
                told, last = time.monotonic(), words
                self.tell(words)
            if time.monotonic() > deadline:
                raise RunError(f"{words}, and federation.wait = {wait:g} s are over; start the same run again later")

    def _agreed(self, enough: int) -> Task | None:
        """The task that enough of the present sites share; else None, and a note on each site that does not fit."""
        rows = sorted(self._arrivals, key=lambda row: row[1].site)
        task = self.task or agree([hello.task for _, hello in rows])
        fitting = {self._place(hello) for _, hello in rows if not self._problem(task, hello)}
        if len(fitting) >= enough:
            return task
        for node, hello in rows:
            if problem := self._problem(task, hello):
                self.once(f"site {hello.site} cannot take part: {problem}", site=hello.site, node=node)
        return None

    @staticmethod
    def _place(hello: Hello) -> int | str:
        return hello.number if hello.number >= 0 else hello.site

    def _problem(self, task: Task, hello: Hello) -> str | None:
        return disagreement(task, hello.task) or number_problem(hello, self.config.partition.clients)

    def greet(self, online: set[int]) -> None:
        """Ask unknown nodes who they are."""
        met = self.mailbox.asked() | {node for node, _ in self._arrivals}
        met |= {node for node, then in self._again.items() if then > time.monotonic()}
        strangers = [node for node in sorted(online - met) if not self.membership.knows(node)]
        if strangers:
            self.events("asked", kind="query", nodes=strangers, sent=self.question)
        letters = [(Letter(node, MessageType.QUERY, GREETING), self.question) for node in strangers]
        self.mailbox.send(letters, self.timeout)

    def welcome(self) -> None:
        """Admit the sites that introduced themselves, if their data fits."""
        assert self.task is not None
        fitting = []
        for node, hello in self._arrivals:
            if problem := self._problem(self.task, hello):
                self.once(f"site {hello.site} cannot take part: {problem}", site=hello.site, node=node)
            else:
                fitting.append((node, hello))
        self._arrivals = []
        for words in self.membership.admit(fitting):
            self.tell(words)
        for node, hello in fitting:
            if self.membership.knows(node):
                facts = {"site": hello.site, "node": node, "key": fingerprint(hello.key)}
                self.events("joined", **facts, head=hello.audit)

    def heard(self, letter: Letter, reply: Reply) -> None:
        """Handle a site's introduction."""
        try:
            hello = self._hello(letter, reply)
        except Exception as error:  # whatever reading it raises is that site's problem, not the server's
            self._again[letter.node] = time.monotonic() + min(AGAIN, self.timeout)
            who, facts = self._stranger(letter.node, reply)
            self.once(f"{who} cannot take part: {why(error)}", **facts)
            return
        if self.identity is not None and (problem := self.identity.claim(hello.site, hello.key)):
            if problem not in self._told:
                spokesmen = [node for node, other in self._arrivals if other.site == hello.site]
                self._notify({letter.node, *spokesmen, *self.membership.nodes(hello.site)}, problem)
            self.once(problem, site=hello.site, node=letter.node, key=fingerprint(hello.key))
            return
        self._arrivals.append((letter.node, hello))

    def _hello(self, letter: Letter, reply: Reply) -> Hello:
        """Read a newcomer's introduction, and verify its signature where messages are signed."""
        content = content_of(reply)
        if self.identity is None:
            return Hello.read(content)
        messages.check_problem(content)
        content, site, key = self.identity.opened(letter, content)
        hello = Hello.read(content)
        if hello.site != site:
            raise ValueError("it signs for one site and speaks for another")
        return replace(hello, key=key, audit=head_of(content) or "")

    def _stranger(self, node: int, reply: Reply) -> tuple[str, dict[str, Any]]:
        """What is known of a node that has not proven who it is: as text, and as facts for the audit log."""
        key = next((fingerprint_of_pem(info.public_key) for info in self.grid.get_nodes() if info.node_id == node), "")
        owner = self.identity.owner(key) if self.identity is not None and key else None
        known = f"node {node}, key {key}" if key else f"node {node}"
        facts = {"node": node, "key": key}
        if owner is not None:
            return f"site {owner} ({known})", {**facts, "site": owner}
        name = "" if isinstance(reply, Broken) or reply.has_error() else messages.claimed_name(reply.content)
        if name:
            return f"a site that calls itself {name} ({known})", {**facts, "says": name}
        return f"a site ({known})", facts

    def _notify(self, nodes: set[int], words: str) -> None:
        """Send sites a notice for their own logs."""
        text = messages.notice(words)
        self.mailbox.send([(Letter(node, NOTICE, GREETING), text) for node in sorted(nodes)], self.timeout)
