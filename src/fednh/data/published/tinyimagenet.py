"""Reads TinyImageNet (200 classes, 64x64 pixels) from its folder or straight from the zip.

The published test part has no labels, so the validation part is the test set, as everywhere in the literature.
Decoding 110,000 JPEGs takes a minute or two; `save` keeps the result beside the data for the next time.
"""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fednh.data.dataset import Arrays
from fednh.data.images import fitted
from fednh.data.published.base import DataPath, Published, RemoteFile
from fednh.errors import UserError
from fednh.storage import cache

FOLDER = "tiny-imagenet-200"
SIDE = 64
LARGEST_FILE = 1 << 26  # the largest genuine one, words.txt, has 3 MB
AT_A_TIME = 500  # images a task: few enough tasks to queue all, many enough to share the work


class Files(Protocol):
    """A folder tree, on disk or in a zip; paths are relative to tiny-imagenet-200 and use slashes."""

    where: Path

    def read(self, name: str) -> bytes: ...

    def images(self, folder: str) -> list[str]:
        """The names of the JPEGs directly in `folder`, sorted."""
        ...


class DiskFiles:
    def __init__(self, root: Path) -> None:
        self.where = root

    def read(self, name: str) -> bytes:
        return (self.where / name).read_bytes()

    def images(self, folder: str) -> list[str]:
        try:
            with os.scandir(self.where / folder) as entries:
                return sorted(entry.name for entry in entries if _is_jpeg(entry.name))
        except FileNotFoundError:
            return []


class ZipFiles:
    """Reading is safe from several threads: the zipfile module locks the file that they share."""

    def __init__(self, where: Path, archive: zipfile.ZipFile) -> None:
        self.where = where
        self._archive = archive
        self._images: dict[str, list[str]] = defaultdict(list)  # listed once: a zip has no folders to look into
        for name in archive.namelist():
            if name.startswith(f"{FOLDER}/") and _is_jpeg(name):
                folder, _, file = name.removeprefix(f"{FOLDER}/").rpartition("/")
                self._images[folder].append(file)

    def read(self, name: str) -> bytes:
        try:
            info = self._archive.getinfo(f"{FOLDER}/{name}")
        except KeyError as error:
            raise FileNotFoundError(name) from error
        if info.file_size > LARGEST_FILE:  # it would unpack to that much
            raise OSError(f"declares {info.file_size} bytes")
        return self._archive.read(info)

    def images(self, folder: str) -> list[str]:
        return sorted(self._images.get(folder, []))


def read(path: Path) -> Arrays:
    """The set at `path`, the folder tiny-imagenet-200 or its zip; class i is line i of wnids.txt."""
    with _open(path) as files:
        wnids = _lines(files, "wnids.txt")
        if len(wnids) < 2 or len(set(wnids)) != len(wnids):
            raise UserError(f"{path}: wnids.txt must list each class once, one a line; download the data again")
        label_of = {wnid: label for label, wnid in enumerate(wnids)}
        train, y_train = _list_train(files, wnids)
        test, y_test = _list_test(files, label_of)
        return Arrays(
            _decode(files, train),
            np.array(y_train, dtype=np.int64),
            _decode(files, test),
            np.array(y_test, dtype=np.int64),
            _class_names(files, wnids),
        )


def save(arrays: Arrays, path: Path) -> bool:
    """Writes the decoded arrays as an .npz file; False, and no trace, where that is not possible."""
    labels = {"y_train": arrays.y_train.astype(np.int16), "y_test": arrays.y_test.astype(np.int16)}
    samples = {"x_train": arrays.x_train, "x_test": arrays.x_test}
    return cache.keep_arrays(path, **samples, **labels, classes=np.array(arrays.classes))


@contextmanager
def _open(path: Path) -> Iterator[Files]:
    if path.is_dir():
        yield DiskFiles(path)
        return
    try:
        archive = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise UserError(f"{path} is not a complete zip file ({error}); download it again") from error
    with archive:
        yield ZipFiles(path, archive)


def _is_jpeg(name: str) -> bool:
    return name.lower().endswith((".jpeg", ".jpg"))


