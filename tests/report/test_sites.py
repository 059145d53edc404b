"""Does federating help a site: numbers, marks and sentences from outcomes that are written down by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fednh.config import load
from fednh.errors import UserError
from fednh.report.load import Run, load_run
from fednh.report.site_tables import class_sheet, site_sheet, to_csv
from fednh.report.sites import SiteTable, class_table, confusion, site_tables
from fednh.report.tables import held_out_sheet
from fednh.report.verdicts import SiteVerdict, headline, verdicts
from fednh.runs.model_file import Outcomes
from fednh.runs.run_folder import RunFolder
from tests.helpers.synthetic import fake_sites

CLASSES = ("cat", "dog", "horse")
SITES = ("art", "Plant 4", "3")


def hits(label: np.ndarray, right: int, first: int = 0) -> np.ndarray:
    """Predictions that are right for `right` samples from `first` on; elsewhere the next class."""
    guessed = (label + 1) % len(CLASSES)
    guessed[first : first + right] = label[first : first + right]
    return guessed


def held(n: int, personal: int, shared: int | None, first: int = 0) -> Outcomes:
    """n samples, of which the personal model gets the first ones right, and the global one those from `first` on."""
    label = np.arange(n) % len(CLASSES)
    return Outcomes(label, hits(label, personal), None if shared is None else hits(label, shared, first))


def run_of(
    folder: Path,
    outcomes: Mapping[int, Outcomes],
    method: str = "fednh",
    counts: Sequence[Sequence[int]] = ((9, 9, 9),) * 3,
    sites: Sequence[str] = SITES,
    keep: bool = True,
    backend: str = "simulator",
    **settings: Any,
) -> Run:
    """A finished run with these outcomes, written by the library's own functions."""
    natural = {"data.name": "npz:x.npz", "partition.name": "site", "method.name": method}
    config = load(None, natural | {key.replace("__", "."): value for key, value in settings.items()})
    run = RunFolder(folder)
    folder.mkdir(parents=True)
    run.begin(config, CLASSES, counts, sites, backend)
    run.write_metrics([{"round": 1, "clients": [0]}])
    if keep:
        run.write_outcomes(outcomes)
    people = []
    for client, found in outcomes.items():
        shared = {} if found.shared is None else {"held_gm_share": 100 * float((found.shared == found.label).mean())}
        own = {"held_share": 100 * float((found.personal == found.label).mean())}
        people.append({"client": client, "site": sites[client], **own, **shared, "samples": 27})
    summary = dict.fromkeys(("gm", "pm_v", "pm_l", "pm_l_std"))
    common = {"held_share": np.mean([p["held_share"] for p in people]), "rounds": 1, "data": "npz:x.npz"}
    run.write_summary({**summary, **common, "clients": people})
    return load_run(folder)


def one_table(*runs: Run) -> SiteTable:
    (table,) = site_tables(runs)
    return table


def said(table: SiteTable, site: str) -> SiteVerdict:
    return verdicts(table)[table.rows.index(table.row(site))]


def sentence(table: SiteTable, site: str) -> str:
    return said(table, site).sentence


def alone(folder: Path, outcomes: Mapping[int, Outcomes], **settings: Any) -> Run:
    return run_of(folder, outcomes, "local", **settings)


def test_a_site_is_told_whether_federating_helps_and_how_sure_that_is(tmp_path: Path) -> None:
    """art: 300 of 400 against 240 alone, the same ones: 60 gained, none lost: +15 points."""
    outcomes = {0: held(400, 300, 260), 1: held(400, 200, 200), 2: held(14, 10, 9, first=5)}
    local = {0: held(400, 240, None), 1: held(400, 280, None), 2: held(14, 9, None)}
    table = one_table(run_of(tmp_path / "r", outcomes), alone(tmp_path / "l", local))
    assert (table.columns, table.row("art").n) == (("local only", "personal", "global"), 400)
    assert [(m.label, m.accuracy) for m in table.row("art").models] == [
        ("personal", 75.0),
        ("global", 65.0),
        ("local only", 60.0),
    ]
    art, plant, third = verdicts(table)
    assert (art.site, art.kind, art.n, art.model, art.use) == ("art", "federate", 400, "personal", "personal")
    assert art.gain is not None
    near, half = 60 / 402, 2.509 * (62 / 402 - (60 / 402) ** 2) ** 0.5 / 401**0.5  # t at 1 - 0.05 / 8
    assert (art.gain.points, art.gain.low, art.gain.high) == pytest.approx(
        (15, 100 * (near - half), 100 * (near + half)), abs=0.05
    )
    gain = f"+15.0 points against training alone ({art.gain.low:+.1f} to "
    assert art.sentence.startswith(f"Federate: personal is at {gain}")
    assert " Its personal model is better than the global one: personal over global +10.0 (" in art.sentence
    assert (plant.kind, plant.use) == ("alone", "local only")
    assert plant.sentence.startswith("Train alone: the best federated model, personal, is at -20.0 points against ")
    assert (third.kind, third.use) == ("unclear", None)
    assert third.sentence.startswith("Too few samples to tell: personal is at ")
    assert headline([art, plant, third]) == (
        "Federating helps at 1 of 3 sites (art); training alone is better at 1 of 3 sites (Plant 4); too few samples "
        "to tell at 1 of 3 sites (3)."
    )


