"""Inputs of a model, from programs and from files, as samples like those it was trained on.

Samples are uint8 images (N, H, W, C) or float32 vectors. Images are brought to the stored size and number of channels.
Files hold grey levels from 0 to 255; where the training data had another range (the digits: 0 to 16), full brightness
stays full brightness. Files and folders are read a batch at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fednh.data.dataset import Inputs
from fednh.data.sources import Source, memory
from fednh.data.sources.csv import numbers_of, site_files
from fednh.data.sources.folder import walk
from fednh.data.sources.images import BROKEN, SUFFIXES, decode, fitted, rule
from fednh.data.sources.registry import SOURCES, build, of_file
from fednh.data.sources.table import encode, warn_notes
from fednh.errors import UserError
from fednh.models.backbone import Recipe
from fednh.runs.model_file import Card, remembered
from fednh.text import some

CHANNELS = (1, 3, 4)  # that an image may have


def is_image(card: Card) -> bool:
    return len(card.shape) == 3


def is_table(card: Card) -> bool:
    return card.sample_form.get("kind") == "table"


def is_text(card: Card) -> bool:
    return card.sample_form.get("kind") == "text"


def are_texts(x: Any, card: Card) -> bool:
    """Whether the inputs are texts for a model of texts: any list of them, or one that names no file."""
    one = isinstance(x, str) and not Path(x[:255]).exists()
    return is_text(card) and (one or (isinstance(x, list | tuple) and all(isinstance(text, str) for text in x)))


def takes(recipe: Recipe, card: Card) -> bool:
    """Whether features by this recipe are those that the model was trained on."""
    return card.features is not None and card.features.same(recipe)


def wanted(card: Card) -> str:
    """What a model takes, in words."""
    if is_image(card):
        channels, height, width = card.shape
        return f"images: files, folders of them, PIL images, or uint8 arrays (N, {height}, {width}, {channels})"
    if is_text(card):
        return f"texts: a .csv or .parquet file with the column {_text_column(card)!r}, or a list of them"
    if is_table(card):
        return f"rows with the columns {some(_columns(card), 8)}: a .csv or .parquet file, a data frame, or dicts"
    return f"rows of {card.shape[0]} numbers: an .npz, .csv or .parquet file, or an array"


def paths_of(x: Any) -> list[Path] | None:
    """The paths, if it is a path or a list of paths and nothing else."""
    if isinstance(x, str | os.PathLike):
        return [Path(x)]
    if isinstance(x, list | tuple) and x and all(isinstance(path, str | os.PathLike) for path in x):
        return [Path(path) for path in x]
    return None


def samples(x: Any, card: Card) -> Inputs:
    """Arrays, tensors, PIL images and paths of image files, one or many; data frames, Arrow tables and dicts."""
    if is_text(card) and (are_texts(x, card) or getattr(getattr(x, "dtype", None), "kind", "") == "U"):
        return np.array([x] if isinstance(x, str) else x, str)
    if memory.is_frame(x):
        return _rows(memory.table(x), card) if not is_image(card) else _refused("a table", card)
    if memory.is_dicts(x):
        return _rows(memory.dicts(x, _columns(card)), card) if is_table(card) else _refused("dicts", card)
    if isinstance(x, str | os.PathLike | Image.Image):
        x = [x]
    if isinstance(x, list | tuple) and x and all(isinstance(row, str | os.PathLike | Image.Image) for row in x):
        return np.stack([image(row, card) for row in x]) if is_image(card) else _refused("images", card)
    array = memory.array(x, "the inputs")
    if array.shape == (0,):  # an empty list
        array = np.empty((0, *card.shape[1:], card.shape[0]) if is_image(card) else (0, *card.shape), np.uint8)
    return _images(array, card) if is_image(card) and not _is_features(array, card) else _vectors(array, card)


def _is_features(array: NDArray[Any], card: Card) -> bool:
    """Whether the inputs are features already, such as the frozen body of the model computes of images."""
    return card.features is not None and array.dtype.kind == "f" and array.shape[1:] == (card.features.dim,)


def _refused(what: str, card: Card) -> Inputs:
    raise UserError(f"this model takes {wanted(card)}; it was given {what}")


def _text_column(card: Card) -> str:
    return str(card.sample_form.get("column"))


def _columns(card: Card) -> list[str]:
    """The columns of the table that a model was trained on."""
    return [column["name"] for column in card.sample_form["columns"]]


def _rows(table: Any, card: Card) -> NDArray[np.float32]:
    """Rows as the card says; what is missing or was never seen is told. Of a model of arrays, rows of numbers."""
    if not is_table(card):
        return _vectors(numbers_of(table, card.shape[0], "the table"), card)
    return _vectors(warn_notes(*encode(table, card.sample_form, "the table")), card)


def image(source: str | Path | Image.Image, card: Card) -> NDArray[np.uint8]:  # (H, W, C)
    """One image as a sample, brought to the model's size and channels as images were for training."""
    channels, height, width = card.shape
    if channels not in (1, 3):
        raise UserError(f"this model takes images of {channels} channels, which no image file has; give it an array")
    fit = rule(card.sample_form)
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
    what = f"this model takes uint8 images (N, {height}, {width}, {channels})"
    one = x.ndim == 3 and x.shape[2] in CHANNELS and x.shape[1:] != (height, width)  # (H, W, C), not (N, H, W)
    if x.ndim == 3 and not one:
        x = x[..., None]
    known = (*CHANNELS, channels)
    if x.ndim != 4 or x.shape[3] not in known:
        last = x.ndim == 4 and x.shape[1] in known
        hint = "channels come last, x.transpose(0, 2, 3, 1)" if last else "for one image, x[None]"
        raise UserError(f"{what}, not an array of shape {x.shape}; {hint}")
    if x.dtype != np.uint8:
        raise UserError(f"{what}, not {x.dtype}; convert, for example (x * 255).astype('uint8')")
    if x.shape[1:] == (height, width, channels):
        return np.ascontiguousarray(x)
    if x.shape[3] not in CHANNELS or channels not in (1, 3):
        raise UserError(f"{what}, not an array of shape {x.shape}")
    rows = (Image.fromarray(row[..., 0] if x.shape[3] == 1 else row) for row in x)
    fit = rule(card.sample_form)
    images = [fitted(row, (height, width), channels, fit) for row in rows]
    return np.stack(images) if images else np.empty((0, height, width, channels), np.uint8)


