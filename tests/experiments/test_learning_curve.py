"""How many samples a site needs: nested samples, the answer by hand, and the command on digits."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fednh.config import load
from fednh.data.splits import limited
from fednh.errors import UserError
from fednh.experiments.learning_curve import Accuracy, _Measured, _Size, answer
from fednh.federated.setup import build_federation, divide, load_data
from fednh.flower.deploy.scaffold import read_config
from tests.helpers.process import fednh

QUICK = ["--rounds", "1", "--clients", "3", "--epochs", "1", "--seeds", "1", "--set", "partition.name=iid"]


def test_shares_by_hand() -> None:
    """Six of class 0 stand at 1/12, 3/12, ... and three of class 1 at 1/6, 3/6, 5/6: the order is 0 1 0 0 1 0 0 1 0."""
    labels = np.array([0] * 6 + [1] * 3)
    sizes = [
        np.bincount(labels[limited(labels, np.arange(9), n, np.random.default_rng(0))], minlength=2).tolist()
        for n in range(1, 10)
    ]
    assert sizes == [[1, 0], [1, 1], [2, 1], [3, 1], [3, 2], [4, 2], [5, 2], [5, 3], [6, 3]]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.integers(0, 9), st.integers(1, 70), st.integers(1, 70))
def test_samples_are_nested_stratified_and_of_the_client(y: list[int], seed: int, one: int, other: int) -> None:
    labels = np.array([9, *y, 9])
    part = np.arange(1, len(y) + 1)
    small, large = (
        limited(labels, part, n, np.random.default_rng(seed)).tolist() for n in (min(one, other), max(one, other))
    )
    assert set(small) <= set(large) <= set(part.tolist())
    assert len(small) == min(one, other, len(y))
    assert small == sorted(set(small))
    for label in set(y):
        wanted = len(small) * y.count(label) / len(y)
        assert abs(int((labels[small] == label).sum()) - wanted) <= 1 + 0.5 * len(set(y))


def test_another_seed_takes_others() -> None:
    labels = np.zeros(50, np.int64)
    first, second = (limited(labels, np.arange(50), 10, np.random.default_rng(seed)) for seed in (0, 1))
    assert first.tolist() != second.tolist()


def test_a_limit_leaves_held_out_samples_and_counts_what_is_trained_on() -> None:
    settings = {"data.holdout": 0.2, "partition.clients": 4}
    data = load_data(load("digits", settings))
    parts, held = divide(data, load("digits", settings))
    for limit in (3, 20):
        config = load("digits", {**settings, "data.limit": limit})
        few, same = divide(data, config)
        assert all((a == b).all() for a, b in zip(held, same, strict=True))
        assert [len(part) for part in few] == [limit] * 4
        assert all(set(a) <= set(b) for a, b in zip(few, parts, strict=True))
        federation = build_federation(config, data)
        assert [sum(row) for row in federation.class_counts()] == [limit] * 4
        notes = federation.server_side(config).notes
        assert any("data.limit" in words for words in notes)
        assert not any("left out by the partition" in words for words in notes)


def test_sites_measure_nothing_but_what_they_train_on(tmp_path: Path) -> None:
    """Of site a the limit takes one row, and the federation's mean is that of the two rows that are taken."""
    rows = [
        f"{value},{site},{value % 2}" for site, values in (("a", range(10)), ("b", range(50, 60))) for value in values
    ]
    (tmp_path / "t.csv").write_text("\n".join(["v,site,label", *rows]) + "\n")
    config = load(
        None, {"data.name": f"csv:{tmp_path}/t.csv", "partition.name": "site", "data.limit": 1, "data.holdout": 0.2}
    )
    federation = build_federation(config)
    taken = [float(federation.dataset.x_train[part][0, 0]) for part in federation.parts]
    assert [one.mean[0] for one in federation.statistics] == taken
    assert federation.dataset.mean[0] == pytest.approx(sum(taken) / 2)


def test_a_real_site_is_not_limited() -> None:
    with pytest.raises(UserError, match=r"data\.limit is for simulations"):
        read_config({"data.limit": 5, "federation.folder": "/tmp/x"})


