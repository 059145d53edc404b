"""Many, medium, few: the classes of a long-tailed run by their number of training samples.

The thresholds are those of the long-tail literature (Liu et al., "Large-Scale Long-Tailed Recognition in an Open
World", CVPR 2019): many have more than 100 training samples, few have fewer than 20. Where that leaves one of the three
empty, as in CIFAR-10 with an imbalance factor of 100, the classes are cut into thirds by their size instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fednh.data.partitions.longtail import LongTail
from fednh.report.load import Run

SIZES = ("many", "medium", "few")
MANY, FEW = 100, 20  # above the one, below the other


def long_tailed(run: Run) -> bool:
    """Whether a run has classes to tell apart by size, and accuracies of them."""
    if not isinstance(run.config.partition.kind, LongTail) or not run.partition["counts"]:
        return False
    return len(run.summary.get("per_class") or ()) >= len(SIZES)


def class_totals(runs: Sequence[Run]) -> NDArray[np.float64]:  # (C,)
    """Training samples of every class over all clients, mean over runs."""
    totals: NDArray[np.float64] = np.mean([np.sum(run.partition["counts"], axis=0) for run in runs], axis=0)
    return totals


def by_size(totals: NDArray[np.float64]) -> tuple[dict[str, list[int]], bool]:
    """Size -> its classes, largest first; and whether they are thirds, since a threshold would leave a size empty."""
    order = np.argsort(-totals, kind="stable")
    cuts = [int((totals > MANY).sum()), int((totals >= FEW).sum())]
    parts = np.split(order, cuts)
    thirds = not all(map(len, parts))
    if thirds:
        parts = np.array_split(order, len(SIZES))
    return {size: part.tolist() for size, part in zip(SIZES, parts, strict=True)}, thirds


def accuracy_by_size(runs: Sequence[Run]) -> list[dict[str, float]]:
    """GM by size, the mean accuracy of its classes, for each of these runs, which differ in the seed alone."""
    sizes, _ = by_size(class_totals(runs))
    found = []
    for run in runs:
        per_class = run.summary["per_class"]
        values = {size: [per_class[c] for c in classes if per_class[c] is not None] for size, classes in sizes.items()}
        found.append({size: float(np.mean(row)) for size, row in values.items() if row})
    return found
