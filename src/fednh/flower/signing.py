"""Signed messages: a site obeys only its federation's server, and the server knows which site has answered.

Flower lets every registered node send messages to every other node, so arrival does not prove who sent a message. The
server signs orders with the federation's Ed25519 key, whose public half each site has as `orders.pub`; a site signs its
replies with the key of its SuperNode. A signature is a record `seal` beside the others. It covers every record to the
last byte, and the `Envelope`: which federation, run, round and kind of message, from or to which node and site, and a
counter that only grows. So a message cannot be forged, changed, sent again, or redirected to somebody else.

A site's key is `sites/NAME/key.pub` in the federation's folder; if that file does not exist, the first key that the
site uses. A key belongs to one site, and a site has one key, until somebody changes that by hand.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from filelock import FileLock
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from pydantic import Field

from fednh.config import Config
from fednh.errors import Refused, UserError
from fednh.flower.layout import FederationFolder, StateFolder
from fednh.flower.transport import Request, StrictModel
from fednh.io.files import expanded, write_json

# --- fingerprints, as `ssh-keygen -l` prints them --------------------------------------------------------------------


def ssh_fingerprint(text: str) -> str:
    """The fingerprint of a public key in OpenSSH's format; empty if the text is not one."""
    try:
        digest = hashlib.sha256(base64.b64decode(text.split()[1], validate=True)).digest()
    except (IndexError, ValueError):
        return ""
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


def fingerprint_of_pem(key: bytes) -> str:
    """The fingerprint of a public key in PEM, as Flower stores it; empty if it is not one."""
    try:
        public = serialization.load_pem_public_key(key)
        text = public.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    except (ValueError, UnsupportedAlgorithm):
        return ""
    return ssh_fingerprint(text.decode())


# --- envelopes ------------------------------------------------------------------------------------------------------


SEAL = "seal"  # the record that holds a signature
ORDER, REPLY = b"fednh order 1", b"fednh reply 1"  # signed bytes begin with their purpose
LONGEST_KEY = 1000  # characters of a public key
AHEAD = 24 * 3600 * 10**9  # nanoseconds that a server's clock may be ahead of a site's
REPEATS = 100  # answered orders that a site recognises when they are repeated, and repeats that it answers at least


class OrderSeal(StrictModel):
    """The record `seal` of an order."""

    federation: str = Field(max_length=LONGEST_KEY)
    counter: int
    signature: bytes = Field(max_length=LONGEST_KEY)


class ReplySeal(StrictModel):
    """The record `seal` of a reply."""

    site: str = Field(max_length=LONGEST_KEY)
    key: str = Field(max_length=LONGEST_KEY)  # in OpenSSH's format
    signature: bytes = Field(max_length=LONGEST_KEY)


@dataclass(frozen=True)
class Envelope:
    """What a signature covers beside the records."""

    federation: str
    run: int  # Flower's run id
    kind: str  # query, train, ...: Flower's message type
    round: str  # Flower's group id of the message
    node: int  # the site's SuperNode
    site: str = ""  # its name; empty in a query, which asks for it
    counter: int = 0  # of the order; its reply repeats it


# --- orders -----------------------------------------------------------------------------------------------------------


class OrderSigner:
    """The server's side: signs each message with a higher counter than the one before."""

    def __init__(self, key: Ed25519PrivateKey):
        self._key, self._last = key, 0

    def next(self) -> int:
        """A counter that no earlier order had, not even before a restart."""
        self._last = max(self._last + 1, time.time_ns())
        return self._last

    def sign(self, content: RecordDict, envelope: Envelope) -> RecordDict:
        """The same records with a seal."""
        signature = self._key.sign(_statement(ORDER, content, envelope))
        seal = ConfigRecord({"federation": envelope.federation, "counter": envelope.counter, "signature": signature})
        return RecordDict({**content, SEAL: seal})


