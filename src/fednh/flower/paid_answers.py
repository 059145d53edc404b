"""Answers under privacy: each is paid in the site's ledger, computed, stored and sent, in this order.

A site that is killed on the way and asked again sends the stored answer, or one that is paid already and has not left;
never another one with fresh noise for the same payment. What must be in the ledger is what the site's audit log, and
the server in its order, say was in it before.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors import safe_open

from fednh.errors import Refused
from fednh.flower.audit import LEDGER
from fednh.flower.layout import KeptState, StateFolder
from fednh.flower.protocol import Answer, Order
from fednh.flower.site_config import SiteConfig
from fednh.io.chain import Head, read
from fednh.io.files import read_tree, sha256, write_tree
from fednh.privacy.accounting import Release
from fednh.privacy.ledger import Balance, Ledger
from fednh.privacy.marks import Marks

ANSWERS = 100  # stored answers that are kept at most
KEPT = 2  # answers that stay of those that the server no longer needs
NUMBERS = "numbers"  # of a stored answer, in the metadata of its file


@dataclass(frozen=True)
class PaidAnswers:
    """The answers of one site to the orders of one federation."""

    site_config: SiteConfig
    federation: str
    kept: KeptState
    marks: Marks

    def answer(
        self, order: Order, work: str, releases: Sequence[Release], compute: Callable[[Balance], Answer]
    ) -> tuple[Answer, bool]:
        """The answer to the order with the digest `work`, and whether it is a new one; Refused if it cannot be paid.

        `compute` gets what the samples' account has come to with it.
        """
        delta, ledger = self.site_config.policy.allow.delta, ledger_of(self.site_config, order.ledger)
        if not releases:
            balance = ledger.balance(self.marks, delta)
            if (answer := compute(balance)).upload:
                raise Refused("its answer would hold what no account names")
            return replace(answer, balance=balance), True
        with ledger.answering:
            path = self.kept.answer(order.round, work)
            if path.is_file() and sha256(path) == ledger.answer_to(work):
                return replace(_read(path), balance=ledger.balance(self.marks, delta)), False
            facts = {"federation": self.federation, "round": order.round}
            balance = ledger.pay(work, releases, self.marks, self.site_config.policy.allow.budget, **facts)
            answer = compute(balance)
            self._discard(order.since)
            head = ledger.stored(work, _write(path, answer))
            return replace(answer, balance=balance._replace(head=head)), True

    def check(self, releases: Sequence[Release]) -> None:
        """Refuse what the account could not pay."""
        ledger_of(self.site_config).check(releases, self.marks, self.site_config.policy.allow.budget)

    def _discard(self, since: int) -> None:
        """Delete the oldest answer if there are too many, or if the server no longer needs it."""
        stored = self.kept.answers()
        if len(stored) > ANSWERS or (len(stored) > KEPT and self.kept.round_of(stored[0]) < since):
            stored[0].unlink()


def ledger_of(site_config: SiteConfig, heard: str = "") -> Ledger:
    """The site's ledger, which must have the lines that the audit log and the server (`heard`) know of."""
    home, said = StateFolder(site_config.home), Head.read(heard)
    known = [*_recorded(home.audit_file(site_config.site)), *([said] if said else [])]
    return Ledger(site_config.ledger or home.ledger_file, site_config.site, known)


def _recorded(audit_file: Path) -> Iterator[Head]:
    """The newest line of the ledger that the site's audit log knows of."""
    if not audit_file.exists():
        return
    log = read(audit_file)
    if log.problem and not log.torn:
        raise Refused("its audit log, which says what was released, is damaged, so nothing more is released here")
    for row in reversed(log.lines):
        if head := Head.read(row.get(LEDGER)):
            yield head
            return


def _write(path: Path, answer: Answer) -> str:
    """Store an answer; returns the SHA-256 of the file."""
    assert answer.upload is not None
    facts = {"client": answer.client, "round": answer.round, "loss_sum": answer.loss_sum}
    return write_tree(path, answer.upload, {NUMBERS: json.dumps(facts)})


def _read(path: Path) -> Answer:
    with safe_open(path, "pt") as file:
        facts = json.loads(file.metadata()[NUMBERS])
    return Answer(facts["client"], facts["round"], read_tree(path), loss_sum=facts["loss_sum"])