def _lines(files: Files, name: str) -> list[str]:
    try:
        text = files.read(name).decode("utf-8")
    except FileNotFoundError as error:
        raise UserError(f"{files.where} lacks {name}; it is incomplete, download or unpack it again") from error
    except (OSError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise UserError(f"{files.where}: {name} cannot be read ({error}); download the data again") from error
    return [line.strip() for line in text.splitlines() if line.strip()]


def _list_train(files: Files, wnids: list[str]) -> tuple[list[str], list[int]]:
    names: list[str] = []
    labels: list[int] = []
    for label, wnid in enumerate(wnids):
        folder = f"train/{wnid}/images"
        images = files.images(folder)
        if not images:
            raise UserError(f"{files.where} has no images in {folder}; it is incomplete, download or unpack it again")
        names += [f"{folder}/{image}" for image in images]
        labels += [label] * len(images)
    return names, labels


def _list_test(files: Files, label_of: dict[str, int]) -> tuple[list[str], list[int]]:
    names: list[str] = []
    labels: list[int] = []
    there = set(files.images("val/images"))
    for number, line in enumerate(_lines(files, "val/val_annotations.txt"), start=1):
        image, *rest = line.split("\t")
        if not rest or rest[0] not in label_of:
            raise UserError(
                f"{files.where}: val/val_annotations.txt, entry {number} ({line[:60]!r}) does not give an image and "
                "one of the classes of wnids.txt; download the data again"
            )
        if image not in there:
            raise UserError(f"{files.where} lacks val/images/{image}; it is incomplete, download or unpack it again")
        names.append(f"val/images/{image}")
        labels.append(label_of[rest[0]])
    if not names:
        raise UserError(f"{files.where}: val/val_annotations.txt is empty; download the data again")
    return names, labels


def _class_names(files: Files, wnids: list[str]) -> tuple[str, ...]:
    """The first word that words.txt gives for a class; where two classes share it, with the id behind it."""
    try:
        words = dict(line.split("\t", 1) for line in _lines(files, "words.txt") if "\t" in line)
    except UserError:
        return tuple(wnids)  # names are for people only: without them the ids do
    first = [words.get(wnid, wnid).split(",")[0].strip() or wnid for wnid in wnids]
    count = Counter(first)
    return tuple(f"{name} ({wnid})" if count[name] > 1 else name for name, wnid in zip(first, wnids, strict=True))


def _decode(files: Files, names: list[str]) -> NDArray[np.uint8]:
    images = np.empty((len(names), SIDE, SIDE, 3), dtype=np.uint8)

    def work(start: int) -> None:
        for i in range(start, min(start + AT_A_TIME, len(names))):
            images[i] = _decode_one(files, names[i])

    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:  # Pillow decodes outside the GIL
        for _ in pool.map(work, range(0, len(names), AT_A_TIME)):
            pass
    return images


def _decode_one(files: Files, name: str) -> NDArray[np.uint8]:
    try:
        with Image.open(io.BytesIO(files.read(name)), formats=["JPEG"]) as image:
            size = image.size  # known before the pixels are decoded
            if size == (SIDE, SIDE):
                return fitted(image, (SIDE, SIDE), 3)
    except Exception as error:
        # A damaged JPEG or zip member reports itself through almost any exception type.
        raise UserError(
            f"{files.where}: {name} cannot be decoded ({type(error).__name__}); download the data again"
        ) from error
    raise UserError(f"{files.where}: {name} has {size[0]}x{size[1]} pixels instead of {SIDE}x{SIDE}")


def _kept(path: Path, single: Path) -> Arrays:
    """The set at `path`, decoded and kept in `single` for the next time."""
    arrays = read(path)
    save(arrays, single)
    return arrays


def _places(folder: Path) -> list[DataPath]:
    single, unpacked, archive = (folder / name for name in ("tinyimagenet.npz", FOLDER, f"{FOLDER}.zip"))
    return [
        DataPath(unpacked, partial(_kept, unpacked, single), unpacked.is_dir),
        DataPath(archive, partial(_kept, archive, single), archive.is_file),
    ]


TINYIMAGENET = Published(
    name="tinyimagenet",
    description="photos, 64x64 colour, 200 classes, 100,000 + 10,000 images",
    shape=(SIDE, SIDE, 3),
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
    classes=None,
    accepts="tinyimagenet.npz, tiny-imagenet-200.zip or tiny-imagenet-200/",
    places=_places,
    files=(
        RemoteFile(
            "tiny-imagenet-200.zip",
            "6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821",
            ("https://cs231n.stanford.edu/tiny-imagenet-200.zip",),
        ),
    ),
    augment="crop_flip",
)
