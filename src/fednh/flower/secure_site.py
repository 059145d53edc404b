"""A site's part in a secure sum: what it keeps between the messages of a round, and what it refuses.

Every message may reach another process, so the state of the round lies in a file (layout.SecureState). It is written
before a reply leaves, and the reply with it: a stage that is asked again gets the same reply, and one that is asked
again differently is refused. So a site masks one summand in a session, and tells one kind of share about each site. A
session ends when the next one begins, and its secrets are gone.

After a crash the server asks for a round again, in a new session. The site then masks the summand that it made the
first time, with the noise that is in it, and only if the same sites are asked. And it agrees to the same survivors
only: because more than half of the sites must agree, no order is ever summed over two different sets of sites, whose
sums could be subtracted from each other. An order whose summand is no longer kept is refused where there is noise in
it: it would leave with fresh noise. The site's ledger says, too, with which noise an order has left and for which sum:
what lies here can be lost, or set back.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives.asymmetric import ec
from filelock import FileLock
from flwr.app import ConfigRecord, RecordDict
from pydantic import BaseModel, ConfigDict, ValidationError

from fednh.errors import Refused, UserError
from fednh.federated.checks import form_of
from fednh.flower import compat, protocol, signing
from fednh.flower.layout import SecureState, StateFolder
from fednh.flower.paid_answers import ledger_of
from fednh.flower.secure_messages import (
    MASKED,
    RECORD,
    STAGES,
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
    listed,
    named,
    read_words,
    summand_of,
    write_words,
)
from fednh.flower.signing import Envelope
from fednh.io.chain import Head
from fednh.io.files import write_bytes
from fednh.privacy.grid import NoisySum, Words
from fednh.privacy.secure_sum import Cohort, Keys, Participant, Secrets, Terms

if TYPE_CHECKING:
    from fednh.flower.protocol import Answer
    from fednh.flower.site_config import SiteConfig

KEPT = 3  # summands that are kept, in case that a round is asked for again
REMEMBERED = 1000  # orders whose survivors are remembered

Summand = tuple[RecordDict, Words]  # what leaves beside the masked upload, and the upload on the grid with its noise


@dataclass(frozen=True)
class MaskedOrder:
    """An order to train, as far as a secure sum looks at it."""

    digest: str  # of all that the answer depends on
    alike: bytes  # a digest of what all sites are asked alike
    least: int  # sites that the config asks for
    noisy: Sequence[NoisySum] = ()
    paid: bool = False  # under privacy: it is paid in the ledger, and leaves with one noise only


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_bytes="hex", val_json_bytes="hex")


class Session(_File):
    """The file of the round that the site is in."""

    terms: Terms
    keys: Keys
    secrets: Secrets | None  # None: the site has revealed its shares, and needs them no more
    participant: Participant | None = None  # from the stage `shares` on
    order: str = ""  # digest of the order whose upload is masked
    paid: bool = False  # under privacy
    asked: dict[str, str] = {}  # stage -> digest of what was asked


class Given(_File):
    """An order for which a masked upload has left."""

    order: str
    sites: tuple[str, ...]
    threshold: int
    survivors: tuple[str, ...] = ()  # that the site has agreed to; none: to no list yet


class GivenFile(_File):
    orders: tuple[Given, ...] = ()


class SecureSite:
    """What one message asks of a site."""

    def __init__(self, site_config: SiteConfig, envelope: Envelope):
        self.site, self.fewest = site_config.site, site_config.policy.allow.sites
        self.terms = Terms(envelope.federation, envelope.run, int(envelope.round), 0)
        self.key = signing.read_site_private(site_config.key)
        self.peers = _with_own(signing.read_peers(site_config.peers), self.site, self.key)
        fingerprint = signing.key_fingerprint(signing.read_orders_public(site_config.orders))
        self.folder: SecureState = StateFolder(site_config.home).secure(self.site, fingerprint)
        self.folder.path.mkdir(parents=True, exist_ok=True)
        self.lock = FileLock(self.folder.lock)
        self.ledger = ledger_of(site_config)
        self.settled: Head | None = None  # the line that this message has added to the ledger

    # --- stages ------------------------------------------------------------------------------------------------

    def stage(self, stage: str, content: RecordDict) -> RecordDict:
        """The reply to a stage's order, other than the one to train."""
        kinds: dict[str, type[Asked]] = {
            "keys": Asked,
            "shares": CohortSent,
            "survivors": SurvivorsSent,
            "reveal": ConfirmationsSent,
        }
        asked = kinds[stage].read(content)
        with self.lock:
            if stage == "keys":
                return self._begin(asked)
            session = self._session(asked)
            if (stored := self._repeated(session, stage, _digest(asked))) is not None:
                return stored
            work = {"shares": self._share, "survivors": self._confirm, "reveal": self._reveal}[stage]
            session, reply = work(session, asked)  # type: ignore[operator]
            return self._done(session, stage, _digest(asked), _content(reply))

    def _begin(self, asked: Asked) -> RecordDict:
        """Make keys for a new session; the secrets of the one before are lost with it."""
        before, terms = self._read(), replace(self.terms, number=asked.session)
        if before is not None and before.terms == terms:
            return self._stored("keys")
        if before is not None and before.terms.number >= terms.number:
            raise Refused("the secure sum was asked for before, or is older than the last one")
        secrets = Secrets.draw(os.urandom)
        keys = secrets.keys(self.site)
        keys = replace(keys, signature=signing.sign_statement(self.key, keys.statement(terms)))
        reply = KeysReply(channel=keys.channel, mask=keys.mask, commitment=keys.commitment, signature=keys.signature)
        return self._done(Session(terms=terms, keys=keys, secrets=secrets), "keys", _digest(asked), _content(reply))

    def _share(self, session: Session, asked: CohortSent) -> tuple[Session, SecureRecord]:
        if unknown := sorted(set(asked.sites) - set(self.peers)):
            raise Refused(
                f"this site has no registered key of site {unknown[0]!r} in its list of peers (peers = of its "
                f"site.toml), so it shares no secret with it"
            )
        assert session.secrets is not None
        cohort = asked.cohort(session.terms)
        cohort.check(self.site, session.keys, self.fewest, self._verify)
        participant, sealed = Participant(self.site, cohort, session.secrets).share()
        sites, shares = listed(sealed)
        return session.model_copy(update={"participant": participant}), SharesReply(sites=sites, shares=shares)

    def masked(self, content: RecordDict, order: MaskedOrder, answer: Callable[[], Answer]) -> RecordDict:
        """The masked answer to an order to train; `answer` computes the plain one."""
        asked = SharesSent.read(content)
        digest = hashlib.sha256(f"{_digest(asked)} {order.digest}".encode()).hexdigest()
        with self.lock:
            session = self._session(asked)
            if (stored := self._repeated(session, "masked", digest)) is not None:
                return stored
            participant = self._received(session, asked, order)
            summand = self._kept(order.digest, participant.cohort)
            if summand is None and order.paid and self._given(order.digest) is not None:
                raise Refused("the upload of this order has left with noise and is no longer kept: it leaves no more")
        if summand is None:  # without the lock: this takes long, and another process of this site may look
            summand = _summand(answer(), participant.cohort, order.noisy)
        with self.lock:
            session = self._session(asked)  # refused if a newer session has begun
            if (stored := self._repeated(session, "masked", digest)) is not None:
                return stored
            participant = self._received(session, asked, order)
            beside, words = self._kept(order.digest, participant.cohort) or self._keep(
                order.digest, participant.cohort, summand
            )
            if order.paid:  # before anything leaves
                beside = self._settle(beside, "summed", order.digest, hashlib.sha256(words.tobytes()).hexdigest())
            cohort = participant.cohort
            self._remember(Given(order=order.digest, sites=cohort.names, threshold=cohort.threshold))
            signature = signing.sign_statement(self.key, cohort.masked_with(participant.senders, participant.asked))
            reply = {
                **beside,
                MASKED: write_words(participant.masked(words)),
                RECORD: SignatureReply(signature=signature).write(),
            }
            what = {"participant": participant, "order": order.digest, "paid": order.paid}
            return self._done(session.model_copy(update=what), "masked", digest, RecordDict(reply))

    def _received(self, session: Session, asked: SharesSent, order: MaskedOrder) -> Participant:
        assert session.participant is not None
        participant = session.participant.receive(named(asked.senders, asked.shares), order.alike)
        cohort, given = participant.cohort, self._given(order.digest)
        if cohort.threshold < order.least:
            raise Refused(f"the secure sum ends with {cohort.threshold} sites, and the config asks for {order.least}")
        if given is not None and (given.sites, given.threshold) != (cohort.names, cohort.threshold):
            raise Refused(
                "the upload of this order has left for a sum over other sites, or one that ends with another number of "
                "them: the two could be subtracted, and the noise be too small"
            )
        return participant

    def _settle(self, beside: RecordDict, event: str, order: str, what: str) -> RecordDict:
        """Record in the ledger what becomes of an order; returns what leaves, with the ledger's new line."""
        self.settled = self.ledger.settle(event, order, what)
        said = beside["said"]
        assert isinstance(said, ConfigRecord)
        newest = {} if self.settled is None else {"ledger": str(self.settled)}
        return RecordDict({**beside, "said": ConfigRecord({**said, **newest})})

    def _confirm(self, session: Session, asked: SurvivorsSent) -> tuple[Session, SecureRecord]:
        assert session.participant is not None
        given = self._given(session.order)
        if given is not None and given.survivors not in ((), tuple(asked.sites)):
            raise Refused("this order was summed up over other sites before: the two sums could be subtracted")
        participant = session.participant.confirm(asked.sites, asked.signatures, self._verify)
        cohort, survivors = participant.cohort, participant.survivors
        if session.paid:
            self.settled = self.ledger.settle("agreed", session.order, _key(*survivors))
        self._remember(Given(order=session.order, sites=cohort.names, threshold=cohort.threshold, survivors=survivors))
        signature = signing.sign_statement(self.key, participant.cohort.agreed(participant.survivors))
        return session.model_copy(update={"participant": participant}), SignatureReply(signature=signature)

    def _reveal(self, session: Session, asked: ConfirmationsSent) -> tuple[Session, SecureRecord]:
        assert session.participant is not None
        told = session.participant.reveal(named(asked.sites, asked.signatures), self._verify)
        sites, shares = listed(told)
        reply = RevealReply(sites=sites, shares=shares)
        return session.model_copy(update={"secrets": None, "participant": None}), reply

    def _verify(self, site: str, statement: bytes, signature: bytes) -> bool:
        return site in self.peers and signing.is_signed(self.peers[site], statement, signature)

    # --- files -------------------------------------------------------------------------------------------------

    def _session(self, asked: Asked) -> Session:
        session = self._read()
        if session is None or session.terms != replace(self.terms, number=asked.session):
            raise Refused("the message belongs to another secure sum than the one that this site is in")
        return session

    def _repeated(self, session: Session, stage: str, digest: str) -> RecordDict | None:
        """The reply that was given to this stage; None if it was not asked yet. Asked otherwise, it is Refused."""
        if stage in session.asked:
            if session.asked[stage] != digest:
                raise Refused(f"the stage {stage!r} of this secure sum was asked before, and differently")
            return self._stored(stage)
        if len(session.asked) != STAGES.index(stage):
            raise Refused(f"the stage {stage!r} of this secure sum does not follow what this site was asked before")
        return None

    def _done(self, session: Session, stage: str, digest: str, reply: RecordDict) -> RecordDict:
        """Store the reply, then the state: a crash between the two leaves the stage undone, and nothing has left."""
        write_bytes(self.folder.reply(stage), compat.pack(reply))
        done = session.model_copy(update={"asked": {**session.asked, stage: digest}})
        write_bytes(self.folder.session_file, done.model_dump_json().encode())
        return reply

    def _stored(self, stage: str) -> RecordDict:
        return compat.unpack(self.folder.reply(stage).read_bytes())

    def _read(self) -> Session | None:
        return self._parsed(Session) if self.folder.session_file.exists() else None

    def _parsed(self, kind: type[Session]) -> Session:
        try:
            return kind.model_validate_json(self.folder.session_file.read_bytes())
        except (OSError, ValidationError) as error:
            raise UserError(f"{self.folder.session_file} is damaged; delete it: the round in it is lost") from error

    def _given_file(self) -> GivenFile:
        if not (file := self.folder.given_file).exists():
            return GivenFile()
        try:
            return GivenFile.model_validate_json(file.read_bytes())
        except (OSError, ValidationError) as error:
            raise UserError(f"{file} is damaged; restore it, or delete it to answer old orders again") from error

    def _given(self, order: str) -> Given | None:
        return next((each for each in self._given_file().orders if each.order == order), None)

    def _remember(self, given: Given) -> None:
        """Note for which sites an order's upload has left; what was agreed to before stays."""
        others = [each for each in self._given_file().orders if each.order != given.order]
        before = self._given(given.order)
        survivors = given.survivors or (before.survivors if before is not None else ())
        rows = (*others, given.model_copy(update={"survivors": survivors}))[-REMEMBERED:]
        write_bytes(self.folder.given_file, GivenFile(orders=rows).model_dump_json().encode())

    def _kept(self, order: str, cohort: Cohort) -> Summand | None:
        if not (file := self._summand_file(order, cohort)).exists():
            return None
        content = compat.unpack(file.read_bytes())
        return RecordDict({name: record for name, record in content.items() if name != MASKED}), read_words(content)

    def _summand_file(self, order: str, cohort: Cohort) -> Path:
        """Its noise depends on the cohort, so in another one it is another file."""
        return self.folder.summand(order, _key(cohort.threshold, *cohort.names))

    def _keep(self, order: str, cohort: Cohort, summand: Summand) -> Summand:
        beside, words = summand
        write_bytes(self._summand_file(order, cohort), compat.pack(RecordDict({**beside, MASKED: write_words(words)})))
        for file in self.folder.summands()[:-KEPT]:
            file.unlink()
        return summand


