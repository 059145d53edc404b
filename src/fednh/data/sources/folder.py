"""Reads a folder of images; what its folders mean is in data/sources/folder_layout.py.

Decoded images are kept in a cache under a key of all names, sizes and times of change.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fednh.data.dataset import Dataset
from fednh.data.sources import folder_layout
from fednh.data.sources.base import Layout, chosen, chosen_words
from fednh.data.sources.columns import in_order, numbered
from fednh.data.sources.folder_layout import FORMS, Listed, of_images, refuse, walk
from fednh.data.sources.images import SUFFIXES, Decoded, Pictures
from fednh.errors import UserError
from fednh.io import cache
from fednh.io.files import expanded


@dataclass(frozen=True)
class Folder(Pictures):
    prefix = "folder"
    address = "DIR"
    example = "photos"
    help = "images as CLASS/ or SITE/CLASS/, with or without train/ and test/"
    named = True
    chooses = True

    layout: Layout = None

    def read(self, name: str, address: str) -> Dataset:
        return dataset(name, expanded(address), self)

    @classmethod
    def applicable(cls, address: str, known: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """The layout, where the folder is as deep as the run's."""
        root, layout = expanded(address), known.get("layout")
        if layout and root.is_dir() and folder_layout.fits(str(layout), _files(root, [])[0]):
            return dict(known)
        return {key: value for key, value in known.items() if key != "layout"}


def dataset(name: str, root: Path, options: Folder) -> Dataset:
    """The folder at `root` as a data set."""
    listed, notes = listing(root, options)
    listed = _of_chosen_sites(root, listed, options)
    agreed, labels = options.classes or (), [image.label for image in listed]
    numbered(labels, agreed, str(root))  # wrong classes are refused before anything is decoded
    images = _images(root, listed, options)
    sites, test = [image.site for image in listed], [image.test for image in listed]
    images = images._replace(notes=(*notes, *images.notes))
    groups = of_images([image.name for image in listed], options.group, str(root)) if options.group else []
    return options.labelled(name, str(root), images, labels, sites, test, agreed, groups)


def listing(root: Path, options: Folder) -> tuple[list[Listed], list[str]]:
    """Every image with its class, site and part, and what was left out, in words."""
    if not root.is_dir():
        raise UserError(f"{root} is {'not a folder' if root.exists() else 'not there'}; give a folder of images")
    notes: list[str] = []
    names, others = _files(root, notes if options.on_bad == "skip" else None)
    if not names:
        raise UserError(f"{root} holds no image ({', '.join(SUFFIXES)}); it should hold {FORMS}")
    if others:
        kinds = ", ".join(kind or "without a suffix" for kind, _ in others.most_common(5))
        notes.append(f"{root}: {others.total()} files that are no images of a known kind are left out ({kinds})")
    found, more = folder_layout.listed(root, names, options.classes or (), options.layout)
    return found, [*notes, *more]


def _of_chosen_sites(root: Path, listed: list[Listed], options: Folder) -> list[Listed]:
    """The images of the sites that data.sites and data.without leave."""
    known = in_order({image.site for image in listed if image.site is not None})
    kept = chosen(known, options, str(root))
    return [image for image in listed if image.site is None or image.site in kept]


def _files(root: Path, left_out: list[str] | None) -> tuple[list[str], Counter[str]]:
    """Images by relative name in a stable order, links followed, and the suffixes of other files; hidden ones are not
    seen. What cannot be followed is refused, or told to `left_out`.
    """
    names, others = [], Counter[str]()
    for file in walk(root, refuse if left_out is None else left_out.append):
        if file.name.lower().endswith(SUFFIXES):
            names.append(file.relative_to(root).as_posix())
        else:
            others[file.suffix.lower()] += 1
    return sorted(names), others


# --- the cache -----------------------------------------------------------------------------------------------------


def _images(root: Path, listed: Sequence[Listed], options: Folder) -> Decoded:
    """The decoded images, from the cache if nothing has changed since; a choice of sites has its own place there."""
    try:
        stats = [image.path.stat() for image in listed]
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read ({error.strerror})") from error
    facts = [[i.name, s.st_size, s.st_mtime_ns] for i, s in zip(listed, stats, strict=True)]
    how = "" if options.fit == "stretch" else options.fit
    size = "auto" if options.size is None else f"{options.size[0]}x{options.size[1]}"
    place, whose = cache.folder("images"), f"{_digest(str(root.resolve()) + chosen_words(options))}-{size}{how}"
    file = place / f"{whose}-{_digest(json.dumps([3, options.on_bad, facts]))}.npz"
    with suppress(OSError, ValueError, KeyError, EOFError), np.load(file, allow_pickle=False) as kept:
        if len(kept["x"]) == len(kept["kept"]):
            return Decoded(kept["x"], kept["kept"].tolist(), tuple(str(note) for note in kept["notes"]))
    images = options.decoded([i.path for i in listed], [i.name for i in listed], str(root))
    with suppress(OSError):
        for old in place.glob(f"{whose}-*.npz"):
            old.unlink(missing_ok=True)
    cache.keep_arrays(file, x=images.x, kept=np.array(images.kept, np.int64), notes=np.array(images.notes, dtype=str))
    return images


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