def test_what_a_pretrained_body_gains_is_no_gain_of_federating(tmp_path: Path) -> None:
    """Alone from scratch and federated behind a frozen body have tables of their own; with the same body, one."""
    outcomes, local = {0: held(400, 300, 260)}, {0: held(400, 240, None)}
    body = {"model__name": "efficientnet_lite0", "model__frozen": "body"}
    federated = run_of(tmp_path / "r", outcomes, **body)
    apart = site_tables([federated, alone(tmp_path / "l", local)])
    assert len(apart) == 2
    assert not any("against training alone" in each.sentence for table in apart for each in verdicts(table))
    table = one_table(federated, alone(tmp_path / "same", local, **body))
    assert sentence(table, "art").startswith("Federate: ")


def test_a_bad_third_method_changes_nothing(tmp_path: Path) -> None:
    runs = [run_of(tmp_path / "a", {0: held(60, 40, 38)}, "fedavg"), alone(tmp_path / "l", {0: held(60, 38, None)})]
    before = said(one_table(*runs), "art")
    after = said(one_table(*runs, run_of(tmp_path / "p", {0: held(60, 10, 9)}, "fedprior")), "art")
    assert (before.kind, after.kind) == ("unclear", "unclear")
    assert (after.gain, after.balanced_gain) == (before.gain, before.balanced_gain)
    assert (before.model, after.model) == ("personal", "FedAvg personal")


def test_a_model_no_better_than_the_commonest_class_is_named(tmp_path: Path) -> None:
    """Sixty cats, thirty dogs: a model that says cat to everything has 66.7% and has learned nothing."""
    label = np.repeat([0, 1], [60, 30])
    constant, good = np.zeros(90, int), np.where(np.arange(90) % 10 == 0, 1 - label, label)
    counts = [(200, 100, 0)] * 3
    idle = run_of(tmp_path / "i", {0: Outcomes(label, constant, constant)}, counts=counts)
    runs = [idle, alone(tmp_path / "l", {0: Outcomes(label, constant)}, counts=counts)]
    found = said(one_table(*runs), "art")
    assert found.kind == "nothing learned"
    assert found.sentence == (
        "No model has learned anything here: none is better than always answering cat (66.7%, n = 90)."
    )
    runs[1] = alone(tmp_path / "g", {0: Outcomes(label, good)}, counts=counts)
    found = said(one_table(*runs), "art")
    assert found.kind == "alone"
    assert found.sentence.endswith(" Not better than always answering cat (66.7%): personal, global.")
    sheet = site_sheet(one_table(*runs))
    assert sheet.columns == ["site", "n", "commonest class", "chance", "local only", "personal", "global"]
    assert [cell.text for cell in sheet.rows[0][:4]] == ["art", "90", "66.7", "50.0"]


