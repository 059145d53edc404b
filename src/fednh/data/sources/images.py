"""Image files as arrays and as a data set: of any kind, turned upright, brought to one size, decoded in parallel.

One way for training and prediction, for files, PIL images and arrays; `recipe` says in a model's card what it is.
Pixels of 16 bits keep their upper eight; CMYK becomes RGB by Pillow's plain formula; an alpha channel is dropped, the
colours stay as they are stored; of several pages or frames the first is used. Pixels without a known range are refused.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps
from rich.console import Console
from rich.progress import Progress

from fednh.data.dataset import Dataset
from fednh.data.sources import Fit, FitRule, OnBad, Size, Source
from fednh.data.sources.columns import in_order, numbered
from fednh.data.splits import from_rows
from fednh.errors import DataError
from fednh.machine import cores
from fednh.text import some

# What folders are searched for.
SUFFIXES = (
    *(".jpg", ".jpeg", ".jfif", ".png", ".bmp", ".tif", ".tiff", ".webp", ".gif"),
    *(".ppm", ".pgm", ".pbm", ".pnm"),
)
GREY = ("1", "L", "LA", "I", "I;16", "I;16L", "I;16B")
FILTER = "BILINEAR"  # of Pillow, which widens it when an image shrinks
KEPT = 64  # images that all have one size, at most this, keep it
DEFAULT = (32, 32)  # else they get this one, the paper's
# Fixed, not measured: reveals nothing about anybody's images, and all sites agree without exchanging anything.
MEAN, STD = 0.5, 0.25
BROKEN = (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError)  # what reading an image may raise
_UPRIGHT, _LYING = 0x0112, (5, 6, 7, 8)  # the EXIF tag of the orientation, and its values that swap the sides
_BITS, _PHOTOMETRIC, _WHITE_IS_ZERO = 258, 262, 0  # tags of TIFF
_SOME, _MANY = 5, 50  # how many files are named when they are refused, and when they are left out

ImageFile = Path | bytes
A = TypeVar("A")


class Decoded(NamedTuple):
    """Images of one size."""

    x: NDArray[np.uint8]  # (N, H, W, C)
    kept: list[int]  # which of the sources they are: all, unless unreadable ones are left out
    notes: tuple[str, ...]  # what was decided, in words


class _Header(NamedTuple):
    """Facts from an image's header."""

    height: int  # when it is upright
    width: int
    grey: bool
    pages: int


def decode(source: ImageFile, size: tuple[int, int], channels: int, fit: FitRule = "stretch") -> NDArray[np.uint8]:
    """One image, upright, brought to (height, width), as (H, W, C); raises one of BROKEN."""
    with Image.open(_opened(source)) as image:
        # Decoded in full: Image.draft would be faster for large JPEG, but gives other pixels than the decoded image.
        return fitted(image, size, channels, fit)


def fitted(image: Image.Image, size: tuple[int, int], channels: int, fit: FitRule = "stretch") -> NDArray[np.uint8]:
    """An opened image, upright, brought to (height, width), as (H, W, C)."""
    _refuse_unknown_range(image)
    upright = ImageOps.exif_transpose(image)
    if upright.mode.startswith("I"):  # 16 bits: the upper eight are kept
        upright = Image.fromarray(_upper_bits(np.asarray(upright)))
    upright.info.pop("transparency", None)  # of a palette: Pillow would warn that it is dropped
    upright = upright.convert(_mode(channels))
    across, how = (size[1], size[0]), Image.Resampling[FILTER]
    if upright.size != across:
        if fit == "crop":  # the largest part in the middle that has the shape
            upright = ImageOps.fit(upright, across, how)
        elif fit == "pad":  # all of it in the middle, with black beside or above and below
            upright = ImageOps.pad(upright, across, how)
        else:
            upright = upright.resize(across, how)
    return np.asarray(upright, np.uint8).reshape(*size, channels)


