"""A site's part in a secure sum: what it keeps between the messages of a round, and what it refuses.

Every message may reach another process, so the state of the round lies in a file (layout.SecureState). It is written
before a reply leaves, and the reply with it: a stage that is asked again gets the same reply, and one that is asked
again differently is refused. So a site masks one summand in a session, and tells one kind of share about each site. A
session ends when the next one begins, and its secrets are gone.

After a crash the server asks for a round again, in a new session. The site then masks the summand that it made the
first time, with the noise that is in it, and only if the same sites are asked. And it agrees to the same survivors
only: because more than half of the sites must agree, no order is ever summed over two different sets of sites, whose
sums could be subtracted from each other. An order whose summand is no longer kept is refused where there is noise in
it: it would leave with fresh noise.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from filelock import FileLock
from flwr.app import RecordDict
from pydantic import BaseModel, ConfigDict, ValidationError

from fednh.errors import Refused, UserError
from fednh.federated.checks import form_of
from fednh.flower import compat, protocol, signing
from fednh.flower.layout import SecureState, StateFolder
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
from fednh.io.files import write_bytes
from fednh.privacy.grid import NoisySum, Words
from fednh.privacy.secure_sum import Cohort, Keys, Participant, Secrets, Terms

if TYPE_CHECKING:
    from fednh.flower.protocol import Answer
    from fednh.flower.site_config import SiteConfig

KEPT = 3  # summands that are kept, in case that a round is asked for again
REMEMBERED = 1000  # orders whose survivors are remembered

Summand = tuple[RecordDict, Words]  # what leaves beside the masked upload, and the upload on the grid with its noise


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_bytes="hex", val_json_bytes="hex")


class Session(_File):
    """The file of the round that the site is in."""

    terms: Terms
    keys: Keys
    secrets: Secrets | None  # None: the site has revealed its shares, and needs them no more
    participant: Participant | None = None  # from the stage `shares` on
    order: str = ""  # digest of the order whose upload is masked
    asked: dict[str, str] = {}  # stage -> digest of what was asked


class Given(_File):
    """An order for which a masked upload has left."""

    order: str
    sites: tuple[str, ...]
    survivors: tuple[str, ...] = ()  # that the site has agreed to; none: to no list yet


class GivenFile(_File):
    orders: tuple[Given, ...] = ()


class SecureSite:
    """What one message asks of a site."""

    def __init__(self, site_config: SiteConfig, envelope: Envelope):
        self.site, self.fewest = site_config.site, site_config.policy.allow.sites
        self.terms = Terms(envelope.federation, envelope.run, int(envelope.round), 0)
        self.key = signing.read_site_private(site_config.key)
        self.peers = {**signing.read_peers(site_config.peers), self.site: signing.public_text(self.key.public_key())}
        fingerprint = signing.key_fingerprint(signing.read_orders_public(site_config.orders))
        self.folder: SecureState = StateFolder(site_config.home).secure(self.site, fingerprint)
        self.folder.path.mkdir(parents=True, exist_ok=True)
        self.lock = FileLock(self.folder.lock)

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

    def masked(
        self,
        content: RecordDict,
        order: str,
        least: int,
        answer: Callable[[], Answer],
        noisy: Sequence[NoisySum] = (),
        once: bool = False,
    ) -> RecordDict:
        """The masked answer to an order to train, whose digest is `order`; `answer` computes the plain one.

        `least` is how many sites the order's config asks for. `once`: there is noise in the answer, so that it is made
        once for an order.
        """
        asked = SharesSent.read(content)
        digest = hashlib.sha256(f"{_digest(asked)} {order}".encode()).hexdigest()
        with self.lock:
            session = self._session(asked)
            if (stored := self._repeated(session, "masked", digest)) is not None:
                return stored
            participant = self._received(session, asked, order, least)
            summand = self._kept(order)
            if summand is None and once and self._given(order) is not None:
                raise Refused("the upload of this order has left with noise and is no longer kept: it leaves no more")
        if summand is None:  # without the lock: this takes long, and another process of this site may look
            summand = _summand(answer(), participant.cohort, noisy)
        with self.lock:
            session = self._session(asked)  # refused if a newer session has begun
            if (stored := self._repeated(session, "masked", digest)) is not None:
                return stored
            participant = self._received(session, asked, order, least)
            beside, words = self._kept(order) or self._keep(order, summand)
            self._remember(Given(order=order, sites=participant.cohort.names))
            signature = signing.sign_statement(self.key, participant.cohort.masked_with(participant.senders))
            reply = {
                **beside,
                MASKED: write_words(participant.masked(words)),
                RECORD: SignatureReply(signature=signature).write(),
            }
            session = session.model_copy(update={"participant": participant, "order": order})
            return self._done(session, "masked", digest, RecordDict(reply))

    def _received(self, session: Session, asked: SharesSent, order: str, least: int) -> Participant:
        assert session.participant is not None
        participant = session.participant.receive(named(asked.senders, asked.shares))
        if (needed := participant.cohort.threshold) < least:
            raise Refused(f"the secure sum ends with {needed} sites, and the config asks for {least}")
        given = self._given(order)
        if given is not None and given.sites != participant.cohort.names:
            raise Refused("the upload of this order has left for a sum over other sites: the two could be subtracted")
        return participant

    def _confirm(self, session: Session, asked: SurvivorsSent) -> tuple[Session, SecureRecord]:
        assert session.participant is not None
        given = self._given(session.order)
        if given is not None and given.survivors not in ((), tuple(asked.sites)):
            raise Refused("this order was summed up over other sites before: the two sums could be subtracted")
        participant = session.participant.confirm(asked.sites, asked.signatures, self._verify)
        names = participant.cohort.names
        self._remember(Given(order=session.order, sites=names, survivors=participant.survivors))
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

    def _kept(self, order: str) -> Summand | None:
        if not (file := self.folder.summand(order)).exists():
            return None
        content = compat.unpack(file.read_bytes())
        return RecordDict({name: record for name, record in content.items() if name != MASKED}), read_words(content)

    def _keep(self, order: str, summand: Summand) -> Summand:
        beside, words = summand
        write_bytes(self.folder.summand(order), compat.pack(RecordDict({**beside, MASKED: write_words(words)})))
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


def _content(reply: SecureRecord) -> RecordDict:
    return RecordDict({**protocol.ack(), RECORD: reply.write()})


def _digest(asked: Asked) -> str:
    """A digest of what a stage's order says."""
    return hashlib.sha256(json.dumps(asked.model_dump(), default=bytes.hex, sort_keys=True).encode()).hexdigest()
