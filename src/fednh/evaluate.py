"""Accuracy, the paper's way: one pass over the balanced test set gives all metrics; nothing here knows any method.

With `correct` and `total` per class, acc(w) = sum(w * correct) / sum(w * total), in percent:
    GM      w = 1                                    the global model
    PM(V)   w = 1 where the client owns the class    the personal model, all its classes alike
    PM(L)   w = the client's class share             the personal model, on its own class distribution
Fairness is the standard deviation of PM(L) over clients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fednh.data.batches import EVAL_BATCH, Samples


@dataclass(frozen=True)
class Personal:
    """What one client's personal model achieves, in percent."""

    client: int
    pm_v: float
    pm_l: float
    per_class: list[float]  # a class without test samples scores 0


@torch.no_grad()
def correct_per_class(predict: Callable[[Tensor], Tensor], test: Samples) -> Tensor:  # (C,)
    """How many test samples of each class `predict` (x -> logits) gets right."""
    hits = torch.zeros(test.num_classes, dtype=torch.float64)
    for x, y in zip(torch.split(test.x, EVAL_BATCH), torch.split(test.y, EVAL_BATCH), strict=True):
        right = y[predict(test.floats(x)).argmax(1) == y]
        hits += torch.bincount(right, minlength=test.num_classes).cpu()
    return hits


def total_per_class(test: Samples) -> Tensor:  # (C,)
    return torch.bincount(test.y, minlength=test.num_classes).cpu().to(torch.float64)


def accuracy(correct: Tensor, total: Tensor, weight: Tensor) -> float:
    """Weighted accuracy in percent. A model that owns no class of the test set scores 0."""
    weight = weight.to(torch.float64)
    return float(100 * (weight * correct).sum() / (weight * total).sum().clamp(min=1e-12))


def personal(client: int, correct: Tensor, total: Tensor, counts: Tensor) -> Personal:
    """PM(V) and PM(L) of one client, from its training counts per class."""
    counts = counts.cpu()
    owned = (counts > 0).to(torch.float64)
    per_class = (100 * correct / total.clamp(min=1)).tolist()
    return Personal(client, accuracy(correct, total, owned), accuracy(correct, total, counts / counts.sum()), per_class)


def mean_and_spread(values: Iterable[float]) -> tuple[float, float]:
    """Mean and population standard deviation over clients."""
    rows: Sequence[float] = list(values)
    column = torch.tensor(rows, dtype=torch.float64)
    return float(column.mean()), float(column.std(correction=0))