def recipe(channels: int, fit: str = "stretch") -> dict[str, Any]:
    """What `fitted` does, for the card: Pillow's names, so that it can be done without fednh."""
    return {"upright": "exif_transpose", "mode": _mode(channels), "filter": FILTER, "rule": fit, "draft": False}


def rule(preprocessing: dict[str, Any]) -> FitRule:
    """How a model's images get their size, from its card."""
    fit: FitRule = (preprocessing.get("resize") or {}).get("rule", "stretch")
    if fit not in get_args(FitRule):
        raise DataError(f"the model's card resizes images by {fit!r}, which this version does not know")
    return fit


def decode_all(
    sources: Sequence[ImageFile],
    names: Sequence[str],
    size: tuple[int, int] | None,
    where: str,
    fit: FitRule = "stretch",
    skip: bool = False,
) -> Decoded:
    """All images, grey only if all are; unreadable ones are named, and refused unless they may be skipped."""
    left, bad = list(range(len(sources))), list[str]()

    def each(work: Callable[[ImageFile], A], verb: str) -> list[A]:
        """The result of `work` for every image that is left; unreadable ones are left out from now on, or refused."""
        results = _each(work, [sources[k] for k in left], verb)
        broken = {k: error for k, error in zip(left, results, strict=True) if isinstance(error, _Unreadable)}
        bad.extend(f"{names[k]} ({error.reason})" for k, error in broken.items())
        if broken and (not skip or len(broken) == len(left)):
            way = "" if skip else ", or leave them out with data.on_bad=skip"
            lost = f"{len(bad)} of {len(names)} images cannot be read: {some(bad, _SOME)}"
            raise DataError(f"{where}: {lost}; repair or remove them{way}")
        left[:] = [k for k in left if k not in broken]
        return [result for result in results if not isinstance(result, _Unreadable)]

    before = -1
    while len(left) != before:  # once more where some were left out: nothing of them decides size and colour
        before = len(left)
        headers = each(_header, "looking at")
        chosen, channels, notes = _decided(headers, size)
        pixels = each(partial(decode, size=chosen, channels=channels, fit=fit), "decoding")
    if bad:
        lost = f"{len(bad)} of {len(sources)} images cannot be read and are left out"
        notes.insert(0, f"{where}: {lost}: {some(bad, _MANY)}")
    pages = [f"{names[k]} has {image.pages}" for k, image in zip(left, headers, strict=True) if image.pages > 1]
    if pages:
        notes.append(f"{where}: of files with several pages or frames the first is used: {some(pages, _SOME)}")
    return Decoded(np.stack(pixels), left, tuple(notes))


def _decided(headers: Sequence[_Header], size: tuple[int, int] | None) -> tuple[tuple[int, int], int, list[str]]:
    """The size and the number of channels of all images, and notes about it."""
    channels = 1 if all(image.grey for image in headers) else 3
    if size is not None:
        return size, channels, []
    (first, *others) = {(image.height, image.width) for image in headers}
    chosen = first if not others and max(first) <= KEPT else DEFAULT
    if chosen == first and not others:
        return chosen, channels, []
    what = f"of {len(others) + 1} sizes" if others else f"of {first[0]}x{first[1]} pixels"
    return chosen, channels, [f"images {what} are resized to {chosen[0]}x{chosen[1]}; choose with data.size"]


def _header(source: ImageFile) -> _Header:
    """Its size when it is upright, whether it is grey, and how many pages or frames it has."""
    with Image.open(_opened(source)) as image:
        _refuse_unknown_range(image)
        width, height = image.size
        if image.getexif().get(_UPRIGHT) in _LYING and image.format != "TIFF":  # Pillow has turned a TIFF's sides
            width, height = height, width
        grey = image.mode in GREY
        # A telephone's JPEG may carry a second picture, such as a depth map (MPO).
        pages = 1 if image.format in ("JPEG", "MPO") else getattr(image, "n_frames", 1)
        return _Header(height, width, grey, pages)


