"""The messages of a secure sum: see privacy/secure_sum.py for what they are for.

    server ---train.keys      {secure: session}                                     --->  site
    server ---train.shares    {secure: session, threshold, everybody's keys}        --->  site
    server ---train           {config, order, down, [global], secure: sealed shares} -->  site
    server ---train.survivors {secure: session, who is in the sum, their signatures} -->  site
    server ---train.reveal    {secure: session, who agreed, their signatures}       --->  site

Every reply has a record `secure` of its own; that to `train` also the masked upload, eight bytes a number. The order to
train is the ordinary one (protocol.py): a site works on it as ever, and masks what it would have uploaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Self

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MessageType, RecordDict
from pydantic import Field

from fednh.federated.checks import TensorSpecs
from fednh.flower import transport
from fednh.flower.transport import Limit, StrictModel
from fednh.privacy import masks, shares
from fednh.privacy.grid import WORD, Grid, NoisySum, Words
from fednh.privacy.secure_sum import Cohort, Keys, Terms
from fednh.tree import Tree, prefix

RECORD = "secure"  # of an order and of a reply
MASKED = "masked"  # the masked upload
KIND = "words"  # its serialisation type: little-endian numbers of 64 bits
STAGES = ("keys", "shares", "masked", "survivors", "reveal")  # in this order, each once a session
SEALED = 2 * shares.SECRET + 16  # bytes of a pair of shares under seal

SiteName = Annotated[str, Field(max_length=1000)]
Key = Annotated[bytes, Field(min_length=masks.KEY, max_length=masks.KEY)]
Signature = Annotated[bytes, Field(max_length=1000)]
Share = Annotated[bytes, Field(min_length=shares.SECRET, max_length=shares.SECRET)]
Sealed = Annotated[bytes, Field(min_length=SEALED, max_length=SEALED)]
Many = Field(max_length=transport.NAMES)


def message_kind(stage: str) -> str:
    """Flower's message type of a stage."""
    return MessageType.TRAIN if stage == "masked" else f"{MessageType.TRAIN}.{stage}"


class SecureRecord(StrictModel):
    """A record `secure`."""

    def write(self) -> ConfigRecord:
        return ConfigRecord(self.model_dump())

    @classmethod
    def read(cls, content: RecordDict) -> Self:
        record = content.get(RECORD)
        if not isinstance(record, ConfigRecord):
            raise ValueError(f"it has no record {RECORD!r}")
        read = cls.parse(record)
        lengths = {len(value) for value in read.model_dump().values() if isinstance(value, list)}
        if len(lengths) > 1:
            raise ValueError(f"the lists in its record {RECORD!r} are of different lengths")
        return read


# --- orders ---------------------------------------------------------------------------------------------------------


class Asked(SecureRecord):
    """What every stage's order has: the number of the attempt, which grows."""

    session: int = Field(ge=1, lt=1 << 63)


class CohortSent(Asked):
    threshold: int = Field(ge=1, le=transport.NUMBER)
    sites: list[SiteName] = Many
    channels: list[Key] = Many
    masks: list[Key] = Many
    commitments: list[Key] = Many
    signatures: list[Signature] = Many

    @classmethod
    def of(cls, cohort: Cohort) -> CohortSent:
        return cls(
            session=cohort.terms.number,
            threshold=cohort.threshold,
            sites=list(cohort.names),
            channels=[each.channel for each in cohort.keys],
            masks=[each.mask for each in cohort.keys],
            commitments=[each.commitment for each in cohort.keys],
            signatures=[each.signature for each in cohort.keys],
        )

    def cohort(self, terms: Terms) -> Cohort:
        rows = zip(self.sites, self.channels, self.masks, self.commitments, self.signatures, strict=True)
        return Cohort(terms, tuple(Keys(*row) for row in rows), self.threshold)


class SharesSent(Asked):
    senders: list[SiteName] = Many
    shares: list[Sealed] = Many


