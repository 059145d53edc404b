"""The registry: from a data set's name to its arrays, wherever and in whichever published form they lie.

load("digits", data_folder())
load("cifar10", data_folder("~/data"))
load("npz:my/own.npz", data_folder())
load("folder:photos", data_folder(), Options(size=(64, 64)))
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fednh.config import PATH_KINDS
from fednh.data.dataset import Arrays, Dataset
from fednh.data.published import cifar, idx, tinyimagenet
from fednh.data.sources import builtin, hf, npz, python, tables
from fednh.data.sources import folder as folders
from fednh.data.sources.options import Options, with_test_set
from fednh.errors import UserError, did_you_mean
from fednh.storage.files import expanded

DEBIAN_ROOT = Path("/usr/share/datasets")  # where Debian's dataset-* packages put their files
NPZ_PREFIX = "npz:"
# Data of one's own: how it is written, what it is, and an example for those who forget what comes behind the colon.
OWN = {
    "npz": ("npz:FILE", "arrays x_train, y_train and perhaps x_test, y_test, site_train", "npz:data/own.npz"),
    "folder": ("folder:DIR", "images as CLASS/, train|test/CLASS/ or SITE/CLASS/", "folder:photos"),
    "csv": ("csv:FILE", "a table with a label column (extra: tables)", "csv:patients.csv"),
    "parquet": ("parquet:FILE", "the same as Parquet (extra: tables)", "parquet:patients.parquet"),
    "hf": ("hf:NAME", "Hugging Face, by name or a local path (extra: hf)", "hf:saved/folder"),
    "py": ("py:MODULE:FUNCTION", "what a Python function returns", "py:mydata:load"),
}

BUILTIN: dict[str, tuple[str, Callable[[], Dataset]]] = {
    "digits": ("handwritten digits, 8x8 grey, 10 classes, 1,797 images", builtin.digits),
    "spiral": ("six interleaved arms in the plane, balanced", builtin.spiral),
    "spiral_imbalanced": ("the same with 3000 to 93 samples a class", partial(builtin.spiral, imbalanced=True)),
}


class Available(NamedTuple):
    """One line of `fednh datasets`."""

    name: str
    description: str
    present: bool
    where: str  # where it was found, or where it would be looked for


@dataclass(frozen=True)
class Place:
    """One path at which a set may lie, and how to read it there."""

    path: Path
    read: Callable[[], Arrays]
    present: Callable[[], bool]


@dataclass(frozen=True)
class Published:
    """What is known about a named set before its files are opened."""

    description: str
    shape: tuple[int, int, int]  # of an image, (H, W, C)
    mean: tuple[float, ...]
    std: tuple[float, ...]
    accepts: str  # the accepted files, for people
    names: str | None = None  # key in names.json; None: the files name the classes
    augment: str = "none"


PUBLISHED = {
    "cifar10": Published(
        "photos, 32x32 colour, 10 classes, 50,000 + 10,000 images",
        (32, 32, 3),
        (0.4914, 0.4822, 0.4465),
        (0.2023, 0.1994, 0.2010),
        "cifar10.npz, cifar-10-binary.tar.gz, cifar-10-python.tar.gz, cifar-10-batches-bin/ or cifar-10-batches-py/",
        names="cifar10",
        augment="crop_flip",
    ),
    "cifar100": Published(
        "photos, 32x32 colour, 100 classes, 50,000 + 10,000 images",
        (32, 32, 3),
        (0.507, 0.487, 0.441),
        (0.267, 0.256, 0.276),
        "cifar100.npz, cifar-100-binary.tar.gz, cifar-100-python.tar.gz, cifar-100-binary/ or cifar-100-python/",
        names="cifar100",
        augment="crop_flip",
    ),
    "tinyimagenet": Published(
        "photos, 64x64 colour, 200 classes, 100,000 + 10,000 images",
        (64, 64, 3),
        (0.485, 0.456, 0.406),
        (0.229, 0.224, 0.225),
        "tinyimagenet.npz, tiny-imagenet-200.zip or tiny-imagenet-200/",
        augment="crop_flip",
    ),
    "fashion_mnist": Published(
        "clothes, 28x28 grey, 10 classes, 60,000 + 10,000 images",
        (28, 28, 1),
        (0.2860,),
        (0.3530,),
        "fashion_mnist.npz, or the four IDX files (plain or .gz) in fashion_mnist/, fashion-mnist/ or "
        "FashionMNIST/raw/",
        names="fashion_mnist",
    ),
    "mnist": Published(
        "handwritten digits, 28x28 grey, 10 classes, 60,000 + 10,000 images",
        (28, 28, 1),
        (0.1307,),
        (0.3081,),
        "mnist.npz, or the four IDX files (plain or .gz) in mnist/, MNIST/raw/ or directly",
        names="digits",
    ),
}


def load(name: str, folder: Path, options: Options | None = None) -> Dataset:
    """The data set of that name; `folder` is where the published ones are looked for."""
    if name in BUILTIN:
        return BUILTIN[name][1]()
    kind, colon, rest = name.partition(":")
    if colon and kind in OWN:
        return _own(name, kind, rest, options or Options())
    if name not in PUBLISHED:
        known = (*BUILTIN, *PUBLISHED, *(written for written, *_ in OWN.values()))
        raise UserError(f"there is no data set {name!r}{did_you_mean(name, known)}")
    place = _find(name, folder)
    if place is None:
        raise UserError(_not_found(name, folder))
    return _assemble(name, place)


def file_of(name: str, folder: Path) -> Path | None:
    """The file or folder that a data set is read from, where there is one."""
    kind, colon, rest = name.partition(":")
    if colon:
        return expanded(rest) if kind in PATH_KINDS else None
    place = _find(name, folder) if name in PUBLISHED else None
    return place.path if place else None


def _own(name: str, kind: str, rest: str, options: Options) -> Dataset:
    """Data of a person's own."""
    if not rest:
        raise UserError(f"'{kind}:' lacks what comes behind it; write for example {OWN[kind][2]}")
    if kind == "py":
        data = python.dataset(name, rest, options)
    elif kind == "hf":
        data = hf.dataset(name, rest, options)
    else:
        read: dict[str, Callable[[str, Path, Options], Dataset]] = {"npz": npz.dataset, "folder": folders.dataset}
        data = read.get(kind, tables.dataset)(name, expanded(rest), options)
    return with_test_set(data, options.test_share)


