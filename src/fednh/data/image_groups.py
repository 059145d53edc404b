"""The groups of a folder's images (data.group): a pattern with one pair of brackets, or a CSV file that lists them."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path

from fednh.data import delimited
from fednh.errors import UserError
from fednh.storage.files import expanded

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
    encoding = delimited.encoding_of(path, delimited.FOUND)
    separator = delimited.separator_of(path, encoding, delimited.FOUND)
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = csv.DictReader(file, delimiter=separator)
        if missing := [name for name in COLUMNS if name not in (rows.fieldnames or ())]:
            raise UserError(f"data.group: {path} has no column {missing[0]!r}; it needs the columns file and group")
        group = {(row["file"] or "").strip().replace("\\", "/"): (row["group"] or "").strip() for row in rows}
    return [group.get(name) or group.get(name.rpartition("/")[2]) for name in names]
