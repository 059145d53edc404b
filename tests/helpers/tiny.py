"""A federation small enough to compute by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fednh.data.dataset import Dataset


def tiny_dataset() -> Dataset:
    """Eleven training vectors of four features; four classes, of which nobody owns the last."""
    rng = np.random.default_rng(7)
    y = np.array([0, 0, 0, 1, 1, 0, 1, 1, 2, 2, 2], np.int64)
    x = (rng.normal(size=(11, 4)) + y[:, None]).astype(np.float32)
    y_test = np.arange(8, dtype=np.int64) % 4
    x_test = (rng.normal(size=(8, 4)) + y_test[:, None]).astype(np.float32)
    return Dataset("tiny", x, y, x_test, y_test, ("a", "b", "c", "d"), (0.0,), (1.0,), scale=1.0)


CLIENTS = [np.arange(6), np.arange(6, 11)]  # classes {0, 1} and {1, 2}


def cifar10_file() -> Path:
    from fednh.io.cache import data_folder

    return data_folder() / "cifar10.npz"