def available(folder: Path) -> list[Available]:
    """Every data set that has a name, and whether it could be loaded now."""
    lines = [Available(name, text, True, "built in") for name, (text, _) in BUILTIN.items()]
    for name, published in PUBLISHED.items():
        place = _find(name, folder)
        where = str(place.path) if place else f"{folder}: {published.accepts}"
        lines.append(Available(name, published.description, place is not None, where))
    return lines


def _assemble(name: str, place: Place) -> Dataset:
    published = PUBLISHED[name]
    found = place.read()
    if found.x_train.shape[1:] != published.shape:
        raise UserError(
            f"{place.path} holds samples of shape {found.x_train.shape[1:]}, but {name} has {published.shape}; "
            f"use {NPZ_PREFIX}PATH for data of your own"
        )
    classes = _class_names(published.names) if published.names else found.classes
    if classes is None:
        raise UserError(f"{place.path} lacks the array 'classes' with the class names; remove it to have it made anew")
    x_train, y_train, x_test, y_test, _ = found
    mean, std = published.mean, published.std
    return Dataset(name, x_train, y_train, x_test, y_test, classes, mean, std, augment=published.augment)


def _class_names(key: str) -> tuple[str, ...]:
    return tuple(json.loads(Path(__file__).with_name("names.json").read_text("utf-8"))[key])


def _find(name: str, folder: Path) -> Place | None:
    try:
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder} is a file, but the data folder must be a folder; set FEDNH_DATA to one")
        return next((place for place in _places(name, folder) if place.present()), None)
    except OSError as error:
        raise UserError(f"the data folder {folder} cannot be read ({error.strerror}); check its permissions") from error


def _places(name: str, folder: Path) -> list[Place]:
    """Where the set may lie, in the order in which it is looked for."""
    single = folder / f"{name}.npz"
    places = [Place(single, partial(npz.read, single), single.is_file)]
    if name in ("cifar10", "cifar100"):
        for layout in cifar.LAYOUTS:
            if name == f"cifar{layout.classes}":
                archive, unpacked = folder / layout.archive, folder / layout.folder
                places.append(Place(archive, partial(cifar.read, archive, layout), archive.is_file))
                places.append(Place(unpacked, partial(cifar.read, unpacked, layout), unpacked.is_dir))
    elif name == "tinyimagenet":
        unpacked, archive = folder / tinyimagenet.FOLDER, folder / f"{tinyimagenet.FOLDER}.zip"
        places.append(Place(unpacked, partial(_read_tinyimagenet, unpacked, single), unpacked.is_dir))
        places.append(Place(archive, partial(_read_tinyimagenet, archive, single), archive.is_file))
    else:
        if name == "mnist":
            folders = [folder / "mnist", folder / "MNIST" / "raw", folder]
        else:
            folders = [folder / "fashion_mnist", folder / "fashion-mnist", folder / "FashionMNIST" / "raw"]
            folders.append(DEBIAN_ROOT / "fashion-mnist")
        places += [Place(path, partial(idx.read, path, 10), partial(idx.present, path)) for path in folders]
    return places


def _read_tinyimagenet(path: Path, cache: Path) -> Arrays:
    arrays = tinyimagenet.read(path)
    tinyimagenet.save(arrays, cache)
    return arrays


def _not_found(name: str, folder: Path) -> str:
    state = "" if folder.exists() else ", which does not exist yet"
    return (
        f"{name} is not in the data folder {folder}{state}: run `fednh data get {name}`, or put there "
        f"{PUBLISHED[name].accepts}"
    )
