"""The statistics, against textbook values and what must always hold."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fednh.report.sheet import Cell, percent, rank, size
from fednh.report.stats import paired, spread, worst_tenth

some = st.floats(0, 100)


def test_spread_is_the_sample_standard_deviation() -> None:
    found = spread([2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0])
    assert found is not None
    assert (found.mean, found.n) == (5.0, 8)
    assert found.std == pytest.approx(math.sqrt(32 / 7))
    assert spread([]) is None
    assert spread([3.0]).std is None  # type: ignore[union-attr]


@given(st.lists(some, min_size=2, max_size=9), st.integers(1, 9))
def test_p_and_interval_never_contradict_each_other(differences: list[float], comparisons: int) -> None:
    found = paired([d - 40 for d in differences], comparisons)
    if found.p is not None and found.low < found.high and abs(found.p - 0.05) > 1e-9:
        assert (found.p < 0.05) == (found.low > 0 or found.high < 0)


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
