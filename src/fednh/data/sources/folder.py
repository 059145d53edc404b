"""Reads a folder of images: what its folders mean, which images belong together, and their decoded pixels.

A layout is a path of the words CLASS, SITE, PART (train or test) and * (which has no meaning), from the outermost
folder to the image's own. It follows from how deep the images lie and from the names of parts, or data.layout gives it;
an ambiguous folder is refused.

Decoded images are kept in a cache under a key of all names, sizes and times of change.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import AfterValidator

from fednh.data.dataset import Dataset
from fednh.data.sources.columns import in_order, numbered
from fednh.data.sources.csv import AUTO, encoding_of, open_text, separator_of
from fednh.data.sources.images import SUFFIXES, Decoded, Pictures
from fednh.errors import DataError
from fednh.io import cache
from fednh.io.files import expanded

CLASS, SITE, PART, ANY = "CLASS", "SITE", "PART", "*"
# Names of parts, in any case: what training and test images are below, and what is left out beside them.
PARTS = {"train": "train", "training": "train", "test": "test", "testing": "test"}
ASIDE = ("val", "valid", "validation")
FORMS = (
    "CLASS/image, SITE/CLASS/image, or one of them with train and test: train/CLASS/image, train/SITE/CLASS/image, "
    "SITE/train/CLASS/image"
)
DEEPEST = 8  # folders


class Listed(NamedTuple):
    """One image of a folder."""

    path: Path
    name: str  # relative to the folder
    label: str
    site: str | None
    test: bool


def _checked_layout(layout: str) -> str:
    if problem := _layout_problem(layout):
        raise ValueError(problem)
    return layout


# What the folders above an image mean; None: detected by their names and depth.
Layout = Annotated[str, AfterValidator(_checked_layout)] | None


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
        root = expanded(address)
        listed, notes = _listing(root, self)
        listed = _of_chosen_sites(root, listed, self)
        agreed, labels = self.classes or (), [image.label for image in listed]
        numbered(labels, agreed, str(root))  # wrong classes are refused before anything is decoded
        images = decoded_images(root, listed, self)
        sites, test = [image.site for image in listed], [image.test for image in listed]
        images = images._replace(notes=(*notes, *images.notes))
        groups = _image_groups([image.name for image in listed], self.group, str(root)) if self.group else []
        return self.labelled(name, str(root), images, labels, sites, test, agreed, groups)

    @classmethod
    def applicable(cls, address: str, known: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """The layout, where the folder is as deep as the run's."""
        root, layout = expanded(address), known.get("layout")
        if layout and root.is_dir() and _fits_layout(str(layout), _files(root, [])[0]):
            return dict(known)
        return {key: value for key, value in known.items() if key != "layout"}


def _listing(root: Path, options: Folder) -> tuple[list[Listed], list[str]]:
    """Every image with its class, site and part, and sentences on what was left out."""
    if not root.is_dir():
        raise DataError(f"{root} is {'not a folder' if root.exists() else 'not there'}; give a folder of images")
    notes: list[str] = []
    names, others = _files(root, notes if options.on_bad == "skip" else None)
    if not names:
        raise DataError(f"{root} holds no image ({', '.join(SUFFIXES)}); it should hold {FORMS}")
    if others:
        kinds = ", ".join(kind or "without a suffix" for kind, _ in others.most_common(5))
        notes.append(f"{root}: {others.total()} files that are no images of a known kind are left out ({kinds})")
    images, more = _described_images(root, names, options.classes or (), options.layout)
    return images, [*notes, *more]


def _of_chosen_sites(root: Path, listed: list[Listed], options: Folder) -> list[Listed]:
    """The images of the sites that data.sites and data.without leave."""
    known = in_order({image.site for image in listed if image.site is not None})
    kept = options.chosen_sites(known, str(root))
    return [image for image in listed if image.site is None or image.site in kept]


def _files(root: Path, left_out: list[str] | None) -> tuple[list[str], Counter[str]]:
    """Images by relative name in a stable order, links followed, and the suffixes of other files; hidden ones are
    skipped. What cannot be followed is refused, or noted in `left_out`.
    """
    names, others = [], Counter[str]()
    for file in walk(root, refuse if left_out is None else left_out.append):
        if file.name.lower().endswith(SUFFIXES):
            names.append(file.relative_to(root).as_posix())
        else:
            others[file.suffix.lower()] += 1
    return sorted(names), others


