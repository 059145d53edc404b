"""FEMNIST as LEAF makes it: handwritten digits and letters, 28x28 grey; each of some 3,550 writers is a natural site.

Caldas et al., "LEAF: A Benchmark for Federated Settings", https://arxiv.org/abs/1812.01097, from NIST Special Database
19. LEAF publishes a script instead of files, and what that writes depends on its options: JSON files of
{"users": [...], "num_samples": [...], "user_data": {user: {"x": [[784 numbers from 0 to 1], ...], "y": [...]}}}. With
folders train and test every writer holds out the samples of the second. Labels are 0 to 9, then A to Z, then a to z.

Reading them takes minutes; femnist.npz beside the folder keeps the result for the next time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase, digits
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fednh.data.dataset import Dataset
from fednh.data.published import PublishedSites
from fednh.data.sources.images import MEAN, STD
from fednh.data.sources.npz import Npz
from fednh.data.splits import from_rows, held_by_sites
from fednh.errors import DataError
from fednh.io import cache

SIDE = 28
CLASSES = tuple(digits + ascii_uppercase + ascii_lowercase)
SINGLE = "femnist.npz"
FOLDERS = ("femnist", "femnist/data", "leaf/data/femnist/data")

Samples = dict[
    str, NDArray[Any]
]  # x (N, 28, 28) uint8, y (N,), site (N,) numbers into writers, writers, test (N,) marks


def read(path: Path) -> Samples:
    """The arrays that were kept, or the JSON files of a folder, kept as arrays for the next time."""
    if path.name == SINGLE:
        with np.load(path, allow_pickle=False) as stored:
            return {name: stored[name] for name in ("x", "y", "site", "test", "writers")}
    files = [(file, part == "test") for part in _parts(path) for file in sorted((path / part).glob("*.json"))]
    if not files:
        raise DataError(f"{path} holds no .json file; run LEAF's preprocess.sh once more")
    blocks = [block for file, test in files for block in _writers(file, test)]
    writers = sorted({writer for writer, *_ in blocks})
    number = {writer: k for k, writer in enumerate(writers)}
    samples = {
        "x": np.concatenate([x for _, x, _, _ in blocks]),
        "y": np.concatenate([y for _, _, y, _ in blocks]),
        "site": np.concatenate([np.full(len(y), number[writer], np.int64) for writer, _, y, _ in blocks]),
        "test": np.concatenate([np.full(len(y), test) for _, _, y, test in blocks]),
        "writers": np.array(writers, str),
    }
    place = max(filter(path.match, FOLDERS), key=len)  # "femnist/data" matches the longest one, too
    cache.keep_arrays(path.parents[place.count("/")] / SINGLE, **samples)
    return samples


def _parts(folder: Path) -> Sequence[str]:
    """The folders below that hold the files: train and test, or the one that holds all."""
    if (folder / "train").is_dir():
        return ("train", "test")
    return ("all_data",) if (folder / "all_data").is_dir() else ("",)


def _writers(file: Path, test: bool) -> list[tuple[str, NDArray[np.uint8], NDArray[np.int64], bool]]:
    content = json.loads(file.read_bytes())["user_data"]
    return [
        (writer, _pixels(file, writer, one["x"]), np.array(one["y"], np.int64), test) for writer, one in content.items()
    ]


def _pixels(file: Path, writer: str, x: Any) -> NDArray[np.uint8]:
    values = np.array(x, np.float32).reshape(len(x), -1)
    if values.shape[1] != SIDE * SIDE or not (values.min(initial=0) >= 0 and values.max(initial=1) <= 1):
        raise DataError(
            f"{file}: the samples of {writer} are not {SIDE * SIDE} numbers from 0 to 1; make the file again"
        )
    return np.rint(values * 255).astype(np.uint8).reshape(-1, SIDE, SIDE)


def dataset(name: str, where: str, samples: Samples, options: Npz) -> Dataset:
    """The samples as a data set, each writer a site."""
    if options.group:
        raise DataError(f"data.group = {options.group!r}, but {name} does not say which samples belong together")
    writers = samples["writers"].tolist()
    data = from_rows(
        name,
        samples["x"][..., np.newaxis],
        samples["y"],
        samples["test"],
        [writers[k] for k in samples["site"].tolist()],
        [],
        where,
        classes=CLASSES,
        mean=(MEAN,),
        std=(STD,),
    )
    return held_by_sites(data) if len(data.y_test) else data


def present(path: Path) -> bool:
    """Whether it is the file with the arrays, or a folder with JSON files."""
    if path.name == SINGLE:
        return path.is_file()
    return path.is_dir() and any(any((path / part).glob("*.json")) for part in _parts(path))


FEMNIST = PublishedSites(
    name="femnist",
    description="handwriting of some 3,550 people, 28x28 grey, 62 classes, some 800,000 images",
    accepts=f"{SINGLE}, or LEAF's JSON files in train/ and test/, all_data/ or ./ of {', '.join(FOLDERS)}",
    places=(SINGLE, *FOLDERS),
    read=read,
    present=present,
    files=(),
    by_hand="LEAF publishes a script that makes them, not files: run data/femnist/preprocess.sh of "
    "github.com/TalwalkarLab/leaf, with `-s niid --sf 1.0 -k 0 -t sample` for all writers",
    sites="some 3,550 writers",
    source=Npz,
    dataset=dataset,
)
