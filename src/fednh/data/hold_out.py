"""A client's own samples that it does not train on, but measures on."""

from __future__ import annotations

import numpy as np

from fednh.data.groups import cut_off
from fednh.data.partitions.base import Indices

DEFAULT_SHARE = 0.2  # of each client's classes, where there is no balanced test set


def hold_out(
    labels: Indices, part: Indices, share: float, rng: np.random.Generator, groups: Indices | None = None
) -> tuple[Indices, Indices]:
    """A client's samples to train on and to measure on: `share` of each class, to the nearest whole number.

    Every class keeps a training sample, so a class with one sample is not measured. Samples of one group stay together.
    """
    if share == 0 or not len(part):
        return part, part[:0]
    if groups is not None:
        held_out = cut_off(labels[part], groups[part], share, rng)
        return np.sort(part[~held_out]), np.sort(part[held_out])
    held = []
    for label in np.unique(labels[part]):
        members = part[labels[part] == label]
        count = min(int(share * len(members) + 0.5), len(members) - 1)
        held.append(rng.choice(members, count, replace=False))
    chosen = np.sort(np.concatenate(held)) if held else part[:0]
    return np.setdiff1d(part, chosen), chosen
