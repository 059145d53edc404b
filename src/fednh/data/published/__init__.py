"""Published: facts about a data set, paths at which its files may lie, and its download. One file a family of sets.

Images are `PublishedImages`, tables are `PublishedTable`, images or vectors of natural sites are `PublishedSites`.

PUBLISHED in sources/registry.py lists all sets.

A download is resumed if interrupted, and accepted only with the published checksum.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any

from fednh.data.dataset import Arrays, Dataset
from fednh.data.sources import Source, npz
from fednh.data.sources.table import Tabular, from_table
from fednh.data.splits import held_by_sites
from fednh.errors import DataError, UserError
from fednh.io.files import commit_file, sha256

CHUNK = 1 << 18  # bytes that are received at a time
DownloadProgress = Callable[[int, int | None], None]  # bytes done, bytes in all (None: the server does not say)


@dataclass(frozen=True)
class RemoteFile:
    """One published file; `name` is its path below the data folder."""

    name: str
    sha256: str
    addresses: tuple[str, ...]  # tried in this order


@dataclass(frozen=True, kw_only=True)
class Published:
    """All that is known about a set before its files are opened."""

    name: str
    description: str
    accepts: str  # the accepted files, for people
    places: tuple[str | Path, ...]  # in the data folder (or absolute), in the order in which they are tried
    read: Callable[[Path], Any]  # what lies at one of these paths: `Arrays`, or what `load` makes a data set of
    present: Callable[[Path], bool] = Path.exists  # whether the set lies at one of these paths
    files: tuple[RemoteFile, ...]  # to download; none where nobody publishes a checksum
    by_hand: str = ""  # where the files come from, if they cannot be downloaded
    sites: str = ""  # the natural sites that its samples come from, for people

    def find(self, folder: Path) -> Path | None:
        """Where the set lies, in the data folder or in a place that all users share."""
        try:
            if folder.exists() and not folder.is_dir():
                raise DataError(f"{folder} is a file, but the data folder must be a folder; set FEDNH_DATA to one")
            return next(filter(self.is_at, self.paths(folder)), None)
        except OSError as error:
            raise DataError(
                f"the data folder {folder} cannot be read ({error.strerror}); check its permissions"
            ) from error

    def paths(self, folder: Path) -> list[Path]:
        """Where the set may lie."""
        return [folder / place for place in self.places]

    def is_at(self, path: Path) -> bool:
        return self.present(path)

    def content(self, path: Path) -> Any:
        return self.read(path)

    def opened(self, folder: Path) -> tuple[Path, Any]:
        """What the set's files hold, and where they lie."""
        path = self.find(folder)
        if path is None:
            raise DataError(self._not_found(folder))
        try:
            return path, self.content(path)
        except UserError:
            raise
        except PermissionError as error:
            raise DataError(f"{error.filename} cannot be read ({error.strerror}); check its permissions") from error
        except Exception as error:  # damage shows in almost any exception
            raise DataError(self._damaged(path, error)) from error

    def _damaged(self, path: Path, error: Exception) -> str:
        """What is wrong with the files at `path` that could not be read, and what to do."""
        again = f"run `fednh data get {self.name}`" if self.files else "get it again"
        for file in self.files:
            name = Path(file.name).name
            stored = path / name if path.is_dir() else path
            if stored.name == name and stored.is_file() and sha256(stored) != file.sha256:
                return f"{stored} is damaged (its SHA-256 is not the published one); move it away and {again}"
        reason = str(error).partition("\n")[0] or type(error).__name__
        return f"{path} cannot be read ({reason}); it is damaged or incomplete: move it away and {again}"

    def _not_found(self, folder: Path) -> str:
        state = "" if folder.exists() else ", which does not exist yet"
        get = f"run `fednh data get {self.name}`, or put there" if self.files else "put there"
        more = f" ({self.by_hand})" if self.by_hand else ""
        return f"{self.name} is not in the data folder {folder}{state}: {get} {self.accepts}{more}"


@dataclass(frozen=True, kw_only=True)
class PublishedImages(Published):
    """A set of images in a training and a test part."""

    shape: tuple[int, int, int]  # of an image, (H, W, C)
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[str, ...] | None  # None: the files name them
    augment: str = "none"  # what the literature does to training images

    def paths(self, folder: Path) -> list[Path]:
        """NAME.npz comes first."""
        return [folder / f"{self.name}.npz", *super().paths(folder)]

    def is_at(self, path: Path) -> bool:
        return path.is_file() if path.name == f"{self.name}.npz" else self.present(path)

    def content(self, path: Path) -> Any:
        return npz.read(path) if path.name == f"{self.name}.npz" else self.read(path)

    def load(self, folder: Path) -> Dataset:
        """The set, from wherever it lies."""
        path, content = self.opened(folder)
        arrays: Arrays = content
        if arrays.x_train.shape[1:] != self.shape:
            raise DataError(
                f"{path} holds samples of shape {arrays.x_train.shape[1:]}, but {self.name} has {self.shape}; "
                f"use npz:PATH for data of your own"
            )
        classes = self.classes or arrays.classes
        if classes is None:
            raise DataError(f"{path} lacks the array 'classes' with the class names; remove it to have it made anew")
        return Dataset(self.name, *arrays[:4], classes, self.mean, self.std, augment=self.augment)


