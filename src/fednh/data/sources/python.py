"""Data from a person's own Python function: `py:package.module:function`, importable from here or installed.

The function takes nothing and returns a Dataset, a dict of arrays with the names of an .npz file, or the tuple
(x_train, y_train) or (x_train, y_train, x_test, y_test).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fednh.core.imports import imported_function
from fednh.data.dataset import Dataset
from fednh.data.npz import KEYS, from_arrays
from fednh.data.sources.base import Source
from fednh.errors import UserError


@dataclass(frozen=True)
class Python(Source):
    prefix = "py"
    address = "MODULE:FUNCTION"
    example = "mydata:load"
    help = "what a Python function returns"
    runs_code = True

    def read(self, name: str, address: str) -> Dataset:
        return dataset(name, address, self.classes or (), self.group)

    @classmethod
    def file(cls, address: str) -> Path | None:
        return None


def dataset(name: str, address: str, agreed: Sequence[str], group: str | None = None) -> Dataset:
    """What the function at `address` returns, checked."""
    module, _, function = address.partition(":")
    if not module or not function:
        raise UserError(f"{name!r} should be py:package.module:function")
    load = imported_function(address, "data.name")
    try:
        found = load()
    except UserError:
        raise
    except Exception as error:  # whatever a person's own code may raise
        raise UserError(f"{name} failed: {type(error).__name__}: {error}") from error
    if isinstance(found, Dataset):
        return found
    if isinstance(found, tuple) and len(found) in (2, 4):
        found = dict(zip(KEYS, found, strict=False))
    if not isinstance(found, dict):
        raise UserError(
            f"{name} returned {type(found).__name__}; it should return a Dataset, a dict of arrays, or "
            "(x_train, y_train) with or without (x_test, y_test)"
        )
    return from_arrays(name, name, found, agreed, group)
