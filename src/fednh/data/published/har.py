"""UCI HAR: what 30 people do, from the sensors of a smartphone at the waist; each person is a natural site.

Anguita, Ghio, Oneto, Parra, Reyes-Ortiz, "A Public Domain Dataset for Human Activity Recognition Using Smartphones",
ESANN 2013; UCI Machine Learning Repository, https://doi.org/10.24432/C54S4K, licence CC BY 4.0. 10,299 windows of 2.56
seconds, each a vector of 561 numbers between -1 and 1, of six activities. The published parts (7,352 and 2,947 windows)
divide people, 21 and 9; both are read, and every person holds out some of their own windows.

Windows follow each other in time and overlap by half, so a window that is held out resembles its neighbours. A person
does each activity in two or more bouts: `data.group = "bout"` keeps the windows of a bout together, which nothing
leaks between. `data.folds = 2` then holds out about every second bout of each activity.
"""

from __future__ import annotations

import zipfile
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fednh.data.dataset import Dataset, Inputs, Labels
from fednh.data.published import PublishedSites, RemoteFile
from fednh.data.scaling import measure
from fednh.data.sources.npz import Npz
from fednh.data.splits import from_rows
from fednh.errors import DataError

FOLDER = "UCI HAR Dataset"
OUTER = "human+activity+recognition+using+smartphones.zip"  # what UCI's page offers: the archive in another one
FEATURES = 561
BOUT = "bout"
CLASSES = ("walking", "walking upstairs", "walking downstairs", "sitting", "standing", "laying")  # labels 1 to 6
PARTS = ("train", "test")

Root = Path | zipfile.Path


class Windows(NamedTuple):
    """All windows in the order of the files, which is that of time for each person."""

    x: Inputs  # (N, 561)
    y: Labels  # (N,), from 0
    person: Labels  # (N,), from 1


def read(path: Path) -> Windows:
    """Both parts of the set at `path`: its folder, its archive, or the archive that holds that one."""
    if path.is_dir():
        return _windows(path)
    if path.name != OUTER:
        return _windows(zipfile.Path(path, f"{FOLDER}/"))
    with zipfile.ZipFile(path) as outer, outer.open(f"{FOLDER}.zip") as inner:
        return _windows(zipfile.Path(zipfile.ZipFile(inner), f"{FOLDER}/"))


def _windows(root: Root) -> Windows:
    parts = [[_numbers(root / part / f"{name}_{part}.txt") for name in ("X", "y", "subject")] for part in PARTS]
    for part, (x, y, person) in zip(PARTS, parts, strict=True):
        if x.shape != (len(y), FEATURES) or len(person) != len(y):
            raise DataError(
                f"{root}: {part} has {len(x)} windows of {x.shape[1]} numbers, {len(y)} labels and {len(person)} "
                f"people, but a window has {FEATURES} numbers, a label and a person; unpack or download it again"
            )
    x, y, person = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Windows(x.astype(np.float32), y[:, 0].astype(np.int64) - 1, person[:, 0].astype(np.int64))


def _numbers(file: Root) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    with file.open("r", encoding="ascii") as opened:
        return np.loadtxt(opened, ndmin=2)


def dataset(name: str, where: str, windows: Windows, options: Npz) -> Dataset:
    """The windows as a data set, each person a site; `options.group` may be "bout"."""
    if options.group not in (None, BOUT):
        raise DataError(
            f"data.group = {options.group!r} is not known of {name}; the windows of a {BOUT!r} belong together"
        )
    mean, std = measure(windows.x, 1.0)
    return from_rows(
        name,
        windows.x,
        windows.y,
        np.zeros(len(windows.y), bool),
        [f"{number:02d}" for number in windows.person.tolist()],
        _bouts(windows) if options.group else [],
        where,
        classes=CLASSES,
        mean=mean,
        std=std,
        scale=1.0,
        fitted=True,
    )


def _bouts(windows: Windows) -> list[str]:
    """The number of each window's bout: windows of one person and activity that follow each other."""
    runs = groupby(zip(windows.person.tolist(), windows.y.tolist(), strict=True))
    return [str(number) for number, (_, run) in enumerate(runs) for _ in run]


HAR = PublishedSites(
    name="har",
    description="activities of 30 people from a smartphone's sensors, 561 numbers, 6 classes, 10,299 windows",
    accepts=f"'{FOLDER}.zip' or the folder '{FOLDER}' in har/ or ./ (har/{FOLDER}.zip, har/{OUTER}, {OUTER})",
    places=(f"har/{FOLDER}", FOLDER, f"har/{FOLDER}.zip", f"{FOLDER}.zip", f"har/{OUTER}", OUTER),
    read=read,
    present=lambda path: path.is_file() if path.suffix else path.is_dir(),
    files=(
        RemoteFile(
            f"har/{FOLDER}.zip",
            "2045e435c955214b38145fb5fa00776c72814f01b203fec405152dac7d5bfeb0",
            ("https://archive.ics.uci.edu/ml/machine-learning-databases/00240/UCI%20HAR%20Dataset.zip",),
        ),
    ),
    sites="30 people, 01 to 30",
    source=Npz,
    dataset=dataset,
)
