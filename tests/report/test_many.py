"""Pages and figures of many clients, sites, settings and variants: bins and samples instead of a row each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fednh.report import html
from fednh.report.figures import Choice
from fednh.report.figures.fairness import FAIRNESS
from fednh.report.figures.partition import PARTITION, alike
from fednh.report.html import render
from fednh.report.load import Run, load_runs
from fednh.report.sheet import spread_sample
from fednh.report.site_tables import MOST_SITES, site_sections
from tests.helpers.synthetic import fake_run, fake_sites, person, record


def crowd(path: Path, clients: int, **overrides: Any) -> Run:
    """A run all of whose clients were measured; client k has PM(L) of 100 k / clients, the last one 100."""
    values = np.linspace(0, 100, clients).round(4).tolist()
    people = [person(k, value, [value]) for k, value in enumerate(values)]
    counts = [(2, 0) if k % 4 else (0, 2) for k in range(clients)]
    return fake_run(path, overrides, [record(1, gm=50.0)], counts, people=people)


def test_a_sample_is_even_and_has_both_ends() -> None:
    assert spread_sample(range(5), 5) == [0, 1, 2, 3, 4]
    assert spread_sample(range(101), 3) == [0, 50, 100]


def test_of_many_clients_the_explorer_has_a_sample_from_the_worst_to_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(html, "MOST_CLIENTS", 40)
    (entry,), _ = html._explorer([crowd(tmp_path / "r", 1001)])
    (method,) = entry["methods"]
    seen = list(method["values"]["pm_l"].values())
    assert (len(entry["clients"]), entry["all"]) == (40, 1001)
    assert entry["counts"].keys() == method["values"]["pm_l"].keys() == set(entry["clients"])
    assert (min(seen), max(seen)) == (0, 100)
    assert max(np.diff(seen)) < 3, "evenly"


def test_few_clients_are_all_there(tmp_path: Path) -> None:
    (entry,), _ = html._explorer([crowd(tmp_path / "r", 20)])
    assert entry["clients"] == list(range(20))
    assert entry["all"] == 20


def test_clients_that_nobody_measured_come_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html, "MOST_CLIENTS", 20)
    run = fake_run(tmp_path / "r", {}, counts=[(1, 1)] * 500, people=[person(77, 50.0, [1]), person(300, 60.0, [1])])
    (entry,), _ = html._explorer([run])
    assert {77, 300} < set(entry["clients"])
    assert len(entry["clients"]) == 20


def test_columns_of_the_partition_stand_for_clients_that_are_alike(tmp_path: Path) -> None:
    counts = np.array([(3, 1), (1, 3), (4, 0), (0, 4)] * 600)
    bins = alike(counts)
    assert sorted(np.concatenate(bins)) == list(range(2400))
    assert [len(np.unique(counts[part], axis=0)) for part in bins] == [1] * len(bins)
    run = fake_run(tmp_path / "r", {}, [record(1)], counts.tolist())
    drawing = PARTITION.draw([run], Choice())
    assert len(drawing.rows) == 2 * len(bins)
    assert sum(row[1] for row in drawing.rows if row[2] == "a") == 2400
    assert {round(row[3]) for row in drawing.rows} == {0, 25, 75, 100}


def test_many_dots_are_a_histogram_that_counts_every_client(tmp_path: Path) -> None:
    drawing = FAIRNESS.draw([crowd(tmp_path / "r", 20_001)], Choice())
    assert drawing.columns == ["method", "from", "to", "number", "of_them_worst_tenth"]
    assert sum(row[3] for row in drawing.rows) == 20_001
    assert sum(row[4] for row in drawing.rows) == pytest.approx(2000, abs=1)
    assert [row[4] > 0 for row in drawing.rows] == [row[1] <= 10 for row in drawing.rows], (
        "the worst tenth is on the left"
    )


def test_of_many_variants_the_best_are_drawn_and_the_caption_says_so(tmp_path: Path) -> None:
    for at in range(14):
        fake_run(tmp_path / f"{at}", {"method.rho": 0.5 + at / 100}, [record(1)], pm_l=50.0 + at)
    runs, words = html._best_variants(load_runs([tmp_path]))
    assert sorted(run.summary["pm_l"] for run in runs) == [50.0 + at for at in range(2, 14)]
    assert "12 of 14" in words
    assert html._best_variants(runs) == (runs, "")


def test_of_many_settings_the_first_have_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html, "MOST_SETTINGS", 1)
    for beta in (0.1, 0.3, 1.0):
        fake_run(tmp_path / f"{beta}", {"partition.beta": beta}, [record(1)], people=[person(0, 60.0, [1, 2])])
    page = render(load_runs([tmp_path]), "t")
    assert 'id="figure-partition"' in page
    assert 'id="figure-partition-1"' not in page
    assert "2 more settings are in the tables" in page


def test_a_csv_file_that_is_too_long_for_a_page_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(html, "MOST_ROWS", 3)
    run = fake_run(tmp_path / "r", {}, [record(r) for r in range(1, 6)], people=[person(0, 60.0, [1, 2])])
    page = render([run], "t")
    assert "`fednh figure partition` writes its 4 numbers." in page
    assert 'data-csv="partition"' not in page
    assert 'data-csv="rounds"' not in page
    assert 'data-csv="fairness"' in page


def test_of_many_sites_a_sample_has_rows_and_the_mean_is_of_all(tmp_path: Path) -> None:
    many = MOST_SITES + 200
    names = [f"site {k}" for k in range(many)]
    held = np.linspace(10, 90, many).tolist()
    run = fake_sites(tmp_path / "r", "fednh", held, names)
    (section,) = site_sections([run])
    assert (len(section["rows"]), section["all"]) == (MOST_SITES, many)
    assert section["rows"][0]["row"].name == "site 0"
    assert section["rows"][-1]["row"].name == f"site {many - 1}"
    assert section["means"] == [pytest.approx(50.0)]
    assert section["file"].count("\n") == many + 1, "the file has all"


@pytest.mark.soak
def test_the_page_of_a_million_clients_is_below_five_megabytes(tmp_path: Path) -> None:
    runs = [crowd(tmp_path / "r", 1_000_000)]
    assert len(render(runs).encode()) < 5_000_000
