"""Reads a folder of images: CLASS/image, train/CLASS/image with test/CLASS/image, or SITE/CLASS/image.

Which of the three it is follows from how deep the images lie and from the names train and test; what could be two
things is refused. Decoded images are kept in a cache under a key of all names, sizes and times of change.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fednh.data import site_choice
from fednh.data.dataset import Dataset
from fednh.data.images import MEAN, STD, SUFFIXES, decode_all
from fednh.data.labels import in_order, numbered
from fednh.data.sources.base import Source
from fednh.data.sources.settings import Size
from fednh.data.walk import walk
from fednh.errors import UserError
from fednh.storage import cache
from fednh.storage.files import expanded

ASIDE = ("val", "valid", "validation")  # beside train and test: left out
FORMS = "CLASS/image, train/CLASS/image with test/CLASS/image, or SITE/CLASS/image"


@dataclass(frozen=True)
class Listed:
    """One image of the folder."""

    path: Path
    name: str  # relative to the folder
    label: str
    site: str | None
    test: bool


@dataclass(frozen=True)
class Folder(Source):
    prefix = "folder"
    address = "DIR"
    example = "photos"
    help = "images as CLASS/, train|test/CLASS/ or SITE/CLASS/"
    named = True
    chooses = True

    size: Size = None

    def read(self, name: str, address: str) -> Dataset:
        size = None if self.size is None else (self.size[0], self.size[1])
        return dataset(name, expanded(address), size, self)


def dataset(name: str, root: Path, size: tuple[int, int] | None, options: Folder) -> Dataset:
    """The folder at `root` as a data set."""
    agreed = options.classes or ()
    listed, notes = listing(root, agreed)
    listed = _of_chosen_sites(root, listed, options)
    x, told = _images(root, listed, size, site_choice.words(options))
    y, classes = numbered([image.label for image in listed], agreed, str(root))
    test = np.array([image.test for image in listed])
    sites = tuple(in_order({image.site for image in listed if image.site is not None}))
    site = np.array([sites.index(image.site) for image in listed if image.site is not None], np.int64)
    channels = x.shape[-1]
    return Dataset(
        name,
        x[~test],
        y[~test],
        x[test],
        y[test],
        classes,
        (MEAN,) * channels,
        (STD,) * channels,
        sites=sites,
        site_train=site if sites else None,
        notes=(*notes, *told),
    )


def listing(root: Path, agreed: Sequence[str]) -> tuple[list[Listed], list[str]]:
    """Every image with its class, site and part, and what was left out, in words."""
    if not root.is_dir():
        raise UserError(f"{root} is {'not a folder' if root.exists() else 'not there'}; give a folder of images")
    names, others = _files(root)
    if not names:
        raise UserError(f"{root} holds no image ({', '.join(SUFFIXES)}); it should hold {FORMS}")
    notes = [f"{root}: {others} files that are no JPEG or PNG are left out"] if others else []
    tops = {name.partition("/")[0] for name in names if "/" in name}
    if "train" in tops:
        if aside := [top for top in ASIDE if top in tops]:
            notes.append(f"{root}: {', '.join(aside)} is left out; only train and test are used")
            names = [name for name in names if name.partition("/")[0] not in aside]
        if strangers := sorted(tops - {"train", "test", *ASIDE}):
            raise UserError(f"{root} holds train and also {strangers[0]}; it should hold {FORMS}, not a mixture")
        _same_depth(root, names, 2)
        return [Listed(root / n, n, n.split("/")[1], None, n.startswith("test/")) for n in names], notes
    if "test" in tops and tops <= {"test", *ASIDE}:
        raise UserError(f"{root} holds test but no train; it should hold {FORMS}")
    depth = names[0].count("/")
    _same_depth(root, names, depth)
    if depth == 1:
        return [Listed(root / n, n, n.split("/")[0], None, False) for n in names], notes
    if depth != 2:
        raise UserError(f"{root}: {names[0]} lies {depth} folders deep; it should hold {FORMS}")
    found = [Listed(root / n, n, n.split("/")[1], n.split("/")[0], False) for n in names]
    _really_sites(root, found, agreed)
    return found, notes


def _of_chosen_sites(root: Path, listed: list[Listed], options: Folder) -> list[Listed]:
    """The images of the sites that data.sites and data.without leave."""
    known = in_order({image.site for image in listed if image.site is not None})
    kept = site_choice.chosen(known, options, str(root))
    return [image for image in listed if image.site is None or image.site in kept]


def _files(root: Path) -> tuple[list[str], int]:
    """Images by relative name in a stable order, links followed, and how many other files; hidden ones are not seen."""
    names, others = [], 0
    for file in walk(root):
        if file.name.lower().endswith(SUFFIXES):
            names.append(file.relative_to(root).as_posix())
        else:
            others += 1
    return sorted(names), others


def _same_depth(root: Path, names: Sequence[str], depth: int) -> None:
    for name in names:
        if name.count("/") == 0:
            raise UserError(f"{root}: {name} lies in no class folder; it should hold {FORMS}")
        if name.count("/") != depth:
            other = next((n for n in names if n.count("/") == depth), "train/CLASS/image")
            raise UserError(f"{root} is a mixture: {name} beside {other}; it should hold {FORMS}")


def _really_sites(root: Path, found: Sequence[Listed], agreed: Sequence[str]) -> None:
    """SITE/CLASS and CLASS/PERSON look alike; sites usually share classes, and `agreed` classes settle it."""
    if agreed:
        return  # `numbered` refuses what is not among them
    by_site: dict[str | None, set[str]] = {}
    for image in found:
        by_site.setdefault(image.site, set()).add(image.label)
    if len(by_site) > 1 and sum(map(len, by_site.values())) == len(set[str]().union(*by_site.values())):
        raise UserError(
            f"{root} could be SITE/CLASS/image or CLASS/something/image: no two of its folders "
            "have a folder in common; name the classes in data.classes, or make it CLASS/image"
        )


# --- the cache -----------------------------------------------------------------------------------------------------


def _images(
    root: Path, listed: Sequence[Listed], size: tuple[int, int] | None, part: str = ""
) -> tuple[NDArray[np.uint8], tuple[str, ...]]:
    """The decoded images, from the cache if nothing has changed since; a `part` has a place of its own there."""
    try:
        stats = [image.path.stat() for image in listed]
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read ({error.strerror})") from error
    facts = [[i.name, s.st_size, s.st_mtime_ns] for i, s in zip(listed, stats, strict=True)]
    place = cache.folder("images")
    whose = f"{_digest(str(root.resolve()) + part)}-{'auto' if size is None else f'{size[0]}x{size[1]}'}"
    file = place / f"{whose}-{_digest(json.dumps([2, facts]))}.npz"
    with suppress(OSError, ValueError, KeyError, EOFError), np.load(file, allow_pickle=False) as kept:
        if len(kept["x"]) == len(listed):
            return kept["x"], tuple(str(note) for note in kept["notes"])
    x, notes = decode_all([i.path for i in listed], [i.name for i in listed], size, str(root))
    with suppress(OSError):
        for old in place.glob(f"{whose}-*.npz"):
            old.unlink(missing_ok=True)
    cache.keep_arrays(file, x=x, notes=np.array(notes, dtype=str))
    return x, notes


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
