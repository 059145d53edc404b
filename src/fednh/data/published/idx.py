"""Reads MNIST's IDX files, plain or gzipped.

Layout: two zero bytes, a type code (8 is unsigned byte, the only one these sets use), the number of axes, each
axis' length as a big-endian 32-bit integer, then the bytes.
"""

from __future__ import annotations

import gzip
import struct
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fednh.data.dataset import Arrays
from fednh.data.published.base import DataPath, RemoteFile
from fednh.errors import UserError

FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def places(folders: Sequence[Path]) -> list[DataPath]:
    """The four files in one of these folders."""
    return [DataPath(path, partial(read, path), partial(present, path)) for path in folders]


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


def read(folder: Path) -> Arrays:
    """The four files of one set; what is damaged raises any exception (see `Published.load`)."""
    if missing := [name for name in FILES if not _find(folder, name)]:
        raise UserError(f"{folder} lacks {', '.join(missing)} (plain or .gz); put all four files there")
    x_train, y_train, x_test, y_test = (_array(_find(folder, name) or folder) for name in FILES)
    return Arrays(x_train[..., np.newaxis], y_train.astype(np.int64), x_test[..., np.newaxis], y_test.astype(np.int64))


def _array(path: Path) -> NDArray[np.uint8]:
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    zeros, kind, axes = struct.unpack_from(">HBB", content)
    if (zeros, kind) != (0, 8):
        raise ValueError(f"{path.name} is not an IDX file of bytes")
    shape = struct.unpack_from(f">{axes}I", content, 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape)


def _find(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)