def _refuse_unknown_range(image: Image.Image) -> None:
    """Pixels of 32 bits, signed ones and fractions have no agreed black and white."""
    tiff = image.format == "TIFF"
    if image.mode == "F" or (tiff and image.mode == "I"):
        raise ValueError("its pixels are signed, fractions or of 32 bits; save it with 8 or 16, from black to white")
    if tiff and image.mode.startswith("I;16"):
        tags: Any = getattr(image, "tag_v2", {})
        if tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO or tuple(tags.get(_BITS, (16,))) != (16,):
            raise ValueError("its pixels have 12 bits, or 0 is white; save it with 8 or 16 bits, from black to white")


def _upper_bits(pixels: NDArray[Any]) -> NDArray[np.uint8]:
    """The upper eight of sixteen bits."""
    if pixels.size and not 0 <= int(pixels.min()) <= int(pixels.max()) < 1 << 16:
        raise ValueError(f"its pixels go from {pixels.min()} to {pixels.max()}; save it with 8 or 16 bits")
    return (pixels.astype(np.int64) >> 8).astype(np.uint8)


def _mode(channels: int) -> str:
    return "L" if channels == 1 else "RGB"


def _opened(source: ImageFile) -> Path | io.BytesIO:
    return io.BytesIO(source) if isinstance(source, bytes) else source


class _Unreadable(NamedTuple):
    reason: str


def _each(work: Callable[[ImageFile], A], sources: Sequence[ImageFile], verb: str) -> list[A | _Unreadable]:
    """`work` on every image, in parallel (PIL lets other threads run), with a bar on a terminal."""

    def attempt(source: ImageFile) -> A | _Unreadable:
        try:
            return work(source)
        except BROKEN as error:
            return _Unreadable(str(error).splitlines()[0] if str(error) else type(error).__name__)

    console = Console(stderr=True)
    with (
        ThreadPoolExecutor(cores()) as pool,
        Progress(console=console, transient=True, disable=not console.is_terminal) as bar,
    ):
        return list(bar.track(pool.map(attempt, sources), len(sources), description=verb))


@dataclass(frozen=True)
class Pictures(Source):
    """A source of image files."""

    size: Size = None
    fit: Fit = "stretch"  # an image of another shape is pulled to the size, cut to its shape, or filled up with black
    on_bad: OnBad = "refuse"

    def decoded(self, sources: Sequence[ImageFile], names: Sequence[str], where: str) -> Decoded:
        """The images, decoded as the settings say."""
        size = None if self.size is None else (self.size[0], self.size[1])
        return decode_all(sources, names, size, where, self.fit, self.on_bad == "skip")

    def labelled(
        self,
        name: str,
        where: str,
        images: Decoded,
        labels: Sequence[str],
        sites: Sequence[str | None],
        test: Sequence[bool],
        classes: Sequence[str] = (),
        groups: Sequence[str] = (),
    ) -> Dataset:
        """A data set of the images that could be read; labels, sites, parts and groups, if any, are those of all."""
        kept = images.kept
        y, known = numbered([labels[k] for k in kept], classes, where)
        height, width, channels = images.x.shape[1:]
        how = {"kind": "image", "size": [height, width], "channels": channels}
        data = from_rows(
            name,
            images.x,
            y,
            np.array([test[k] for k in kept]),
            [sites[k] for k in kept],
            [groups[k] for k in kept] if groups else [],
            where,
            classes=known,
            mean=(MEAN,) * channels,
            std=(STD,) * channels,
            preprocessing=how if self.fit == "stretch" else {**how, "fit": self.fit},
            notes=(*_lost(labels, kept), *images.notes),
        )
        return data if len(data.y_test) else replace(data, site_test=None)


def _lost(labels: Sequence[str], kept: Sequence[int]) -> list[str]:
    """Classes of which no image could be read."""
    lost = in_order(set(labels) - {labels[k] for k in kept})
    return [f"no image of the class {', '.join(lost)} could be read"] if lost else []
