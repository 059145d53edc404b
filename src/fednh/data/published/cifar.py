"""Reads CIFAR-10 and CIFAR-100 as published: binary or python version, as an archive or unpacked.

An archive is read member by member in memory. Nothing is ever written to a path that the archive names, and
members outside the one folder that belongs there are passed over.
"""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fednh.data.dataset import Arrays
from fednh.data.published import pickles
from fednh.data.published.base import DataPath, RemoteFile
from fednh.errors import UserError

PIXELS = 3 * 32 * 32  # an image is a row: all red, then all green, then all blue values
LARGEST_FILE = 1 << 29  # the largest genuine one has 155 MB


@dataclass(frozen=True)
class Layout:
    """One of the four forms in which a CIFAR set is published."""

    archive: str
    folder: str
    train: tuple[str, ...]
    test: str
    classes: int

    @property
    def binary(self) -> bool:
        return self.test.endswith(".bin")

    @property
    def label_bytes(self) -> int:
        return 1 if self.classes == 10 else 2  # CIFAR-100: the coarse label, then the fine one

    @property
    def labels_key(self) -> str:
        return "labels" if self.classes == 10 else "fine_labels"


_BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))
LAYOUTS = (
    Layout("cifar-10-binary.tar.gz", "cifar-10-batches-bin", tuple(f"{b}.bin" for b in _BATCHES), "test_batch.bin", 10),
    Layout("cifar-10-python.tar.gz", "cifar-10-batches-py", _BATCHES, "test_batch", 10),
    Layout("cifar-100-binary.tar.gz", "cifar-100-binary", ("train.bin",), "test.bin", 100),
    Layout("cifar-100-python.tar.gz", "cifar-100-python", ("train",), "test", 100),
)

HOSTS = ("https://www.cs.toronto.edu/~kriz/", "https://cave.cs.toronto.edu/kriz/")

Part = tuple[NDArray[np.uint8], NDArray[np.int64]]  # images (N, 32, 32, 3) and labels (N,)


def places(classes: int) -> Callable[[Path], list[DataPath]]:
    """The places of the set with this many classes."""

    def in_folder(folder: Path) -> list[DataPath]:
        found = []
        for layout in LAYOUTS:
            if layout.classes == classes:
                archive, unpacked = folder / layout.archive, folder / layout.folder
                found.append(DataPath(archive, partial(read, archive, layout), archive.is_file))
                found.append(DataPath(unpacked, partial(read, unpacked, layout), unpacked.is_dir))
        return found

    return in_folder


def remote(archive: str, sha256: str) -> tuple[RemoteFile, ...]:
    """The archive to download."""
    return (RemoteFile(archive, sha256, tuple(host + archive for host in HOSTS)),)


def read(path: Path, layout: Layout) -> Arrays:
    """The set at `path`, which is the layout's folder or its archive."""
    wanted = (*layout.train, layout.test)
    files = _files_of_folder(path, wanted) if path.is_dir() else _files_of_archive(path, layout.folder, wanted)
    parts: dict[str, Part] = {}
    for name, content in files:
        parse = _parse_binary if layout.binary else _parse_pickle
        parts[name] = parse(f"{path}: {name}", content, layout)
    missing = [name for name in wanted if name not in parts]
    if missing:
        raise UserError(f"{path} lacks {', '.join(missing)}; it is incomplete, download or unpack it again")
    x_train = np.concatenate([parts[name][0] for name in layout.train])
    y_train = np.concatenate([parts[name][1] for name in layout.train])
    return Arrays(x_train, y_train, *parts[layout.test])


def _files_of_folder(folder: Path, wanted: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    for name in wanted:
        path = folder / name
        if path.is_file():
            try:
                if path.stat().st_size > LARGEST_FILE:
                    raise UserError(f"{path} is too large for a CIFAR file; download it again")
                content = path.read_bytes()
            except OSError as error:
                raise UserError(f"{path} cannot be read ({error.strerror})") from error
            yield name, content


def _files_of_archive(path: Path, folder: str, wanted: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    names = {f"{prefix}{folder}/{name}": name for name in wanted for prefix in ("", "./")}
    try:
        with gzip.open(path) as stream, tarfile.open(fileobj=stream, mode="r:") as archive:
            for member in archive:
                name = names.get(member.name)
                if name is None or not member.isreg():
                    continue
                if member.size > LARGEST_FILE:
                    raise UserError(f"{path}: {name} is too large for a CIFAR file; download the archive again")
                file = archive.extractfile(member)
                if file is not None:
                    yield name, file.read()
            while stream.read(1 << 20):  # gzip compares its checksum only when the very end is reached
                pass
    except (tarfile.TarError, zlib.error, EOFError, OSError, ValueError) as error:
        raise UserError(f"{path} is not a complete tar.gz archive ({error}); download it again") from error


def _parse_binary(where: str, content: bytes, layout: Layout) -> Part:
    record = layout.label_bytes + PIXELS
    if not content or len(content) % record:
        raise UserError(f"{where} has {len(content)} bytes, not a multiple of {record}; it is damaged or incomplete")
    rows = np.frombuffer(content, np.uint8).reshape(-1, record)
    labels = rows[:, layout.label_bytes - 1].astype(np.int64)
    return _images(rows[:, layout.label_bytes :]), _in_range(where, labels, layout.classes)


def _parse_pickle(where: str, content: bytes, layout: Layout) -> Part:
    batch = pickles.load(content, where)
    for key in ("data", layout.labels_key):
        if key not in batch:
            there = ", ".join(sorted(batch)) or "nothing"
            raise UserError(f"{where} lacks the entry {key!r} (it holds {there[:200]}); download it again")
    data, labels = batch["data"], batch[layout.labels_key]
    if not (isinstance(data, np.ndarray) and data.dtype == np.uint8 and data.ndim == 2 and data.shape[1] == PIXELS):
        raise UserError(f"{where}: 'data' is not an array of bytes with {PIXELS} columns; download it again")
    if len(data) == 0:
        raise UserError(f"{where} holds no image; download it again")
    numbers = _whole_numbers(where, labels)
    if len(numbers) != len(data):
        raise UserError(f"{where} holds {len(data)} images but {len(numbers)} labels; download it again")
    return _images(data), _in_range(where, numbers, layout.classes)


def _whole_numbers(where: str, labels: Any) -> NDArray[np.int64]:
    if not (isinstance(labels, list) and all(type(n) is int and abs(n) < 1 << 31 for n in labels)):
        raise UserError(f"{where}: the labels are not a list of whole numbers; download it again")
    return np.array(labels, dtype=np.int64)


def _images(rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


def _in_range(where: str, labels: NDArray[np.int64], classes: int) -> NDArray[np.int64]:
    outside = labels[(labels < 0) | (labels >= classes)]
    if len(outside):
        raise UserError(f"{where} holds the label {outside[0]}, outside 0 to {classes - 1}; download it again")
    return labels
