"""Fetches the published files of a data set: resumed if interrupted, and accepted only with the right checksum."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import BinaryIO

from fednh.data.published import PUBLISHED
from fednh.data.published.base import RemoteFile
from fednh.data.sources.registry import BUILTIN, find
from fednh.errors import UserError, did_you_mean
from fednh.io.files import commit_file, sha256

CHUNK = 1 << 18
DownloadProgress = Callable[[int, int | None], None]  # bytes done, bytes in all (None: the server does not say)


class _Broken(Exception):
    """An address gave no complete file; the text says why."""


def get(
    name: str,
    folder: Path,
    progress: DownloadProgress | None = None,
    *,
    files: Sequence[RemoteFile] | None = None,
    timeout: float = 30.0,
) -> str:
    """Puts the files of data set `name` below `folder` and returns a sentence that says what was done.

    `files` replaces the published addresses, for a mirror of one's own or a test.
    """
    if name in BUILTIN:
        return f"{name} is built in: there is nothing to download"
    if files is None:
        if find(name):
            raise UserError(f"{name} is data of your own: there is nothing to download")
        if name not in PUBLISHED:
            raise UserError(f"there is no data set {name!r} to download{did_you_mean(name, PUBLISHED)}")
        files = PUBLISHED[name].files
    parents = {(folder / file.name).parent for file in files} | {folder}
    made = sorted((parent for parent in parents if not parent.exists()), reverse=True)
    try:
        missing = [file for file in files if not _already_there(folder / file.name, file.sha256)]
        for position, file in enumerate(missing):
            _fetch(file, folder, progress, timeout, still_missing=missing[position:])
    except OSError as error:
        raise UserError(f"cannot use {error.filename or folder} ({error.strerror}); choose another folder") from error
    finally:
        for new in made:  # what was made for files that never came is not left behind
            with suppress(OSError):  # not empty
                new.rmdir()
    if not missing:
        return f"{name} is already complete in {folder}"
    return f"{name}: downloaded {', '.join(file.name for file in missing)} to {folder}"


def _already_there(path: Path, expected: str) -> bool:
    if not path.exists():
        return False
    if not path.is_file():
        raise UserError(f"{path} is in the way: it is not a file; move it and try again")
    if sha256(path) != expected:
        # It may be somebody's own, differently packed copy: not ours to overwrite.
        raise UserError(f"{path} is there, but is not the published file (its checksum differs); move it and try again")
    return True


def _fetch(
    file: RemoteFile,
    folder: Path,
    progress: DownloadProgress | None,
    timeout: float,
    still_missing: Sequence[RemoteFile],
) -> None:
    target = folder / file.name
    part = target.with_name(f"{target.name}.part")
    target.parent.mkdir(parents=True, exist_ok=True)
    failures = []
    for address in file.addresses:
        try:
            _transfer(address, part, progress, timeout)
        except _Broken as failure:
            failures.append(f"{address}: {failure}")
            continue
        if sha256(part) != file.sha256:
            part.unlink()
            raise UserError(
                f"what came from {address} is not the published {target.name} (its checksum differs) and was deleted; "
                "try again, perhaps from another network"
            )
        commit_file(part, target)
        return
    raise UserError(_by_hand(failures, part, folder, still_missing))


def _transfer(address: str, part: Path, progress: DownloadProgress | None, timeout: float) -> None:
    """Brings `part` to its full length, from where it stands. Raises _Broken when the network is at fault."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(address, headers={"User-Agent": "fednh"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        response: HTTPResponse = urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and have:  # nothing lies beyond what we have: complete, or else the checksum tells
            return
        raise _Broken(f"HTTP {error.code} {error.reason}") from error
    except urllib.error.URLError as error:
        raise _Broken(str(error.reason)) from error
    except (OSError, HTTPException, ValueError) as error:
        raise _Broken(str(error) or type(error).__name__) from error
    with response:
        resumed = response.status == 206 and (response.headers["Content-Range"] or "").startswith(f"bytes {have}-")
        if response.status == 206 and not resumed:
            raise _Broken("the server sent another range than the one asked for")
        done = have if resumed else 0
        length = response.headers["Content-Length"]
        total = done + int(length) if length and length.isdecimal() else None
        with part.open("ab" if resumed else "wb") as out:
            done = _copy(response, out, done, total, progress)
    if total is not None and done < total:
        raise _Broken(f"the connection ended after {done} of {total} bytes")


def _copy(
    response: HTTPResponse, out: BinaryIO, done: int, total: int | None, progress: DownloadProgress | None
) -> int:
    while True:
        if progress:
            progress(done, total)
        try:
            chunk = response.read(CHUNK)
        except (OSError, HTTPException) as error:
            raise _Broken(f"the connection broke after {done} bytes ({str(error) or type(error).__name__})") from error
        if not chunk:
            return done
        out.write(chunk)
        done += len(chunk)


def _by_hand(failures: list[str], part: Path, folder: Path, still_missing: Sequence[RemoteFile]) -> str:
    again = "run the command again to go on from there" if part.exists() else "try again later"
    todo = ", ".join(f"{file.addresses[0]} as {folder / file.name}" for file in still_missing)
    return f"the download failed ({'; '.join(failures)}): {again}, or put the files there by hand: {todo}"
