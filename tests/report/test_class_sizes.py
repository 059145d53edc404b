"""GM of classes with many, medium and few training samples: by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fednh.report import html
from fednh.report.figures import FIGURES
from fednh.report.figures.base import Choice
from fednh.report.groups import by_size, long_tailed
from fednh.report.load import Run
from fednh.report.tables import class_size_sheet, records, result_sheets
from tests.helpers.synthetic import fake_result

# Two clients; classes a to e have 150, 100, 20, 19 and 101 samples.
COUNTS = [[100, 50, 20, 10, 101], [50, 50, 0, 9, 0]]


def tailed(folder: Path, seed: int = 0, method: str = "fednh", **more: Any) -> Run:
    """GM by size: many a and e, medium b and c, few d."""
    accuracy = [90.0, 60.0, 40.0 + seed, 10.0, 70.0]
    given = {"per_class": accuracy, "counts": COUNTS, "partition__name": "longtail"} | more
    return fake_result(folder, method, seed, 54.0, **given)


def test_thresholds() -> None:
    sizes, thirds = by_size(np.sum(COUNTS, axis=0))
    assert (sizes, thirds) == ({"many": [0, 4], "medium": [1, 2], "few": [3]}, False)


def test_thirds_where_a_size_would_be_empty() -> None:
    """CIFAR-10 with an imbalance of 100: 83 and 50 are no few."""
    sizes, thirds = by_size(np.array([5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]))
    assert (sizes, thirds) == ({"many": [0, 1, 2, 3], "medium": [4, 5, 6], "few": [7, 8, 9]}, True)


@given(st.lists(st.integers(0, 300), min_size=3, max_size=30))
@settings(max_examples=100)
def test_every_class_has_one_size_and_no_size_is_empty(counts: list[int]) -> None:
    sizes, thirds = by_size(np.array(counts))
    assert sorted(c for classes in sizes.values() for c in classes) == list(range(len(counts)))
    assert all(sizes.values())
    assert min(counts[c] for c in sizes["many"]) >= max(counts[c] for c in sizes["medium"])
    assert min(counts[c] for c in sizes["medium"]) >= max(counts[c] for c in sizes["few"])
    if not thirds:
        assert [all(counts[c] > 100 for c in sizes["many"]), all(counts[c] < 20 for c in sizes["few"])] == [True] * 2


def test_the_table(tmp_path: Path) -> None:
    runs = [tailed(tmp_path / str(seed), seed) for seed in (0, 2)]
    sheet = class_size_sheet(runs)
    assert sheet.columns == ["method", "GM", "GM many", "GM medium", "GM few"]
    assert [c.text for c in sheet.rows[0]] == ["FedNH", "54.00 ± 0.00", "80.00 ± 0.00", "50.50 ± 0.71", "10.00 ± 0.00"]
    assert "Many: more than 100, few: fewer than 20, medium: between." in sheet.note
    assert "many 2 (101 to 150 samples), medium 2 (20 to 100 samples), few 1 (19 samples)" in sheet.note
    assert "thirds" not in sheet.note
    few = class_size_sheet([tailed(tmp_path / "few", counts=[[9, 8, 7, 6, 5]])])
    assert [c.text for c in few.rows[0]][2:] == ["75.00", "25.00", "70.00"]
    assert "many 2 (8 to 9 samples), medium 2 (6 to 7 samples), few 1 (5 samples); thirds by size" in few.note


def test_a_class_without_test_samples_is_left_out(tmp_path: Path) -> None:
    run = tailed(tmp_path / "r", per_class=[90.0, 60.0, None, None, 70.0])
    assert [c.text for c in class_size_sheet([run]).rows[0]][2:] == ["80.00", "60.00", "–"]


def test_only_long_tailed_runs_have_it_in_table_report_and_csv(tmp_path: Path) -> None:
    tail, plain = tailed(tmp_path / "tail"), tailed(tmp_path / "plain", partition__name="dirichlet")
    assert [sheet.name for sheet in result_sheets([tail, plain])] == ["accuracy", "class-size", "fairness"]
    assert len(class_size_sheet([tail]).rows) == 1
    assert [sheet.name for sheet in result_sheets([plain])] == ["accuracy", "fairness"]
    assert not long_tailed(tailed(tmp_path / "local", method="local", per_class=[]))
    assert "Test accuracy in percent by class size" in html.render([tail], "t")
    rows = {(row["partition"], row["metric"]): row for row in records([tail, plain])}
    means = [rows["longtail", f"gm_{size}"]["mean"] for size in ("many", "medium", "few")]
    assert means == pytest.approx([80.0, 50.0, 10.0])
    assert ("dirichlet", "gm_few") not in rows
    assert rows["longtail", "gm"]["settings"].startswith("imbalance=100; ")


def test_the_figure_of_the_partition_says_that_samples_are_left_out(tmp_path: Path) -> None:
    words = "The partition, long tail (IF 100), Dirichlet(0.3), leaves all other training samples out."
    assert words in FIGURES["partition"].draw([tailed(tmp_path / "tail")], Choice()).caption
    plain = tailed(tmp_path / "plain", partition__name="dirichlet")
    assert "leaves" not in FIGURES["partition"].draw([plain], Choice()).caption
