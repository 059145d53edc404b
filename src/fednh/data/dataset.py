"""Dataset: arrays, class names, and how inputs become floats, for the rest of the program.

Its fingerprint is of the contents, not of the file that they were read from: a table that was saved again is the same
table, and rows in another order are not.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fednh.errors import DataError, nearest
from fednh.text import some

CHUNK = 16 << 20  # bytes that one thread hashes at a time

FEATURES = "features"  # the kind, in `preprocessing`, of vectors that a frozen network has computed

Inputs = NDArray[np.uint8] | NDArray[np.float32]
Labels = NDArray[np.int64]


class Arrays(NamedTuple):
    """The arrays of a file; the registry adds names and normalisation and makes it a `Dataset`."""

    x_train: Inputs
    y_train: Labels
    x_test: Inputs
    y_test: Labels
    classes: tuple[str, ...] | None = None  # when the file itself names its classes


@dataclass(frozen=True)
class Dataset:
    """Training and test samples of one classification task.

    Images are uint8 (N, H, W, C) and stay so in memory; vectors are float32 (N, F). Labels are int64 (N,) in
    [0, C). A channel (or feature) `v` reaches the model as `(v / scale - mean) / std`; a missing value of a table is
    NaN here and takes the mean. Without test samples there is no balanced test set, and clients hold out some of
    their own.
    """

    name: str
    x_train: Inputs
    y_train: Labels
    x_test: Inputs
    y_test: Labels
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float = 255.0
    augment: str = "none"  # what the data set's literature does: "none" or "crop_flip"
    sites: tuple[str, ...] = ()  # where the samples come from, sorted
    site_train: Labels | None = None  # the site number of every training sample
    site_test: Labels | None = None  # the same of test samples, where it is known; -1: of none of the sites
    held_train: NDArray[np.bool_] | None = None  # marks what sites hold out by a published split
    group_train: Labels | None = None  # the number of every training sample's group, which is never separated
    fitted: bool = False  # mean and std were measured on the training samples; a run measures its own (scaling.py)
    preprocessing: dict[str, Any] = field(default_factory=dict)  # how a raw input becomes a sample, for model cards
    reading: dict[str, str] = field(default_factory=dict)  # the detected dialect of a CSV file
    warnings: tuple[str, ...] = ()  # problems of the raw data, in sentences
    notes: tuple[str, ...] = ()  # what was done to the raw data, in sentences for its owner
    views: NDArray[np.float32] | None = None  # (V, N, F): further vectors of every training sample, drawn in training
    raw_fingerprint: dict[str, Any] | None = None  # the fingerprint of the images whose features these are

    @property
    def is_image(self) -> bool:
        return self.x_train.ndim == 4

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample as a model sees it: (C, H, W) for images, (F,) for vectors."""
        if self.is_image:
            height, width, channels = self.x_train.shape[1:]
            return (channels, height, width)
        return tuple(self.x_train.shape[1:])

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """A fingerprint of all samples (contents, labels, names, order), to be compared when a run is resumed."""
        if self.raw_fingerprint is not None:
            return self.raw_fingerprint
        sites = [] if self.site_test is None else [self.site_test]
        facts: dict[str, Any] = {
            "classes": list(self.classes),
            "train": len(self.y_train),
            "test": len(self.y_test),
            "test_samples": digest(self.x_test, self.y_test, *sites),
            "scale": [self.scale, *self.mean, *self.std],
            **({} if self.group_train is None else {"groups": digest(self.group_train)}),
            **({} if self.held_train is None else {"held": digest(self.held_train)}),
            **({"rows": digest(self.y_train)} if self.is_image else {}),  # by which images of another size are known
        }
        if self.site_train is None:
            return {**facts, "inputs": digest(self.x_train), "labels": digest(self.y_train)}
        masks = {name: self.site_train == number for number, name in enumerate(self.sites)}
        by_site = {
            name: {"samples": int(mask.sum()), "sha256": digest(self.x_train[mask], self.y_train[mask])}
            for name, mask in masks.items()
        }
        return {**facts, "sites": by_site, "order": digest(self.site_train)}

    def __post_init__(self) -> None:
        if not self.preprocessing:
            object.__setattr__(self, "preprocessing", self._described())
        self._check_sites()
        if self.group_train is not None and len(self.group_train) != len(self.y_train):
            raise DataError(f"{self.name}: {len(self.y_train)} training samples but {len(self.group_train)} groups")
        for part, x, y in (("train", self.x_train, self.y_train), ("test", self.x_test, self.y_test)):
            where = f"{self.name}: {part}"
            image = x.ndim == 4 and x.dtype == np.uint8
            if not (image or (x.ndim == 2 and x.dtype == np.float32)):
                raise DataError(
                    f"{where} inputs are {x.dtype} of shape {x.shape}, but must be uint8 images (N, H, W, C) "
                    "or float32 vectors (N, F)"
                )
            if len(x) != len(y):
                raise DataError(f"{where} has {len(x)} inputs but {len(y)} labels")
            if len(y) == 0 and part == "train":
                raise DataError(f"{where} is empty")
            if len(y) == 0:
                continue
            if y.min() < 0 or y.max() >= self.num_classes:
                bad = int(y.min()) if y.min() < 0 else int(y.max())
                raise DataError(
                    f"{where} label {bad} lies outside the {self.num_classes} classes (0 to {self.num_classes - 1})"
                )
            missing = self.preprocessing["kind"] == "table"
            if not image and not (np.isfinite(x) | (np.isnan(x) & missing)).all():
                raise DataError(f"{where} inputs hold NaN or infinite values; clean or impute them first")
        if self.x_train.shape[1:] != self.x_test.shape[1:]:
            raise DataError(
                f"{self.name}: train inputs have shape {self.x_train.shape[1:]}, test inputs {self.x_test.shape[1:]}"
            )

    def _described(self) -> dict[str, Any]:
        if not self.is_image:
            return {"kind": "vector"}
        height, width, channels = self.x_train.shape[1:]
        return {"kind": "image", "size": [height, width], "channels": channels}

    def _check_sites(self) -> None:
        if self.site_train is None:
            if self.sites:
                raise DataError(f"{self.name}: the sites are named, but not which sample comes from which")
            return
        if len(self.site_train) != len(self.y_train):
            raise DataError(f"{self.name}: {len(self.y_train)} training samples but {len(self.site_train)} sites")
        if len(self.site_train) and not 0 <= self.site_train.min() <= self.site_train.max() < len(self.sites):
            raise DataError(f"{self.name}: a sample's site number lies outside the {len(self.sites)} sites")


