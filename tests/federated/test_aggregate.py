from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fednh.errors import UserError
from fednh.federated import aggregate
from fednh.methods.base import UploadSpec
from fednh.methods.fedavg import FedAvg
from fednh.tree import Tree, Uploads, mean
from tests.helpers.compare import same
from tests.helpers.reference import averaged_by


@dataclass(frozen=True)
class ByClass(FedAvg):
    upload = UploadSpec(by_class=("p",))


def trimmed(uploads: list[Tree], share: float, method: FedAvg | None = None) -> Tree:
    return aggregate.trimmed(uploads, share, (method or FedAvg()).upload)


def trees(*rows: list[float]) -> list[dict[str, torch.Tensor]]:
    return [{"w": torch.tensor(row)} for row in rows]


def test_median_by_hand() -> None:
    assert trimmed(trees([1.0, 9.0], [2.0, 8.0], [90.0, -5.0]), 0.5)["w"].tolist() == [2.0, 8.0]
    assert trimmed(trees([1.0], [2.0], [4.0], [90.0]), 0.5)["w"].tolist() == [3.0]


def test_trimmed_mean_by_hand() -> None:
    """A fifth of five is cut at each end: 2, 3 and 4 remain."""
    assert trimmed(trees([100.0], [2.0], [3.0], [4.0], [-100.0]), 0.2)["w"].tolist() == [3.0]


def test_trimmed_mean_cuts_at_least_one_where_three_are_left() -> None:
    """A fifth of four, or of three, is less than one: one hostile client is cut off all the same."""
    assert trimmed(trees([2.0], [3.0], [5.0], [-100.0]), 0.2)["w"].tolist() == [2.5]
    assert trimmed(trees([2.0], [3.0], [900.0]), 0.2)["w"].tolist() == [3.0]
    assert trimmed(trees([2.0], [4.0]), 0.2)["w"].tolist() == [3.0], "of two nobody knows who is wrong"


def test_as_many_are_cut_as_the_round_may_have_hostile_clients() -> None:
    """A fifth of ten clients is two, who may both be among the five owners of a class: the median is left."""
    rows = [[[1.0]], [[2.0]], [[3.0]], [[2.5]], [[2.5]], *[[[0.0]]] * 5]
    out = trimmed([{"p": torch.tensor(r)} for r in rows], 0.2, ByClass())["p"]
    assert out.item() == pytest.approx(2.5 * 5 / 10)


def test_silence_is_no_vote() -> None:
    """Three of four own the class (row 0), one owns row 1: the median of the owners, times their share."""
    rows = [[[1.0, 2.0], [0.0, 0.0]], [[3.0, 2.0], [0.0, 0.0]], [[5.0, 2.0], [0.0, 3.0]], [[0.0, 0.0], [0.0, 0.0]]]
    out = trimmed([{"p": torch.tensor(r)} for r in rows], 0.5, ByClass())["p"]
    assert out.tolist() == [[3.0 * 3 / 4, 2.0 * 3 / 4], [0.0, 0.75]]


def test_a_zero_weight_is_a_vote() -> None:
    """Only what is uploaded by class can be silent: zeros for the model itself are outvoted, not averaged in."""
    ones, zeros = {"w": torch.ones(3)}, {"w": torch.zeros(3)}
    for share in (0.5, 0.2):
        assert trimmed([ones] * 8 + [zeros] * 2, share)["w"].tolist() == [1.0, 1.0, 1.0]


def test_weighted_mean_by_hand() -> None:
    """10 and 30 samples: a quarter and three quarters, but only of what the server holds and not of rows by class."""
    uploads = [{"w": torch.tensor([a]), "change": torch.tensor([a]), "p": torch.tensor([[a]])} for a in (1.0, 5.0)]
    server = {"w": torch.zeros(1), "p": torch.zeros(1, 1)}
    out = averaged_by("weighted_mean", uploads, server, ByClass(), [10, 30]).mean()
    assert {name: value.item() for name, value in out.items()} == {"w": 4.0, "change": 3.0, "p": 3.0}
    assert [tree["w"].item() for tree in uploads] == [1.0, 5.0], "uploads are not changed"