def check_order(content: RecordDict, key: Ed25519PublicKey, expected: Envelope) -> Envelope:
    """The envelope of an order that the federation's server signed for this site; anything else is Refused.

    `expected` has what the site knows itself; federation and counter come from the server.
    """
    record = content.get(SEAL)
    if not isinstance(record, ConfigRecord):
        raise Refused("the order is not signed")
    try:
        seal = OrderSeal.parse(record)
    except ValueError as error:
        raise Refused(f"the signature of the order cannot be read: {error}") from None
    query = expected.kind.startswith("query")  # it asks who the site is, so it cannot name it
    site = "" if query else expected.site
    envelope = replace(expected, federation=seal.federation, counter=seal.counter, site=site)
    try:
        key.verify(seal.signature, _statement(ORDER, content, envelope))
    except InvalidSignature:
        raise Refused(
            "the order was not signed by this federation's server for this site, run and round: it was forged, changed "
            "or redirected, or orders.pub is of another federation"
        ) from None
    return envelope


@dataclass(frozen=True)
class Work:
    """What an order asks a site to compute from its samples."""

    trains: bool
    evaluates: bool
    digest: str  # of all that the answer depends on: a repeated order has the same, and its answer says nothing new

    @classmethod
    def of(cls, content: RecordDict, basis: bytes) -> Work:
        """The work of an order; `basis` is what its answer depends on at the site: the samples and the state."""
        order = content.get("order")
        record = order if isinstance(order, ConfigRecord) else ConfigRecord()
        digest = _digest_of(content, lambda key: key not in ("since", "sites", "ledger"), basis)
        return cls(bool(record.get("round")), bool(record.get("evaluate")), digest.hex()[:32])


def _digest_of(content: RecordDict, counts: Callable[[str], bool], basis: bytes | None = None) -> bytes:
    """A hash of an order's records, of the record `order` only the keys that count, and of `basis`."""
    order = content.get("order")
    record = order if isinstance(order, ConfigRecord) else ConfigRecord()
    total = hashlib.sha256() if basis is None else hashlib.sha256(hashlib.sha256(basis).digest())
    asked = ConfigRecord({key: value for key, value in record.items() if counts(key)})
    for part in _parts(RecordDict({**content, "order": asked})):
        total.update(struct.pack(">Q", len(part)) + part)
    return total.digest()


def asked_alike(content: RecordDict) -> bytes:
    """A digest of what an order to train asks of every site of a round: the config, the task, the round, the model.

    All but the order's words to one site, such as its number and the state that it starts from.
    """
    return _digest_of(content, lambda key: key in ("round", "network"))


class GuardState(StrictModel):
    """The file of a ReplayGuard."""

    counter: int = Field(0, ge=0)  # of the last order
    trained: int = Field(0, ge=0)  # orders to train that were worked on
    evaluated: int = Field(0, ge=0)
    answered: tuple[str, ...] = ()  # digests of the newest orders
    repeated: int = Field(0, ge=0)  # orders that were repeated

    def updated(self, **values: Any) -> GuardState:
        return self.model_copy(update=values)


