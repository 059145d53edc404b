"""The server's messages: sent through the Grid, answered in any order, too late or never."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fednh.errors import Interrupted
from fednh.flower.bounds import Limit
from fednh.flower.parcels import Broken, Parcels

Reply = Message | Broken


@dataclass(frozen=True)
class Letter:
    """What was sent, and to whom."""

    node: int
    kind: str  # query, train or evaluate
    limit: Limit  # of the reply
    client: int = -1
    round: int = 0
    site: str = ""  # its name; empty in a query, which asks for it
    counter: int = 0  # of the signed order; its reply must repeat it


Sign = Callable[[Letter, RecordDict], tuple[Letter, RecordDict]]


class Mailbox:
    """Sends and polls. `stray` gets every reply that no caller waits for: to queries, and to letters that timed out.

    With `sign` every letter is signed when it is sent.
    """

    def __init__(
        self,
        grid: Grid,
        stop: threading.Event,
        stray: Callable[[Letter, Reply], None],
        pause: float,
        sign: Sign | None = None,
    ):
        self.grid, self.stop, self.stray, self.pause, self.sign = grid, stop, stray, pause, sign
        self._open: dict[str, Letter] = {}
        self._parcels = Parcels(grid)

    def asked(self) -> set[int]:
        """Nodes that owe an answer to a query."""
        return {letter.node for letter in self._open.values() if letter.kind == MessageType.QUERY}

    def send(self, letters: Sequence[tuple[Letter, RecordDict]], keep: float) -> dict[str, Letter]:
        """Send letters; a reply is valid for `keep` seconds. Returns the letters that could be sent, by message id."""
        if self.sign is not None:
            letters = [self.sign(*letter) for letter in letters]
        messages = [Message(content, row.node, row.kind, ttl=keep, group_id=str(row.round)) for row, content in letters]
        posted = set(self.grid.push_messages(messages)) if messages else set()
        sent = {m.metadata.message_id: row for m, (row, _) in zip(messages, letters, strict=True)}
        sent = {name: row for name, row in sent.items() if name in posted}
        self._open |= sent
        return sent

    def replies(self, sent: dict[str, Letter], timeout: float) -> Iterator[tuple[Letter, Reply]]:
        """Replies to what was `sent`, as they arrive, until all are in or the timeout has passed."""
        waiting, deadline = set(sent), time.monotonic() + timeout
        while waiting and time.monotonic() < deadline:
            for name, letter, reply in self._pull():
                if name in waiting:
                    waiting.remove(name)
                    yield letter, reply
                else:
                    self.stray(letter, reply)
            if waiting:
                self._wait()
        for name in waiting:
            self._parcels.drop(name)

    def rest(self) -> None:
        """Handle the replies that have arrived, waiting for none in particular, then pause."""
        for _, letter, reply in self._pull():
            self.stray(letter, reply)
        self._wait()

    def _pull(self) -> list[tuple[str, Letter, Reply]]:
        if not self._open:
            return []
        limits = {name: letter.limit for name, letter in self._open.items()}
        replies = [(name, reply) for name, reply in self._parcels.pull(limits) if name in self._open]
        return [(name, self._open.pop(name), reply) for name, reply in replies if name in self._open]

    def _wait(self) -> None:
        if self.stop.wait(self.pause):
            raise Interrupted
