"""Which samples are trained on and which are measured on: held-out samples, test sets, balanced samples of one.

Groups of samples that belong together, such as those of one patient (data.group), are never separated: held-out
samples, a test share and partitions consist of whole groups, so no model is measured on a person that it was trained
on. Where that prevents a division, a warning says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fednh.data.dataset import Dataset, Inputs, Labels, select_rows
from fednh.data.partitions import Indices, class_table
from fednh.data.scaling import measure
from fednh.data.sources.columns import numbered_sites
from fednh.errors import DataError
from fednh.seeding import numpy_rng
from fednh.text import some

FEWEST_HELD = 5  # samples that a site must hold out to count in means over sites
DEFAULT_SHARE = 0.2  # of each client's classes, where there is no balanced test set


def numbered_groups(names: Sequence[str]) -> Labels:
    """The group of every sample as a number."""
    return np.unique(np.array(names, dtype=str), return_inverse=True)[1].astype(np.int64)


def cut_off(labels: Indices, groups: Indices, share: float, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Marks whole groups with about `share` of every class; every class keeps a sample that is not marked.

    Groups are looked at in a random order, and one is taken if that brings the classes nearer to their shares. Where
    every sample is a group of its own, these are the numbers that are cut off without groups.
    """
    group, y = (np.unique(values, return_inverse=True)[1] for values in (groups, labels))
    table = class_table(y, group, int(group.max()) + 1)  # (G, C)
    total = table.sum(axis=0)
    wanted = np.minimum((share * total + 0.5).astype(np.int64), total - 1)
    held, chosen = np.zeros_like(total), np.zeros(len(table), bool)
    for at in rng.permutation(len(table)):
        more = held + table[at]
        if (more[table[at] > 0] < total[table[at] > 0]).all() and _away(more, wanted) < _away(held, wanted):
            held, chosen[at] = more, True
    marked: NDArray[np.bool_] = chosen[group]
    return marked


def _away(held: Indices, wanted: Indices) -> int:
    return int(np.abs(wanted - held).sum())


def from_rows(
    name: str,
    x: Inputs,
    y: Labels,
    test: NDArray[np.bool_],
    sites: Sequence[str | None],
    groups: Sequence[str],
    where: str,
    **facts: Any,
) -> Dataset:
    """A data set of samples of which `test` marks the test samples, with the site and the group of each.

    All sites are None where samples do not name them; `groups` is empty where they belong to none. `facts` are other
    fields of the data set.
    """
    known, site = numbered_sites(sites, test)
    facts["warnings"] = (*separated_groups(groups, test, where), *facts.get("warnings", ()))
    return Dataset(
        name,
        x[~test],
        y[~test],
        x[test],
        y[test],
        sites=known,
        site_train=site[~test] if known else None,
        site_test=site[test] if known else None,
        group_train=numbered_groups(groups)[~test] if groups else None,
        **facts,
    )


def separated_groups(groups: Sequence[str], test: NDArray[np.bool_], where: str) -> list[str]:
    """A warning if the data's own split separates groups, which only its owner can change."""
    parts = {(group, bool(is_test)) for group, is_test in zip(groups, test, strict=True)} if groups else set()
    both = [group for group, is_test in parts if is_test and (group, False) in parts]
    if not both:
        return []
    return [f"{where}: {len(both)} groups have training and test samples, so results on the test set are too good"]


def not_divided(
    data: Dataset, parts: Sequence[Indices], held_out: Sequence[Indices], names: Sequence[str], share: float
) -> list[str]:
    """Warnings, which name no group, where groups prevent the division that was asked for."""
    if data.group_train is None:
        return []
    warnings, owners = [], np.full(int(data.group_train.max()) + 1, -1)
    shared = np.zeros(len(owners), bool)
    for client, both in enumerate(zip(parts, held_out, strict=True)):
        here = np.unique(data.group_train[np.concatenate(both)])
        shared[here] |= owners[here] >= 0
        owners[here] = client
    if shared.any():
        warnings.append(
            f"{data.name}: {int(shared.sum())} groups have samples at several sites: one site may train on what "
            "another holds out"
        )
    if whole := [name for name, held in zip(names, held_out, strict=True) if share and not len(held)]:
        warnings.append(
            f"{data.name}: nothing is held out at {some(whole, 8)}, because no group can be spared there: "
            "some class would lose all of its training samples"
        )
    return warnings


def balanced_sample(labels: Indices, number: int, rng: np.random.Generator) -> Indices:
    """Indices, in order, of `number` samples, equally many of each class; classes with fewer give all, others more."""
    classes, counts = np.unique(labels, return_counts=True)
    if number >= len(labels):
        return np.arange(len(labels))
    if number < len(classes):
        raise DataError(f"eval.samples = {number} is fewer than the {len(classes)} classes of the test set; raise it")
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


