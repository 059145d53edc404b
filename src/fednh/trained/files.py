"""The samples in files and folders, as a model was trained on them, a batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from fednh.data.dataset import Inputs
from fednh.data.images import SUFFIXES
from fednh.data.sources import SOURCES, build, of_file
from fednh.data.sources.base import Source
from fednh.data.walk import walk
from fednh.errors import UserError
from fednh.storage.model_file import Card, remembered
from fednh.trained.inputs import image, is_image, is_table, samples, wanted

BATCH = 256
TEXT = "csv"  # the kind of a file whose suffix says nothing, for models that take no images
T = TypeVar("T")


class Batch(NamedTuple):
    """Samples with what to call them: a file, or a file and the number of the row in it."""

    names: list[str]
    x: Inputs


def stream(
    paths: Sequence[Path], card: Card, failed: Callable[[str], None], form: Mapping[str, Any] | None = None
) -> Iterator[Batch]:
    """All samples in files and folders, a batch at a time; `failed` is told what could not be read.

    Images that follow each other share batches, however they are given: so a program that gives a list of images gets
    the same numbers, to the bit. `form` has the encoding, separator and decimal mark of text files, where they are not
    found or as in training.
    """
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        raise UserError(f"{missing[0]} does not exist")
    for kind, same in groupby(paths, lambda path: _kind(path, card)):
        if kind is None:
            yield from _image_files(chain.from_iterable(_images_in(path, failed) for path in same), card, failed)
            continue
        for path in same:
            known = kind.applicable(str(path), remembered(card), form or {}) if is_table(card) else {}
            yield from _source_file(build(kind, {**known, **(form or {})}), path, card)


def _kind(path: Path, card: Card) -> type[Source] | None:
    """The kind of source that a file is of; None: an image, or a folder of images."""
    if path.is_dir():
        return SOURCES[TEXT] if is_table(card) else None
    if is_image(card) or path.suffix.lower() in SUFFIXES:
        return of_file(path)
    return of_file(path) or SOURCES[TEXT]


def _images_in(path: Path, failed: Callable[[str], None]) -> Iterator[Path]:
    """The file, or the image files below a folder, in a stable order, found as they are asked for."""
    if not path.is_dir():
        yield path
        return
    found = False
    for file in walk(path, failed, hidden=True):
        if file.name.lower().endswith(SUFFIXES):
            found = True
            yield file
    if not found:
        failed(f"{path} holds no image files ({', '.join(SUFFIXES)})")


def _image_files(files: Iterable[Path], card: Card, failed: Callable[[str], None]) -> Iterator[Batch]:
    if not is_image(card):
        raise UserError(f"this model takes {wanted(card)}; it was given images")

    def read(path: Path) -> NDArray[np.uint8] | str:
        try:
            return image(path, card)
        except UserError as error:
            return str(error)

    with ThreadPoolExecutor() as pool:
        for chunk in _chunks(files):
            names, pixels = [], []
            for path, found in zip(chunk, pool.map(read, chunk), strict=True):
                if isinstance(found, str):
                    failed(found)
                else:
                    names.append(str(path))
                    pixels.append(found)
            if names:
                yield Batch(names, np.stack(pixels))


def _source_file(source: Source, path: Path, card: Card) -> Iterator[Batch]:
    """The samples in a file of one of the kinds of sources."""
    first = 0
    for block in source.unlabelled(path, card.shape, card.preprocessing.model_extra or {}):
        x = samples(block, card)
        yield from _batches(path, x, first)
        first += len(x)


def _batches(path: Path, x: Inputs, first: int = 0) -> Iterator[Batch]:
    for start in range(0, len(x), BATCH):
        part = x[start : start + BATCH]
        yield Batch([f"{path}[{first + start + i}]" for i in range(len(part))], part)


def _chunks(items: Iterable[T]) -> Iterator[list[T]]:
    rest = iter(items)
    while chunk := list(islice(rest, BATCH)):
        yield chunk
