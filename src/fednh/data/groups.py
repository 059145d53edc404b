"""Groups of samples that belong together, such as those of one patient (data.group): no division separates them.

Held-out samples, a test share and partitions consist of whole groups, so nobody is measured on a person that he was
trained on. What cannot be divided for that reason is told.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fednh.data.dataset import Dataset, Labels
from fednh.data.partitions.base import Indices, class_table


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


def torn(groups: Sequence[str], test: NDArray[np.bool_], where: str) -> list[str]:
    """A sentence if the data's own split separates groups, which only its owner can change."""
    parts = {(group, bool(there)) for group, there in zip(groups, test, strict=True)} if groups else set()
    both = [group for group, there in parts if there and (group, False) in parts]
    if not both:
        return []
    return [f"{where}: {len(both)} groups have training and test samples, so results on the test set are too good"]


def not_divided(
    data: Dataset, parts: Sequence[Indices], held_out: Sequence[Indices], names: Sequence[str], share: float
) -> list[str]:
    """What groups keep from being divided as asked, in sentences that name no group."""
    if data.group_train is None:
        return []
    found, owners = [], np.full(int(data.group_train.max()) + 1, -1)
    shared = np.zeros(len(owners), bool)
    for client, both in enumerate(zip(parts, held_out, strict=True)):
        here = np.unique(data.group_train[np.concatenate(both)])
        shared[here] |= owners[here] >= 0
        owners[here] = client
    if shared.any():
        found.append(
            f"{data.name}: {int(shared.sum())} groups have samples at several sites: one site may train on what "
            "another holds out"
        )
    whole = [name for name, held in zip(names, held_out, strict=True) if share and not len(held)]
    if whole:
        more = f" and {len(whole) - 8} more" if len(whole) > 8 else ""
        found.append(
            f"{data.name}: nothing is held out at {', '.join(whole[:8])}{more}, because no group can be spared there: "
            "some class would lose all of its training samples"
        )
    return found
