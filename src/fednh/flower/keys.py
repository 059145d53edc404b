"""Public keys as people compare them: the fingerprint that `ssh-keygen -l` prints."""

from __future__ import annotations

import base64
import hashlib

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization


def fingerprint(text: str) -> str:
    """Of a public key in OpenSSH's form; empty if it is none."""
    try:
        digest = hashlib.sha256(base64.b64decode(text.split()[1], validate=True)).digest()
    except (IndexError, ValueError):
        return ""
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


def fingerprint_of_pem(key: bytes) -> str:
    """Of a public key as Flower keeps it; empty if it is none."""
    try:
        public = serialization.load_pem_public_key(key)
        text = public.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    except (ValueError, UnsupportedAlgorithm):
        return ""
    return fingerprint(text.decode())