def select_rows(data: Dataset, train: NDArray[np.bool_], test: NDArray[np.bool_] | None = None) -> Dataset:
    """The marked training samples and, if `test` is given, the marked test samples, with their sites and groups."""
    kept = slice(None) if test is None else test
    return replace(
        data,
        x_train=data.x_train[train],
        y_train=data.y_train[train],
        x_test=data.x_test[kept],
        y_test=data.y_test[kept],
        site_train=None if data.site_train is None else data.site_train[train],
        site_test=None if data.site_test is None else data.site_test[kept],
        group_train=None if data.group_train is None else data.group_train[train],
        views=None if data.views is None else data.views[:, train],
        held_train=None if data.held_train is None else data.held_train[train],
    )


def one_site(data: Dataset, name: str) -> Dataset:
    """The training and test samples of one site; all of them where the data do not name sites."""
    if data.site_train is not None:
        if name not in data.sites:
            raise DataError(f"{data.name} has no site {name!r}{nearest(name, data.sites)}")
        number = data.sites.index(name)
        data = select_rows(
            data, data.site_train == number, None if data.site_test is None else data.site_test == number
        )
    return replace(data, sites=(name,), site_train=np.zeros_like(data.y_train), site_test=np.zeros_like(data.y_test))


def digest(*arrays: NDArray[Any]) -> str:
    """SHA-256 of the arrays' types, shapes and contents."""
    whole = hashlib.sha256()
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # hashlib releases the GIL
        for array in arrays:
            view = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            whole.update(f"{array.dtype.str}{array.shape}".encode())
            chunks = [view[i : i + CHUNK] for i in range(0, len(view), CHUNK)]
            for part in pool.map(lambda chunk: hashlib.sha256(chunk).digest(), chunks):
                whole.update(part)
    return whole.hexdigest()


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """The first difference between two fingerprints, as the rest of a sentence, or None."""
    difference = next(_differences(before, now), None)
    sizes = [data.get("bytes") for data in (before, now)]
    if difference and None not in sizes and sizes[0] != sizes[1]:
        difference += f" ({before['path']} had {sizes[0]:,} bytes and has {sizes[1]:,})"
    return difference


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    if ("sites" in before) != ("sites" in now):
        yield "their samples come from sites now" if "sites" in now else "they do not name sites any more"
    then, here = before.get("sites", {}), now.get("sites", {})
    gone, new = [name for name in then if name not in here], [name for name in here if name not in then]
    if gone or new:
        yield " and ".join(filter(None, [_sites(gone, "missing"), _sites(new, "new")]))
    if list(then) != list(here):
        yield f"the sites are in another order: {some(list(then), 8)} then, {some(list(here), 8)} now"
    if before["classes"] != now["classes"]:
        yield f"the classes were {some(before['classes'], 8)} and are {some(now['classes'], 8)}"
    for name in then:
        if then[name]["samples"] != here[name]["samples"]:
            yield (
                f"the site {name!r} had {then[name]['samples']:,} training samples and has {here[name]['samples']:,}"
            )
    for kind, words in (("train", "training"), ("test", "test")):
        if before[kind] != now[kind]:
            yield f"there were {before[kind]:,} {words} samples and are {now[kind]:,}"
    for name in then:
        if then[name]["sha256"] != here[name]["sha256"]:
            yield f"the training samples of the site {name!r} are others, or in another order"
    parts = {
        "inputs": "the training samples are others, or in another order",
        "labels": "the labels of the training samples are others",
        "order": "the training samples of the sites follow each other in another order",
        "held": "the samples that sites hold out are others",
        "groups": "the groups that training samples belong to are others",
        "test_samples": "the test samples are others, or in another order",
        "scale": "they are normalised in another way",
    }
    for key, words in parts.items():
        if before.get(key) != now.get(key):
            yield words


def _sites(names: list[str], what: str) -> str:
    if not names:
        return ""
    return f"the site {names[0]!r} is {what}" if len(names) == 1 else f"the sites {some(names, 8)} are {what}"
