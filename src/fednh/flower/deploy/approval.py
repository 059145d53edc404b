"""Which apps a site runs: a list of hashes in its folder. An app is code, sent by whoever starts it at the server.

The list is `approved` beside site.toml. Each line has the SHA-256 of an app's bundle and, after a blank, a comment.
"""

from __future__ import annotations

import hashlib
import re
import zipfile
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from fednh.errors import UserError
from fednh.storage.files import write_bytes


@dataclass(frozen=True)
class App:
    """A bundle as Flower builds and sends it."""

    hash: str
    files: tuple[str, ...]


def app_of(folder: Path) -> App:
    """The app that `flwr run` would send from this folder now."""
    from click import ClickException
    from flwr.cli.build import build_fab_from_disk

    try:
        content = build_fab_from_disk(folder)
    except (ValueError, OSError, ClickException) as error:
        raise UserError(f"{folder} is not an app that Flower can build: {' '.join(str(error).split())}") from error
    with zipfile.ZipFile(BytesIO(content)) as bundle:
        files = tuple(sorted(name for name in bundle.namelist() if not name.startswith(".info/")))
    return App(hash_of(content), files)


def hash_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def approved(file: Path) -> list[str]:
    """The hashes in a list; empty if the file does not exist."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}, the list of apps that this site runs, cannot be read: {error}") from error
    return [line.split()[0].lower() for line in lines if line.strip() and not line.startswith("#")]


def approve(file: Path, app_hash: str, words: str = "") -> bool:
    """Put an app on a list; returns whether it was new there."""
    if not re.fullmatch(r"[0-9a-f]{64}", app_hash):
        raise UserError(f"{app_hash!r} is not the hash of an app: that has 64 digits, 0 to 9 and a to f")
    if app_hash in approved(file):
        return False
    before = file.read_bytes() if file.exists() else b""
    newline = b"" if not before or before.endswith(b"\n") else b"\n"
    write_bytes(file, before + newline + f"{app_hash} {words}".rstrip().encode() + b"\n")
    return True


def check(file: Path, content: bytes) -> None:
    """Refuse a bundle that is not on the list, before it is unpacked."""
    found = hash_of(content)
    if found not in approved(file):
        raise UserError(
            f"this site has not approved the app {found}, so nothing of it was run; its owner can do so with "
            f"`fednh federation approve SITE {found}`"
        )
