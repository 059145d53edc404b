"""Image files as arrays: JPEG and PNG of any size and kind, turned upright, resized as a whole, decoded in parallel.

One way for training and prediction, for files, PIL images and arrays; `recipe` says in a model's card what it is.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps
from rich.console import Console
from rich.progress import Progress

from fednh.errors import UserError

SUFFIXES = (".jpg", ".jpeg", ".png")
GREY = ("1", "L", "LA", "I", "I;16", "I;16B", "F")
FILTER = "BILINEAR"  # of Pillow, which widens it when an image shrinks
KEPT = 64  # images that all have one size, at most this, keep it
DEFAULT = (32, 32)  # else they get this one, the paper's
# Fixed, not measured: reveals nothing about anybody's images, and all sites agree without exchanging anything.
MEAN, STD = 0.5, 0.25
_BROKEN = (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError)
_UPRIGHT, _LYING = 0x0112, (5, 6, 7, 8)  # the EXIF tag of the orientation, and its values that swap the sides

ImageFile = Path | bytes
A = TypeVar("A")


def decode(source: ImageFile, size: tuple[int, int], channels: int) -> NDArray[np.uint8]:  # (H, W, C)
    """One image, upright, as a whole resized to (height, width); raises what PIL raises."""
    with Image.open(_opened(source)) as image:
        # Decoded in full: Image.draft would be faster for large JPEG, but gives other pixels than the decoded image.
        return fitted(image, size, channels)


def fitted(image: Image.Image, size: tuple[int, int], channels: int) -> NDArray[np.uint8]:  # (H, W, C)
    """An opened image, upright, as a whole resized to (height, width)."""
    upright = ImageOps.exif_transpose(image)
    if upright.mode.startswith("I;16") or upright.mode == "I":  # 16 bits: the upper eight are kept
        upright = Image.fromarray((np.asarray(upright).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    upright = upright.convert(_mode(channels))
    if upright.size != (size[1], size[0]):
        upright = upright.resize((size[1], size[0]), Image.Resampling[FILTER])
    return np.asarray(upright, np.uint8).reshape(*size, channels)


def recipe(channels: int) -> dict[str, Any]:
    """What `fitted` does, for the card: Pillow's names, so that it can be done without fednh."""
    return {"upright": "exif_transpose", "mode": _mode(channels), "filter": FILTER, "rule": "stretch", "draft": False}


def _mode(channels: int) -> str:
    return "L" if channels == 1 else "RGB"


def decode_all(
    sources: Sequence[ImageFile], names: Sequence[str], size: tuple[int, int] | None, where: str
) -> tuple[NDArray[np.uint8], tuple[str, ...]]:
    """All images as (N, H, W, C), grey only if all are, and what was decided, in words; broken ones are named."""
    seen = _each(_look, sources, names, "looking at", where)
    channels = 1 if all(grey for *_, grey in seen) else 3
    sizes = {(height, width) for height, width, _ in seen}
    notes: tuple[str, ...] = ()
    if size is None:
        (first, *others) = sizes
        size = first if not others and max(first) <= KEPT else DEFAULT
        if size != first or others:
            what = f"of {len(sizes)} sizes" if others else f"of {first[0]}x{first[1]} pixels"
            notes = (f"images {what} are resized to {size[0]}x{size[1]}; choose with data.size",)
    wanted = size
    out = np.empty((len(sources), *wanted, channels), np.uint8)
    for at, image in enumerate(_each(lambda s: decode(s, wanted, channels), sources, names, "decoding", where)):
        out[at] = image
    return out, notes


def _look(source: ImageFile) -> tuple[int, int, bool]:
    """Height and width after turning it upright, and whether it is grey."""
    with Image.open(_opened(source)) as image:
        width, height = image.size
        if image.getexif().get(_UPRIGHT) in _LYING:
            width, height = height, width
        return height, width, image.mode in GREY


def _opened(source: ImageFile) -> Path | io.BytesIO:
    return io.BytesIO(source) if isinstance(source, bytes) else source


def _each(
    work: Callable[[ImageFile], A], sources: Sequence[ImageFile], names: Sequence[str], verb: str, where: str
) -> list[A]:
    """`work` on every image, in parallel (PIL lets other threads run), with a bar on a terminal."""
    found: list[A] = []
    broken: list[str] = []

    def attempt(source: ImageFile) -> A | Exception:
        try:
            return work(source)
        except _BROKEN as error:
            return error

    console = Console(stderr=True)
    with (
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
        Progress(console=console, transient=True, disable=not console.is_terminal) as bar,
    ):
        for name, result in zip(
            names, bar.track(pool.map(attempt, sources), len(sources), description=verb), strict=True
        ):
            if isinstance(result, Exception):
                broken.append(f"{name} ({str(result).splitlines()[0] if str(result) else type(result).__name__})")
            else:
                found.append(result)
    if broken:
        more = f" and {len(broken) - 5} more" if len(broken) > 5 else ""
        raise UserError(
            f"{where}: {len(broken)} of {len(names)} images cannot be read: {', '.join(broken[:5])}{more}; "
            "repair or remove them"
        )
    return found
