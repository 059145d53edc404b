"""The meaning of the folders above an image: its class, the site that it comes from, and its part (train or test).

A layout is a path of the words CLASS, SITE, PART and * (which has no meaning), from the outermost folder to the image's
own. It follows from how deep the images lie and from the names of parts, or it is said in data.layout; what could be
two things is refused.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from fednh.data.sources import csv as delimited
from fednh.errors import UserError
from fednh.io.files import expanded

# --- walk -----------------------------------------------------------------------------------------------------------
# Every file below a folder, links followed; loops, dangling links and unreadable folders are reported.


def refuse(sentence: str) -> None:
    """For readers that need all of a folder."""
    raise UserError(sentence)


def walk(
    folder: Path, told: Callable[[str], None] = refuse, hidden: bool = False, above: tuple[tuple[int, int], ...] = ()
) -> Iterator[Path]:
    """Files in a stable order, a folder's own before those below; `told` gets a sentence on what is left out."""
    try:
        facts = folder.stat()
        entries = sorted(folder.iterdir())
    except OSError as error:
        told(f"{folder} cannot be read ({error.strerror}); check its permissions")
        return
    here = (facts.st_dev, facts.st_ino)
    if here in above:
        told(f"{folder} links to a folder that it lies in, which has no end; remove the link")
        return
    seen = [entry for entry in entries if hidden or not entry.name.startswith(".")]
    inner = {entry: None for entry in seen if entry.is_dir()}
    for entry in seen:
        if entry.is_symlink() and not entry.exists():
            told(f"{entry} links to {entry.readlink()}, which is not there; repair or remove the link")
        elif entry not in inner:
            yield entry
    for entry in inner:
        yield from walk(entry, told, hidden, (*above, here))


# --- image groups ---------------------------------------------------------------------------------------------------
# The groups of a folder's images (data.group): a pattern with one pair of brackets, or a CSV file that lists them.


COLUMNS = ("file", "group")


def is_file(given: str) -> bool:
    """Whether data.group names a file and is no pattern."""
    return given.lower().endswith(".csv")


def of_images(names: Sequence[str], given: str, where: str) -> list[str]:
    """The group of every image, given its name relative to the folder."""
    found = _listed(names, expanded(given)) if is_file(given) else _matched(names, given)
    if lacking := [name for name, group in zip(names, found, strict=True) if not group]:
        raise UserError(
            f"data.group = {given!r} gives no group to {len(lacking)} of {len(names)} images in {where}, such as "
            f"{lacking[0]}"
        )
    return [str(group) for group in found]


def _matched(names: Sequence[str], given: str) -> list[str | None]:
    """What the brackets match in the file's name; in its whole path, if the pattern has a slash."""
    try:
        pattern = re.compile(given)
    except re.error as error:
        raise UserError(f"data.group = {given!r} is no pattern that Python knows: {error}") from error
    if pattern.groups != 1:
        raise UserError(
            f"data.group = {given!r} should have one pair of brackets around what names the group, such as "
            "'patient([0-9]+)', or be a CSV file"
        )
    texts = names if "/" in given else [name.rpartition("/")[2] for name in names]
    return [match[1] if (match := pattern.search(text)) else None for text in texts]


def _listed(names: Sequence[str], path: Path) -> list[str | None]:
    """The CSV file's group of each path relative to the folder, or of its file's name alone."""
    if not path.is_file():
        raise UserError(f"data.group: {path} does not exist; it should be a CSV file with the columns file and group")
    encoding = delimited.encoding_of(path, delimited.AUTO)
    separator = delimited.separator_of(path, encoding, delimited.AUTO)
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = csv.DictReader(file, delimiter=separator)
        if missing := [name for name in COLUMNS if name not in (rows.fieldnames or ())]:
            raise UserError(f"data.group: {path} has no column {missing[0]!r}; it needs the columns file and group")
        group = {(row["file"] or "").strip().replace("\\", "/"): (row["group"] or "").strip() for row in rows}
    return [group.get(name) or group.get(name.rpartition("/")[2]) for name in names]


# --- folder layout --------------------------------------------------------------------------------------------------


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


