"""A test set that is cut off training samples, the same for every seed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fednh.core.seeding import numpy_rng
from fednh.data.dataset import Dataset, Labels
from fednh.data.scaling import measure


def test_rows(labels: Labels, share: float) -> NDArray[np.bool_]:
    """Marks `share` of every class, the same rows for every seed; a class keeps a training sample."""
    chosen, rng = np.zeros(len(labels), bool), numpy_rng(0, "test share")
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        chosen[rng.choice(members, min(int(share * len(members) + 0.5), len(members) - 1), replace=False)] = True
    return chosen


def with_test_set(data: Dataset, share: float) -> Dataset:
    """`share` of every class of a data set without a test set, cut off as one."""
    if not share or len(data.y_test):
        return data
    test = test_rows(data.y_train, share)
    site = data.site_train
    mean, std = measure(data.x_train[~test], data.scale, data.preprocessing) if data.fitted else (data.mean, data.std)
    return replace(
        data,
        x_train=data.x_train[~test],
        y_train=data.y_train[~test],
        x_test=data.x_train[test],
        y_test=data.y_train[test],
        site_train=None if site is None else site[~test],
        site_test=None if site is None else site[test],
        mean=mean,
        std=std,
    )
