"""Eq. (1): cases that can be checked by hand, and the best known spherical codes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fednh.errors import UserError
from fednh.models import prototypes
from fednh.models.prototypes import Separation, orthogonal, rotated, separated


def cosines(points: Tensor) -> Tensor:
    """Of all pairs, in float64."""
    x = points.double()
    upper = torch.triu_indices(len(x), len(x), 1)
    return (x @ x.T)[upper[0], upper[1]]


def assert_sound(found: Separation, classes: int, dim: int) -> None:
    assert found.points.shape == (classes, dim)
    assert torch.allclose(found.points.norm(dim=1), torch.ones(classes), atol=1e-6)
    if classes > 1:
        assert found.min_distance == pytest.approx(torch.pdist(found.points.double()).min().item(), abs=1e-7)
        assert found.max_cosine == pytest.approx(cosines(found.points).max().item(), abs=1e-9)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_one_class_has_no_pair() -> None:
    found = separated(1, 5)
    assert_sound(found, 1, 5)
    assert found.min_distance == math.inf


def test_two_classes_are_opposite() -> None:
    assert separated(2, 1).points.tolist() == [[1.0], [-1.0]]
    assert separated(2, 7).min_distance == pytest.approx(2.0)


def test_the_hexagon_has_side_one() -> None:
    found = separated(6, 2)
    assert_sound(found, 6, 2)
    assert found.min_distance == pytest.approx(1.0, abs=1e-6)
    assert "polygon" in found.how


@pytest.mark.parametrize(("classes", "dim"), [(3, 2), (4, 3), (10, 64), (11, 10), (100, 192)])
def test_simplex_cosines_are_all_the_same(classes: int, dim: int) -> None:
    found = separated(classes, dim)
    assert_sound(found, classes, dim)
    assert (cosines(found.points) + 1 / (classes - 1)).abs().max() < 1e-6


@pytest.mark.parametrize(("classes", "dim"), [(5, 3), (6, 3), (66, 64), (100, 64), (128, 64)])
def test_up_to_two_classes_per_dimension_stand_at_right_angles(classes: int, dim: int) -> None:
    found = separated(classes, dim)
    assert_sound(found, classes, dim)
    assert found.min_distance == pytest.approx(math.sqrt(2), abs=1e-6)
    assert found.points.sum(dim=0).abs().max() < 1e-5
    assert "orthoplex" in found.how


@pytest.mark.parametrize(
    ("classes", "dim", "degrees"),  # the best known codes: N. J. A. Sloane's tables of spherical codes
    [
        (10, 3, 66.1468),
        pytest.param(12, 3, 63.4349, marks=pytest.mark.soak),
        pytest.param(20, 3, 47.4310, marks=pytest.mark.soak),
        (10, 4, 80.4059),
    ],
)
def test_reaches_the_best_known_codes(classes: int, dim: int, degrees: float) -> None:
    found = separated(classes, dim)
    assert_sound(found, classes, dim)
    assert found.max_cosine == pytest.approx(math.cos(math.radians(degrees)), abs=5e-5)
    assert "starts" in found.how


@pytest.mark.soak
@pytest.mark.parametrize(
    ("classes", "dim", "distance"),
    [
        (13, 3, 0.9564),
        (15, 3, 0.9026),
        (24, 4, 0.9999),
        (30, 3, 0.6609),
        (120, 4, 0.6180),
        (240, 8, 0.9999),
        (200, 64, 1.3750),
        (200, 16, 1.1900),
        (1000, 64, 1.3055),
    ],
)
def test_reaches_large_targets(classes: int, dim: int, distance: float) -> None:
    found = separated(classes, dim)
    assert_sound(found, classes, dim)
    assert found.min_distance > distance


def test_the_energys_gradient_is_its_slope() -> None:
    x = torch.randn(6, 3, generator=generator(0), dtype=torch.float64).numpy().ravel()
    _, slope = prototypes._energy(x, (6, 3), 8.0)
    for k in range(x.size):
        step = 1e-6 * (torch.arange(x.size) == k).double().numpy()
        rise = prototypes._energy(x + step, (6, 3), 8.0)[0] - prototypes._energy(x - step, (6, 3), 8.0)[0]
        assert slope[k] == pytest.approx(rise / 2e-6, abs=1e-6)


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 40), st.data())
def test_closed_forms_are_sound_and_the_same_every_time(dim: int, data: st.DataObject) -> None:
    classes = data.draw(st.integers(2, 2 * dim))
    found = separated(classes, dim)
    assert_sound(found, classes, dim)
    assert torch.equal(found.points, separated(classes, dim).points)
    if dim > 2:
        assert found.max_cosine < 1e-6


@settings(deadline=None, max_examples=5)
@given(st.integers(3, 6), st.integers(1, 6))
def test_the_search_is_sound_and_the_same_every_time(dim: int, more: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prototypes, "MOST_STARTS", 2)
        patch.setattr(prototypes, "MOST_STEPS", 30)
        found, again = (prototypes._best.__wrapped__(2 * dim + more, dim) for _ in range(2))
    assert_sound(found, 2 * dim + more, dim)
    assert torch.equal(found.points, again.points)
    assert 0 < found.max_cosine < 0.75


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 30), st.integers(1, 50), st.integers(0, 2**31))
def test_rotation_keeps_every_cosine(classes: int, dim: int, seed: int) -> None:
    points = torch.nn.functional.normalize(torch.randn(classes, dim, generator=generator(seed)), dim=1)
    turned = rotated(points, generator(seed + 1))
    assert turned.dtype == points.dtype
    assert (cosines(turned) - cosines(points)).abs().max() < 1e-6
    assert torch.equal(turned, rotated(points, generator(seed + 1)))


def test_rotations_are_rotations_and_differ_by_seed() -> None:
    for seed in range(10):
        assert torch.linalg.det(rotated(torch.eye(4), generator(seed))) == pytest.approx(1.0, abs=1e-5)
    assert not torch.allclose(rotated(torch.eye(4), generator(0)), rotated(torch.eye(4), generator(1)))


@pytest.mark.parametrize(("classes", "dim"), [(1, 1), (10, 10), (10, 64), (64, 10)])
def test_orthogonal_rows(classes: int, dim: int) -> None:
    points = orthogonal(classes, dim, generator(3))
    assert points.shape == (classes, dim)
    assert torch.allclose(points.norm(dim=1), torch.ones(classes), atol=1e-6)
    assert torch.equal(points, orthogonal(classes, dim, generator(3)))
    if classes <= dim:
        assert torch.allclose(points @ points.T, torch.eye(classes), atol=1e-5)


@pytest.mark.parametrize(("classes", "dim", "word"), [(0, 3, "classes"), (3, 0, "dim"), (3, 1, "dim"), (-1, 2, "-1")])
def test_bad_input_is_named(classes: int, dim: int, word: str) -> None:
    with pytest.raises(UserError, match=word):
        separated(classes, dim)


def test_orthogonal_names_bad_input() -> None:
    with pytest.raises(UserError, match="classes = 0"):
        orthogonal(0, 3, generator(0))


def test_too_many_classes_say_what_to_do() -> None:
    with pytest.raises(UserError, match=r"raise dim to 10000 or more"):
        separated(20000, 64)


def test_a_search_is_done_once_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prototypes, "MOST_STARTS", 2)
    assert separated(9, 3) is separated(9, 3)
