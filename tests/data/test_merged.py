"""data.merge_test: the test part joins the training part before samples are divided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fednh.config import load as load_config
from fednh.data.dataset import Dataset
from fednh.data.scaling import measure
from fednh.data.sources.registry import load, taken
from fednh.data.splits import merged
from fednh.errors import UserError
from fednh.federated.setup import build_federation


def small(**more: Any) -> Dataset:
    """Four training and two test samples of two classes."""
    x = np.arange(12, dtype=np.float32).reshape(6, 2)
    y = np.array([0, 1, 0, 1, 1, 0])
    return Dataset("small", x[:4], y[:4], x[4:], y[4:], ("a", "b"), (0.0, 0.0), (1.0, 1.0), scale=1.0, **more)


def test_all_samples_are_training_samples_in_their_order() -> None:
    found = merged(small())
    np.testing.assert_array_equal(found.x_train, np.arange(12).reshape(6, 2))
    assert found.y_train.tolist() == [0, 1, 0, 1, 1, 0]
    assert len(found.x_test) == len(found.y_test) == 0
    assert (found.mean, found.std) == ((0.0, 0.0), (1.0, 1.0))
    assert found.notes == (
        "small: 2 test samples were merged with 4 training samples (data.merge_test): there is no common test set",
    )
    assert merged(found) is found


def test_measured_statistics_are_those_of_all_samples() -> None:
    found = merged(small(fitted=True))
    assert (found.mean, found.std) == measure(np.arange(12, dtype=np.float32).reshape(6, 2), 1.0)


def test_sites_take_their_test_samples() -> None:
    sites: dict[str, Any] = {"sites": ("n", "s"), "site_train": np.array([0, 0, 1, 1])}
    assert merged(small(**sites, site_test=np.array([1, 0]))).site_train.tolist() == [0, 0, 1, 1, 1, 0]  # type: ignore[union-attr]
    for nobody in (None, np.array([1, -1])):
        with pytest.raises(UserError, match="test samples of none of its sites"):
            merged(small(**sites, site_test=nobody))


def test_what_contradicts_it_is_refused() -> None:
    with pytest.raises(UserError, match=r"data.test_share = 0.2 cuts one off"):
        merged(small(), 0.2)
    with pytest.raises(UserError, match="does not say to which groups"):
        merged(small(group_train=np.arange(4)))


def test_every_kind_of_source_heeds_it(tmp_path: Path) -> None:
    data = small()
    np.savez(tmp_path / "s.npz", **{k: getattr(data, k) for k in ("x_train", "y_train", "x_test", "y_test")})
    settings = {"merge_test": True}
    assert len(load("digits", tmp_path, settings).y_train) == 1797
    assert len(load(f"npz:{tmp_path / 's.npz'}", tmp_path, settings).y_train) == 6
    assert len(taken((data.x_train, data.y_train, data.x_test, data.y_test), settings).y_train) == 6
    assert len(load("digits", tmp_path, {}).y_train) == 1442


def test_every_client_holds_out_its_share_of_the_merged_set() -> None:
    given = {"data.merge_test": True, "data.holdout": 0.25, "partition.beta": 0.1, "partition.min_classes": 1}
    fed = build_federation(load_config("digits", given))
    owned = np.array([[len(part), len(held)] for part, held in zip(fed.parts, fed.held_out, strict=True)])
    assert owned.sum() == 1797
    assert len(fed.test) == 0
    for part, held in zip(fed.parts, fed.held_out, strict=True):
        train, out = (np.bincount(fed.dataset.y_train[index], minlength=10) for index in (part, held))
        assert (np.abs(out - 0.25 * (train + out)) <= 0.5 + (train + out == 1)).all()
