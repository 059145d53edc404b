"""The contents of a data set in a form that can be compared: what was read, not the file it was read from.

So a table that was saved again is the same table, and rows in another order are not.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

CHUNK = 16 << 20  # bytes that one thread hashes at a time


def digest(*arrays: NDArray[Any]) -> str:
    """SHA-256 of the arrays' types, shapes and contents."""
    whole = hashlib.sha256()
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # hashlib leaves Python's lock while it works
        for array in arrays:
            view = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            whole.update(f"{array.dtype.str}{array.shape}".encode())
            chunks = [view[i : i + CHUNK] for i in range(0, len(view), CHUNK)]
            for part in pool.map(lambda chunk: hashlib.sha256(chunk).digest(), chunks):
                whole.update(part)
    return whole.hexdigest()


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """The first difference between the data then and now, as the rest of a sentence, or None."""
    told = next(_changes(before, now), None)
    sizes = [data.get("bytes") for data in (before, now)]
    if told and None not in sizes and sizes[0] != sizes[1]:
        told += f" ({before['path']} had {sizes[0]:,} bytes and has {sizes[1]:,})"
    return told


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    if ("sites" in before) != ("sites" in now):
        yield "their samples come from sites now" if "sites" in now else "they do not name sites any more"
    then, here = before.get("sites", {}), now.get("sites", {})
    gone, new = [name for name in then if name not in here], [name for name in here if name not in then]
    if gone or new:
        yield " and ".join(filter(None, [_sites(gone, "missing"), _sites(new, "new")]))
    if list(then) != list(here):
        yield f"the sites are in another order: {_some(then)} then, {_some(here)} now"
    if before["classes"] != now["classes"]:
        yield f"the classes were {_some(before['classes'])} and are {_some(now['classes'])}"
    for name in then:
        if then[name]["samples"] != here[name]["samples"]:
            yield (
                f"the site {name!r} had {then[name]['samples']:,} training samples and has {here[name]['samples']:,}"
            )
    for kind, words in (("train", "training"), ("test", "test")):
        if before[kind] != now[kind]:
            yield f"there were {before[kind]:,} {words} samples and are {now[kind]:,}"
    for name in then:
        if then[name]["sha256"] != here[name]["sha256"]:
            yield f"the training samples of the site {name!r} are others, or in another order"
    parts = {
        "inputs": "the training samples are others, or in another order",
        "labels": "the labels of the training samples are others",
        "order": "the training samples of the sites follow each other in another order",
        "groups": "the groups that training samples belong to are others",
        "test_samples": "the test samples are others, or in another order",
        "scale": "they are normalised in another way",
    }
    for key, words in parts.items():
        if before.get(key) != now.get(key):
            yield words


def _sites(names: list[str], what: str) -> str:
    if not names:
        return ""
    return f"the site {names[0]!r} is {what}" if len(names) == 1 else f"the sites {_some(names)} are {what}"


def _some(names: Iterable[str], most: int = 8) -> str:
    every = list(names)
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")
