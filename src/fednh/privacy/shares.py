"""Secret shares: any `threshold` of a secret's shares give it back, fewer say nothing about it.

Shamir, "How to Share a Secret", 1979, over GF(2^128) as pycryptodome has it. Secrets have 16 bytes; share k of n is the
polynomial's value at k, and belongs to the k-th of n holders.
"""

from __future__ import annotations

from collections.abc import Mapping

from Crypto.Protocol.SecretSharing import Shamir

SECRET = 16  # bytes of a secret, and of a share of one


def split(secret: bytes, threshold: int, holders: int) -> list[bytes]:
    """The shares of a secret, one for each holder in order."""
    if len(secret) != SECRET or not 1 <= threshold <= holders:
        raise ValueError(f"{len(secret)} bytes cannot be shared among {holders} such that {threshold} give them back")
    return [bytes(share) for _, share in Shamir.split(threshold, holders, secret, False)]


def join(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """The secret of these shares, by holder from 0; ValueError if they are too few."""
    if len(shares) < threshold:
        raise ValueError(f"{len(shares)} shares of a secret are here, and {threshold} give it back")
    chosen = sorted(shares.items())[:threshold]
    return bytes(Shamir.combine([(holder + 1, share) for holder, share in chosen], False))
