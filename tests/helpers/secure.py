"""Sites with real keys and files in a secure sum, without Flower's messages: what the server asks can be anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from flwr.app import ConfigRecord, RecordDict

from fednh.federated.checks import form_of
from fednh.flower import signing
from fednh.flower.deploy import certificates as certs
from fednh.flower.protocol import Answer
from fednh.flower.secure_messages import RECORD, STAGES, SharesSent, SignatureReply, listed, named, read_words
from fednh.flower.secure_round import SecureRound, Total
from fednh.flower.secure_site import MaskedOrder, SecureSite
from fednh.flower.signing import Envelope
from fednh.flower.site_config import SiteConfig, read_site_config
from fednh.flower.transport import Limit
from fednh.privacy.grid import NoisySum, Words
from fednh.privacy.secure_sum import Terms
from fednh.tree import Tree
from tests.helpers.federation import write_site_key

FORM = form_of({"a": torch.zeros(3), "b": torch.zeros(())})
ALIKE = b"what all are asked"
Change = Callable[[str, ConfigRecord], ConfigRecord]  # (site, order) -> what this site is asked


class Cohorts:
    """Sites by name, and a server that drives them; `changes` are what it does to its orders when it lies."""

    def __init__(self, folder: Path, names: Sequence[str] = ("a", "b", "c"), least: int = 2, **node: Any):
        self.folder, self.names, self.least = folder, tuple(names), least
        for name in names:
            write_site_key(folder / "sites" / name)
        certs.make_orders(folder, names)
        certs.make_peers(folder, names)
        self.configs: dict[str, SiteConfig] = {name: self._config(name, **node) for name in names}
        self.keys = {name: signing.known_site_key(folder / "sites" / name / "key.pub") or "" for name in names}
        self.uploads: dict[str, Tree] = {
            name: {"a": torch.tensor([1.0, 2.0, 3.0]) * (k + 1), "b": torch.tensor(0.5 * k)}
            for k, name in enumerate(names)
        }
        self.said: list[tuple[str, str, RecordDict]] = []  # (stage, site, reply)
        self.lost: dict[str, str] = {}  # site -> the stage in which it is lost
        self.changes: dict[str, Change] = {}  # by stage
        self.refused: dict[str, str] = {}  # site -> why
        self.computed = 0
        self.lies = False  # the server takes every signature
        self.paid, self.noisy = False, list[NoisySum]()
        self.alike: dict[str, bytes] = {}  # site -> what it is asked like all others, where it is asked something else

    def _config(self, name: str, **node: Any) -> SiteConfig:
        own = self.folder / "sites" / name
        place = {"orders": own / "orders.pub", "key": own / "key", "peers": own / "peers", "state": own / "state"}
        more = {"site": name, "partition-id": 0, "num-partitions": 1, **node}
        return read_site_config({key: str(value) for key, value in place.items()} | more)

    def site(self, name: str, round_: int = 1) -> SecureSite:
        """A new process of a site."""
        return SecureSite(self.configs[name], Envelope("fed", 1, "train", str(round_), 1, name, 1))

    def ask(self, name: str, stage: str, order: ConfigRecord, round_: int = 1, digest: str = "") -> RecordDict:
        """What a site says to an order of a stage; of the one to train, whose digest is given."""
        content, site = RecordDict({RECORD: order}), self.site(name, round_)
        if stage != "masked":
            return site.stage(stage, content)
        alike = self.alike.get(name, ALIKE)
        training = MaskedOrder(digest or f"order-{round_}", alike, self.least, self.noisy, self.paid)
        return site.masked(content, training, lambda: self._answer(name))

    def _answer(self, name: str) -> Answer:
        self.computed += 1
        return Answer(0, 1, self.uploads[name], 10, 2.5)

    def round(self, number: int = 1, round_: int = 1) -> SecureRound:
        def exchange(stage: str, orders: Mapping[int, ConfigRecord], limit: Limit) -> dict[int, RecordDict]:
            asked = {self.names[client]: order for client, order in orders.items()}
            return {self.names.index(name): reply for name, reply in self.replies(stage, asked, round_).items()}

        terms = Terms("fed", 1, round_, number)
        names = dict(enumerate(self.names))
        out = lambda client, why: self.refused.update({self.names[client]: why})  # noqa: E731
        return SecureRound(terms, names, FORM, self.noisy, self.least, exchange, out, self.verify)

    def verify(self, site: str, statement: bytes, signature: bytes) -> bool:
        return self.lies or signing.is_signed(self.keys[site], statement, signature)

    def replies(
        self, stage: str, orders: Mapping[str, ConfigRecord], round_: int = 1, digest: str = ""
    ) -> dict[str, RecordDict]:
        from fednh.errors import Refused

        replies = {}
        for name, order in orders.items():
            if name in self.lost and STAGES.index(self.lost[name]) <= STAGES.index(stage):
                continue
            asked = self.changes[stage](name, order) if stage in self.changes else order
            try:
                replies[name] = self.ask(name, stage, asked, round_, digest)
            except Refused as error:
                self.refused[name] = str(error)
                continue
            self.said.append((stage, name, replies[name]))
        return replies

    def total(self, number: int = 1, round_: int = 1, digest: str = "") -> Total:
        """A whole secure sum by an honest server, but for `changes`."""
        exchange = self.round(number, round_)
        orders = exchange.open(range(len(self.names)))
        asked = {self.names[client]: order for client, order in orders.items()}
        replies = self.replies("masked", asked, round_, digest)
        return exchange.close({self.names.index(name): masked(reply) for name, reply in replies.items()}, ALIKE)

    def of(self, *names: str) -> Tree:
        """The plain sum of these sites' uploads."""
        return {key: sum((self.uploads[name][key] for name in names), torch.zeros(())) for key in ("a", "b")}

    def masked_words(self) -> dict[str, Words]:
        return {name: read_words(reply) for stage, name, reply in self.said if stage == "masked"}


def masked(reply: RecordDict) -> tuple[Words, bytes]:
    return read_words(reply), SignatureReply.read(reply).signature


def without_sender(order: ConfigRecord, sender: str) -> ConfigRecord:
    """The order to train as if a site had sent no shares."""
    asked = SharesSent.read(RecordDict({RECORD: order}))
    senders, shares = listed({name: row for name, row in named(asked.senders, asked.shares).items() if name != sender})
    return SharesSent(session=asked.session, senders=senders, shares=shares).write()
