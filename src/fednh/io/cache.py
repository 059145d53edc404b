"""Locations of files that belong to no run: data sets by name, and results that can be recomputed.

data sets    --data-dir or `data.dir`, else $FEDNH_DATA, else ~/.cache/fednh
the rest     $FEDNH_CACHE, else the user's cache folder, with a folder for each kind: `images` (decoded), `native`

Two variables, because a data set may be somebody's only copy, and a cache may be emptied at any time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
from numpy.typing import NDArray

from fednh.io.files import atomic_write, expanded

NOWHERE = Path("/nonexistent/fednh")  # for a user without a home, as in some containers: nothing is found or kept there


def data_folder(chosen: str | Path | None = None) -> Path:
    """The folder of data sets by name; `chosen` is the user's choice, if any."""
    named = chosen or os.environ.get("FEDNH_DATA")
    return expanded(named) if named else _of_the_user(lambda: Path.home() / ".cache" / "fednh")


def folder(kind: str) -> Path:
    """The cache folder for results of this kind."""
    named = os.environ.get("FEDNH_CACHE")
    place = expanded(named) if named else _of_the_user(lambda: Path(platformdirs.user_cache_dir("fednh")))
    return place / kind


def _of_the_user(place: Callable[[], Path]) -> Path:
    try:
        folder = place()
    except RuntimeError:  # a user without a home
        return NOWHERE
    return folder if folder.is_absolute() else NOWHERE  # older platformdirs leave the ~ as it is


def keep(file: Path, write: Callable[[Path], object]) -> bool:
    """Put what `write` writes at `file`, whole or not at all: another process may be reading.

    False, and no trace, where that is not possible: a cache that cannot be written must not stop a run.
    """
    try:
        with atomic_write(file) as place:
            write(place)
    except OSError:
        return False
    return True


def keep_arrays(file: Path, **arrays: NDArray[Any]) -> bool:
    """Keep arrays as an .npz file."""

    def write(draft: Path) -> None:
        with draft.open("wb") as opened:
            np.savez(opened, **arrays)  # type: ignore[arg-type]

    return keep(file, write)
