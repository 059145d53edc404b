"""eval.samples: a class-balanced sample of the test set, the same for all methods, said wherever its numbers are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fednh
from fednh.config import load
from fednh.data.splits import balanced_sample
from fednh.errors import UserError
from fednh.federated.setup import build_federation
from fednh.report.load import load_runs
from fednh.report.tables import accuracy_sheet, comparison_sheet, fairness_sheet, records
from tests.helpers.process import fednh as command


def counts(labels: np.ndarray, number: int, seed: int = 0) -> list[int]:
    chosen = balanced_sample(labels, number, np.random.default_rng(seed))
    assert len(chosen) == len(set(chosen.tolist())) == min(number, len(labels))
    assert (np.diff(chosen) > 0).all()
    return np.bincount(labels[chosen], minlength=labels.max() + 1).tolist()


def test_by_hand() -> None:
    labels = np.repeat([0, 1, 3], [2, 9, 20])  # nobody has class 2
    assert counts(labels, 6) == [2, 2, 0, 2]
    assert counts(labels, 12) == [2, 5, 0, 5]
    assert counts(labels, 24) == [2, 9, 0, 13]
    assert {tuple(counts(labels, 13, seed)) for seed in range(20)} == {(2, 6, 0, 5), (2, 5, 0, 6)}
    assert counts(labels, 31) == counts(labels, 99) == [2, 9, 0, 20]
    with pytest.raises(UserError, match=r"eval\.samples = 2 is fewer than the 3 classes of the test set"):
        balanced_sample(labels, 2, np.random.default_rng(0))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(8, 100), st.integers(0, 3))
def test_as_even_as_the_classes_allow(sizes: list[int], number: int, seed: int) -> None:
    """No class gives two less than another one, unless it has no more."""
    taken = counts(np.repeat(np.arange(len(sizes)), sizes), number, seed)
    assert all(here == size or here >= max(taken) - 1 for here, size in zip(taken, sizes, strict=True))


def test_the_sample_depends_on_seed_and_data_alone() -> None:
    def test_of(**more: object) -> torch.Tensor:
        return build_federation(load("digits", {"eval.samples": 50, **more})).test.x

    first = test_of()
    assert len(first) == 50
    assert torch.equal(first, test_of(**{"method.name": "fedavg", "rounds": 7, "partition.clients": 5}))
    assert not torch.equal(first, test_of(seed=1))


def test_every_table_says_so_and_mixes_nothing(tmp_path: Path) -> None:
    settings = {"method.name": "fedavg", "rounds": 1, "train.epochs": 1, "partition.clients": 4, "workers": 1}
    fednh.run({**settings}, out=tmp_path / "all")
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    ended = command(["run", *words, "--set", "eval.samples=50", "--out", str(tmp_path / "some")], tmp_path / "io")
    assert ended.code == 0, ended.stderr
    assert "evaluated on 50 of 355 test samples, classes alike (eval.samples)" in ended.stdout
    said = "seeded sample of the test set with equal numbers of every class (eval.samples; "
    assert f"{said}n = 50)" in " ".join(ended.stdout.split())
    summary = json.loads((tmp_path / "some/summary.json").read_text())
    assert summary["test_samples"] == 50
    assert {value * 5 / 100 for value in summary["per_class"]} <= {0.0, 1.0, 2.0, 3.0, 4.0, 5.0}, "5 of each class"
    assert "test_samples" not in json.loads((tmp_path / "all/summary.json").read_text())
    every, some, both = (
        load_runs([tmp_path / name for name in names]) for names in (["all"], ["some"], ["all", "some"])
    )
    for sheet in (accuracy_sheet, fairness_sheet, comparison_sheet):
        assert said not in sheet(every).note
        assert f"{said}n = 50)" in sheet(some).note
        assert f"{said}some runs: n = 50)" in sheet(both).note
    labels = [row[0].text for row in accuracy_sheet(both).rows]
    assert labels == ["FedAvg, eval.samples=50", "FedAvg, eval.samples=default"]
    assert all("eval.samples=50" in record["settings"] for record in records(some))