def test_norm_clip_by_hand() -> None:
    """Moves of length 1, 2 and 100 from the server at 10: the third is cut to the median, 2."""
    server = {"w": torch.tensor([10.0])}
    out = averaged_by("norm_clip", trees([11.0], [12.0], [110.0]), server, FedAvg()).mean()
    assert out["w"].item() == pytest.approx(10 + (1 + 2 + 2) / 3)


def test_norm_clip_of_what_the_server_does_not_hold() -> None:
    out = averaged_by("norm_clip", trees([3.0, 4.0], [0.0, 0.0], [30.0, 40.0], [0.0, 5.0]), {}, FedAvg()).mean()
    torch.testing.assert_close(out["w"], torch.tensor([6 / 4, 13 / 4]))


@pytest.mark.parametrize("name", ["mean", "weighted_mean", "median", "trimmed_mean", "norm_clip"])
def test_every_rule_agrees_when_all_agree(name: str) -> None:
    one = {"body.w": torch.randn(3, 2), "scale": torch.tensor(2.0), "p": torch.tensor([[0.0, 0.0], [1.0, 2.0]])}
    server = {"body.w": torch.zeros(3, 2), "scale": torch.tensor(1.0)}
    same(averaged_by(name, [one, one, one], server, ByClass(), [3, 1, 8]).mean(), one)


@given(st.lists(st.lists(st.floats(0.5, 2.0, width=32), min_size=3, max_size=3), min_size=1, max_size=9))
@settings(max_examples=60)
def test_median_equals_numpy(rows: list[list[float]]) -> None:
    np.testing.assert_allclose(trimmed(trees(*rows), 0.5)["w"].numpy(), np.median(rows, 0), rtol=1e-5)


@dataclass(frozen=True)
class Comparing(FedAvg):
    """A method that looks at single uploads."""

    upload = UploadSpec(single=True)


def test_uploads_average_by_the_rule_of_the_run() -> None:
    """Of 1, 2 and 900 the median is 2, the mean 301; which of them is asked for can be read at the call."""
    rows = trees([1.0], [2.0], [900.0])
    median = averaged_by("median", rows, {}, FedAvg())
    assert (median.mean()["w"].tolist(), median.count) == ([2.0], 3)
    assert mean(median.trees)["w"].tolist() == [301.0]
    assert Uploads.of(rows).mean()["w"].tolist() == [301.0], "without a rule the plain mean"
    compared = averaged_by("mean", rows, {}, Comparing())
    assert [tree["w"].item() for tree in compared.trees] == [1.0, 2.0, 900.0]


@pytest.mark.parametrize("name", ["mean", "weighted_mean"])
def test_a_method_that_reads_single_uploads_must_declare_it(name: str) -> None:
    """Means are running sums: without the declaration no upload is kept, and reading them is an error, not silence."""
    uploads = averaged_by(name, trees([1.0], [2.0]), {"w": torch.zeros(1)}, FedAvg())
    with pytest.raises(UserError, match="UploadSpec\\(single=True\\)"):
        uploads.trees  # noqa: B018


@pytest.mark.parametrize("name", ["mean", "weighted_mean"])
def test_kept_uploads_have_the_same_average_to_the_bit(name: str) -> None:
    rows = [{"w": torch.randn(50, generator=torch.Generator().manual_seed(k))} for k in range(7)]
    server = {"w": torch.zeros(50)}
    running, kept = (averaged_by(name, rows, server, method, range(3, 10)) for method in (FedAvg(), Comparing()))
    assert torch.equal(running.mean()["w"], kept.mean()["w"])


def test_the_plain_mean_does_not_take_uploads() -> None:
    """A method that writes `mean(uploads)` would bypass the rule without a word."""
    with pytest.raises(TypeError, match="'Uploads' object is not iterable"):
        mean(averaged_by("median", trees([1.0]), {}, FedAvg()))  # type: ignore[arg-type]
