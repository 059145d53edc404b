"""Tables and figures put the same runs together, count a seed once, and compute a figure in one way."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from fednh.report.figures import FIGURES, Choice
from fednh.report.figures.base import Drawing
from fednh.report.figures.sensitivity import gains
from fednh.report.groups import by_setting, by_variant, group_runs, lay_out
from fednh.report.html import render
from fednh.report.load import Run, load_run, load_runs
from fednh.report.tables import accuracy_sheet, departures, fairness_sheet, held_out_sheet
from fednh.runs.run_folder import display_name, display_names
from tests.helpers.synthetic import fake_result, fake_run, person, record


def rounds(*values: float) -> list[dict[str, Any]]:
    return [record(r, gm=value, pm_v=value, pm_l=value) for r, value in enumerate(values, start=1)]


def drawn(name: str, runs: list[Run]) -> Drawing:
    return FIGURES[name].draw(runs, Choice())


@pytest.fixture
def one_seed(tmp_path: Path) -> list[Run]:
    """A run, its copy, its copy that was evaluated more often, and the same seed with another `eval.final`."""
    people = [person(0, 40.0, [50.0, 50.0]), person(1, 60.0, [50.0, 50.0])]
    fake_run(tmp_path / "a", {"seed": 3}, rounds(10, 20), people=people)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    fake_run(tmp_path / "c", {"seed": 3, "eval.every": 1}, rounds(10, 15, 20), people=people)
    fake_run(tmp_path / "d", {"seed": 3, "eval.final": 1}, rounds(10, 20), people=people[:1])
    return load_runs([tmp_path])


def test_a_copy_of_a_run_is_not_a_second_seed_in_any_figure(one_seed: list[Run]) -> None:
    table = accuracy_sheet(one_seed)
    assert [row[0].text for row in table.rows] == ["FedNH, eval.final=1", "FedNH, eval.final=all"]
    assert "n = 1 seed" in table.note
    assert "Left out: 2 runs with settings and seed of another one" in table.note
    settings = by_setting(one_seed)
    assert [label.rpartition(", ")[2] for label in settings] == ["eval.final=all", "eval.final=1"]
    assert [[run.path.name for run in runs] for runs in settings.values()] == [["c"], ["d"]], "c was evaluated most"
    for name, column in (("curves", 5), ("fairness", None)):
        for runs in (*settings.values(), one_seed[:3]):
            drawing = drawn(name, runs)
            assert "n = 1 " in drawing.caption
            assert column is None or {row[column] for row in drawing.rows} == {1}
    assert len(drawn("fairness", one_seed[:3]).rows) == 2, "two clients, once each"


def test_the_report_says_one_n_everywhere(one_seed: list[Run]) -> None:
    page = render(one_seed, "one seed")
    assert set(re.findall(r"n = (\d+(?: to \d+)?) (?:seed|run)", page)) == {"1"}


def test_figures_of_data_with_one_name_at_two_places_stay_apart(tmp_path: Path) -> None:
    places = [f"npz:{tmp_path / folder}/wine.npz" for folder in ("old", "new")]
    runs = [fake_run(tmp_path / str(i), {"data.name": p}, rounds(1, 2), data="wine") for i, p in enumerate(places)]
    assert [len(group) for group in by_setting(runs).values()] == [1, 1]


def test_what_a_partition_does_not_use_keeps_no_runs_apart(tmp_path: Path) -> None:
    """Two groups in one place of the table would hide one of them."""
    same = {"partition.name": "iid"}
    runs = [fake_run(tmp_path / str(i), {**same, "partition.beta": b, "seed": i}) for i, b in enumerate((0.3, 0.9))]
    runs += [fake_run(tmp_path / "t", {**same, "trim": 0.4, "seed": 2, "federation.folder": "/srv/a"})]
    (group,) = group_runs(runs)
    assert group.n == 3
    assert "over n = 3 seeds" in accuracy_sheet(runs).note


def test_a_repeated_seed_does_not_change_a_gain(tmp_path: Path) -> None:
    runs = [fake_run(tmp_path / f"{rho}", {"method.rho": rho}, gm=gm) for rho, gm in ((0.1, 50.0), (0.9, 53.0))]
    shutil.copytree(tmp_path / "0.9", tmp_path / "again")
    assert [(g.value, g.mean, g.n) for g in gains([*runs, load_run(tmp_path / "again")], "method.rho", "gm", 0.1)] == [
        (0.1, 0.0, 1),
        (0.9, 3.0, 1),
    ]


def test_lines_of_a_sweep_that_differ_in_more_have_labels_of_their_own(tmp_path: Path) -> None:
    settings = [{"method.rho": rho, "train.lr": lr} for rho in (0.1, 0.9) for lr in (0.01, 0.1)]
    runs = [fake_run(tmp_path / str(i), setting) for i, setting in enumerate(settings)]
    drawing = drawn("sensitivity", runs)
    assert {row[0] for row in drawing.rows} == {"FedNH train.lr 0.01", "FedNH train.lr 0.1"}
    (legend,) = drawing.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["FedNH train.lr 0.01", "FedNH train.lr 0.1"]


# --- departures from the paper -----------------------------------------------------------------------------------

OTHER_FIGURES: dict[str, Any] = {
    "eval.final": 5,
    "data.holdout": 0.1,
    "data.test_share": 0.1,
    "data.augment": "none",
    "partition.clients": 50,
    "partition.min_samples": 1,
    "partition.min_classes": 1,
    "participation.dropout": 0.1,
    "model.name": "resnet18",
    "model.norm": "local",
    "precision": "bf16",
    "aggregator": "median",
    "rounds": 199,
    "train.momentum": 0.5,
    "personal.model": "global",
    "personal.prior": 1.0,
    "method.rho": 0.5,
}
SAME_FIGURES: dict[str, Any] = {
    "eval.every": 1,
    "eval.clients": "all",
    "workers": 7,
    "engine": "loop",
    "checkpoint.every": 9,
    "store.memory": "1GiB",
    "data.dir": "/elsewhere",
    "diagnostics.gradient_norm": True,
    "federation.folder": "/srv/run",
}


@pytest.mark.parametrize("key", [*OTHER_FIGURES, *SAME_FIGURES])
def test_whatever_changes_a_figure_is_a_departure_from_the_paper(key: str, tmp_path: Path) -> None:
    setting = {key.replace(".", "__"): (OTHER_FIGURES | SAME_FIGURES)[key]}
    run = fake_result(tmp_path / "r", "fednh", 0, 70.0, preset="cifar10", **setting)
    (group,) = group_runs([run])
    assert [word.partition("=")[0] for word in departures(group)] == ([key] if key in OTHER_FIGURES else [])


# --- one figure, one way -----------------------------------------------------------------------------------------


def test_the_worst_tenth_is_the_same_number_in_table_and_figure(tmp_path: Path) -> None:
    """Seed 0: clients 10 and 90, the worst is 10; seed 1: 50, 52 and 54, the worst is 50. So 30 over the seeds.

    All clients in one heap would have 10 as their worst tenth, and 51.2 as their mean instead of (50 + 52) / 2 = 51.
    """
    for seed, values in enumerate([(10.0, 90.0), (50.0, 52.0, 54.0)]):
        people = [person(k, value, [0.0, 0.0]) for k, value in enumerate(values)]
        fake_run(tmp_path / str(seed), {"seed": seed}, people=people, pm_l=sum(values) / len(values))
    runs = load_runs([tmp_path])
    (cells,) = fairness_sheet(runs).rows
    assert cells[-1].text.startswith("30.00 ±")
    drawing = drawn("fairness", runs)
    assert [text.get_text() for text in drawing.figure.axes[0].texts] == ["51.0 ± 5.0, worst 10% 30.0"]
    assert [row[1:] for row in drawing.rows if row[-1]] == [[0, 0, 10.0, True], [1, 0, 50.0, True]]


def test_the_legend_has_everything_that_any_panel_shows(tmp_path: Path) -> None:
    """Local has no global model: no line in the panels of GM, which are the last ones of held-out figures."""
    held = {"held_macro": 50.0, "held_share": 55.0}
    shared = {"held_gm_macro": 40.0, "held_gm_share": 45.0}
    lacks = {"gm": None, "pm_v": None, "pm_l": None, "pm_l_std": None, "held_share_std": 1.0}
    for method, figures in (("local", held), ("fednh", {**held, **shared})):
        lines = [record(r, **figures) for r in (1, 2)]
        fake_run(tmp_path / method, {"method.name": method}, lines, **{**lacks, **figures})
    runs = load_runs([tmp_path])
    assert held_out_sheet(runs).rows
    (legend,) = drawn("curves", runs).figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["Local", "FedNH"]


def test_a_legend_of_long_names_stays_within_its_figure(tmp_path: Path) -> None:
    variants = [(1.0, "count", "orthogonal"), (20.0, "uniform", "separated"), (20.0, "count", "separated")]
    for i, (scale, aggregation, head) in enumerate(variants):
        settings = {"method.scale": scale, "method.aggregation": aggregation, "method.head_init": head}
        fake_run(tmp_path / str(i), settings, rounds(50.0, 60.0))
    figure = drawn("curves", load_runs([tmp_path])).figure
    (legend,) = figure.legends
    assert len(legend.get_texts()) == 3
    assert legend.get_window_extent().width <= figure.bbox.width


def test_a_method_without_rare_classes_is_in_the_legend_too(tmp_path: Path) -> None:
    """FedAvg's only evaluated client owns every class, so it has no bar in the first group, the absent classes."""
    for method, who in (("fedavg", 0), ("fednh", 1)):
        fake_run(tmp_path / method, {"method.name": method}, people=[person(who, 1.0, [1.0, 2.0])], per_class=None)
    (legend,) = drawn("frequency", load_runs([tmp_path])).figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["FedAvg", "FedNH"]


