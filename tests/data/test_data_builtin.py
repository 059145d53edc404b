"""The sets that need no file."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.datasets import load_digits

from fednh.data.sources import builtin


def test_digits_is_a_stratified_split_of_all_images() -> None:
    found = builtin.digits()
    assert len(found.y_train) + len(found.y_test) == 1797
    assert found.shape == (1, 8, 8)
    assert found.x_train.max() == found.scale == 16
    assert found.classes == tuple("0123456789")
    share = np.bincount(found.y_test) / (np.bincount(found.y_train) + np.bincount(found.y_test))
    np.testing.assert_allclose(share, 0.2, atol=0.005)
    scaled = found.x_train / found.scale
    np.testing.assert_allclose([found.mean[0], found.std[0]], [scaled.mean(), scaled.std()])


def test_digits_is_learnable_by_its_nearest_class_mean() -> None:
    """Images and labels belong together in both parts."""
    found = builtin.digits()
    train, test = (x.reshape(len(x), -1).astype(float) for x in (found.x_train, found.x_test))
    means = np.stack([train[found.y_train == c].mean(axis=0) for c in range(10)])
    nearest = ((test[:, np.newaxis] - means) ** 2).sum(axis=-1).argmin(axis=1)
    assert (nearest == found.y_test).mean() > 0.85


@pytest.mark.parametrize("lies_elsewhere", [False, True])
def test_digits_are_scikit_learns_in_its_order(lies_elsewhere: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read from its file, or through its function should the file lie elsewhere one day."""
    images, labels = load_digits(return_X_y=True)
    if lies_elsewhere:
        monkeypatch.setattr(builtin, "find_spec", lambda name: None)
    np.testing.assert_array_equal(builtin._digits_table(), np.column_stack([images, labels]))


@pytest.mark.parametrize(
    ("imbalanced", "sizes"),
    [(False, [3000] * 6), (True, [3000, 1500, 750, 375, 187, 93])],
    ids=["balanced", "imbalanced"],
)
def test_spiral_sizes(imbalanced: bool, sizes: list[int]) -> None:
    found = builtin.spiral(imbalanced=imbalanced)
    assert np.bincount(found.y_train).tolist() == sizes
    assert np.bincount(found.y_test).tolist() == [3000] * 6
    assert found.x_train.dtype == np.float32
    assert found.shape == (2,)
    assert (found.mean, found.std, found.scale) == ((0, 0), (1, 1), 1)


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_spiral_radius_and_angle_follow_the_arm(noise: float) -> None:
    found = builtin.spiral(noise=noise)
    for k in range(6):
        x, y = found.x_train[found.y_train == k].T.astype(float)
        np.testing.assert_allclose(np.hypot(x, y), np.linspace(1, 10, 3000), atol=1e-4)
        turned = np.arctan2(x, y) - np.linspace(k, k + 1, 3000) * np.pi / 3  # the paper's x is r sin(angle)
        off = (turned + 1e-5) % (2 * np.pi) - 1e-5
        assert off.min() >= -1e-5
        assert off.max() <= noise + 1e-5
        assert off.max() > 0.9 * noise - 1e-9


def test_spiral_is_the_same_every_time_and_its_parts_are_different_draws() -> None:
    first, again, other = builtin.spiral(), builtin.spiral(), builtin.spiral(seed=1)
    np.testing.assert_array_equal(first.x_train, again.x_train)
    np.testing.assert_array_equal(first.x_test, again.x_test)
    assert not np.isin(first.x_test[:, 0], first.x_train[:, 0]).all()
    assert np.abs(first.x_train - first.x_test).max() > 0.1
    assert np.abs(first.x_train - other.x_train).max() > 0.1
