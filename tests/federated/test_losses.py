from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from fednh.methods.losses import FEW_CLASSES, balanced_softmax, class_means, cross_entropy, squared_distance, unit


def scores(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return x


def test_cross_entropy_gives_one_value_a_sample() -> None:
    x = torch.tensor([[0.0, 0.0], [math.log(3), 0.0]])
    loss = cross_entropy(scores)({}, x, torch.tensor([0, 0]))
    torch.testing.assert_close(loss, torch.tensor([math.log(2), math.log(4 / 3)]))


@pytest.mark.parametrize("classes", [2, 10, FEW_CLASSES - 1, FEW_CLASSES, 100])
def test_cross_entropy_is_torchs(classes: int) -> None:
    x = 5 * torch.randn(64, classes, generator=torch.Generator().manual_seed(0))
    y = torch.arange(64) % classes
    ours, torchs = x.clone().requires_grad_(), x.clone().requires_grad_()
    values, expected = cross_entropy(scores)({}, ours, y), F.cross_entropy(torchs, y, reduction="none")
    torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-6)
    gradients = [torch.autograd.grad(v.mean(), p)[0] for v, p in ((values, ours), (expected, torchs))]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-8)


def test_balanced_softmax_by_hand() -> None:
    """softmax weights e^0 * 3/4 and e^0 * 1/4: the loss of the rare class is log 4. A class without share drops out."""
    x = torch.zeros(2, 3)
    loss = balanced_softmax(scores, torch.tensor([0.75, 0.25, 0.0]))({}, x, torch.tensor([0, 1]))
    torch.testing.assert_close(loss, torch.tensor([math.log(4 / 3), math.log(4)]))


def test_balanced_softmax_has_finite_gradients_for_missing_classes() -> None:
    x = torch.zeros(1, 3, requires_grad=True)
    balanced_softmax(scores, torch.tensor([0.5, 0.5, 0.0]))({}, x, torch.tensor([0])).sum().backward()
    assert x.grad is not None
    assert x.grad[0].tolist() == [-0.5, 0.5, 0.0]


def test_squared_distance_uses_the_names_of_the_first() -> None:
    a, b = {"x": torch.tensor([1.0, 2.0])}, {"x": torch.tensor([0.0, 0.0]), "y": torch.tensor([9.0])}
    assert squared_distance(a, b).item() == 5.0


def test_class_means_by_hand_over_two_batches_with_padding() -> None:
    batches = [
        (torch.tensor([[1.0, 0.0], [3.0, 0.0]]), torch.tensor([0, 0]), torch.tensor([1.0, 1.0])),
        (torch.tensor([[5.0, 2.0], [0.0, 4.0], [99.0, 99.0]]), torch.tensor([0, 2, 1]), torch.tensor([1.0, 1.0, 0.0])),
    ]
    means = class_means(lambda x: x, batches, torch.tensor([3.0, 0.0, 1.0]))
    torch.testing.assert_close(means, torch.tensor([[3.0, 2 / 3], [0.0, 0.0], [0.0, 4.0]]))


def test_unit_keeps_zero_rows() -> None:
    torch.testing.assert_close(unit(torch.tensor([[3.0, 4.0], [0.0, 0.0]])), torch.tensor([[0.6, 0.8], [0.0, 0.0]]))