# --- names for people ----------------------------------------------------------------------------------------------

NAMES = {
    "fednh": "FedNH",
    "moon:Moon": "Moon",
    "/home/me/moon.py:Moon": "Moon",
    "csv:/data/hospitals.csv": "hospitals",
    "csv:/data/hospitals/*.csv": "hospitals",
    "folder:/data/photos/": "photos",
    "hf:owner/set-v1.5": "set-v1.5",
    "digits": "digits",
}


def test_methods_models_and_data_have_names_for_people() -> None:
    assert {name: display_name(name) for name in NAMES} == NAMES
    assert display_names(["csv:a/x.csv", "csv:b/x.csv", "digits"]) == {
        "csv:a/x.csv": "csv:a/x.csv",  # both would be x
        "csv:b/x.csv": "csv:b/x.csv",
        "digits": "digits",
    }


def test_two_methods_of_one_name_are_not_taken_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    methods = ["first_file:Moon", "second_file:Moon"]
    for method in methods:
        file = tmp_path / f"{method.partition(':')[0]}.py"
        file.write_text("from fednh.methods.fedavg import FedAvg as Moon\n")
    runs = [fake_run(tmp_path / str(at), {"method.name": method}) for at, method in enumerate(methods)]
    assert list(by_variant(runs[:1])) == ["Moon"]
    assert list(by_variant(runs)) == methods
    assert [row.label for row in lay_out(runs).rows] == methods
