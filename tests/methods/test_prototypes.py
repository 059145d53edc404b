"""Eq. (1): cases that can be checked by hand, the best known spherical codes, and the cache."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from fednh.errors import UserError
from fednh.methods import prototypes
from fednh.methods.prototypes import Separation, orthogonal, rotated, separated


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
    found = separated(1, 5, cache=None)
    assert_sound(found, 1, 5)
    assert found.min_distance == math.inf


def test_two_classes_are_opposite() -> None:
    assert separated(2, 1, cache=None).points.tolist() == [[1.0], [-1.0]]
    assert separated(2, 7, cache=None).min_distance == pytest.approx(2.0)


def test_the_hexagon_has_side_one() -> None:
    found = separated(6, 2, cache=None)
    assert_sound(found, 6, 2)
    assert found.min_distance == pytest.approx(1.0, abs=1e-6)
    assert "polygon" in found.how


@pytest.mark.parametrize(("classes", "dim"), [(3, 2), (4, 3), (10, 64), (11, 10), (100, 192)])
def test_simplex_cosines_are_all_the_same(classes: int, dim: int) -> None:
    found = separated(classes, dim, cache=None)
    assert_sound(found, classes, dim)
    assert (cosines(found.points) + 1 / (classes - 1)).abs().max() < 1e-6


@pytest.mark.parametrize(("classes", "dim"), [(5, 3), (6, 3), (66, 64), (100, 64), (128, 64)])
def test_up_to_two_classes_per_dimension_stand_at_right_angles(classes: int, dim: int) -> None:
    found = separated(classes, dim, cache=None)
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
    found = separated(classes, dim, cache=None)
    assert_sound(found, classes, dim)
    assert math.degrees(math.acos(found.max_cosine)) == pytest.approx(degrees, abs=2e-4)
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
        (200, 16, 1.2247),
        (1000, 64, 1.3228),
    ],
)
def test_reaches_large_targets(classes: int, dim: int, distance: float) -> None:
    found = separated(classes, dim, cache=None)
    assert_sound(found, classes, dim)
    assert found.min_distance > distance


@pytest.mark.parametrize(("classes", "dim"), [(288, 16), (1000, 64), (600, 256)])
def test_unbiased_bases_have_one_over_the_root_of_the_dimension(classes: int, dim: int) -> None:
    points = prototypes._unbiased_bases(classes, dim)
    assert points is not None
    assert points.shape == (classes, dim)
    found = torch.unique(cosines(torch.from_numpy(points)).mul(math.sqrt(dim)).round(decimals=9).abs())
    assert found.tolist() == [0.0, 1.0, math.sqrt(dim)]  # within a basis, between bases, a vector and its opposite
    assert cosines(torch.from_numpy(points)).max() < 1 / math.sqrt(dim) + 1e-9


@pytest.mark.parametrize(("classes", "dim"), [(31, 16), (289, 16), (9, 4), (50, 8), (50, 20)])
def test_unbiased_bases_are_not_claimed_where_they_do_not_exist(classes: int, dim: int) -> None:
    assert (prototypes._unbiased_bases(classes, dim) is None) == (dim != 16 or classes > 288)


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
    found = separated(classes, dim, cache=None)
    assert_sound(found, classes, dim)
    assert torch.equal(found.points, separated(classes, dim, cache=None).points)
    if dim > 2:
        assert found.max_cosine < 1e-6


@settings(deadline=None, max_examples=5)
@given(st.integers(3, 6), st.integers(1, 6))
def test_the_search_is_sound_and_the_same_every_time(dim: int, more: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prototypes, "MOST_STARTS", 2)
        patch.setattr(prototypes, "MOST_STEPS", 30)
        found, again = (separated(2 * dim + more, dim, cache=None) for _ in range(2))
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
        separated(classes, dim, cache=None)


def test_orthogonal_names_bad_input() -> None:
    with pytest.raises(UserError, match="classes = 0"):
        orthogonal(0, 3, generator(0))


def test_too_many_classes_say_what_to_do() -> None:
    with pytest.raises(UserError, match=r"raise dim to 10000 or more"):
        separated(20000, 64, cache=None)


def test_too_many_classes_to_search_still_have_unbiased_bases() -> None:
    assert separated(5000, 256, cache=None).max_cosine == pytest.approx(1 / 16, abs=1e-6)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prototypes, "MOST_STARTS", 2)


def forbid_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(classes: int, dim: int) -> Separation:
        raise AssertionError("searched although the cache has it")

    monkeypatch.setattr(prototypes, "_best", fail)


@pytest.mark.usefixtures("quick")
def test_the_second_call_reads_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = separated(10, 3, cache=tmp_path / "new" / "folder")
    assert "cache" not in first.how
    assert [file.name for file in (tmp_path / "new" / "folder").iterdir()] == ["v1-10x3.safetensors"]
    forbid_search(monkeypatch)
    second = separated(10, 3, cache=tmp_path / "new" / "folder")
    assert torch.equal(first.points, second.points)
    assert (first.min_distance, first.max_cosine) == (second.min_distance, second.max_cosine)
    assert second.how == f"{first.how}; read from the cache"


@pytest.mark.usefixtures("quick")
def test_the_environment_names_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDNH_CACHE", str(tmp_path))
    separated(9, 3)
    assert (tmp_path / "prototypes" / "v1-9x3.safetensors").exists()


def test_closed_forms_are_not_cached(tmp_path: Path) -> None:
    for classes, dim in ((1, 3), (4, 3), (6, 3), (9, 2)):
        separated(classes, dim, cache=tmp_path)
    assert not list(tmp_path.iterdir())


def stored(file: Path, points: Tensor, distance: str) -> None:
    save_file({"points": points}, file, {"how": "made up", "distance": distance})


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "fault", ["empty", "garbage", "truncated", "shape", "long rows", "nan", "name", "bare", "moved"]
)
def test_a_broken_cache_file_is_made_again(tmp_path: Path, fault: str) -> None:
    good = separated(10, 3, cache=tmp_path)
    file = tmp_path / "v1-10x3.safetensors"
    distance = f"{good.min_distance:.6f}"
    match fault:
        case "empty":
            file.write_bytes(b"")
        case "garbage":
            file.write_bytes(b"not a tensor" * 100)
        case "truncated":
            file.write_bytes(file.read_bytes()[:-7])
        case "shape":
            stored(file, good.points[:9].clone(), distance)
        case "long rows":
            stored(file, good.points * 2, distance)
        case "nan":
            stored(file, good.points * math.nan, distance)
        case "name":
            save_file({"other": good.points}, file, {"how": "made up", "distance": distance})
        case "bare":
            save_file({"points": good.points}, file)
        case "moved":  # unit rows, but not the ones that were measured
            stored(file, torch.nn.functional.normalize(torch.randn(10, 3, generator=generator(0)), dim=1), distance)
    again = separated(10, 3, cache=tmp_path)
    assert "cache" not in again.how
    assert torch.equal(again.points, good.points)
    assert "cache" in separated(10, 3, cache=tmp_path).how


@pytest.mark.usefixtures("quick")
def test_a_read_only_folder_is_no_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        assert_sound(separated(10, 3, cache=tmp_path), 10, 3)
        if os.geteuid() != 0:  # root writes anywhere
            assert not list(tmp_path.iterdir())
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.usefixtures("quick")
def test_a_folder_that_cannot_exist_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert_sound(separated(10, 3, cache=tmp_path / "file" / "cache"), 10, 3)
    (tmp_path / "v1-10x3.safetensors").mkdir()
    assert_sound(separated(10, 3, cache=tmp_path), 10, 3)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "v1-10x3.safetensors"]