def fold_of(labels: Indices, groups: Indices | None, folds: int, rng: np.random.Generator) -> Indices:
    """The fold of every sample: each has about as many of every class, and samples of one group are in one fold."""
    order = rng.permutation(len(labels))
    if groups is None:
        order = order[np.argsort(labels[order], kind="stable")]  # class after class, dealt out in turn
        fold = np.empty(len(labels), np.int64)
        fold[order] = np.arange(len(labels)) % folds
        return fold
    group, y = (np.unique(values, return_inverse=True)[1] for values in (groups, labels))
    table = class_table(y, group, int(group.max()) + 1)  # (G, C)
    share = table / table.sum(axis=0)
    filled, chosen = np.zeros((folds, table.shape[1])), np.zeros(len(table), np.int64)
    shuffled = rng.permutation(len(table))
    for at in shuffled[np.argsort(-table[shuffled].sum(axis=1), kind="stable")]:  # the largest first
        chosen[at] = np.argmin(((filled + share[at]) ** 2 - filled**2).sum(axis=1))
        filled[chosen[at]] += share[at]
    return chosen[group]


def limited(labels: Indices, part: Indices, limit: int, rng: np.random.Generator) -> Indices:
    """`limit` of a client's training samples, or all: classes by their shares, and part of what any larger limit gives.

    The samples of a class with n stand at 1/2n, 3/2n, ... of a line from 0 to 1, in random order; the first are taken.
    Of classes that stand at one place a random one comes first.
    """
    place, rank = np.empty(len(part)), np.empty(len(part), np.int64)
    for turn, label in enumerate(rng.permutation(np.unique(labels[part]))):
        members = rng.permutation(np.flatnonzero(labels[part] == label))
        place[members], rank[members] = (np.arange(len(members)) + 0.5) / len(members), turn
    return np.sort(part[np.lexsort((rank, place))[:limit]])


def held_by_sites(data: Dataset) -> Dataset:
    """A set whose test samples name their sites, as one in which each site holds its own out, whatever the seed."""
    both = merged(data)
    held = np.arange(len(both.y_train)) >= len(data.y_train)
    words = f"{data.name}: its sites hold out the {len(data.y_test):,} test samples of the published split"
    return replace(both, held_train=held, notes=(*data.notes, words))


def hold_out_fold(
    labels: Indices, part: Indices, folds: int, fold: int, rng: np.random.Generator, groups: Indices | None = None
) -> tuple[Indices, Indices]:
    """A client's samples to train on and to measure on: one of its folds. Over all folds each is measured once."""
    if not len(part):
        return part, part
    held = fold_of(labels[part], None if groups is None else groups[part], folds, rng) == fold
    return part[~held], part[held]


def test_rows(labels: Labels, share: float, groups: Labels | None) -> NDArray[np.bool_]:
    """Marks a test set as `hold_out` chooses it, the same for every seed."""
    _, chosen = hold_out(labels, np.arange(len(labels)), share, numpy_rng(0, "test share"), groups)
    if groups is not None and not len(chosen):
        raise DataError(
            f"data.test_share = {share:g}: the {len(np.unique(groups))} groups of data.group are too few or too "
            "large to cut a test set off without separating one; leave it out"
        )
    return np.isin(np.arange(len(labels)), chosen)


def with_test_set(data: Dataset, share: float) -> Dataset:
    """`share` of every class of a data set without a test set, cut off as one."""
    if not share or len(data.y_test):
        return data
    test = test_rows(data.y_train, share, data.group_train)
    mean, std = measure(data.x_train[~test], data.scale, data.preprocessing) if data.fitted else (data.mean, data.std)
    return replace(
        select_rows(data, ~test),
        x_test=data.x_train[test],
        y_test=data.y_train[test],
        site_test=None if data.site_train is None else data.site_train[test],
        mean=mean,
        std=std,
    )


def merged(data: Dataset, share: float = 0.0) -> Dataset:
    """Training and test samples as one set, as some libraries divide published data; `share` is data.test_share."""
    if share:
        raise DataError(
            f"data.merge_test leaves no test set, but data.test_share = {share:g} cuts one off; leave one of them out"
        )
    if not len(data.y_test):
        return data
    if data.views is not None:
        raise DataError(
            f"data.merge_test: {data.name} has further views of its training samples alone; set it when their features "
            "are computed"
        )
    if data.group_train is not None:
        raise DataError(
            f"data.merge_test: {data.name} does not say to which groups of data.group its test samples belong; "
            "leave one of them out"
        )
    site = data.site_train
    if site is not None and (data.site_test is None or data.site_test.min() < 0):
        raise DataError(
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
