"""Samples that are nearly the same on both sides of a split: an image saved again, a row measured twice.

Images are compared as grey pictures of at most 16x16 pixels, whatever their brightness and contrast; rows by their
standardised numbers, where their words are the same. Of large sets a sample is compared, so the time is bounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fednh.core.seeding import numpy_rng
from fednh.data.dataset import Inputs
from fednh.data.partitions.base import Indices
from fednh.data.scaling import category_slots, measure

MOST, MOST_OTHERS = 2_000, 20_000  # samples that are compared, and samples that each is compared with
MOST_VALUES = 20_000_000  # numbers in all, of rows
SIDE = 16  # pixels
ALIKE = 0.998  # the least correlation of images that are nearly the same
CLOSE = 0.02  # the largest distance of rows that are, in standard deviations, on average over the numbers
FINE = 20  # a number with so many different values tells rows apart
CHANCE = 1e-4  # how often a row may have a near one by chance: in few dimensions rows are close anyway
BLOCK = 500

Near = Callable[[slice], NDArray[np.bool_]]  # which of these rows is near to which of the others


class Found(NamedTuple):
    """How many samples have a near copy among the others, and how many were compared."""

    copies: int
    samples: int
    others: int


def near_copies(x: Inputs, mine: Indices, others: Inputs, theirs: Indices, preprocessing: dict[str, Any]) -> Found:
    """Samples x[mine] with a near copy in others[theirs]; within one array a sample is no copy of itself."""
    rng, most = numpy_rng(0, "near copies"), MOST_OTHERS
    if x.ndim == 2:
        most = min(most, MOST_VALUES // max(x.shape[1], 1))
    mine, theirs = _some(mine, min(MOST, most), rng), _some(theirs, most, rng)
    none = Found(0, len(mine), len(theirs))
    if not len(mine) or not len(theirs):
        return none
    if x.ndim == 4:
        near = _near_images(_pictures(x, mine), _pictures(others, theirs))
    else:
        near = _near_rows(x[mine], others[theirs], preprocessing)
    count = 0
    for start in range(0, len(mine), BLOCK):
        close = near(slice(start, start + BLOCK))
        if x is others:
            close &= mine[start : start + BLOCK, None] != theirs[None]
        count += int(close.any(axis=1).sum())
    by_chance = x.ndim == 2 and count <= 3 * CHANCE * len(mine)
    return none if by_chance else none._replace(copies=count)


def _some(index: Indices, most: int, rng: np.random.Generator) -> Indices:
    return index if len(index) <= most else np.sort(rng.choice(index, most, replace=False))


def _near_images(one: NDArray[np.float32], two: NDArray[np.float32]) -> Near:
    return lambda rows: one[rows] @ two.T >= ALIKE


def _pictures(x: Inputs, index: Indices) -> NDArray[np.float32]:  # (N, P)
    """Small grey pictures of mean 0 and length 1; one without any contrast is 0."""
    edges = [np.unique(np.linspace(0, side, min(side, SIDE) + 1).astype(int)[:-1]) for side in x.shape[1:3]]
    found = []
    for start in range(0, len(index), BLOCK):
        grey = x[index[start : start + BLOCK]].astype(np.float32).mean(axis=3)
        for axis, at in enumerate(edges, 1):
            width = np.diff([*at, grey.shape[axis]])
            grey = np.add.reduceat(grey, at, axis=axis) / width.reshape((-1, 1) if axis == 1 else (1, -1))
        flat = grey.reshape(len(grey), -1)
        flat = flat - flat.mean(axis=1, keepdims=True)
        length = np.linalg.norm(flat, axis=1, keepdims=True)
        found.append(np.where(length > 1, flat / np.maximum(length, 1), 0).astype(np.float32))
    return np.concatenate(found)


def _near_rows(one: Inputs, two: Inputs, preprocessing: dict[str, Any]) -> Near:
    """Nothing is near where too few numbers tell rows apart."""
    slots = set(category_slots(preprocessing))
    numbers = [k for k in range(two.shape[1]) if k not in slots]
    fine = [k for k in numbers if len(np.unique(two[:, k])) > FINE]
    if len(fine) < 2:
        return lambda rows: np.zeros((len(one[rows]), len(two)), bool)
    mean, std = (np.array(each) for each in measure(two, 1.0, preprocessing))

    def standard(x: Inputs) -> NDArray[np.float64]:
        gaps = np.isnan(x[:, numbers]).astype(np.float64)  # a gap is like a gap alone
        return np.concatenate([np.nan_to_num((x - mean) / std), gaps], axis=1)

    a, b = standard(one), standard(two)
    reach = min(CLOSE * math.sqrt(len(numbers)), _by_chance(len(fine), len(two)))
    squares = (a**2).sum(axis=1)[:, None], (b**2).sum(axis=1)[None]

    def near(rows: slice) -> NDArray[np.bool_]:
        close: NDArray[np.bool_] = squares[0][rows] + squares[1] - 2 * a[rows] @ b.T <= max(reach**2, 1e-9)
        return close

    return near


def _by_chance(dimensions: int, rows: int) -> float:
    """The distance within which a normally distributed row finds one of so many others with probability CHANCE."""
    half = dimensions / 2
    ball = math.log(CHANCE / rows) + half * math.log(2 * math.pi) + math.lgamma(half + 1) - half * math.log(math.pi)
    return math.exp(ball / dimensions)
