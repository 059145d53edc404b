"""Reads MNIST's IDX files, plain or gzipped.

Layout: two zero bytes, a type code (8 is unsigned byte, the only one these sets use), the number of axes, each
axis' length as a big-endian 32-bit integer, then the bytes.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from fednh.data.dataset import Arrays
from fednh.data.published.base import DataPath, RemoteFile
from fednh.errors import UserError

UNSIGNED_BYTE = 8
DEFLATE_LIMIT = 1032  # no gzip file holds more than this many times its own size
CHUNK = 1 << 20
FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def places(folders: Sequence[Path], classes: int = 10) -> list[DataPath]:
    """The four files in one of these folders."""
    return [DataPath(path, partial(read, path, classes), partial(present, path)) for path in folders]


def remote(folder: str, hosts: tuple[str, ...], sums: tuple[str, str, str, str]) -> tuple[RemoteFile, ...]:
    """The four files to download, gzipped, into a folder."""
    names = [f"{name}.gz" for name in FILES]
    return tuple(
        RemoteFile(f"{folder}/{name}", sha256, tuple(host + name for host in hosts))
        for name, sha256 in zip(names, sums, strict=True)
    )


def present(folder: Path) -> bool:
    """Whether any of the four files is there; `read` then says which ones are not."""
    return any(_find(folder, name) for name in FILES)


def read(folder: Path, classes: int) -> Arrays:
    """The four files of one set."""
    missing = [name for name in FILES if not _find(folder, name)]
    if missing:
        raise UserError(f"{folder} lacks {', '.join(missing)} (plain or .gz); put all four files there")
    x_train, y_train, x_test, y_test = (read_array(_find(folder, name) or folder) for name in FILES)
    for name, x, y in (("train", x_train, y_train), ("t10k", x_test, y_test)):
        if x.ndim != 3 or y.ndim != 1:
            raise UserError(
                f"{folder}: the {name} files hold arrays with {x.ndim} and {y.ndim} axes instead of images (N, H, W) "
                "and labels (N,); are they mixed up?"
            )
        if len(x) != len(y):
            raise UserError(f"{folder}: the {name} files hold {len(x)} images but {len(y)} labels")
        if len(y) == 0:
            raise UserError(f"{folder}: the {name} files are empty; download them again")
        if y.max() >= classes:
            raise UserError(f"{folder}: the {name} labels hold {y.max()}, outside 0 to {classes - 1}")
    return Arrays(x_train[..., np.newaxis], y_train.astype(np.int64), x_test[..., np.newaxis], y_test.astype(np.int64))


def read_array(path: Path) -> NDArray[np.uint8]:
    """One IDX file; gzipped if its name ends in .gz."""
    zipped = path.suffix == ".gz"
    try:
        stored = path.stat().st_size
        file: BinaryIO | gzip.GzipFile
        with gzip.open(path, "rb") if zipped else path.open("rb") as file:
            return _parse(path, file, most=stored * DEFLATE_LIMIT if zipped else stored)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read ({error}); it is damaged or incomplete, download it again") from error


def _parse(path: Path, file: BinaryIO | gzip.GzipFile, most: int) -> NDArray[np.uint8]:
    head = file.read(4)
    if len(head) < 4 or head[:2] != b"\0\0":
        raise UserError(f"{path} is not an IDX file (it starts with {head.hex() or 'nothing'}); download it again")
    kind, axes = head[2], head[3]
    if kind != UNSIGNED_BYTE or axes == 0:
        raise UserError(f"{path} has IDX type {kind} and {axes} axes; only unsigned bytes (type 8) are read")
    lengths = file.read(4 * axes)
    if len(lengths) < 4 * axes:
        raise UserError(f"{path} ends within its header; download it again")
    shape = struct.unpack(f">{axes}I", lengths)
    expected = math.prod(shape)
    if expected > most:
        raise UserError(f"{path} declares {expected} bytes, more than the file can hold; download it again")
    # In chunks: a single read would reserve all that the header promises before the first byte is seen.
    content = bytearray()
    while len(content) <= expected and (chunk := file.read(min(CHUNK, expected + 1 - len(content)))):
        content += chunk
    if len(content) != expected:
        found = "more" if len(content) > expected else str(len(content))
        raise UserError(f"{path} should hold {expected} bytes after its header but holds {found}; download it again")
    try:
        return np.frombuffer(content, np.uint8).reshape(shape)
    except ValueError as error:  # more axes than numpy has
        raise UserError(f"{path} has {axes} axes; images have 3 and labels 1") from error


def _find(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)
