"""Raw inputs of any kind as the samples that a model was trained on: uint8 images (N, H, W, C) or float32 vectors.

Images are brought to the stored size and number of channels. Files hold grey levels from 0 to 255; where the training
data had another range (the digits: 0 to 16), full brightness stays full brightness.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fednh.data.dataset import Inputs
from fednh.data.delimited import Form, Usual
from fednh.data.images import BROKEN, SUFFIXES, decode, fitted, rule
from fednh.data.sources import build, of_file
from fednh.data.sources.base import Source
from fednh.data.sources.tables import encode, told
from fednh.data.table_files import as_table, read
from fednh.data.walk import walk
from fednh.errors import UserError
from fednh.storage.model_file import Card, remembered

BATCH = 256
T = TypeVar("T")


class Batch(NamedTuple):
    """Samples with what to call them: a file, or a file and the number of the row in it."""

    names: list[str]
    x: Inputs


def is_image(card: Card) -> bool:
    return len(card.shape) == 3


def samples(x: Any, card: Card) -> Inputs:
    """An array, or PIL images or paths of image files, one or many; of a table model a table, or a path of one."""
    if is_table(card) and (isinstance(x, str | Path) or hasattr(x, "__arrow_c_stream__")):
        path = isinstance(x, str | Path)
        table = read(Path(x), Form(usual=_usual(card))) if path else as_table(x)
        return _encoded(table, card, str(x) if path else "the table")
    if isinstance(x, str | Path | Image.Image):
        x = [x]
    if isinstance(x, list | tuple) and x and all(isinstance(row, str | Path | Image.Image) for row in x):
        if not is_image(card):
            raise UserError(f"this model takes vectors of {card.shape[0]} values, not images")
        return np.stack([image(row, card) for row in x])
    try:
        array = np.asarray(x)
    except ValueError as error:
        raise UserError(f"the inputs cannot be made one array: {error}") from error
    return _images(array, card) if is_image(card) else _vectors(array, card)


def _usual(card: Card) -> Usual:
    """The form of the files that the model was trained on."""
    known = remembered(card)
    return Usual(**{key: known.get(key) for key in Usual._fields})


def is_table(card: Card) -> bool:
    return (card.preprocessing.model_extra or {}).get("kind") == "table"


def stream(
    paths: Sequence[Path], card: Card, failed: Callable[[str], None], form: Mapping[str, Any] | None = None
) -> Iterator[Batch]:
    """All samples in files and folders, a batch at a time; `failed` is told what could not be read.

    `form` has the encoding, separator and decimal mark of text files, where they are not found or as in training.
    """
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        raise UserError(f"{missing[0]} does not exist")
    for path in paths:
        if path.is_dir():
            yield from _image_files(_walk(path, failed), card, failed)
        elif kind := of_file(path):
            known = kind.applicable(str(path), remembered(card), form or {}) if is_table(card) else {}
            yield from _source_file(build(kind, {**known, **(form or {})}), path, card)
        else:
            yield from _image_files([path], card, failed)


def image(source: str | Path | Image.Image, card: Card) -> NDArray[np.uint8]:  # (H, W, C)
    """One image as a sample, brought to the model's size and channels as images were for training."""
    channels, height, width = card.shape
    if channels not in (1, 3):
        raise UserError(f"this model takes images of {channels} channels, which no image file has; give it an array")
    fit = rule(card.preprocessing.model_extra or {})
    try:
        if isinstance(source, Image.Image):
            pixels = fitted(source, (height, width), channels, fit)
        else:
            pixels = decode(Path(source), (height, width), channels, fit)
    except BROKEN as error:
        raise UserError(f"{source} is not an image that can be read: {error}") from error
    scale = card.preprocessing.scale
    return pixels if scale == 255 else np.rint(pixels * (scale / 255)).astype(np.uint8)


def _images(x: NDArray[Any], card: Card) -> NDArray[np.uint8]:
    """An array of images, resized and with its channels converted where they are others than the model's."""
    channels, height, width = card.shape
    wanted = f"uint8 images (N, {height}, {width}, {channels})"
    if x.ndim == 3:
        x = x[..., None]
    if x.ndim != 4 or x.shape[3] not in (1, 3, 4, channels):
        raise UserError(f"this model takes {wanted}, not an array of shape {x.shape}; for one image, x[None]")
    if x.dtype != np.uint8:
        raise UserError(f"this model takes {wanted}, not {x.dtype}; convert, for example (x * 255).astype('uint8')")
    if x.shape[1:] == (height, width, channels):
        return np.ascontiguousarray(x)
    if x.shape[3] not in (1, 3, 4) or channels not in (1, 3):
        raise UserError(f"this model takes {wanted}, not an array of shape {x.shape}")
    rows = (Image.fromarray(row[..., 0] if x.shape[3] == 1 else row) for row in x)
    fit = rule(card.preprocessing.model_extra or {})
    found = [fitted(row, (height, width), channels, fit) for row in rows]
    return np.stack(found) if found else np.empty((0, height, width, channels), np.uint8)


def _vectors(x: NDArray[Any], card: Card) -> NDArray[np.float32]:
    (features,) = card.shape
    if x.ndim != 2 or x.shape[1] != features or x.dtype.kind not in "fiu":
        raise UserError(
            f"this model takes numbers of shape (N, {features}), not {x.dtype} of shape {x.shape}; for one, x[None]"
        )
    with np.errstate(over="ignore"):  # what overflows becomes infinite and is refused in the next line
        vectors = x.astype(np.float32)
    if not (np.isfinite(vectors) | (np.isnan(vectors) & is_table(card))).all():  # a table's gap takes the mean
        raise UserError("the inputs hold NaN or infinite values; clean or impute them first")
    return vectors


def _walk(folder: Path, failed: Callable[[str], None]) -> Iterator[Path]:
    """The image files below a folder, in a stable order, found as they are asked for."""
    found = False
    for file in walk(folder, failed, hidden=True):
        if file.name.lower().endswith(SUFFIXES):
            found = True
            yield file
    if not found:
        failed(f"{folder} holds no image files ({', '.join(SUFFIXES)})")


def _image_files(files: Iterable[Path], card: Card, failed: Callable[[str], None]) -> Iterator[Batch]:
    if not is_image(card):
        raise UserError(f"this model takes vectors of {card.shape[0]} values, as .npz or .csv, not images")

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
        yield from _rows(path, x, first)
        first += len(x)


def _rows(path: Path, x: Inputs, first: int = 0) -> Iterator[Batch]:
    for start in range(0, len(x), BATCH):
        part = x[start : start + BATCH]
        yield Batch([f"{path}[{first + start + i}]" for i in range(len(part))], part)


def _encoded(table: Any, card: Card, where: str) -> NDArray[np.float32]:
    """Raw rows as the card says; what is missing or was never seen is told."""
    return _vectors(told(*encode(table, card.preprocessing.model_extra or {}, where)), card)


def _chunks(items: Iterable[T]) -> Iterator[list[T]]:
    rest = iter(items)
    while chunk := list(islice(rest, BATCH)):
        yield chunk