class SurvivorsSent(Asked):
    sites: list[SiteName] = Many
    signatures: list[Signature] = Many


class ConfirmationsSent(SurvivorsSent):
    """The sites that agreed to the list of survivors, with their signatures."""


# --- replies --------------------------------------------------------------------------------------------------------


class KeysReply(SecureRecord):
    channel: Key
    mask: Key
    commitment: Key
    signature: Signature

    def keys(self, site: str) -> Keys:
        return Keys(site, self.channel, self.mask, self.commitment, self.signature)


class SharesReply(SecureRecord):
    sites: list[SiteName] = Many  # for whom
    shares: list[Sealed] = Many


class SignatureReply(SecureRecord):
    """To `train`: with whom the upload is masked. To `train.survivors`: whose uploads are in the sum."""

    signature: Signature


class RevealReply(SecureRecord):
    sites: list[SiteName] = Many  # about whom
    shares: list[Share] = Many


def named(sites: Sequence[str], values: Sequence[bytes]) -> dict[str, bytes]:
    """Two lists of a record as a dictionary."""
    return dict(zip(sites, values, strict=True))


def listed(values: Mapping[str, bytes]) -> tuple[list[str], list[bytes]]:
    """The same as two lists, in the order of the names."""
    rows = sorted(values.items())
    return [name for name, _ in rows], [value for _, value in rows]


# --- masked uploads -------------------------------------------------------------------------------------------------


UPLOAD = "upload"  # the names of a summand's tensors begin with it, but for these two:
SAMPLES, LOSS = "facts.samples", "facts.loss_sum"  # that the site processed, and their loss; 0: it does not say


def grid_of(form: TensorSpecs, sites: int, threshold: int, noisy: Sequence[NoisySum]) -> Grid:
    """The grid of summands, for uploads of this form."""
    facts: TensorSpecs = {SAMPLES: ((), torch.float64), LOSS: ((), torch.float64)}
    below = [replace(each, names=tuple(f"{UPLOAD}.{name}" for name in each.names)) for each in noisy]
    return Grid.of({**{f"{UPLOAD}.{name}": spec for name, spec in form.items()}, **facts}, sites, threshold, below)


def summand_of(upload: Tree, samples: int | None, loss_sum: float | None) -> Tree:
    """What a site adds to the sum; samples and loss are in it if it discloses both."""
    told = (float(samples), loss_sum) if samples is not None and loss_sum is not None else (0.0, 0.0)
    facts = {name: torch.tensor(value, dtype=torch.float64) for name, value in zip((SAMPLES, LOSS), told, strict=True)}
    return {**prefix(UPLOAD, upload), **facts}


def write_words(words: Words) -> ArrayRecord:
    data = words.astype("<u8").tobytes()
    return ArrayRecord({MASKED: Array(dtype="uint8", shape=(len(data),), stype=KIND, data=data)})


def read_words(content: RecordDict, size: int | None = None) -> Words:
    """The masked upload of a reply, which must have exactly so many numbers; None: any number."""
    record = content.get(MASKED)
    if not isinstance(record, ArrayRecord) or list(record) != [MASKED]:
        raise ValueError(f"it has no ArrayRecord {MASKED!r} with one array of that name")
    array, data = record[MASKED], record[MASKED].data
    wanted = len(data) // WORD * WORD if size is None else WORD * size
    if (array.stype, array.dtype, tuple(array.shape)) != (KIND, "uint8", (len(data),)) or len(data) != wanted:
        raise ValueError(f"its masked upload has {len(data)} bytes, not {wanted}")
    return np.frombuffer(data, "<u8").astype(np.uint64)


def limit(stage: str, sites: int, numbers: int) -> Limit:
    """The largest size of a reply."""
    size = transport.WORDS + 4000 * sites + (WORD * numbers if stage == "masked" else 0)
    return Limit(size, 16 + size // transport.CHUNK)