def test_balanced_accuracy_decides_as_well(tmp_path: Path) -> None:
    """150 cats, 50 dogs. Federated: 50 dogs right and 120 cats; alone: 10 and 150: 85 to 80, balanced 90 to 60."""
    label = np.repeat([0, 1], [150, 50])
    joint, own = label.copy(), label.copy()
    joint[:30], own[160:] = 1, 0
    counts = [(300, 100, 0)] * 3
    first = run_of(tmp_path / "r", {0: Outcomes(label, joint)}, counts=counts)
    found = said(one_table(first, alone(tmp_path / "l", {0: Outcomes(label, own)}, counts=counts)), "art")
    assert found.gain is not None
    assert found.balanced_gain is not None
    assert (found.kind, found.gain.clear, found.balanced_gain.clear) == ("federate", False, True)
    assert (found.gain.points, found.balanced_gain.points) == pytest.approx((5, 30))
    worse = label.copy()
    worse[:75] = 1  # half of the cats: 62.5 against 80 in accuracy, 75 against 60 balanced
    second = run_of(tmp_path / "s", {0: Outcomes(label, worse)}, counts=counts)
    found = said(one_table(second, alone(tmp_path / "m", {0: Outcomes(label, own)}, counts=counts)), "art")
    assert found.kind == "unclear"
    assert found.sentence.startswith("Accuracy and balanced accuracy contradict each other: personal is at -17.5 p")


def test_no_difference_needs_both_measures(tmp_path: Path) -> None:
    """990 cats are all right, of 10 dogs 6 or 5: surely no difference in accuracy, but nobody knows about dogs."""
    label = np.repeat([0, 1], [990, 10])
    joint, own = label.copy(), label.copy()
    joint[996:], own[990:995] = 0, 0
    counts = [(1980, 20, 0)] * 3
    first = run_of(tmp_path / "r", {0: Outcomes(label, joint)}, counts=counts)
    found = said(one_table(first, alone(tmp_path / "l", {0: Outcomes(label, own)}, counts=counts)), "art")
    assert found.gain is not None
    assert (found.kind, found.gain.alike) == ("unclear", True)


def of_seed(seed: int, personal: int, n: int = 60) -> Outcomes:
    """Rows seed, seed + 1, ...: neighbouring seeds share all but one of their samples."""
    rows = np.arange(seed, seed + n)
    label = rows % len(CLASSES)
    return replace(Outcomes(label, hits(label, personal)), sample=rows)


def test_seeds_and_folds_are_pooled_and_a_sample_counts_once(tmp_path: Path) -> None:
    runs = []
    for seed in range(3):
        runs.append(run_of(tmp_path / f"r{seed}", {0: of_seed(seed, 40)}, seed=seed))
        runs.append(alone(tmp_path / f"l{seed}", {0: of_seed(seed, 20)}, seed=seed))
    table = one_table(*runs)
    assert (table.title, table.row("art").n) == ("x, 3 seeds", 62)
    assert said(table, "art").kind == "federate"
    folds = [
        run_of(tmp_path / f"{method}{fold}", {0: of_seed(60 * fold, 40)}, method, data__folds=3, data__fold=fold)
        for method in ("fednh", "local")
        for fold in range(3)
    ]
    table = one_table(*folds)
    assert (table.title, table.row("art").n) == ("x, seed 0, 3 folds", 180)
    assert one_table(*folds[:2], *folds[3:5]).title == "x, seed 0, 2 of 3 folds"
    table = one_table(*runs[:3])
    assert table.row("art").n == 60
    assert table.notes[0] == "Seeds and folds that not all methods have are left out: 1 of 2."


def test_runs_that_do_not_say_which_samples_they_hold_out_count_with_one_seed(tmp_path: Path) -> None:
    runs = [run_of(tmp_path / f"r{seed}", {0: held(60, 40, 30)}, seed=seed) for seed in (0, 1)]
    runs += [alone(tmp_path / f"l{seed}", {0: held(60, 20, None)}, seed=seed) for seed in (0, 1)]
    table = one_table(*runs)
    assert (table.title, table.row("art").n, said(table, "art").kind) == ("x, seed 0", 60, "federate")
    assert "which samples they hold out, so those of two seeds cannot be matched: only seed 0 counts." in table.notes[0]


def test_a_name_comes_first_and_a_number_is_a_number(tmp_path: Path) -> None:
    table = one_table(run_of(tmp_path / "r", {k: held(20, 9, 9) for k in range(3)}))
    assert [table.row(site).client for site in ("3", 0, "0", "Plant 4", 1)] == [2, 0, 0, 1, 1]
    with pytest.raises(UserError, match=r"has no site 'plant4' \(did you mean 'Plant 4'\?\); it has art, Plant 4, 3$"):
        table.row("plant4")
    with pytest.raises(UserError, match=r"has no client 7; it has 0, 1, 2$"):
        table.row("7")