def _summand(answer: Answer, cohort: Cohort, noisy: Sequence[NoisySum]) -> Summand:
    """What an answer leaves beside the masked upload, and what is masked: upload, samples and loss on the grid."""
    assert answer.upload is not None
    if not math.isfinite(answer.loss_sum or 0.0):
        raise Refused("its training did not stay finite, so it adds nothing to the secure sum")
    grid = grid_of(form_of(answer.upload), len(cohort.keys), cohort.threshold, noisy)
    try:
        words = grid.words(summand_of(answer.upload, answer.samples, answer.loss_sum), os.urandom)
    except ValueError as error:
        raise Refused(f"its upload cannot be added to the secure sum: {error}") from None
    return replace(answer, upload=None, samples=None, loss_sum=None, gradient_norm=None).write(), words


def _with_own(peers: dict[str, str], site: str, key: ec.EllipticCurvePrivateKey) -> dict[str, str]:
    """The keys of all sites: the peers', and its own, which is no other site's."""
    own = signing.public_text(key.public_key())
    if others := [name for name, theirs in peers.items() if theirs == own and name != site]:
        raise UserError(f"the list of peers says that this site's own key is that of site {others[0]}; delete the line")
    return {**peers, site: own}


def _key(*parts: str | int) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _content(reply: SecureRecord) -> RecordDict:
    return RecordDict({**protocol.ack(), RECORD: reply.write()})


def _digest(asked: Asked) -> str:
    """A digest of what a stage's order says."""
    return hashlib.sha256(json.dumps(asked.model_dump(), default=bytes.hex, sort_keys=True).encode()).hexdigest()
