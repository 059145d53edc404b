"""Data that a program gives instead of a name: `fednh.run(data=...)`, with arrays, a data frame or a Dataset.

The run records `memory:NAME`: the name of a Dataset, or else a checksum of what was given. They are not kept, so only
a program that gives the same data again can go on with the run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fednh.data import given
from fednh.data.columns import word
from fednh.data.dataset import Dataset
from fednh.data.labels import numbered
from fednh.data.npz import KEYS, MEDMNIST_KEYS, from_arrays
from fednh.data.site_choice import restricted
from fednh.data.sources.tables import Tabular, from_table
from fednh.errors import UserError

FORMS = (
    "(x, y), (x, y, site), (x_train, y_train, x_test, y_test), a dict of arrays with the names of an .npz file, a data "
    "frame, or a Dataset"
)


@dataclass(frozen=True)
class Memory(Tabular):
    prefix = "memory"
    address = "NAME"
    example = "visits"
    help = "what a program gave to fednh.run(data=...)"

    def read(self, name: str, address: str) -> Dataset:
        raise UserError(
            f"the data {name} were given in Python and are not kept; give them again there, for example "
            "fednh.resume(RUN, data=...)"
        )

    def taken(self, data: Any) -> Dataset:
        """What a program gives, as a data set."""
        if given.is_frame(data):
            return _called(from_table("memory", given.table(data), "the data frame", self))
        if isinstance(data, Dataset):
            found = replace(data, name=f"{self.prefix}:{data.name}") if data.name else _called(data)
        else:
            arrays, agreed = _named(_arrays(data), self.classes or [])
            found = _called(from_arrays("memory", "data", arrays, agreed, self.group))
        return restricted(found, self, "data")

    @classmethod
    def file(cls, address: str) -> Path | None:
        return None


def is_given(data: Any) -> bool:
    """Whether these are data, and not a name or settings."""
    if data is None or isinstance(data, str | Path):
        return False
    return not isinstance(data, Mapping) or any(key in data for key in (KEYS[0], MEDMNIST_KEYS[0]))


def _called(data: Dataset) -> Dataset:
    """Named by a checksum of the contents, so that reports do not take different data for the same."""
    text = json.dumps(data.fingerprint, sort_keys=True)
    return replace(data, name=f"{Memory.prefix}:{hashlib.sha256(text.encode()).hexdigest()[:8]}")


def _arrays(data: Any) -> dict[str, NDArray[Any]]:
    """Arrays by the names that an .npz file has for them."""
    if isinstance(data, Mapping):
        named = dict(data)
    elif isinstance(data, tuple | list) and len(data) in (2, 3, 4):
        named = dict(zip((*KEYS[:2], "site_train") if len(data) == 3 else KEYS, data, strict=False))
    else:
        raise UserError(f"data is of the type {type(data).__name__}; give {FORMS}")
    return {str(key): given.array(value, f"data: {key}") for key, value in named.items()}


def _named(arrays: dict[str, NDArray[Any]], agreed: list[str]) -> tuple[dict[str, NDArray[Any]], list[str]]:
    """The arrays with classes as numbers, and the names of the classes where labels are names."""
    if "site_train" in arrays:
        arrays["site_train"] = _words(arrays["site_train"], "site_train")
    labels = [key for key in (KEYS[1], KEYS[3], MEDMNIST_KEYS[1], MEDMNIST_KEYS[3]) if key in arrays]
    words = {key: _words(arrays[key], key) for key in labels}
    if not any(found.dtype.kind == "U" for found in words.values()):
        return arrays, agreed
    every = [str(name) for found in words.values() for name in found.reshape(-1)]
    numbers, classes = numbered(every, agreed, "data")
    parts = np.split(numbers, np.cumsum([found.size for found in words.values()])[:-1])
    return {**arrays, **dict(zip(words, parts, strict=True))}, list(classes)


def _words(values: NDArray[Any], key: str) -> NDArray[Any]:
    """Names as text; numbers as they are."""
    if values.dtype.kind not in "bOSU":
        return values
    wrong = next((value for value in values.reshape(-1).tolist() if not isinstance(value, str | int)), None)
    if wrong is not None or None in values.reshape(-1).tolist():
        raise UserError(f"data: {key} holds {wrong!r}; give every sample a name or a number")
    return np.array([word(value) for value in values.reshape(-1).tolist()], str)