def test_training_alone_comes_from_a_run_of_local_on_the_same_samples(tmp_path: Path) -> None:
    outcomes = {0: held(400, 300, 260), 1: held(400, 300, 300), 2: held(50, 20, 20)}
    first = run_of(tmp_path / "r", outcomes)
    table = one_table(first)
    (note,) = table.notes
    assert f"`fednh run {tmp_path}/r/config.toml --method local --out {tmp_path}/r-local` adds it." in note
    assert said(table, "art").kind == "unknown"
    told = (
        "Personal 75.0, global 65.0 (n = 400): what training alone achieves is not known. Its personal model is better"
    )
    assert sentence(table, "art").startswith(told)
    own = {0: held(400, 200, None), 1: held(400, 300, None), 2: held(50, 45, None)}
    table = one_table(alone(tmp_path / "l", own), first)
    assert (table.columns, table.notes) == (("local only", "personal", "global"), ())
    assert [found.kind for found in verdicts(table)] == ["federate", "alike", "alone"]
    assert table.mean("local only") == pytest.approx((50 + 75 + 90) / 3)


def test_other_splits_hold_out_other_samples_and_are_not_compared(tmp_path: Path) -> None:
    outcomes = {0: held(60, 30, 30)}
    runs = [run_of(tmp_path / "a", outcomes), run_of(tmp_path / "c", outcomes, "local", data__holdout=0.3)]
    assert [table.columns for table in site_tables(runs)] == [("personal", "global"), ("local only",)]
    table = one_table(runs[0], run_of(tmp_path / "b", outcomes, "local", seed=1))
    assert table.columns == ("personal", "global")
    assert table.notes[0] == "Local was run with other seeds or folds than the others: it is left out."
    other = Outcomes(np.array([2, 2, 1] * 20), np.zeros(60, int))
    table = one_table(runs[0], run_of(tmp_path / "d", {0: other}, "local"))
    assert table.columns == ("personal", "global")
    assert "d held out other samples of art: they are not compared." in table.notes[0]


def test_several_methods_say_whose_model_it_is(tmp_path: Path) -> None:
    runs = [
        run_of(tmp_path / "a", {0: held(400, 300, 260)}),
        run_of(tmp_path / "b", {0: held(400, 380, 250)}, "fedavg"),
        alone(tmp_path / "l", {0: held(400, 300, None)}),
    ]
    table = one_table(*runs)
    assert table.columns == ("local only", "FedAvg personal", "FedAvg global", "FedNH personal", "FedNH global")
    assert sentence(table, "art").startswith("Federate: FedAvg personal is at +20.0 points against training alone (")


def test_a_one_class_site_is_left_out_of_means_and_named(tmp_path: Path) -> None:
    single = Outcomes(np.zeros(20, int), np.zeros(20, int), np.ones(20, int))
    counts = [(9, 9, 9), (80, 0, 0), (9, 9, 0)]
    run = run_of(tmp_path / "r", {0: held(40, 30, 20), 1: single, 2: held(40, 20, 20)}, counts=counts)
    table = one_table(run)
    assert (table.mean("personal"), table.mean("global")) == (62.5, 50.0)
    assert said(table, "Plant 4").kind == "one class"
    assert sentence(table, "Plant 4").startswith("This site has one class, cat:")
    assert "left out of means: Plant 4." in site_sheet(table).note
    assert site_sheet(table).rows[-1][0].text == "mean of 2 sites"
    alone = one_table(run_of(tmp_path / "s", {1: single}, counts=counts)).only("Plant 4")
    assert alone.mean("personal") == 100.0, "if all sites are like that, there is nobody else"


def test_runs_without_single_samples_have_no_intervals_and_say_why(tmp_path: Path) -> None:
    outcomes = {0: held(400, 300, 200), 1: held(400, 100, 200)}
    old = one_table(run_of(tmp_path / "old", outcomes, keep=False))
    assert (old.row("art").n, said(old, "art").kind) == (None, "unknown")
    assert sentence(old, "art").startswith("Personal 75.0, global 50.0: how sure that is cannot be said here")
    assert "was made before runs kept what happened to held-out samples" in old.notes[0]
    far = one_table(run_of(tmp_path / "far", outcomes, keep=False, backend="flower", counts=(), seed=3))
    assert "The sites of" in far.notes[0]
    assert "without numbers of samples, so there are no intervals" in far.notes[0]
    assert not any("--method local" in note for note in far.notes), "the server has no data to train on"
    assert class_sheet(old, old.row("art")) is None
    assert [cell.text for cell in site_sheet(old).rows[0]] == ["art", "–", "–", "33.3", "75.0", "50.0"]