class ReplayGuard:
    """A site's record of the orders that one key signed: the last counter, and how much was done."""

    def __init__(self, folder: Path, site: str, key: Ed25519PublicKey):
        self._path = StateFolder(folder).replay_file(site, key_fingerprint(key))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(self._path.with_suffix(".lock"))  # two ClientApps of one site may run at once

    def accept(self, counter: int) -> None:
        """Accept an order once; one with an old counter, or one of the far future, is Refused."""
        with self._lock:
            state = self._read()
            if counter <= state.counter:
                raise Refused(
                    "the order was given before, or is older than the last one: it was sent again, or the server's "
                    "clock has been set back"
                )
            if counter > time.time_ns() + AHEAD:  # once accepted, it would shut out all others until then
                raise Refused(
                    "the order is dated more than a day ahead of this site's clock; set the server's clock, or this one"
                )
            self._write(state.updated(counter=counter))

    def count(self, work: Work, most: int | None) -> bool:
        """Count work before it is done; returns whether it is new: a repeated order counts once.

        Work beyond the `most` rounds that are trained here, and twice as many that are evaluated, in all, is Refused.
        So is a repeated order after twice as many: it says nothing new, but takes as long.
        """
        with self._lock:
            state = self._counted(before := self._read(), work, most)
            self._write(state)
            return state.repeated == before.repeated

    @staticmethod
    def _counted(state: GuardState, work: Work, most: int | None) -> GuardState:
        if work.digest in state.answered:
            if most is not None and state.repeated >= max(REPEATS, 2 * most):
                raise Refused(f"this site has answered {state.repeated} repeated orders, and answers no more of them")
            return state.updated(repeated=state.repeated + 1)
        if most is not None and work.trains and state.trained >= most:
            raise Refused(f"this site has trained {state.trained} rounds, and its site.toml allows no more")
        if most is not None and work.evaluates and state.evaluated >= 2 * most:  # a run that goes on evaluates again
            raise Refused(f"this site has evaluated {state.evaluated} rounds, and its site.toml allows no more")
        answered = (*state.answered, work.digest)[-REPEATS:]
        trained, evaluated = state.trained + work.trains, state.evaluated + work.evaluates
        return state.updated(answered=answered, trained=trained, evaluated=evaluated)

    def _write(self, state: GuardState) -> None:
        write_json(self._path, state.model_dump())

    def _read(self) -> GuardState:
        if not self._path.exists():
            return GuardState()
        try:
            return GuardState.parse(self._path.read_bytes())
        except (OSError, ValueError) as error:
            raise UserError(f"{self._path} is damaged; restore it, or delete it to accept old orders again") from error


# --- replies ----------------------------------------------------------------------------------------------------------


def sign_reply(content: RecordDict, key: ec.EllipticCurvePrivateKey, envelope: Envelope) -> RecordDict:
    """A site's answer with its seal."""
    signature = key.sign(_statement(REPLY, content, envelope), ec.ECDSA(hashes.SHA384()))
    seal = ConfigRecord({"site": envelope.site, "key": public_text(key.public_key()), "signature": signature})
    return RecordDict({**content, SEAL: seal})


def check_reply(content: RecordDict, expected: Envelope) -> tuple[str, str]:
    """The site that sent a reply, and the public key that signed it; ValueError if the signature is wrong.

    `expected` is the order's envelope; a query does not know the site yet, so the reply names it.
    """
    record = content.get(SEAL)
    if not isinstance(record, ConfigRecord):
        raise ValueError("it is not signed")
    try:
        seal = ReplySeal.parse(record)
    except ValueError as error:
        raise ValueError(f"its signature cannot be read: {error}") from None
    if expected.site and seal.site != expected.site:
        raise ValueError("it is signed for another site")
    key, envelope = _site_public(seal.key), replace(expected, site=seal.site)
    try:
        key.verify(seal.signature, _statement(REPLY, content, envelope), ec.ECDSA(hashes.SHA384()))
    except InvalidSignature:
        raise ValueError("its signature does not match") from None
    return seal.site, public_text(key)


def without_signature(content: RecordDict) -> RecordDict:
    """The records without the signature."""
    return RecordDict({name: record for name, record in content.items() if name != SEAL})


# --- keys -------------------------------------------------------------------------------------------------------------


def public_text(key: Ed25519PublicKey | ec.EllipticCurvePublicKey) -> str:
    """A public key as one line, in OpenSSH's format without a comment."""
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()


def sign_statement(key: ec.EllipticCurvePrivateKey, statement: bytes) -> bytes:
    """A site's signature of a statement, which begins with its purpose."""
    return key.sign(statement, ec.ECDSA(hashes.SHA384()))


def is_signed(public: str, statement: bytes, signature: bytes) -> bool:
    """Whether the holder of a site's key, in OpenSSH's format, has signed a statement."""
    try:
        _site_public(public).verify(signature, statement, ec.ECDSA(hashes.SHA384()))
    except (InvalidSignature, ValueError):
        return False
    return True


def is_safe_name(name: str) -> bool:
    """Whether a site's name is safe as the name of a folder."""
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name) is not None


def key_fingerprint(key: Ed25519PublicKey) -> str:
    return hashlib.sha256(public_text(key).encode()).hexdigest()[:16]


