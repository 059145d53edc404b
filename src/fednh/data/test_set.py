"""A test set that is cut off training samples, the same for every seed; and one that joins them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fednh.core.seeding import numpy_rng
from fednh.data.dataset import Dataset, Labels
from fednh.data.groups import cut_off
from fednh.data.scaling import measure
from fednh.errors import UserError


def test_rows(labels: Labels, share: float, groups: Labels | None) -> NDArray[np.bool_]:
    """Marks `share` of every class, the same rows for every seed; classes keep some, and groups all or none."""
    chosen, rng = np.zeros(len(labels), bool), numpy_rng(0, "test share")
    if groups is not None:
        chosen = cut_off(labels, groups, share, rng)
        if not chosen.any():
            raise UserError(
                f"data.test_share = {share:g}: the {len(np.unique(groups))} groups of data.group are too few or too "
                "large to cut a test set off without separating one; leave it out"
            )
        return chosen
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        chosen[rng.choice(members, min(int(share * len(members) + 0.5), len(members) - 1), replace=False)] = True
    return chosen


def with_test_set(data: Dataset, share: float) -> Dataset:
    """`share` of every class of a data set without a test set, cut off as one."""
    if not share or len(data.y_test):
        return data
    test = test_rows(data.y_train, share, data.group_train)
    site, group = data.site_train, data.group_train
    mean, std = measure(data.x_train[~test], data.scale, data.preprocessing) if data.fitted else (data.mean, data.std)
    return replace(
        data,
        x_train=data.x_train[~test],
        y_train=data.y_train[~test],
        x_test=data.x_train[test],
        y_test=data.y_train[test],
        site_train=None if site is None else site[~test],
        site_test=None if site is None else site[test],
        group_train=None if group is None else group[~test],
        mean=mean,
        std=std,
    )


def merged(data: Dataset, share: float = 0.0) -> Dataset:
    """Training and test samples as one set, as some libraries divide published data; `share` is data.test_share."""
    if share:
        raise UserError(
            f"data.merge_test leaves no test set, but data.test_share = {share:g} cuts one off; leave one of them out"
        )
    if not len(data.y_test):
        return data
    if data.group_train is not None:
        raise UserError(
            f"data.merge_test: {data.name} does not say to which groups of data.group its test samples belong; "
            "leave one of them out"
        )
    site = data.site_train
    if site is not None and (data.site_test is None or data.site_test.min() < 0):
        raise UserError(
            f"data.merge_test: {data.name} has test samples of none of its sites, so no client could hold them; "
            "leave it out"
        )
    x = np.concatenate([data.x_train, data.x_test])
    mean, std = measure(x, data.scale, data.preprocessing) if data.fitted else (data.mean, data.std)
    words = f"{len(data.y_test):,} test samples were merged with {len(data.y_train):,} training samples"
    return replace(
        data,
        x_train=x,
        y_train=np.concatenate([data.y_train, data.y_test]),
        x_test=data.x_test[:0],
        y_test=data.y_test[:0],
        site_train=None if site is None or data.site_test is None else np.concatenate([site, data.site_test]),
        site_test=None if data.site_test is None else data.site_test[:0],
        mean=mean,
        std=std,
        notes=(*data.notes, f"{data.name}: {words} (data.merge_test): there is no common test set"),
    )
