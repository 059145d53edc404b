"""A sample of a test set that has the same number of every class, as far as the classes allow."""

from __future__ import annotations

import numpy as np

from fednh.data.partitions.base import Indices
from fednh.errors import UserError


def balanced_sample(labels: Indices, number: int, rng: np.random.Generator) -> Indices:
    """Indices of `number` samples in their order; a class that has too few gives all, and others give more."""
    classes, counts = np.unique(labels, return_counts=True)
    if number >= len(labels):
        return np.arange(len(labels))
    if number < len(classes):
        raise UserError(f"eval.samples = {number} is fewer than the {len(classes)} classes of the test set; raise it")
    take = _even(counts, number)
    more = rng.permutation(np.flatnonzero(counts > take))[: number - take.sum()]  # fewer than there are such classes
    take[more] += 1
    chosen = [rng.permutation(np.flatnonzero(labels == c))[:n] for c, n in zip(classes, take, strict=True)]
    return np.sort(np.concatenate(chosen))


def _even(counts: Indices, number: int) -> Indices:
    """As many of every class, or all that it has, as `number` allows."""
    left = number
    for done, count in enumerate(np.sort(counts)):
        level = left // (len(counts) - done)
        if count > level:
            break
        left -= int(count)
    return np.minimum(counts, level)
