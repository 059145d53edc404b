"""The ledger of a site: what is paid, what is refused, and what crashes, copies and hands can do to it."""

from __future__ import annotations

import math
import os
import shutil
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fednh.errors import Refused
from fednh.io import chain
from fednh.privacy.accounting import Release, epsilon
from fednh.privacy.ledger import Allowance, Ledger, accounts
from fednh.privacy.marks import SKETCH, Marks

DELTA = 1e-5
ONE = (Release("prototypes", 4.0),)  # epsilon 0.93 once


def marks(*rows: int, place: str = "csv:/a.csv") -> Marks:
    return Marks.of(place, None, np.array(rows, np.float32).reshape(-1, 1))


def cost(times: int) -> float:
    return epsilon([Release("prototypes", 4.0, count=times)], DELTA)


FREE = Allowance(math.inf, DELTA)
MINE = marks(1, 2, 3)


def test_payments_add_up_and_the_one_too_many_is_refused(tmp_path: Path) -> None:
    ledger, budget = Ledger(tmp_path / "ledger.jsonl", "a"), Allowance(cost(3), DELTA)
    for k in range(3):
        assert ledger.pay(f"order {k}", ONE, MINE, budget).epsilon == pytest.approx(cost(k + 1))
    before = (tmp_path / "ledger.jsonl").read_bytes()
    with pytest.raises(Refused, match=r"budget is spent: another answer would bring .* epsilon 1\.99 .*1\.69"):
        ledger.pay("order 3", ONE, MINE, budget)
    assert (tmp_path / "ledger.jsonl").read_bytes() == before
    (account,) = accounts(chain.read(tmp_path / "ledger.jsonl"))
    assert (account.epsilon, len(account.payments)) == (pytest.approx(cost(3)), 3)


def test_a_payment_counts_in_all_runs_and_federations_until_its_answer_is_stored(tmp_path: Path) -> None:
    file = tmp_path / "ledger.jsonl"
    Ledger(file, "a").pay("order", ONE, MINE, FREE, federation="one")
    again = Ledger(file, "a").pay("order", ONE, MINE, FREE)  # killed before it was stored: nothing had left
    assert again.epsilon == pytest.approx(cost(1))
    assert Ledger(file, "a").answer_to("order") is None
    Ledger(file, "a").stored("order", "f" * 64)
    assert Ledger(file, "a").answer_to("order") == "f" * 64
    assert Ledger(file, "a").pay("order", ONE, MINE, FREE).epsilon == pytest.approx(cost(2))  # what was stored is lost
    assert Ledger(file, "b").pay("order", ONE, MINE, FREE, federation="two").epsilon == pytest.approx(cost(3))
    assert Ledger(file, "b").answer_to("order") is None  # of another site


SAME = {
    "other order": (Marks.of("csv:/b.csv", None, np.float32([[3], [1], [2]])), True),
    "other place": (marks(1, 2, 3, place="parquet:/b.parquet"), True),
    "a part": (marks(2, place="npz:/c.npz"), True),
    "overlap": (marks(3, 4, place="npz:/c.npz"), True),
    "other rows in the same place": (marks(7, 8), True),
    "other rows elsewhere": (marks(7, 8, place="csv:/b.csv"), False),
}


@pytest.mark.parametrize(("other", "one"), SAME.values(), ids=SAME)
def test_which_data_are_one_account(other: Marks, one: bool, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl", "a")
    ledger.pay("1", ONE, MINE, FREE)
    assert ledger.pay("2", ONE, other, FREE).epsilon == pytest.approx(cost(2 if one else 1))
    assert ledger.pay("3", ONE, MINE, FREE).epsilon == pytest.approx(cost(3 if one else 2))


def test_data_between_two_others_make_them_one_account(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl", "a")
    ledger.pay("1", ONE, marks(1, place="x"), FREE)
    assert ledger.pay("2", ONE, marks(2, place="y"), FREE).epsilon == pytest.approx(cost(1))
    assert ledger.pay("3", ONE, marks(1, 2, place="z"), FREE).epsilon == pytest.approx(cost(3))
    assert ledger.pay("4", ONE, marks(2, place="w"), FREE).epsilon == pytest.approx(cost(4))
    assert [len(each.payments) for each in accounts(chain.read(ledger.file))] == [4]


def lost(file: Path) -> None:
    file.unlink()


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def anew(file: Path) -> None:
    file.unlink()
    for k in range(5):
        Ledger(file, "a").pay(f"cheap {k}", ONE, MINE, FREE)


def cut(file: Path) -> None:
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:2]))


def cut_in_a_line(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-40])


def edited(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b'"noise": 4.0', b'"noise": 9.0', 1))


def without_a_line(file: Path) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:1], *lines[2:]]))