def test_recall_precision_and_confusion_of_a_class_at_a_site(tmp_path: Path) -> None:
    """Twelve cats and three dogs; two cats are taken for dogs and one for a horse, all dogs are recognised."""
    label = np.array([0] * 12 + [1] * 3)
    personal = np.array([0] * 9 + [1, 1, 2] + [1] * 3)
    run = run_of(tmp_path / "r", {0: Outcomes(label, personal, np.zeros(15, int))}, counts=[(48, 12, 0)] * 3)
    table = one_table(run)
    art = table.row("art")
    assert confusion(art, art.models[0], 3).tolist() == [[9, 2, 1], [0, 3, 0], [0, 0, 0]]
    cat, dog, horse = class_table(art, art.models[0], CLASSES)
    assert (cat.n, cat.recall, cat.precision, cat.few, cat.trained) == (12, 75.0, 100.0, False, 48)
    assert (dog.n, dog.recall, dog.precision, dog.few) == (3, 100.0, 60.0, True)
    assert (horse.n, horse.recall, horse.precision, horse.guesses) == (0, None, 0.0, 1)
    sheet = class_sheet(table, art)
    assert sheet is not None
    assert [[cell.text for cell in row] for row in sheet.rows] == [
        ["cat", "48", "12", "75.0", "100.0", "100.0", "80.0"],
        ["dog", "12", "3*", "100.0", "60.0", "0.0", "–"],
        ["horse", "0", "0*", "–", "0.0", "–", "–"],
    ]


def test_programs_read_a_line_for_each_site_and_model(tmp_path: Path) -> None:
    table = one_table(run_of(tmp_path / "r", {0: held(400, 300, 260), 1: held(8, 4, None)}))
    lines = to_csv([table]).splitlines()
    assert lines[0] == "federation,site,client,n,model,accuracy,low,high,best,sentence"
    assert lines[1].startswith('"x, seed 0",art,0,400,personal,75.0,70.5')
    parts = [line.split(",") for line in lines[1:]]
    assert [(p[2], p[5]) for p in parts] == [("art", "personal"), ("art", "global"), ("Plant 4", "personal")]


def test_the_worst_tenth_leaves_out_sites_with_one_class(tmp_path: Path) -> None:
    run = run_of(tmp_path / "r", {0: held(40, 30, 20), 1: held(40, 0, 20), 2: held(40, 20, 20)})
    summary = json.loads(run.layout.summary_file.read_text()) | {"one_class": [1]}
    run.layout.summary_file.write_text(json.dumps(summary))
    sheet = held_out_sheet([load_run(run.path)])
    assert "50.00" in [cell.text for cell in sheet.rows[0]]
    assert "A site with one class, which any model can name, is left out: Plant 4." in sheet.note


def test_runs_that_differ_in_more_than_the_method_are_told_apart(tmp_path: Path) -> None:
    joint = fake_sites(tmp_path / "a", "fednh", [80.0, 60.0])
    alone = fake_sites(tmp_path / "b", "local", [50.0, 50.0])
    said = "The runs differ in more than the method: rounds."
    assert said not in site_tables([joint, alone])[0].notes
    file = alone.layout.config_file
    file.write_text(file.read_text().replace("rounds = 40", "rounds = 7"))
    assert said in site_tables([joint, load_run(alone.path)])[0].notes


def test_with_many_sites_chance_is_named(tmp_path: Path) -> None:
    names = [f"plant {k}" for k in range(41)]
    outcomes = {k: held(20, 15, 15) for k in range(41)}
    run = run_of(tmp_path / "r", outcomes, counts=[(9, 9, 9)] * 40 + [(9, 0, 0)], sites=names)
    assert one_table(run).notes[-1].startswith("If all models were equally good, up to 2 of 40 sites")
    with pytest.raises(UserError, match=r"plant 8, plant 9 and 31 more$"):
        one_table(run).row("nowhere")
