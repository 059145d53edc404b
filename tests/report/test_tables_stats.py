"""The statistics, against textbook values and what must always hold."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fednh.report.sheet import Cell, percent, rank, size
from fednh.report.stats import holm, paired, spread, worst_tenth

some = st.floats(0, 100)


def test_spread_is_the_sample_standard_deviation() -> None:
    found = spread([2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0])
    assert found is not None
    assert (found.mean, found.n) == (5.0, 8)
    assert found.std == pytest.approx(math.sqrt(32 / 7))
    assert spread([]) is None
    assert spread([3.0]).std is None  # type: ignore[union-attr]


def test_holm_by_hand() -> None:
    # sorted 0.005 0.01 0.03 0.04, times 4 3 2 1: 0.02 0.03 0.06 0.04, and never below the one before
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.01, None, 0.5]) == [0.02, None, 0.5]
    assert holm([]) == []


@given(st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=12))
def test_holm_corrects_upwards_in_order_up_to_one(ps: list[float | None]) -> None:
    corrected = holm(ps)
    both = sorted((p, c) for p, c in zip(ps, corrected, strict=True) if p is not None and c is not None)
    assert [c is None for c in corrected] == [p is None for p in ps]
    assert all(p <= c <= 1 for p, c in both)
    assert all(first[1] <= second[1] for first, second in pairwise(both))


@settings(deadline=None, max_examples=50)
@given(st.lists(some, min_size=2, max_size=5))
@example([3.0, 1.0, 4.0, 1.5, 9.0, 2.6])
@example([0.0, 1.0, 1.0, 2.0, 3.0, 5.0, 8.0])
def test_paired_is_symmetric_and_within_bounds(differences: list[float]) -> None:
    one, other = paired(differences), paired([-d for d in differences])
    assert one.mean == pytest.approx(-other.mean)
    assert one.p == (None if other.p is None else pytest.approx(other.p))
    assert one.p is None or 0 <= one.p <= 1
    assert one.low <= one.mean <= one.high


def test_paired_t_of_two_pairs() -> None:
    # 1 and 3: mean 2, sd sqrt(2), t = 2 with one degree of freedom: p = 1 - 2/pi atan(2)
    found = paired([1.0, 3.0])
    assert found.p == pytest.approx(1 - 2 / math.pi * math.atan(2))
    assert found.effect == pytest.approx(math.sqrt(2))


def test_wilcoxons_test_counts_the_differences_that_are_not_zero() -> None:
    """Of six pairs with a tie five can be ranked: p could not fall below 2 / 2^5 = 0.06, so it is Student's test."""
    assert paired([1.0, 2.0, 3.0, 4.0, 5.0, 0.0]).test == "t"
    full = paired([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 0.0])
    assert (full.test, full.n) == ("Wilcoxon", 7)


def test_worst_tenth_rounds_up() -> None:
    assert worst_tenth([5.0, 1.0, 9.0]) == 1.0
    assert worst_tenth([float(v) for v in range(20)]) == 0.5


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (999, "999 B"), (999.99, "1.0 kB"), (1e6, "1.0 MB"), (5e15, "5000.0 TB")]
)
def test_sizes_in_words(value: float, text: str) -> None:
    assert size(value).text == text


@given(st.lists(st.one_of(st.none(), some), min_size=1, max_size=8))
def test_the_best_is_first_and_nothing_better_is_unmarked(column: list[float | None]) -> None:
    rows = [[Cell("x", value)] for value in column]
    rank(rows, 0)
    values = [(round(float(r[0].value), 2), r[0].place) for r in rows if isinstance(r[0].value, float)]
    if len(values) < 2:
        assert all(place == 0 for _, place in values)
        return
    assert all(place == 1 for value, place in values if value == max(v for v, _ in values))
    for value, place in values:
        better = {v for v, _ in values if v > value}
        assert place == (len(better) + 1 if len(better) < 2 else 0)


def test_shares_do_not_look_like_none_or_all() -> None:
    written = {0.004: "0.4%", 0.0: "0%", 0.1: "10%", 0.125: "12.5%", 1.0: "100%", 0.9999: ">99.9%", 0.00005: "0.005%"}
    assert {share: percent(share) for share in written} == written
