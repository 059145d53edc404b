"""The server's part in a secure sum: it drives the stages, and takes the masks off the sum of those that are left.

A site that does not answer a stage in time, or answers wrongly, is left out from then on. With fewer than the threshold
left the sum is given up, and none of its uploads can be used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from flwr.app import ConfigRecord, RecordDict

from fednh.federated.checks import TensorSpecs
from fednh.flower.secure_messages import (
    LOSS,
    RECORD,
    SAMPLES,
    UPLOAD,
    Asked,
    CohortSent,
    ConfirmationsSent,
    KeysReply,
    RevealReply,
    SecureRecord,
    SharesReply,
    SharesSent,
    SignatureReply,
    SurvivorsSent,
    grid_of,
    limit,
    listed,
    named,
)
from fednh.flower.transport import Limit
from fednh.privacy.grid import Grid, NoisySum, Words
from fednh.privacy.secure_sum import Cohort, Keys, Terms, Verify, threshold, unmasked
from fednh.tree import Tree, strip_prefix

# Sends an order of a stage to clients, and returns the replies that can be used; `limit` is of each.
Exchange = Callable[[str, Mapping[int, ConfigRecord], Limit], Mapping[int, RecordDict]]
# Says why a client is left out.
LeaveOut = Callable[[int, str], None]
R = TypeVar("R", bound=SecureRecord)


class GivenUp(Exception):
    """Too few sites are left: the sum cannot be had."""


@dataclass(frozen=True)
class Total:
    """The sum of the uploads of some clients."""

    clients: tuple[int, ...]
    upload: Tree
    samples: int | None  # that they processed together; None: a site does not say
    loss_sum: float | None
    sent: int  # bytes that came up for it, from all sites in all stages


@dataclass
class SecureRound:
    """One round's secure sum."""

    terms: Terms
    names: Mapping[int, str]  # client -> site
    form: TensorSpecs  # of an upload
    noisy: Sequence[NoisySum]
    min_clients: int
    exchange: Exchange
    leave_out: LeaveOut
    verify: Verify
    sent: int = 0  # bytes that came up for it, from all sites in all stages
    cohort: Cohort = field(init=False)
    senders: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.clients = {site: client for client, site in self.names.items()}

    # --- before the sites train --------------------------------------------------------------------------------

    def open(self, clients: Sequence[int]) -> dict[int, ConfigRecord]:
        """Exchange keys and shares; returns the record `secure` of the order to train, for each client that is left."""
        keys = self._keys(clients)
        needed = threshold(len(keys), self.min_clients)
        if len(keys) < needed:
            raise GivenUp(f"{len(keys)} sites have sent keys, and {needed} are needed")
        rows = sorted(keys.values(), key=lambda each: each.site)
        self.cohort = Cohort(self.terms, tuple(rows), needed)
        sealed = self._shares(sorted(keys))
        self.senders = tuple(sorted(sealed))
        self._check_left(len(sealed), "shared their secrets")
        orders = {}
        for site in self.senders:
            theirs = {sender: sealed[sender][site] for sender in self.senders if sender != site}
            senders, shares = listed(theirs)
            asked = SharesSent(session=self.terms.number, senders=senders, shares=shares)
            orders[self.clients[site]] = asked.write()
        return orders

    def _keys(self, clients: Sequence[int]) -> dict[int, Keys]:
        keys = {}
        order = Asked(session=self.terms.number).write()
        for client, reply in self._ask("keys", dict.fromkeys(clients, order), KeysReply).items():
            theirs = reply.keys(self.names[client])
            if self.verify(theirs.site, theirs.statement(self.terms), theirs.signature):
                keys[client] = theirs
            else:
                self.leave_out(client, "its keys for the secure sum are not signed with its registered key")
        return keys

    def _shares(self, clients: Sequence[int]) -> dict[str, dict[str, bytes]]:
        """Sealed shares, by sender and receiver."""
        sealed, order = {}, CohortSent.of(self.cohort).write()
        for client, reply in self._ask("shares", dict.fromkeys(clients, order), SharesReply).items():
            site, theirs = self.names[client], named(reply.sites, reply.shares)
            if set(theirs) == set(self.cohort.names) - {site}:
                sealed[site] = theirs
            else:
                self.leave_out(client, "its shares are not for the other sites of the secure sum")
        return sealed

    # --- after they have trained -------------------------------------------------------------------------------

    @property
    def numbers(self) -> int:
        """How many numbers a masked upload has."""
        return self._grid.size

    @property
    def limit(self) -> Limit:
        """Of a reply with a masked upload."""
        return limit("masked", len(self.names), self.numbers)

    @property
    def _grid(self) -> Grid:
        return grid_of(self.form, len(self.cohort.keys), self.cohort.threshold, self.noisy)

    def close(self, masked: Mapping[int, tuple[Words, bytes]], asked: bytes) -> Total:
        """The sum of the clients' masked uploads, each with the site's signature of whom it masked with.

        `asked` is a digest of what their orders asked of all of them (signing.asked_alike).
        """
        statement = self.cohort.masked_with(self.senders, asked)
        rows = dict[str, tuple[Words, bytes]]()
        for client, (words, signature) in masked.items():
            self.sent += words.nbytes
            if self.verify(self.names[client], statement, signature):
                rows[self.names[client]] = words, signature
            else:
                self.leave_out(client, "it has not signed with whom its upload is masked, and what it was asked")
        self._check_left(len(rows), "sent a masked upload")
        survivors = tuple(sorted(rows))
        confirmed = self._confirmed(survivors, {site: signature for site, (_, signature) in rows.items()})
        revealed = self._revealed(confirmed)
        try:
            words = unmasked(self.cohort, self.senders, {site: words for site, (words, _) in rows.items()}, revealed)
        except ValueError as error:
            raise GivenUp(str(error)) from None
        return self._total(tuple(sorted(self.clients[site] for site in survivors)), words)

    def _confirmed(self, survivors: tuple[str, ...], signatures: Mapping[str, bytes]) -> dict[str, bytes]:
        sites, listed_signatures = listed(signatures)
        order = SurvivorsSent(session=self.terms.number, sites=sites, signatures=listed_signatures).write()
        asked = {self.clients[site]: order for site in survivors}
        statement, confirmed = self.cohort.agreed(survivors), dict[str, bytes]()
        for client, reply in self._ask("survivors", asked, SignatureReply, final=False).items():
            if self.verify(self.names[client], statement, reply.signature):
                confirmed[self.names[client]] = reply.signature
        self._check_left(len(confirmed), "agreed to the list of survivors")
        return confirmed

    def _revealed(self, confirmed: Mapping[str, bytes]) -> dict[str, dict[str, bytes]]:
        sites, signatures = listed(confirmed)
        order = ConfirmationsSent(session=self.terms.number, sites=sites, signatures=signatures).write()
        asked = {self.clients[site]: order for site in confirmed}
        replies = self._ask("reveal", asked, RevealReply, final=False)
        revealed = {self.names[client]: named(reply.sites, reply.shares) for client, reply in replies.items()}
        revealed = {site: told for site, told in revealed.items() if set(told) == set(self.senders)}
        self._check_left(len(revealed), "revealed their shares")
        return revealed

    def _total(self, clients: tuple[int, ...], words: Words) -> Total:
        tree = self._grid.tree(words)
        samples, loss = round(float(tree[SAMPLES])), float(tree[LOSS])
        upload, known = strip_prefix(tree, UPLOAD), samples > 0
        return Total(clients, upload, samples if known else None, loss if known else None, self.sent)

    # --- stages ------------------------------------------------------------------------------------------------

    def _ask(self, stage: str, orders: Mapping[int, ConfigRecord], kind: type[R], final: bool = True) -> dict[int, R]:
        """The replies to a stage; with `final`, a client whose reply cannot be read is left out of the round."""
        replies = {}
        for client, content in self.exchange(stage, orders, limit(stage, len(self.names), 0)).items():
            record = content.get(RECORD)
            try:
                replies[client] = kind.read(content)
            except ValueError as error:
                if final:
                    self.leave_out(client, f"its answer to the stage {stage!r} of the secure sum: {error}")
                continue
            assert isinstance(record, ConfigRecord)
            self.sent += record.count_bytes()
        return replies

    def _check_left(self, left: int, what: str) -> None:
        if left < self.cohort.threshold:
            raise GivenUp(
                f"{left} of {len(self.cohort.keys)} sites have {what}, and {self.cohort.threshold} are needed"
            )