def decoded_images(root: Path, listed: Sequence[Listed], options: Folder) -> Decoded:
    """The decoded images, from the cache if nothing has changed since; a choice of sites has its own place there."""
    try:
        stats = [image.path.stat() for image in listed]
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read ({error.strerror})") from error
    facts = [[i.name, s.st_size, s.st_mtime_ns] for i, s in zip(listed, stats, strict=True)]
    how = "" if options.fit == "stretch" else options.fit
    size = "auto" if options.size is None else f"{options.size[0]}x{options.size[1]}"
    sites = f" sites={options.sites} without={options.without}" if options.chooses_sites() else ""
    place, whose = cache.folder("images"), f"{_digest(str(root.resolve()) + sites)}-{size}{how}"
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


def _layout_problem(layout: str) -> str | None:
    """Why a text is no layout, or None."""
    words = layout.split("/")
    if not 1 <= len(words) <= DEEPEST or set(words) - {CLASS, SITE, PART, ANY}:
        return "should be a path of the words CLASS, SITE, PART and *, such as SITE/PART/CLASS"
    if words.count(CLASS) != 1 or words.count(SITE) > 1 or words.count(PART) > 1:
        return "should name CLASS once, and SITE and PART at most once"
    return None


def _fits_layout(layout: str, names: Sequence[str]) -> bool:
    """Whether images of these relative names lie as deep as a layout says."""
    return all(name.count("/") == layout.count("/") + 1 for name in names)


def _described_images(
    root: Path, names: Sequence[str], agreed: Sequence[str], layout: str | None
) -> tuple[list[Listed], list[str]]:
    """The images with class, site and part, and sentences on what was left out.

    `agreed` classes tell SITE/CLASS from CLASS/something.
    """
    if layout and (wrong := _layout_problem(layout)):  # from a model's card, which may come from anybody
        raise DataError(f"data.layout = {layout!r} {wrong}")
    given = layout.split("/") if layout else None
    level = _level_of_parts(root, names) if given is None else given.index(PART) if PART in given else None
    aside = sorted({folder for name in names if level is not None and _part(folder := _folder(name, level)) == "aside"})
    left = [name for name in names if level is None or _folder(name, level) not in aside]
    words = given or _detected_layout(level, left[0].count("/") if left else 0)
    _check_depth(root, left, words)
    images = [_image(root, name, words) for name in left]
    if all(image.test for image in images):
        raise DataError(f"{root} holds no training images; it should hold {FORMS}")
    if SITE in words and given is None and not agreed:  # `numbered` refuses sites that are not agreed classes
        _refuse_ambiguous_sites(root, images)
    return images, [f"{root}: {', '.join(aside)} is left out; only train and test are used"] if aside else []


def _image(root: Path, name: str, words: Sequence[str]) -> Listed:
    at = dict(zip(words, name.split("/"), strict=False))
    part = _part(at[PART]) if PART in at else "train"
    if part is None:
        raise DataError(f"{root}: {name} lies below {at[PART]}, where train or test should be")
    return Listed(root / name, name, at[CLASS], at.get(SITE), part == "test")


def _part(name: str) -> str | None:
    """train, test, or aside; None for a name that is none of them."""
    word = name.lower()
    return "aside" if word in ASIDE else PARTS.get(word)


def _folder(name: str, level: int) -> str:
    """The folder at a level above an image, counted from the outermost; empty if the image lies higher."""
    folders = name.split("/")[:-1]
    return folders[level] if level < len(folders) else ""


def _level_of_parts(root: Path, names: Sequence[str]) -> int | None:
    """The level of the folders train and test; None if there are none."""
    first, second = ({folder for name in names if (folder := _folder(name, level))} for level in (0, 1))
    if _are_parts(first):
        return 0
    if "train" in first:
        strange = min(name for name in first if _part(name) is None)
        raise DataError(
            f"{root} holds train and also {strange}; it should hold {FORMS}, not a mixture; if train is a name like "
            "the others, say so with data.layout, such as CLASS or SITE/CLASS"
        )
    if first and all(map(_part, first)):
        raise DataError(f"{root} holds {', '.join(sorted(first))} but no train; it should hold {FORMS}")
    return 1 if _are_parts(second) else None


def _are_parts(folders: set[str]) -> bool:
    """Whether these are train, and perhaps test, and nothing else."""
    parts = {_part(name) for name in folders}
    return "train" in parts and None not in parts


def _detected_layout(level: int | None, depth: int) -> list[str]:
    """The layout of images that lie so deep, with parts at that level."""
    words = [CLASS] if depth - (level is not None) < 2 else [SITE, CLASS]
    if level == 0:
        return [PART, *words]
    return words if level is None else [SITE, PART, CLASS]


