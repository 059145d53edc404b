from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fednh import tree


def leaf(value: float) -> torch.Tensor:
    return torch.full((2,), value)


TREE = {"body.a": leaf(1), "body.b.c": leaf(2), "head": leaf(3), "header": leaf(4)}


def test_select_takes_whole_words_only() -> None:
    assert set(tree.select(TREE, "body")) == {"body.a", "body.b.c"}
    assert set(tree.select(TREE, "head")) == {"head"}, "'header' is not below 'head'"
    assert tree.select(TREE, "bod") == {}


@given(st.text("abc", min_size=1))
def test_prefix_and_below_are_inverse(part: str) -> None:
    assert tree.strip_prefix(tree.prefix(part, TREE), part) == TREE


def test_mean_by_hand_from_a_generator() -> None:
    average = tree.mean({"x": leaf(v)} for v in (1.0, 2.0, 6.0))
    assert average["x"].tolist() == [3.0, 3.0]


def test_mean_leaves_its_arguments_alone() -> None:
    trees = [{"x": leaf(1)}, {"x": leaf(2)}]
    tree.mean(trees)
    assert trees[0]["x"].tolist() == [1.0, 1.0]


def test_mean_refuses_different_names_and_nothing() -> None:
    with pytest.raises(ValueError, match="differ in names: \\['x', 'y'\\]"):
        tree.mean([{"x": leaf(1)}, {"y": leaf(1)}])
    with pytest.raises(ValueError, match="nothing to average"):
        tree.mean([])


def test_size_counts_bytes() -> None:
    assert tree.size({"a": torch.zeros(3, 2), "b": torch.zeros((), dtype=torch.int64)}) == 3 * 2 * 4 + 8


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_finite(bad: float) -> None:
    assert tree.finite(TREE)
    assert not tree.finite({**TREE, "z": torch.tensor([0.0, bad])})


def test_finite_numbers_whose_sum_is_not_are_finite() -> None:
    assert tree.finite({"z": torch.full((2,), 3e38)})
    assert tree.finite_rows({"z": torch.full((1, 2), 3e38)}, 1) == [True]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_finite_by_row(bad: float) -> None:
    """Rows are matrices or single numbers; infinities of both signs cancel in no sum."""
    w, s = torch.zeros(4, 2, 3), torch.zeros(4)
    w[1, 0, 2], s[3] = bad, bad
    assert tree.finite_rows({"w": w, "s": s}, 4) == [True, False, True, False]
    w[1, 1, 1], w[2, 0, 0], s[2] = -bad, bad, -bad
    assert tree.finite_rows({"w": w, "s": s}, 4) == [True, False, False, False]
    assert tree.finite_rows({}, 2) == [True, True]


def test_mean_of_trees_without_names() -> None:
    assert tree.mean([{}, {}]) == {}


def test_arranged_changes_layout_not_values() -> None:
    weight = torch.randn(4, 3, 5, 5)
    laid = tree.canonical({"w": weight})["w"]
    assert laid.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(laid, weight)


def test_stack() -> None:
    assert tree.stack([{"x": leaf(1)}, {"x": leaf(2)}])["x"].tolist() == [[1, 1], [2, 2]]