def size_of(right: Mapping[str, list[int]], seeds: int = 1) -> _Size:
    """One size with the same outcomes for every seed, of two sites with half of the samples each."""
    n = len(right["personal"])
    client = np.repeat([0, 1], n // 2)
    columns = {kind: np.array(values, float) for kind, values in right.items()}
    return _Size({seed: _Measured(np.arange(n), np.arange(n), client, columns) for seed in range(seeds)}, True)


def test_the_answer_by_hand() -> None:
    """Personal models are right in 4 of 4 and 4 of 4, alone in 2 of 4 and 2 of 4, and in all with more samples."""
    few = size_of({"local only": [1, 1, 0, 0] * 2, "personal": [1] * 8})
    many = size_of({"local only": [1] * 8, "personal": [1] * 8})
    points, sentences = answer({10: few, 20: many}, "FedNH", "site")
    assert [point.accuracy["local only"].mean for point in points] == [50.0, 100.0]
    assert [point.gain.points for point in points] == [50.0, 0.0]
    assert points[0].gain.low < 0 < points[0].gain.high, "eight samples are too few"
    assert points[0].held_out == 8
    assert isinstance(points[0].accuracy["personal"], Accuracy)
    assert sentences[0].startswith("With 10 samples a site FedNH's personal models are ")
    assert "n = 8 held-out samples, 1 seed" in sentences[0]
    target = "the 100.0% that personal models have with 10 samples a site"
    assert sentences[2] == f"Training alone reaches {target} with 20 (estimates, no test)."
    assert sentences[3].startswith("From 10 to 20 samples a site personal models gain 0.0 points")
    assert sentences[4].startswith("From 10 to 20 samples a site models trained alone gain 50.0 points")


def test_sites_count_alike_and_clients_by_their_samples() -> None:
    right = {"local only": np.zeros(4), "personal": np.array([1.0, 0, 0, 0])}
    client = np.array([0, 1, 1, 1])
    one = _Measured(np.arange(4), np.arange(4), client, right)
    assert _Size({0: one}, natural=True).accuracy("personal").mean == pytest.approx(50.0)
    assert _Size({0: one}, natural=False).accuracy("personal").mean == pytest.approx(25.0)


def test_many_samples_make_a_difference_clear() -> None:
    points, sentences = answer(
        {10: size_of({"local only": [0, 1] * 100, "personal": [1] * 200}, seeds=2)}, "FedNH", "site"
    )
    assert points[0].gain.clear
    assert "are 50.0 points ahead of training alone (95% interval +" in sentences[0]


def test_the_command(tmp_path: Path) -> None:
    command = ["learning-curve", "digits", "--samples", "5,12", "--out", str(tmp_path / "curve"), *QUICK]
    ended = fednh(command, tmp_path / "io")
    assert ended.code == 0, ended.stderr
    assert "With 5 samples a client FedNH's personal models are " in ended.stdout
    assert "From 5 to 12 samples a client personal models " in ended.stdout
    runs = sorted(path.name for path in (tmp_path / "curve" / "runs").iterdir())
    assert runs == [f"digits-{method}-iid-limit{n}-seed0" for method in ("fednh", "local") for n in (12, 5)]
    counts = json.loads((tmp_path / "curve" / "runs" / runs[1] / "partition.json").read_text())["counts"]
    assert [sum(row) for row in counts] == [5, 5, 5]
    with (tmp_path / "curve" / "learning-curve.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["samples"], row["model"]) for row in rows] == [
        (size, kind) for size in ("5", "12") for kind in ("local only", "personal", "global")
    ]
    assert (tmp_path / "curve" / "learning-curve.svg").read_text().startswith("<?xml")
    assert (tmp_path / "curve" / "learning-curve.png").stat().st_size > 5000
    said = json.loads((tmp_path / "curve" / "learning-curve.json").read_text())
    assert [point["samples"] for point in said["points"]] == [5, 12]

    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "curve" / "runs").glob("*/summary.json")}
    command[3] = "5,12,20"
    more = fednh([*command, "--quiet"], tmp_path / "io2")  # reuses what is finished
    assert (more.code, more.stdout.strip()) == (0, str(tmp_path / "curve"))
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "curve" / "runs").glob("*/summary.json")}
    assert len(after) == 6
    assert all(after[path] == time for path, time in before.items())


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--samples", "ten"], "--samples 'ten' should be numbers"),
        (["--samples", "0,5"], "--samples should be numbers of training samples"),
        (["--method", "local"], "is what a method is compared with"),
        (["--set", "data.limit=5"], "data.limit is what a learning curve varies"),
        (["--set", "data.holdout=0"], "needs held-out samples"),
        (["--minutes", "0"], "minutes = 0 should be more than 0"),
    ],
)
def test_bad_input_is_one_sentence(words: list[str], complaint: str, tmp_path: Path) -> None:
    ended = fednh(["learning-curve", "digits", *words, "--out", str(tmp_path / "c")], tmp_path / "io")
    assert (ended.code, ended.stderr.count("\n")) == (2, 1)
    assert complaint in ended.stderr
    assert not (tmp_path / "c").exists()


def test_too_little_time_says_so_and_goes_on(tmp_path: Path) -> None:
    command = ["learning-curve", "digits", "--samples", "5", "--out", str(tmp_path / "c"), *QUICK]
    early = fednh([*command, "--minutes", "0.00001"], tmp_path / "io")
    assert early.code == 2
    assert "no size was finished" in early.stderr
    late = fednh([*command, "--minutes", "5"], tmp_path / "io")
    assert late.code == 0, late.stderr