@dataclass(frozen=True, kw_only=True)
class PublishedTable(Published):
    """A table whose rows name their sites; rows whose split is "test" are what the sites hold out."""

    settings: Mapping[str, Any]  # below [data], unless the user sets them: label, classes, columns, missing

    def load(self, folder: Path, options: Tabular) -> Dataset:
        """The set, read by these settings; its card remembers which column the label is."""
        path, table = self.opened(folder)
        data = from_table(self.name, table, str(path), options)
        data = replace(data, reading={"label": options.label or "label"})
        return held_by_sites(data) if len(data.y_test) else data


@dataclass(frozen=True, kw_only=True)
class PublishedSites(Published):
    """Images or vectors, each of a natural site."""

    source: type[Source]  # the kind of source whose settings below [data] hold for it
    dataset: Callable[[str, str, Any, Any], Dataset]  # of the name, where it lies, what `places` read, and a `source`

    def load(self, folder: Path, options: Source) -> Dataset:
        """The set, read by these settings, without the sites that they leave out."""
        path, content = self.opened(folder)
        data = self.dataset(self.name, str(path), content, options)
        return data if options.chooses else options.restricted(data, self.name)


class _DownloadError(Exception):
    """An address gave no complete file; the text says why."""


def download(
    name: str,
    files: Sequence[RemoteFile],
    folder: Path,
    progress: DownloadProgress | None = None,
    timeout: float = 30.0,
) -> str:
    """Put the files of data set `name` below `folder`; returns a sentence that says what was done."""
    parents = {(folder / file.name).parent for file in files} | {folder}
    made = sorted((parent for parent in parents if not parent.exists()), reverse=True)
    try:
        missing = [file for file in files if not _already_there(folder / file.name, file.sha256)]
        for position, file in enumerate(missing):
            _fetch(file, folder, progress, timeout, missing[position:])
    except OSError as error:
        raise DataError(f"cannot use {error.filename or folder} ({error.strerror}); choose another folder") from error
    finally:
        for new in made:  # folders for files that never came are removed
            with suppress(OSError):  # not empty
                new.rmdir()
    if not missing:
        return f"{name} is already complete in {folder}"
    return f"{name}: downloaded {', '.join(file.name for file in missing)} to {folder}"


def _already_there(path: Path, expected: str) -> bool:
    if not path.exists():
        return False
    if not path.is_file():
        raise DataError(f"{path} is in the way: it is not a file; move it and try again")
    if sha256(path) != expected:
        # It may be somebody's own, differently packed copy: not ours to overwrite.
        raise DataError(f"{path} is there, but is not the published file (its checksum differs); move it and try again")
    return True


def _fetch(
    file: RemoteFile, folder: Path, progress: DownloadProgress | None, timeout: float, missing: Sequence[RemoteFile]
) -> None:
    """Download one file; the error lists all that are still `missing`."""
    target = folder / file.name
    part = target.with_name(f"{target.name}.part")
    target.parent.mkdir(parents=True, exist_ok=True)
    failures = []
    for address in file.addresses:
        try:
            _transfer(address, part, progress, timeout)
        except _DownloadError as failure:
            failures.append(f"{address}: {failure}")
            continue
        if sha256(part) != file.sha256:
            part.unlink()
            raise DataError(
                f"what came from {address} is not the published {target.name} (its checksum differs) and was deleted; "
                "try again, perhaps from another network"
            )
        commit_file(part, target)
        return
    again = "run the command again to go on from there" if part.exists() else "try again later"
    by_hand = ", ".join(f"{file.addresses[0]} as {folder / file.name}" for file in missing)
    raise DataError(f"the download failed ({'; '.join(failures)}): {again}, or put the files there by hand: {by_hand}")


def _transfer(address: str, part: Path, progress: DownloadProgress | None, timeout: float) -> None:
    """Bring `part` to its full length, from where it stands; _DownloadError if the network fails."""
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
        raise _DownloadError(f"HTTP {error.code} {error.reason}") from error
    except (OSError, HTTPException, ValueError) as error:
        reason = str(getattr(error, "reason", error))
        raise _DownloadError(reason or type(error).__name__) from error
    with response:
        resumed = response.status == 206 and (response.headers["Content-Range"] or "").startswith(f"bytes {have}-")
        if response.status == 206 and not resumed:
            raise _DownloadError("the server sent another range than the one asked for")
        done = have if resumed else 0
        length = response.headers["Content-Length"]
        total = done + int(length) if length and length.isdecimal() else None
        with part.open("ab" if resumed else "wb") as out:
            while True:
                if progress:
                    progress(done, total)
                try:
                    chunk = response.read(CHUNK)
                except (OSError, HTTPException) as error:
                    reason = str(error) or type(error).__name__
                    raise _DownloadError(f"the connection broke after {done} bytes ({reason})") from error
                if not chunk:
                    break
                done += out.write(chunk)
    if total is not None and done < total:
        raise _DownloadError(f"the connection ended after {done} of {total} bytes")
