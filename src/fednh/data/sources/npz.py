"""One .npz file with arrays: see data/npz.py for what it may hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fednh.data import npz
from fednh.data.dataset import Dataset
from fednh.data.sources.base import Source
from fednh.errors import UserError
from fednh.storage.files import expanded

INPUTS = ("x", "x_test", "test_images", "images")  # what inputs without labels may be called


@dataclass(frozen=True)
class Npz(Source):
    prefix = "npz"
    address = "FILE"
    example = "data/own.npz"
    help = "arrays x_train, y_train and perhaps x_test, y_test, site_train"
    suffixes = (".npz",)

    def read(self, name: str, address: str) -> Dataset:
        return npz.dataset(name, expanded(address), self.classes or (), self.group)

    def unlabelled(
        self, path: Path, shape: tuple[int, ...], preprocessing: Mapping[str, Any]
    ) -> Iterator[NDArray[Any]]:
        try:
            with np.load(path, allow_pickle=False) as stored:
                keys = [key for key in INPUTS if key in stored.files] or stored.files[:1] * (len(stored.files) == 1)
                if not keys:
                    raise UserError(f"{path} holds {', '.join(stored.files)}; the inputs should be called x")
                array: NDArray[Any] = stored[keys[0]]
        except UserError:
            raise
        except Exception as error:  # a damaged zip or header fails in many ways
            raise UserError(f"{path} cannot be read as an .npz file: {str(error) or type(error).__name__}") from error
        yield array
