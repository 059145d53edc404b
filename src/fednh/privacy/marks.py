"""By what a site's ledger recognises data: where they are read, their files, their rows.

Reading the same data again gives the same marks, in whatever order rows or files come. The server decides columns,
sizes and classes, so the same rows may become other samples; then place and files are still the same. Data that share
a single mark are taken for the same, which errs towards what costs more.

Not recognised: rows that were changed and moved to another place at once (rounded, other columns, recompressed), a
person who is in both in different words, and, of sets with more than `SKETCH` rows or files, small overlaps: of those
only the `SKETCH` smallest hashes are kept, so a part of 1% is found surely, one of a thousandth with 98% chance.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fednh.data.sources.images import SUFFIXES
from fednh.errors import DataError
from fednh.io.files import sha256

SKETCH = 4096  # hashes of rows, and of files, that are kept
LENGTH = 12  # hexadecimal digits of a hash


@dataclass(frozen=True)
class Marks:
    """What data are recognised by; hashes only."""

    place: str
    files: frozenset[str]
    rows: frozenset[str]

    @classmethod
    def of(cls, place: str, file: Path | None, *inputs: NDArray[Any]) -> Marks:
        """The marks of data read at a `place`, from a file or folder if there is one; `inputs` has a sample a row."""
        rows = (row for part in inputs for row in _rows(part))
        return cls(_hash(place.encode()), _sketch(_files(file)), _sketch(map(_hash, rows)))

    def meets(self, other: Marks) -> bool:
        """Whether both may hold the same sample."""
        return self.place == other.place or bool(self.files & other.files) or bool(self.rows & other.rows)

    def write(self) -> dict[str, str]:
        """As a line of the ledger has them."""
        return {"place": self.place, "files": "".join(sorted(self.files)), "rows": "".join(sorted(self.rows))}

    @classmethod
    def read(cls, row: dict[str, Any]) -> Marks:
        return cls(str(row["place"]), _split(str(row["files"])), _split(str(row["rows"])))


def _rows(inputs: NDArray[Any]) -> Iterable[bytes]:
    """The bytes of every sample; equal numbers have equal bytes."""
    if inputs.dtype.kind == "f":
        inputs = np.where(np.isnan(inputs), np.nan, inputs + 0.0)  # one NaN, one zero
    return (row.tobytes() for row in np.ascontiguousarray(inputs))


def _files(file: Path | None) -> Iterable[str]:
    """Hashes of the file's content, or of every image in the folder."""
    if file is None:
        return
    found = [path for path in file.rglob("*") if path.suffix.lower() in SUFFIXES] if file.is_dir() else [file]
    for path in found:
        if path.is_file():
            try:
                yield sha256(path)[:LENGTH]
            except OSError as error:
                raise DataError(f"{path} cannot be read: {error.strerror}") from error


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=LENGTH // 2).hexdigest()


def _sketch(hashes: Iterable[str]) -> frozenset[str]:
    return frozenset(sorted(set(hashes))[:SKETCH])


def _split(text: str) -> frozenset[str]:
    return frozenset(text[k : k + LENGTH] for k in range(0, len(text), LENGTH))
