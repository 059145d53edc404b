"""What a person may say about data of their own: the settings below `data.` that concern reading them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from fednh.core.seeding import numpy_rng
from fednh.data.dataset import Dataset, Labels
from fednh.data.scaling import measure
from fednh.errors import UserError


@dataclass(frozen=True)
class Options:
    size: tuple[int, int] | None = None  # height and width of images
    label: str | None = None
    site: str | None = None
    classes: tuple[str, ...] = ()
    columns: Mapping[str, str | Sequence[str]] = field(default_factory=dict)
    test_share: float = 0.0
    encoding: str | None = None  # of CSV files; None: UTF-8


NONE = Options()


def numbered(names: Sequence[str], agreed: Sequence[str], where: str) -> tuple[Labels, tuple[str, ...]]:
    """Class names as numbers, and the classes in their order: as agreed, else sorted (numbers as numbers)."""
    found = set(names)
    classes = tuple(agreed) or tuple(in_order(found))
    if len(set(classes)) < len(classes):
        raise UserError(f"data.classes names a class twice: {', '.join(classes)}")
    if strangers := in_order(found - set(classes)):
        raise UserError(f"{where} holds the class {strangers[0]!r}, which is not one of data.classes")
    if len(classes) < 2:
        raise UserError(
            f"{where} holds only the class {classes[0]!r}; training needs at least two, and a site that has one names "
            "all in data.classes"
        )
    number = {name: k for k, name in enumerate(classes)}
    return np.array([number[name] for name in names], np.int64), classes


def in_order(names: set[str]) -> list[str]:
    """Sorted; as numbers where all are."""
    numbers = all(n.isdecimal() and n.isascii() for n in names)
    return sorted(names, key=lambda n: (int(n) if numbers else 0, n))


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