def load_key(path: Path, kind: type[Any], form: str, absent: str, wrong: str) -> Any:
    """A key of this kind from a file: "PEM" or "OpenSSH" private, or "public" in OpenSSH's format.

    UserError if the file cannot be read (`absent` says what to do) or holds something else (`wrong`).
    """
    readers: dict[str, tuple[Callable[[bytes], Any], str]] = {
        "PEM": (lambda data: serialization.load_pem_private_key(data, None), "an unencrypted PEM private key"),
        "OpenSSH": (
            lambda data: serialization.load_ssh_private_key(data, None),
            "an unencrypted private key in OpenSSH's format",
        ),
        "public": (serialization.load_ssh_public_key, "a public key in OpenSSH's format"),
    }
    read, name = readers[form]
    try:
        key = read(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; {absent}") from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UserError(f"{path} is not {name}; {wrong}") from error
    if not isinstance(key, kind):
        algorithm = "an Ed25519 key" if kind in (Ed25519PrivateKey, Ed25519PublicKey) else "an elliptic-curve key"
        raise UserError(f"{path} is not {algorithm}; {wrong}")
    return key


RESTORE = "restore it from a copy"


def read_orders_private(path: Path) -> Ed25519PrivateKey:
    """The key with which a server signs."""
    make = "`fednh federation certs DIR` makes what is missing in the federation's folder DIR"
    absent = f"the server signs its orders with it; {make}"
    key: Ed25519PrivateKey = load_key(path, Ed25519PrivateKey, "PEM", absent, RESTORE)
    return key


def read_orders_public(path: Path) -> Ed25519PublicKey:
    """The key with which a site verifies its server's orders."""
    absent = (
        "this site accepts no orders without it; `fednh federation certs DIR` makes it in the federation's folder: "
        "copy sites/NAME/orders.pub here, or set orders = in site.toml"
    )
    key: Ed25519PublicKey = load_key(path, Ed25519PublicKey, "public", absent, "get it again from the server")
    return key


def read_site_private(path: Path) -> ec.EllipticCurvePrivateKey:
    """The key of a site's SuperNode, which also signs the site's replies."""
    absent = (
        "this site signs its replies with it; say in site.toml where its key is (key =), the one that "
        "--auth-supernode-private-key names"
    )
    make = "Flower needs one as `ssh-keygen -t ecdsa -b 384` makes it"
    key: ec.EllipticCurvePrivateKey = load_key(path, ec.EllipticCurvePrivateKey, "OpenSSH", absent, make)
    return key


def known_site_key(path: Path) -> str | None:
    """The public key in a site's `key.pub` at the server; None if there is none."""
    try:
        return public_text(_site_public(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def read_peers(path: Path) -> dict[str, str]:
    """The registered keys of the sites that a site shares secrets with; its lines are `NAME KEY`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise Refused(
            f"this site has no list of its peers' keys ({path.name}), so it takes part in no secure sum; "
            "`fednh federation certs` writes it"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    rows = [line.split(None, 1) for line in lines if line.strip() and not line.startswith("#")]
    try:
        peers = {name: public_text(_site_public(key)) for name, key in rows}
    except ValueError as error:
        raise UserError(f"{path} has a line that is not NAME and a public key: {error}") from error
    if len({*peers.values()}) < len(rows):  # one site would count as two
        raise UserError(f"{path} has a name or a key twice; delete the line that is wrong")
    return peers


def _site_public(text: str) -> ec.EllipticCurvePublicKey:
    try:
        key = serialization.load_ssh_public_key(text.encode()) if len(text) <= LONGEST_KEY else None
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError("its key is not an elliptic-curve key in OpenSSH's format")
    return key


# --- what is signed ---------------------------------------------------------------------------------------------------


def _statement(purpose: bytes, content: RecordDict, envelope: Envelope) -> bytes:
    """The purpose, the envelope and a digest of all records but the seal."""
    total = hashlib.sha256()
    for part in (purpose, json.dumps(asdict(envelope), sort_keys=True).encode(), *_parts(content)):
        total.update(struct.pack(">Q", len(part)))  # lengths first: no two contents give the same bytes
        total.update(part)
    return purpose + total.digest()


def _parts(content: RecordDict) -> Iterator[bytes]:
    for name, record in sorted(content.items()):
        if name == SEAL:
            continue
        yield from (type(record).__name__.encode(), name.encode(), str(len(record)).encode())
        if isinstance(record, ArrayRecord):
            for key, array in sorted(record.items()):
                form = json.dumps([array.dtype, [int(n) for n in array.shape], array.stype])
                yield from (key.encode(), form.encode(), array.data)
        elif isinstance(record, ConfigRecord | MetricRecord):
            for key, value in sorted(record.items()):
                yield from (key.encode(), _value(value))


def _value(value: Any) -> bytes:
    """A value with its type; a number by its bits."""
    if isinstance(value, list):
        return b"l" + b"".join(struct.pack(">Q", len(part := _value(each))) + part for each in value)
    if isinstance(value, bool):
        return b"b1" if value else b"b0"
    if isinstance(value, int):
        return b"i%d" % value
    if isinstance(value, float):
        return b"f" + struct.pack(">d", value)
    return b"s" + value.encode() if isinstance(value, str) else b"y" + bytes(value)


# --- identity -------------------------------------------------------------------------------------------------------


@dataclass
class Identity:
    """The server's key, and the sites'."""

    signer: OrderSigner
    federation: str
    run: int
    folder: FederationFolder | None = None  # the federation's folder, with its sites' keys
    keys: dict[str, str] = field(default_factory=dict)  # site -> its public key

    def sign(self, request: Request, content: RecordDict) -> tuple[Request, RecordDict]:
        """A request with its counter, and its content with a seal."""
        request = replace(request, counter=self.signer.next())
        return request, self.signer.sign(content, self._envelope(request))

    def verify_reply(self, request: Request, content: RecordDict) -> tuple[RecordDict, str, str]:
        """The records of a reply, its site and that site's key; ValueError if the signature does not prove it."""
        site, key = check_reply(content, self._envelope(request))
        if request.site and key != self.keys.get(site):
            raise ValueError("it is signed by another key than the site's")
        return without_signature(content), site, key

    def bind_key(self, site: str, key: str) -> str | None:
        """Assign a key to a site; returns the reason if that is not possible, else None."""
        if (known := self._known(site)) is not None and known != key:
            return f"a node with another key than that of site {site} says that it is site {site}; it is left out"
        if others := sorted(
            name for name in {*self.keys, *self._sites_with_files()} - {site} if self._known(name) == key
        ):
            return f"a node with the key of site {others[0]} says that it is site {site}; it is left out"
        self.keys[site] = key
        return None

    def owner(self, fingerprint: str) -> str | None:
        """The site whose key has this fingerprint; None if no such key is known."""
        filed = {name: self._known(name) or "" for name in self._sites_with_files()}
        known = filed | self.keys
        return next((site for site, key in known.items() if ssh_fingerprint(key) == fingerprint), None)

    def _known(self, site: str) -> str | None:
        """The site's key in the federation's folder; else the first that it used."""
        filed = None
        if self.folder is not None and is_safe_name(site):
            filed = known_site_key(self.folder.site(site).public_key)
        return filed or self.keys.get(site)

    def _sites_with_files(self) -> list[str]:
        """Sites whose keys are in the federation's folder, whether they have joined yet or not."""
        return [] if self.folder is None else [site.name for site in self.folder.sites_with_keys()]

    def _envelope(self, request: Request) -> Envelope:
        where = (request.kind, str(request.round), request.node, request.site, request.counter)
        return Envelope(self.federation, self.run, *where)


def server_identity(config: Config, run: int) -> Identity:
    """The identity of a deployed server; its keys lie where `fednh federation certs` puts them."""
    given, folder = config.federation.key, config.federation.folder
    assert folder is not None
    key = expanded(given) if given else FederationFolder(Path(folder).parent).orders_key
    signer = OrderSigner(read_orders_private(key))
    return Identity(signer, config.federation.name, run, FederationFolder.of_orders_key(key))