def _vectors(x: NDArray[Any], card: Card) -> NDArray[np.float32]:
    features = card.shape[0] if card.features is None else card.features.dim
    if x.ndim != 2 or x.shape[1] != features or x.dtype.kind not in "fiu":
        takes = f"numbers of shape (N, {features})"
        if is_table(card):
            raise UserError(f"this model takes {wanted(card)}, or {takes} as its card encodes them, not {_form(x)}")
        raise UserError(f"this model takes {takes}, not {_form(x)}; for one, x[None]")
    with np.errstate(over="ignore"):  # what overflows becomes infinite and is refused in the next line
        vectors = x.astype(np.float32)
    if not (np.isfinite(vectors) | (np.isnan(vectors) & is_table(card))).all():  # a table's gap takes the mean
        raise UserError("the inputs hold NaN or infinite values; clean or impute them first")
    return vectors


def _form(x: NDArray[Any]) -> str:
    return f"{x.dtype} of shape {x.shape}"


# --- files ---------------------------------------------------------------------------------------------------------

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
        for path in chain.from_iterable(site_files(path) or [path] for path in same):
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
    any_image = False
    for file in walk(path, failed, hidden=True):
        if file.name.lower().endswith(SUFFIXES):
            any_image = True
            yield file
    if not any_image:
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
            for path, read_image in zip(chunk, pool.map(read, chunk), strict=True):
                if isinstance(read_image, str):
                    failed(read_image)
                else:
                    names.append(str(path))
                    pixels.append(read_image)
            if names:
                yield Batch(names, np.stack(pixels))


def _source_file(source: Source, path: Path, card: Card) -> Iterator[Batch]:
    """The samples in a file of one of the kinds of sources."""
    first = 0
    backbone = {} if card.features is None else {"backbone": card.features.model_dump(mode="json")}
    for block in source.unlabelled(path, card.shape, {**card.sample_form, **backbone}):
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
