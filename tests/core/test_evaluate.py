from __future__ import annotations

import numpy as np
import pytest
import torch

from fednh.core import evaluate
from fednh.data.batches import Samples

# A hand-made confusion: of class 0 2 of 4 right, of class 1 3 of 3, of class 2 0 of 1.
CORRECT = torch.tensor([2.0, 3.0, 0.0], dtype=torch.float64)
TOTAL = torch.tensor([4.0, 3.0, 1.0], dtype=torch.float64)


def test_gm() -> None:
    assert evaluate.accuracy(CORRECT, TOTAL, torch.ones(3)) == pytest.approx(100 * 5 / 8)


def test_pm_of_a_client_with_classes_0_and_2() -> None:
    person = evaluate.personal(7, CORRECT, TOTAL, torch.tensor([9.0, 0.0, 3.0]))
    assert person.client == 7
    assert person.pm_v == pytest.approx(100 * 2 / 5)  # (2 + 0) / (4 + 1)
    assert person.pm_l == pytest.approx(100 * (0.75 * 2) / (0.75 * 4 + 0.25 * 1))


def test_pm_l_of_equal_shares_is_pm_v() -> None:
    person = evaluate.personal(0, CORRECT, TOTAL, torch.tensor([5.0, 5.0, 0.0]))
    assert person.pm_l == pytest.approx(person.pm_v) == pytest.approx(100 * 5 / 7)


def test_a_class_without_test_samples_counts_nothing() -> None:
    total = torch.tensor([4.0, 3.0, 0.0], dtype=torch.float64)
    assert evaluate.personal(0, CORRECT, total, torch.tensor([1.0, 0.0, 1.0])).pm_v == pytest.approx(50.0)
    assert evaluate.accuracy(CORRECT, total, torch.tensor([0.0, 0.0, 1.0])) == 0.0


def test_fairness_is_the_population_standard_deviation() -> None:
    assert evaluate.mean_and_spread([60.0, 80.0, 100.0]) == pytest.approx((80.0, np.std([60, 80, 100])))


def test_correct_per_class_counts_over_batches() -> None:
    """1,000 samples, more than one batch; the model says 'class 1' whenever the feature is positive."""
    x = torch.linspace(-1, 1, 1000)[:, None]
    y = torch.arange(1000) % 2
    test = Samples(x, y, 3, torch.ones(1), torch.zeros(1), augment=False)
    hits = evaluate.correct_per_class(lambda v: torch.cat([-v, v, torch.full_like(v, -9)], 1), test)
    right_1 = int(((x[:, 0] > 0) & (y == 1)).sum())
    right_0 = int(((x[:, 0] <= 0) & (y == 0)).sum())
    assert hits.tolist() == [right_0, right_1, 0]
    assert evaluate.total_per_class(test).tolist() == [500, 500, 0]
