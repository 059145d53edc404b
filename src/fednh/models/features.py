"""Features of a frozen network: images or texts as vectors, and a cache that no sample enters twice.

The cache has a folder a recipe, with two files that only grow: `keys` (a digest of each image and a checksum of its
vector) and `vectors` (float32). Vectors are written before their keys, under a lock, so that a killed process leaves at
most vectors without keys, which the next one overwrites. A vector whose checksum does not fit is computed again.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
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
from fednh.data.dataset import FEATURES, Dataset, Inputs
from fednh.errors import DataError, Notice
from fednh.interrupt import no_progress
from fednh.io import cache
from fednh.machine import cores, one_thread
from fednh.models.backbone import CHANNELS, Backbone, Recipe
from fednh.models.sentences import SentenceEncoder
from fednh.seeding import torch_rng

BATCH = 32  # images at a time, always: a feature must not depend on how many are computed with it
DIGEST, CHECK = 16, 4  # bytes of a key: of the image's digest, and of the vector's checksum
BLOCK = 50 * BATCH  # images after which the cache is written
MANY = 1000  # images whose features take long enough to say so

Vectors = NDArray[np.float32]
Images = Inputs  # uint8 (N, H, W, C)


def is_features(preprocessing: dict[str, Any]) -> bool:
    return preprocessing.get("kind") == FEATURES


def recipe_of(preprocessing: dict[str, Any], where: str) -> Recipe:
    """The recipe of the features in a data set; it may have been read from somebody's file."""
    try:
        recipe = Recipe.model_validate(preprocessing["backbone"])
        inputs = preprocessing["inputs"]
        known = inputs["kind"] == "text" or (len(inputs["size"]) == 2 and inputs["channels"] in (1, CHANNELS))
        if not (known and recipe.sha256 and recipe.dim):
            raise ValueError
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{where} says in a form that is not known of which network its features are; make it again with "
            f"`fednh features`"
        ) from error
    return recipe


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
    with _progress(sum(map(len, parts))) as tick:
        vectors = [features(part, backbone, tick) for part in parts]
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
        preprocessing={"kind": FEATURES, "inputs": data.preprocessing, "backbone": recipe},
        raw_fingerprint=data.fingerprint,
    )


def with_text_features(rows: Dataset, texts: Sequence[str], column: str, encoder: SentenceEncoder) -> Dataset:
    """The features of texts; `rows` has, as the only number of a sample, that of its text."""
    parts = [[texts[int(row)] for row in x[:, 0]] for x in (rows.x_train, rows.x_test)]
    with _progress(sum(map(len, parts))) as tick:
        train, test = (features(part, encoder, tick) for part in parts)
    about = {"inputs": {"kind": "text", "column": column}, "backbone": encoder.recipe.model_dump(mode="json")}
    return replace(
        rows,
        x_train=train,
        x_test=test,
        mean=(0.0,),
        std=(1.0,),
        scale=1.0,
        fitted=False,
        preprocessing={"kind": FEATURES, **about},
    )


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar where there is a terminal, and what moves it on."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        shown = bar.add_task("computing features", total=total)
        yield lambda number: bar.advance(shown, number)


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


def features(
    samples: Images | Sequence[str],
    backbone: Backbone | SentenceEncoder,
    tick: Callable[[int], None] = no_progress,
) -> Vectors:  # (N, D)
    """The features of images or texts; those that the cache has are not computed again. `tick` is told how many are."""
    dim, what = backbone.recipe.dim, "images" if isinstance(backbone, Backbone) else "texts"
    vectors, keys = np.empty((len(samples), dim), np.float32), [_digest(sample) for sample in samples]
    store = FeatureCache(cache.folder("features") / backbone.recipe.key, dim)
    missing = store.read(keys, vectors)
    tick(len(samples) - len(missing))
    if len(missing) >= MANY:
        words = f"computing the features of {len(missing):,} {what}, once: they are kept in {store.folder}"
        warnings.warn(words, Notice, stacklevel=4)
    block = BLOCK if isinstance(backbone, Backbone) else BATCH
    for start in range(0, len(missing), block):
        rows = missing[start : start + block]
        if isinstance(backbone, Backbone):
            vectors[rows] = compute(np.asarray(samples)[rows], backbone)
        else:
            vectors[rows] = backbone([str(samples[row]) for row in rows])
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


def _digest(sample: Images | str) -> bytes:
    if isinstance(sample, str):
        return blake2b(sample.encode(), digest_size=DIGEST, person=b"text").digest()
    image = np.asarray(sample)
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
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            with FileLock(self.folder.with_suffix(".lock"), timeout=60):
                number = self._whole()
                _put(self.vectors_file, number * 4 * self.dim, np.ascontiguousarray(vectors).tobytes())
                rows = b"".join(key + _check(vector) for key, vector in zip(keys, vectors, strict=True))
                _put(self.keys_file, number * (DIGEST + CHECK), rows)

    def _whole(self) -> int:
        """How many keys have a vector."""
        sizes = [file.stat().st_size if file.exists() else 0 for file in (self.keys_file, self.vectors_file)]
        return min(sizes[0] // (DIGEST + CHECK), sizes[1] // (4 * self.dim))


def _put(file: Path, at: int, content: bytes) -> None:
    """Write `content` at a position, and cut off what stood behind it."""
    with file.open("r+b" if file.exists() else "w+b") as opened:
        opened.truncate(at)
        opened.seek(at)
        opened.write(content)


def _check(vector: Vectors) -> bytes:
    return zlib.crc32(vector.tobytes()).to_bytes(CHECK, "little")