@pytest.mark.parametrize("harm", [lost, emptied, anew, cut, cut_in_a_line, edited, without_a_line])
def test_a_ledger_that_is_not_the_one_that_is_known_releases_nothing(harm, tmp_path: Path) -> None:
    file = tmp_path / "ledger.jsonl"
    for k in range(3):
        head = Ledger(file, "a").pay(f"order {k}", ONE, MINE, FREE).head
    assert head is not None
    kept = file.read_bytes()
    harm(file)
    there = file.read_bytes() if file.exists() else None
    for use in (
        lambda ledger: ledger.pay("order 9", ONE, MINE, FREE),
        lambda ledger: ledger.stored("order 2", "f" * 64),
        lambda ledger: ledger.answer_to("order 2"),
        lambda ledger: ledger.balance(MINE, DELTA),
    ):
        with pytest.raises(Refused, match="damaged, lost or an old copy, so nothing more is released"):
            use(Ledger(file, "a", known=[head]))
    assert (file.read_bytes() if file.exists() else None) == there
    file.write_bytes(kept)  # the newest copy is restored
    assert Ledger(file, "a", known=[head]).pay("order 9", ONE, MINE, FREE).epsilon == pytest.approx(cost(4))


def test_a_line_that_a_crash_cut_short_was_no_payment(tmp_path: Path) -> None:
    file = tmp_path / "ledger.jsonl"
    head = Ledger(file, "a").pay("order 0", ONE, MINE, FREE).head
    Ledger(file, "a").pay("order 1", ONE, MINE, FREE)
    file.write_bytes(file.read_bytes()[:-40])
    assert head is not None
    assert Ledger(file, "a", [head]).pay("order 1", ONE, MINE, FREE).epsilon == pytest.approx(cost(2))
    assert [row["event"] for row in chain.read(file).lines] == ["data", "paid", "torn", "paid"]


def test_many_processes_pay_at_once_and_none_too_much(tmp_path: Path) -> None:
    file, budget = tmp_path / "ledger.jsonl", Allowance(cost(10), DELTA)

    def spend(who: int) -> None:
        for k in range(6):
            try:
                Ledger(file, "a").pay(f"{who} {k}", ONE, MINE, budget)
            except Refused:
                os._exit(7)

    running = [get_context("fork").Process(target=spend, args=(who,)) for who in range(3)]
    for process in running:
        process.start()
    for process in running:
        process.join(60)
    assert 7 in [process.exitcode for process in running]
    (account,) = accounts(chain.read(file))
    assert len(account.payments) == 10
    assert account.epsilon <= budget.epsilon


# --- marks -----------------------------------------------------------------------------------------------------------


def test_reading_again_gives_the_same_marks(tmp_path: Path) -> None:
    x = np.array([[1.0, np.nan], [0.0, 2.0], [3.0, 4.0]], np.float32)
    (tmp_path / "a.csv").write_text("x")
    shutil.copy(tmp_path / "a.csv", tmp_path / "b.csv")
    other = x[[2, 0, 1]].copy()
    other[2, 0] = -0.0
    other.view(np.uint32)[1, 1] |= 1  # another NaN
    one, two = Marks.of("p", tmp_path / "a.csv", x), Marks.of("p", tmp_path / "b.csv", other[:1], other[1:])
    assert one == two
    assert Marks.read({"line": 1, **one.write()}) == one


def test_images_are_known_by_their_files_whatever_size_they_are_read_at(tmp_path: Path) -> None:
    for folder in ("a/north", "b"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "a/north/1.png").write_bytes(b"one")
    (tmp_path / "a/north/2.png").write_bytes(b"two")
    (tmp_path / "a/labels.txt").write_bytes(b"same")
    (tmp_path / "b/renamed.PNG").write_bytes(b"two")
    (tmp_path / "b/labels.txt").write_bytes(b"same")
    small, large = np.zeros((1, 2, 2, 1), np.uint8), np.zeros((1, 4, 4, 1), np.uint8)
    one, two = Marks.of("a", tmp_path / "a", small), Marks.of("b", tmp_path / "b", large)
    assert one.meets(two)
    assert len(one.files) == 2
    (tmp_path / "b/renamed.PNG").write_bytes(b"three")
    assert not one.meets(Marks.of("b", tmp_path / "b", large))


@given(shared=st.integers(0, 400), mine=st.integers(1, 400), theirs=st.integers(1, 400))
@settings(max_examples=30, deadline=None)
def test_up_to_a_sketch_every_overlap_is_found(shared: int, mine: int, theirs: int) -> None:
    one = marks(*range(shared), *range(1000, 1000 + mine), place="p")
    two = marks(*range(shared), *range(2000, 2000 + theirs), place="q")
    assert one.meets(two) == (shared > 0)


def test_of_large_sets_a_part_of_one_percent_is_found() -> None:
    rows = np.random.default_rng(0).normal(size=(100_000, 2)).astype(np.float32)
    whole, part = Marks.of("p", None, rows), Marks.of("q", None, rows[::100])
    assert len(whole.rows) == SKETCH
    assert len(whole.rows & part.rows) == pytest.approx(SKETCH / 100, rel=0.5)
