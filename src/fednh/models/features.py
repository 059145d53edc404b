"""Features of a frozen backbone: a data set of images as one of vectors, and a cache that no image enters twice.

The cache has a folder a recipe, with two files that only grow: `keys` (a digest of each image and a checksum of its
vector) and `vectors` (float32). Vectors are written before their keys, under a lock, so that a killed process leaves at
most vectors without keys, which the next one overwrites. A vector whose checksum does not fit is computed again.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

from fednh.data.batches import crop_flip
from fednh.data.dataset import Dataset, Inputs
from fednh.errors import DataError, Notice
from fednh.interrupt import no_progress
from fednh.io import cache
from fednh.machine import cores, one_thread
from fednh.models.backbone import Backbone
from fednh.seeding import torch_rng

BATCH = 32  # images at a time, always: a feature must not depend on how many are computed with it
DIGEST, CHECK = 16, 4  # bytes of a key: of the image's digest, and of the vector's checksum
BLOCK = 50 * BATCH  # images after which the cache is written
MANY = 1000  # images whose features take long enough to say so
KIND = "features"  # of a data set's preprocessing

Vectors = NDArray[np.float32]
Images = Inputs  # uint8 (N, H, W, C)


def is_features(preprocessing: dict[str, Any]) -> bool:
    return preprocessing.get("kind") == KIND


def with_features(data: Dataset, backbone: Backbone, views: int = 1) -> Dataset:
    """The data set with every image replaced by its feature vector, in the same order, with the same labels and sites.

    Each training sample has `views` vectors: of the image itself, and of views - 1 copies that are cropped and flipped
    at random, the same in every run. Nothing is measured on the samples: features are used as they are.
    """
    if is_features(data.preprocessing):
        return data
    if not data.is_image:
        raise DataError(f"model.frozen = 'body' needs images, but {data.name} holds vectors; leave it out")
    if data.scale != 255:
        raise DataError(f"model.frozen = 'body' needs pixels from 0 to 255; those of {data.name} end at {data.scale:g}")
    copies = [_copy(data, number) for number in range(1, views)]
    parts = [data.x_train, data.x_test, *copies]
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        shown = bar.add_task("computing features", total=sum(map(len, parts)))
        vectors = [features(part, backbone, lambda number: bar.advance(shown, number)) for part in parts]
    recipe = backbone.recipe.model_dump(mode="json")
    return replace(
        data,
        x_train=vectors[0],
        x_test=vectors[1],
        views=np.stack(vectors[2:]) if views > 1 else None,
        mean=(0.0,),
        std=(1.0,),
        scale=1.0,
        augment="none",
        fitted=False,
        preprocessing={"kind": KIND, "images": data.preprocessing, "backbone": recipe},
        as_read=data.fingerprint,
    )


def _copy(data: Dataset, number: int) -> Images:
    """Augmented copies of all training images.

    Those of a natural site are drawn by its name, so that it draws the same alone as in the simulation of all sites.
    """
    images = torch.from_numpy(np.ascontiguousarray(data.x_train))
    if data.site_train is None:
        return crop_flip(images, torch_rng(0, "views", number)).numpy()
    out = torch.empty_like(images)
    for site, name in enumerate(data.sites):
        rows = torch.from_numpy(data.site_train == site)
        out[rows] = crop_flip(images[rows], torch_rng(0, f"views {name}", number))
    return out.numpy()


def features(images: Images, backbone: Backbone, tick: Callable[[int], None] = no_progress) -> Vectors:  # (N, D)
    """The features of images; those that the cache has are not computed again. `tick` is told how many are done."""
    dim = backbone.recipe.dim
    vectors, keys = np.empty((len(images), dim), np.float32), [_digest(image) for image in images]
    store = FeatureCache(cache.folder("features") / backbone.recipe.key, dim)
    missing = store.read(keys, vectors)
    tick(len(images) - len(missing))
    if len(missing) >= MANY:
        words = f"computing the features of {len(missing):,} images, once: they are kept in {store.folder}"
        warnings.warn(words, Notice, stacklevel=4)
    for start in range(0, len(missing), BLOCK):
        rows = missing[start : start + BLOCK]
        vectors[rows] = compute(images[rows], backbone)
        store.append([keys[row] for row in rows], vectors[rows])
        tick(len(rows))
    return vectors


def compute(images: Images, backbone: Backbone) -> Vectors:
    """The features of images, in batches of one size on one-thread workers: the same bits for any number of cores."""

    def one(start: int) -> Vectors:
        batch = torch.from_numpy(np.ascontiguousarray(images[start : start + BATCH]))
        padded = torch.cat([batch, batch.new_zeros(BATCH - len(batch), *batch.shape[1:])])
        with torch.no_grad():
            made: Vectors = backbone(padded)[: len(batch)].numpy()
        return made

    with one_thread(), ThreadPoolExecutor(cores()) as pool:
        parts = list(pool.map(one, range(0, len(images), BATCH)))
    vectors = np.concatenate(parts) if parts else np.empty((0, backbone.recipe.dim), np.float32)
    if not np.isfinite(vectors).all():
        raise DataError("the frozen body gives features that are not finite; its weights are damaged or do not fit")
    return vectors


def _digest(image: Images) -> bytes:
    return blake2b(f"{image.shape}".encode() + image.tobytes(), digest_size=DIGEST).digest()


class FeatureCache:
    """Vectors of one recipe on disk, by the digest of their image. What cannot be read or written is not cached."""

    def __init__(self, folder: Path, dim: int):
        self.folder, self.dim = folder, dim
        self.keys_file, self.vectors_file = folder / "keys", folder / "vectors"

    def read(self, keys: list[bytes], out: Vectors) -> list[int]:
        """Put the vectors that are here into the rows of `out`; returns the rows that are missing."""
        try:
            number = self._whole()
            table = np.fromfile(self.keys_file, np.uint8, number * (DIGEST + CHECK)).reshape(number, DIGEST + CHECK)
            stored = np.memmap(self.vectors_file, np.float32, "r", shape=(number, self.dim)) if number else None
        except (OSError, ValueError):
            return list(range(len(keys)))
        places = {row[:DIGEST].tobytes(): at for at, row in enumerate(table)}
        missing = []
        for row, key in enumerate(keys):
            at = places.get(key)
            if at is None or stored is None:
                missing.append(row)
                continue
            out[row] = stored[at]
            if _check(out[row]) != table[at, DIGEST:].tobytes():
                missing.append(row)
        return missing

    def append(self, keys: list[bytes], vectors: Vectors) -> None:
        """Add vectors with their keys; what another process has added in the meantime stays."""
        try:
            with self._locked():
                number = self._whole()
                _put(self.vectors_file, number * 4 * self.dim, np.ascontiguousarray(vectors).tobytes())
                rows = b"".join(key + _check(vector) for key, vector in zip(keys, vectors, strict=True))
                _put(self.keys_file, number * (DIGEST + CHECK), rows)
        except OSError:
            return

    def _whole(self) -> int:
        """How many keys have a vector."""
        sizes = [file.stat().st_size if file.exists() else 0 for file in (self.keys_file, self.vectors_file)]
        return min(sizes[0] // (DIGEST + CHECK), sizes[1] // (4 * self.dim))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder / ".lock", timeout=60):
            yield


def _put(file: Path, at: int, content: bytes) -> None:
    """Write `content` at a position, and cut off what stood behind it."""
    with file.open("r+b" if file.exists() else "w+b") as opened:
        opened.truncate(at)
        opened.seek(at)
        opened.write(content)


def _check(vector: Vectors) -> bytes:
    return zlib.crc32(vector.tobytes()).to_bytes(CHECK, "little")
