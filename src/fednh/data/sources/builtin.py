"""The data sets that need no file: scikit-learn's digits, and the paper's two-dimensional spiral."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fednh.data.dataset import Dataset
from fednh.data.scaling import measure

SPIRAL_CLASSES = 6
SPIRAL_BALANCED = (3000,) * SPIRAL_CLASSES
SPIRAL_IMBALANCED = (3000, 1500, 750, 375, 187, 93)


class BuiltIn(NamedTuple):
    """A data set by name that is always here."""

    description: str
    make: Callable[[], Dataset]


def digits() -> Dataset:
    """1,797 handwritten digits of 8x8 pixels with 17 grey levels; every fifth image of a class is a test image."""
    table = _digits_table()
    x = table[:, :-1].reshape(-1, 8, 8, 1).astype(np.uint8)
    y = table[:, -1].astype(np.int64)
    # Counting instead of drawing: the same split under every version of every library.
    test = np.zeros(len(y), dtype=bool)
    for c in range(10):
        test[np.flatnonzero(y == c)[4::5]] = True
    mean, std = measure(x[~test], 16.0)
    names = tuple(str(c) for c in range(10))
    return Dataset("digits", x[~test], y[~test], x[test], y[test], names, mean, std, scale=16.0)


def _digits_table() -> NDArray[np.float64]:  # (1797, 64 pixels and the label)
    """scikit-learn's file as it lies there: importing scikit-learn for it takes longer than everything else here."""
    package = find_spec("sklearn")
    places = list(package.submodule_search_locations or ()) if package is not None else []
    for place in places:
        if (file := Path(place, "datasets", "data", "digits.csv.gz")).is_file():
            return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return np.column_stack([images, labels])


def spiral(*, imbalanced: bool = False, noise: float = 0.5, seed: int = 0) -> Dataset:
    """Six interleaved arms in the plane; the test set is always balanced and a draw of its own.

    The angles get uniform noise in [0, noise) radians. The text's N(0, 1) would mix all classes, the authors'
    notebook draws from [0, 0.5).
    """
    sizes = SPIRAL_IMBALANCED if imbalanced else SPIRAL_BALANCED
    x_train, y_train = _arms(sizes, noise, np.random.default_rng([seed, 0]))
    x_test, y_test = _arms(SPIRAL_BALANCED, noise, np.random.default_rng([seed, 1]))
    return Dataset(
        name="spiral_imbalanced" if imbalanced else "spiral",
        x_train=x_train,
        y_train=y_train,
        x_test=x_test,
        y_test=y_test,
        classes=tuple(f"arm {k}" for k in range(SPIRAL_CLASSES)),
        mean=(0.0, 0.0),
        std=(1.0, 1.0),
        scale=1.0,
    )


def _arms(
    sizes: tuple[int, ...], noise: float, rng: np.random.Generator
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Along arm k the radius runs from 1 to 10 and the angle from k to k+1 sixths of a turn."""
    points = []
    for k, size in enumerate(sizes):
        radius = np.linspace(1, 10, size)
        angle = np.linspace(k, k + 1, size) * np.pi / 3 + rng.uniform(0, noise, size)
        points.append(np.stack([radius * np.sin(angle), radius * np.cos(angle)], axis=1))
    labels = np.repeat(np.arange(len(sizes), dtype=np.int64), sizes)
    return np.concatenate(points).astype(np.float32), labels


BUILTIN = {
    "digits": BuiltIn("handwritten digits, 8x8 grey, 10 classes, 1,797 images", digits),
    "spiral": BuiltIn("six interleaved arms in the plane, balanced", spiral),
    "spiral_imbalanced": BuiltIn("the same with 3000 to 93 samples a class", partial(spiral, imbalanced=True)),
}
