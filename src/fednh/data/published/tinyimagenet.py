"""Reads TinyImageNet (200 classes, 64x64 pixels) from its folder or straight from the zip.

The published test part has no labels, so the validation part is the test set, as everywhere in the literature.
Decoding 110,000 JPEGs takes a minute or two; `save` keeps the result beside the data for the next time.
"""

from __future__ import annotations

import zipfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fednh.data.dataset import Arrays
from fednh.data.published import PublishedImages, RemoteFile
from fednh.data.sources.images import BROKEN, decode
from fednh.errors import DataError
from fednh.io import cache
from fednh.machine import cores

FOLDER = "tiny-imagenet-200"
SIDE = 64
AT_A_TIME = 500  # images a task: few enough tasks to queue all, many enough to share the work

Root = Path | zipfile.Path  # the folder tiny-imagenet-200, on disk or in a zip, which several threads may read at once


def read(path: Path) -> Arrays:
    """The set at `path`, the folder tiny-imagenet-200 or its zip; class i is line i of wnids.txt.

    What is damaged raises any exception (see `Published.load`).
    """
    root = path if path.is_dir() else zipfile.Path(path, f"{FOLDER}/")
    wnids = _lines(root / "wnids.txt")
    label_of = {wnid: label for label, wnid in enumerate(wnids)}
    train: dict[str, list[str]] = {wnid: [] for wnid in wnids}
    for image in sorted(_images(root)):
        if image.startswith("train/"):
            train[image.split("/")[1]].append(image)
    if empty := [wnid for wnid in wnids if not train[wnid]]:
        raise DataError(f"{path} has no images of {empty[0]}; it is incomplete, download or unpack it again")
    test = [line.split("\t") for line in _lines(root / "val/val_annotations.txt")]
    return Arrays(
        _decode(root, [image for images in train.values() for image in images]),
        np.array([label_of[wnid] for wnid, images in train.items() for _ in images], np.int64),
        _decode(root, [f"val/images/{image}" for image, *_ in test]),
        np.array([label_of[wnid] for _, wnid, *_ in test], np.int64),
        _class_names(root, wnids),
    )


def save(arrays: Arrays, path: Path) -> bool:
    """Writes the decoded arrays as an .npz file; False, and no trace, where that is not possible."""
    labels = {"y_train": arrays.y_train.astype(np.int16), "y_test": arrays.y_test.astype(np.int16)}
    samples = {"x_train": arrays.x_train, "x_test": arrays.x_test}
    return cache.keep_arrays(path, **samples, **labels, classes=np.array(arrays.classes))


def _images(root: Root) -> list[str]:
    """All images by their paths below `root`. (zipfile.Path would search all names of the archive for each folder.)"""
    if isinstance(root, Path):
        return [image.relative_to(root).as_posix() for image in root.rglob("*.JPEG")]
    return [name.removeprefix(root.at) for name in root.root.namelist() if name.endswith(".JPEG")]


def _lines(file: Root) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines()


def _class_names(root: Root, wnids: list[str]) -> tuple[str, ...]:
    """The first word that words.txt gives for a class; where two classes share it, with the id behind it."""
    words = dict(line.partition("\t")[::2] for line in _lines(root / "words.txt"))
    first = [words[wnid].split(",")[0].strip() for wnid in wnids]
    count = Counter(first)
    return tuple(f"{name} ({wnid})" if count[name] > 1 else name for name, wnid in zip(first, wnids, strict=True))


def _decode(root: Root, names: list[str]) -> NDArray[np.uint8]:
    images = np.empty((len(names), SIDE, SIDE, 3), dtype=np.uint8)

    def work(start: int) -> None:
        for i in range(start, min(start + AT_A_TIME, len(names))):
            try:
                images[i] = decode((root / names[i]).read_bytes(), (SIDE, SIDE), 3)
            except BROKEN as error:
                raise ValueError(f"{names[i]}: {error}") from error

    with ThreadPoolExecutor(max_workers=min(8, cores())) as pool:  # Pillow decodes outside the GIL
        for _ in pool.map(work, range(0, len(names), AT_A_TIME)):
            pass
    return images


def _kept(path: Path) -> Arrays:
    """The set at `path`, decoded and kept beside it for the next time."""
    arrays = read(path)
    save(arrays, path.with_name("tinyimagenet.npz"))
    return arrays


TINYIMAGENET = PublishedImages(
    name="tinyimagenet",
    description="photos, 64x64 colour, 200 classes, 100,000 + 10,000 images",
    shape=(SIDE, SIDE, 3),
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
    classes=None,
    accepts="tinyimagenet.npz, tiny-imagenet-200.zip or tiny-imagenet-200/",
    places=(FOLDER, f"{FOLDER}.zip"),
    read=_kept,
    files=(
        RemoteFile(
            "tiny-imagenet-200.zip",
            "6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821",
            ("https://cs231n.stanford.edu/tiny-imagenet-200.zip",),
        ),
    ),
    augment="crop_flip",
)