def _check_depth(root: Path, names: Sequence[str], words: Sequence[str]) -> None:
    """All images lie as deep as the layout says."""
    for name in names:
        depth = name.count("/")
        if depth == 0:
            raise DataError(f"{root}: {name} lies in no class folder; it should hold {FORMS}")
        if depth == len(words):
            continue
        if other := next((n for n in names if n.count("/") == len(words)), None):
            raise DataError(f"{root} is a mixture: {name} beside {other}; it should hold {FORMS}")
        deeper = "/".join([*words, *[ANY] * (depth - len(words))])
        such = deeper if depth > len(words) else (CLASS, f"{CLASS}/{PART}")[depth > 1]
        raise DataError(
            f"{root}: {name} lies {depth} folders deep, not as {'/'.join(words)}/image; it should hold {FORMS}, or say "
            f"what its folders mean with data.layout, such as {such}"
        )


def _refuse_ambiguous_sites(root: Path, images: Sequence[Listed]) -> None:
    """SITE/CLASS and CLASS/PERSON look alike; sites usually share classes."""
    by_site: dict[str | None, set[str]] = {}
    for image in images:
        by_site.setdefault(image.site, set()).add(image.label)
    if len(by_site) > 1 and sum(map(len, by_site.values())) == len(set[str]().union(*by_site.values())):
        raise DataError(
            f"{root} could be SITE/CLASS/image or CLASS/something/image: no two of its folders have a folder in "
            "common; name the classes in data.classes, or say what its folders mean with data.layout, such as CLASS/*"
        )


def is_group_file(given: str) -> bool:
    """Whether data.group names a file and is no pattern."""
    return given.lower().endswith(".csv")


def _image_groups(names: Sequence[str], given: str, where: str) -> list[str]:
    """The group of every image, given its name relative to the folder."""
    groups = _groups_in_file(names, expanded(given)) if is_group_file(given) else _groups_by_pattern(names, given)
    if lacking := [name for name, group in zip(names, groups, strict=True) if not group]:
        raise DataError(
            f"data.group = {given!r} gives no group to {len(lacking)} of {len(names)} images in {where}, such as "
            f"{lacking[0]}"
        )
    return [str(group) for group in groups]


def _groups_by_pattern(names: Sequence[str], given: str) -> list[str | None]:
    """What the brackets match in the file's name; in its whole path, if the pattern has a slash."""
    try:
        pattern = re.compile(given)
    except re.error as error:
        raise DataError(f"data.group = {given!r} is no pattern that Python knows: {error}") from error
    if pattern.groups != 1:
        raise DataError(
            f"data.group = {given!r} should have one pair of brackets around what names the group, such as "
            "'patient([0-9]+)', or be a CSV file"
        )
    texts = names if "/" in given else [name.rpartition("/")[2] for name in names]
    return [match[1] if (match := pattern.search(text)) else None for text in texts]


def _groups_in_file(names: Sequence[str], path: Path) -> list[str | None]:
    """The CSV file's group of each path relative to the folder, or of its file's name alone."""
    if not path.is_file():
        raise DataError(f"data.group: {path} does not exist; it should be a CSV file with the columns file and group")
    encoding = encoding_of(path, AUTO)
    with open_text(path, encoding) as file:
        rows = csv.DictReader(file, delimiter=separator_of(path, encoding, AUTO))
        if missing := [name for name in ("file", "group") if name not in (rows.fieldnames or ())]:
            raise DataError(f"data.group: {path} has no column {missing[0]!r}; it needs the columns file and group")
        group = {(row["file"] or "").strip().replace("\\", "/"): (row["group"] or "").strip() for row in rows}
    return [group.get(name) or group.get(name.rpartition("/")[2]) for name in names]


def refuse(sentence: str) -> None:
    """Raise: for readers that need all of a folder."""
    raise DataError(sentence)


def walk(
    folder: Path, report: Callable[[str], None] = refuse, hidden: bool = False, above: tuple[tuple[int, int], ...] = ()
) -> Iterator[Path]:
    """Files in a stable order, a folder's own before those below; `report` gets a sentence on what is left out."""
    try:
        facts = folder.stat()
        entries = sorted(folder.iterdir())
    except OSError as error:
        report(f"{folder} cannot be read ({error.strerror}); check its permissions")
        return
    here = (facts.st_dev, facts.st_ino)
    if here in above:
        report(f"{folder} links to a folder that it lies in, which has no end; remove the link")
        return
    seen = [entry for entry in entries if hidden or not entry.name.startswith(".")]
    inner = {entry: None for entry in seen if entry.is_dir()}
    for entry in seen:
        if entry.is_symlink() and not entry.exists():
            report(f"{entry} links to {entry.readlink()}, which is not there; repair or remove the link")
        elif entry not in inner:
            yield entry
    for entry in inner:
        yield from walk(entry, report, hidden, (*above, here))