def problem(layout: str) -> str | None:
    """Why a text is no layout, or None."""
    words = layout.split("/")
    if not 1 <= len(words) <= DEEPEST or set(words) - {CLASS, SITE, PART, ANY}:
        return "should be a path of the words CLASS, SITE, PART and *, such as SITE/PART/CLASS"
    if words.count(CLASS) != 1 or words.count(SITE) > 1 or words.count(PART) > 1:
        return "should name CLASS once, and SITE and PART at most once"
    return None


def fits(layout: str, names: Sequence[str]) -> bool:
    """Whether images of these relative names lie as deep as a layout says."""
    return all(name.count("/") == layout.count("/") + 1 for name in names)


def listed(
    root: Path, names: Sequence[str], agreed: Sequence[str], layout: str | None
) -> tuple[list[Listed], list[str]]:
    """Images by relative name with class, site and part, and in words what was left out.

    `agreed` classes tell SITE/CLASS from CLASS/something.
    """
    if layout and (words := problem(layout)):  # from a model's card, which may come from anybody
        raise UserError(f"data.layout = {layout!r} {words}")
    said = layout.split("/") if layout else None
    level = _level_of_parts(root, names) if said is None else said.index(PART) if PART in said else None
    aside = sorted({folder for name in names if level is not None and _part(folder := _folder(name, level)) == "aside"})
    left = [name for name in names if level is None or _folder(name, level) not in aside]
    form = said or _meaning(level, left[0].count("/") if left else 0)
    _check_depth(root, left, form)
    found = [_image(root, name, form) for name in left]
    if all(image.test for image in found):
        raise UserError(f"{root} holds no training images; it should hold {FORMS}")
    if SITE in form and said is None:
        _really_sites(root, found, agreed)
    return found, [f"{root}: {', '.join(aside)} is left out; only train and test are used"] if aside else []


def _image(root: Path, name: str, words: Sequence[str]) -> Listed:
    at = dict(zip(words, name.split("/"), strict=False))
    part = _part(at[PART]) if PART in at else "train"
    if part is None:
        raise UserError(f"{root}: {name} lies below {at[PART]}, where train or test should be")
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
        raise UserError(
            f"{root} holds train and also {strange}; it should hold {FORMS}, not a mixture; if train is a name like "
            "the others, say so with data.layout, such as CLASS or SITE/CLASS"
        )
    if first and all(map(_part, first)):
        raise UserError(f"{root} holds {', '.join(sorted(first))} but no train; it should hold {FORMS}")
    return 1 if _are_parts(second) else None


def _are_parts(folders: set[str]) -> bool:
    """Whether these are train, and perhaps test, and nothing else."""
    parts = {_part(name) for name in folders}
    return "train" in parts and None not in parts


def _meaning(level: int | None, depth: int) -> list[str]:
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
            raise UserError(f"{root}: {name} lies in no class folder; it should hold {FORMS}")
        if depth == len(words):
            continue
        if other := next((n for n in names if n.count("/") == len(words)), None):
            raise UserError(f"{root} is a mixture: {name} beside {other}; it should hold {FORMS}")
        deeper = "/".join([*words, *[ANY] * (depth - len(words))])
        such = deeper if depth > len(words) else (CLASS, f"{CLASS}/{PART}")[depth > 1]
        raise UserError(
            f"{root}: {name} lies {depth} folders deep, not as {'/'.join(words)}/image; it should hold {FORMS}, or say "
            f"what its folders mean with data.layout, such as {such}"
        )


def _really_sites(root: Path, found: Sequence[Listed], agreed: Sequence[str]) -> None:
    """SITE/CLASS and CLASS/PERSON look alike; sites usually share classes, and `agreed` classes settle it."""
    if agreed:
        return  # `numbered` refuses what is not among them
    by_site: dict[str | None, set[str]] = {}
    for image in found:
        by_site.setdefault(image.site, set()).add(image.label)
    if len(by_site) > 1 and sum(map(len, by_site.values())) == len(set[str]().union(*by_site.values())):
        raise UserError(
            f"{root} could be SITE/CLASS/image or CLASS/something/image: no two of its folders have a folder in "
            "common; name the classes in data.classes, or say what its folders mean with data.layout, such as CLASS/*"
        )
