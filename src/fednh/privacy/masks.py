"""The cryptography of secure sums: keys of one round, masks made from them, and shares under seal.

All primitives are of `cryptography`: X25519, HKDF with SHA-256, AES-256 in counter mode as the source of masks,
ChaCha20-Poly1305. A site's secrets of a round are two seeds of 16 bytes, which can be shared (shares.py), and the
private key of its channel, which never leaves it:

    mask_seed   gives an X25519 key; with every other site it agrees on a mask that one adds and the other subtracts
    self_seed   gives a mask of its own, which nobody else knows
    channel     an X25519 key, under which other sites seal the shares that are for this one

`context` in what follows is a digest of the round and of all keys in it, so nothing fits another round.
"""

from __future__ import annotations

import hashlib

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fednh.privacy.grid import WORD, Words

KEY = 32  # bytes of an X25519 key, private or public
ONCE = bytes(12)  # the nonce of a key that seals one message only


def mask_key(seed: bytes) -> bytes:
    """The private key that a mask seed stands for."""
    return _derived(seed, b"", b"fednh mask key 1")


def public_key(private: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def commitment(self_seed: bytes) -> bytes:
    """What proves later that a seed is the one that was shared."""
    return hashlib.sha256(b"fednh self seed 1" + self_seed).digest()


def pair_mask(private: bytes, public: bytes, context: bytes, size: int) -> Words:
    """The mask that two sites agree on, from either's private and the other's public mask key."""
    return _stream(_common_secret(private, public, context, b"fednh pair mask 1"), size)


def self_mask(self_seed: bytes, context: bytes, size: int) -> Words:
    return _stream(_derived(self_seed, context, b"fednh self mask 1"), size)


def seal(private: bytes, public: bytes, context: bytes, way: str, content: bytes) -> bytes:
    """`content` for one other site, under the channel keys; `way` names sender and receiver, and is used once."""
    key = _common_secret(private, public, context, b"fednh shares 1 " + way.encode())
    return ChaCha20Poly1305(key).encrypt(ONCE, content, context)


def unseal(private: bytes, public: bytes, context: bytes, way: str, sealed: bytes) -> bytes:
    """The content of what `seal` made; ValueError if it was made by somebody else, for another round, or changed."""
    key = _common_secret(private, public, context, b"fednh shares 1 " + way.encode())
    try:
        return ChaCha20Poly1305(key).decrypt(ONCE, sealed, context)
    except InvalidTag:
        raise ValueError("it cannot be opened: it was not sealed for this site and round, or was changed") from None


def _common_secret(private: bytes, public: bytes, context: bytes, purpose: bytes) -> bytes:
    """A key that both sides derive; ValueError for a public key with which no secret can be agreed."""
    own = X25519PrivateKey.from_private_bytes(private)
    return _derived(own.exchange(X25519PublicKey.from_public_bytes(public)), context, purpose)


def _derived(secret: bytes, context: bytes, purpose: bytes) -> bytes:
    return HKDF(hashes.SHA256(), KEY, salt=context or None, info=purpose).derive(secret)


def _stream(key: bytes, size: int) -> Words:
    """`size` pseudo-random words: the counter mode's key stream."""
    cipher = Cipher(AES(key), CTR(bytes(16))).encryptor()
    return np.frombuffer(cipher.update(bytes(WORD * size)) + cipher.finalize(), "<u8").astype(np.uint64)
