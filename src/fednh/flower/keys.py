"""Fingerprints of public keys, as `ssh-keygen -l` prints them, for people to compare."""

from __future__ import annotations

import base64
import hashlib

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization


def fingerprint(text: str) -> str:
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
    return fingerprint(text.decode())
