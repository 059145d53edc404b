"""The numbers behind the figures, against what a person gets by hand."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from fednh.data.sources.builtin import digits
from fednh.data.sources.registry import PUBLISHED
from fednh.errors import UserError
from fednh.inference.metrics import assess, calibration_error, reliability
from fednh.inference.model import load_model
from fednh.methods import METHODS
from fednh.report.figures import FIGURES
from fednh.report.figures.base import Choice, FigureUnavailable
from fednh.report.figures.curves import curve
from fednh.report.figures.frequency import global_groups, personal_groups, shot_group
from fednh.report.figures.partition import chosen_clients, shares
from fednh.report.figures.representations import principal, shared_classes
from fednh.report.figures.sensitivity import gains, swept
from fednh.report.figures.similarity import cosines, load_groups, semantics
from fednh.report.figures.style import Look, looks
from fednh.report.groups import by_setting, by_variant
from fednh.report.stats import lowest_tenth
from fednh.runs.model_file import Outcomes, write_outcomes
from tests.helpers.synthetic import add_outcomes, fake_run, fake_sites, person, real_run, record


def test_curve_is_mean_and_spread_over_seeds_at_rounds_that_all_evaluated(tmp_path: Path) -> None:
    one = fake_run(tmp_path / "1", {"seed": 1}, [record(1, gm=10.0), record(2), record(3, gm=30.0), record(4, gm=40.0)])
    two = fake_run(tmp_path / "2", {"seed": 2}, [record(1, gm=14.0), record(2, gm=9.0), record(3, gm=36.0)])
    points = curve([one, two], "gm")
    assert [(p.x, p.mean, p.n) for p in points] == [(1, 12.0, 2), (3, 33.0, 2)]
    assert [p.spread for p in points] == pytest.approx([8**0.5, 18**0.5])  # sqrt(2^2 + 2^2), sqrt(3^2 + 3^2)
    assert [p.x for p in curve([one, two], "gm", "bytes")] == pytest.approx([4, 12])  # 1 + 3 MB a round
    assert [p.x for p in curve([one, two], "gm", "seconds")] == pytest.approx([2, 6])
    assert curve([one], "pm_v") == []
    assert curve([one], "gm")[0].spread == 0


def test_semantics_is_within_minus_between_without_the_diagonal() -> None:
    cosine = np.array([[1, 0.8, 0.1, 0.2], [0.8, 1, 0.3, 0.4], [0.1, 0.3, 1, 0.6], [0.2, 0.4, 0.6, 1]])
    # within: (0.8 + 0.6) / 2 = 0.7; between: (0.1 + 0.2 + 0.3 + 0.4) / 4 = 0.25
    assert semantics(cosine, {"x": [0, 1], "y": [2, 3]}) == pytest.approx(0.45)
    with pytest.raises(FigureUnavailable):
        semantics(cosine, {"all": [0, 1, 2, 3]})


def test_cosines_of_a_class_never_seen_are_zero() -> None:
    found = cosines(np.array([[3.0, 0.0], [3.0, 3.0], [0.0, 0.0]]))
    assert found[0, 1] == pytest.approx(0.5**0.5)
    assert found[2].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("samples", "group"), [(0, "absent"), (1, "few"), (19, "few"), (20, "medium"), (100, "medium"), (101, "many")]
)
def test_shot_groups_have_their_bounds_in_the_middle(samples: int, group: str) -> None:
    assert shot_group(samples, (20, 100)) == group


def test_accuracy_by_shot_group(tmp_path: Path) -> None:
    people = [person(0, 0, [90.0, 50.0, 10.0]), person(1, 0, [80.0, 20.0, 0.0])]
    run = fake_run(
        tmp_path / "r", {}, counts=[(150, 5, 0), (40, 7, 0)], classes="abc", people=people, per_class=[70.0, 60.0, 5.0]
    )
    assert personal_groups(run, (20, 100)) == {
        "absent": (5.0, 2),  # (10 + 0) / 2
        "few": (35.0, 2),  # (50 + 20) / 2
        "medium": (80.0, 1),
        "many": (90.0, 1),
    }
    assert global_groups(run, (20, 100)) == {"absent": (5.0, 1), "few": (60.0, 1), "many": (70.0, 1)}  # 0, 12, 190


@pytest.mark.parametrize(("n", "marked"), [(1, 1), (10, 1), (11, 2), (20, 2)])
def test_worst_tenth_is_rounded_up_and_lowest(n: int, marked: int) -> None:
    values = np.arange(n, 0, -1).astype(float)
    found = lowest_tenth(values)
    assert found.sum() == marked
    assert set(values[found]) == set(range(1, marked + 1))


def test_gains_are_paired_by_seed(tmp_path: Path) -> None:
    table = {(0.1, 0): 50, (0.1, 1): 70, (0.9, 0): 53, (0.9, 1): 75, (0.5, 0): 49, (0.5, 2): 99}
    runs = [
        fake_run(tmp_path / f"{rho}-{seed}", {"method.rho": rho, "seed": seed}, gm=gm)
        for (rho, seed), gm in table.items()
    ]
    found = gains(runs, "method.rho", "gm", 0.1)
    assert [(g.value, g.mean, g.n) for g in found] == [(0.1, 0, 2), (0.5, -1, 1), (0.9, 4, 2)]  # seed 2 has no base
    assert [g.spread for g in found] == pytest.approx([0, 0, 2**0.5])
    assert swept(runs) == ["method.rho"]


def test_swept_needs_runs_that_are_otherwise_the_same(tmp_path: Path) -> None:
    settings = [{"method.rho": 0.1, "train.lr": 0.1}, {"method.rho": 0.9, "train.lr": 0.2}]
    runs = [fake_run(tmp_path / str(i), setting) for i, setting in enumerate(settings)]
    assert swept(runs) == []
    runs.append(fake_run(tmp_path / "2", {"method.rho": 0.1, "train.lr": 0.2}))
    assert swept(runs) == ["method.rho", "train.lr"]


def test_gradient_norms_over_seeds(tmp_path: Path) -> None:
    one = fake_run(tmp_path / "1", {"seed": 1}, [record(1, gradient_norm=8.0), record(2, gradient_norm=2.0), record(3)])
    two = fake_run(tmp_path / "2", {"seed": 2}, [record(1, gradient_norm=4.0), record(2, gradient_norm=1.0)])
    found = [(p.x, p.mean, p.low, p.high, p.n) for p in curve([one, two], "gradient_norm")]
    assert found == [(1, 6.0, 4.0, 8.0, 2), (2, 1.5, 1.0, 2.0, 2)]


def test_principal_components_keep_distances_of_a_plane() -> None:
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.normal(size=(7, 2)))[0]
    a, b = rng.normal(size=(2, 20, 2)) @ basis.T
    (one, two), held = principal(a, b)
    assert held == pytest.approx(1)
    assert np.linalg.norm(one[3] - two[5]) == pytest.approx(np.linalg.norm(a[3] - b[5]))


def test_default_classes_are_those_that_both_clients_hold() -> None:
    counts = np.array([[9, 0, 5, 3], [9, 8, 4, 6]])
    assert shared_classes(counts, (0, 1)) == [0, 2, 3]  # the smaller counts are 9, 0, 4, 3


def test_shares_and_clients(tmp_path: Path) -> None:
    assert shares(np.array([[3, 1], [1, 1]]), 0).tolist() == [75, 25]
    run = fake_run(tmp_path / "r", {})
    assert chosen_clients(run, Choice()) == (0, 1)
    with pytest.raises(FigureUnavailable, match="no client 7"):
        chosen_clients(run, Choice(clients=(0, 7)))
    eight = fake_run(tmp_path / "eight", {}, counts=[(5, 5)] * 8)
    assert chosen_clients(eight, Choice()) == (0, 1, 2, 3, 4, 5, 6, 7)  # all, up to eight
    nine = fake_run(tmp_path / "nine", {}, counts=[(5, 5)] * 9)
    assert chosen_clients(nine, Choice()) == (0, 1)
    assert chosen_clients(nine, Choice(clients=(8, 2, 5))) == (8, 2, 5)
    named = fake_sites(tmp_path / "named", "fednh", [1.0, 2.0, 3.0])
    assert chosen_clients(named, Choice(clients=("photo", "0"))) == (2, 0)  # by name, and numbers stay valid
    with pytest.raises(UserError, match=r"no site 'phot'.*'photo'"):
        chosen_clients(named, Choice(clients=("phot",)))
    with pytest.raises(FigureUnavailable, match="9 clients are too many"):
        chosen_clients(nine, Choice(clients=tuple(range(9))))


def test_a_site_with_one_class_counts_in_no_mean(tmp_path: Path) -> None:
    """100% at a site with one class says nothing: FedNH's mean is 60, not 73, and its worst site is cartoon."""
    run = fake_sites(tmp_path / "fednh", "fednh", [70.0, 50.0, 100.0], one_class=[2])
    drawn = FIGURES["fairness"].draw([run], Choice())
    assert [row[3] for row in drawn.rows] == ["art", "cartoon"]
    assert "is left out: photo." in drawn.caption
    [note] = [text.get_text() for text in drawn.figure.axes[0].texts]
    assert note.startswith("60.0 ± ")
    assert note.endswith("worst: cartoon 50.0")


def test_reliability_by_hand(tmp_path: Path) -> None:
    """Two sites: of four predictions with 90% three are right, of two with 50% one: ECE = (4 * 0.15 + 2 * 0) / 6."""
    run = fake_sites(tmp_path / "fednh", "fednh", [50.0, 50.0])
    label, guess = np.array([0, 0, 1]), np.array([0, 0, 0])
    sure, half = np.array([0.9, 0.9, 0.9], np.float32), np.array([0.9, 0.5, 0.5], np.float32)
    write_outcomes(run.layout.outcomes_of(0), Outcomes(label, guess, label, confidence=sure, shared_confidence=sure))
    write_outcomes(run.layout.outcomes_of(1), Outcomes(label, guess, label, confidence=half, shared_confidence=sure))
    drawn = FIGURES["reliability"].draw([run], Choice())
    assert drawn.columns == ["method", "model", "low", "high", "samples", "confidence", "accuracy"]
    personal, shared = ([row for row in drawn.rows if row[1] == kind] for kind in ("personal", "global"))
    assert [row[4] for row in personal] == [2, 4]
    assert [row[6] for row in personal] == [0.5, 0.75]
    assert [row[5] for row in personal] == pytest.approx([0.5, 0.9])
    assert [(row[4], row[6]) for row in shared] == [(6, 1.0)]
    texts = [text.get_text() for text in drawn.figure.axes[0].get_legend().get_texts()]
    assert texts == ["personal: ECE 10.0", "global: ECE 10.0"]
    assert "n = 1 seed a method" in drawn.caption


def test_reliability_needs_confidences_which_older_runs_lack(tmp_path: Path) -> None:
    run = fake_sites(tmp_path / "fednh", "fednh", [50.0, 50.0])
    add_outcomes(run, 0, [0, 1], [0, 1], [])
    with pytest.raises(FigureUnavailable, match="before confidences were recorded"):
        FIGURES["reliability"].draw([run], Choice())


def test_confidences_of_a_run_are_those_of_its_saved_models(tmp_path: Path) -> None:
    run = real_run(tmp_path / "run", {"data.holdout": 0.3, "rounds": 1, "partition.clients": 3})
    rows, data = run.outcomes(1), digits()
    assert rows is not None
    assert rows.sample is not None
    for client, stored, guess in ((1, rows.confidence, rows.personal), (None, rows.shared_confidence, rows.shared)):
        said = load_model(run.path, client).scores(data.x_train[rows.sample]).probabilities
        np.testing.assert_allclose(said.max(1), stored, atol=1e-5)
        assert (said.argmax(1) == guess).all()
    first = assess(load_model(run.path, 1), data.x_train[rows.sample], data.y_train[rows.sample])
    assert rows.confidence is not None
    assert calibration_error(reliability(rows.confidence, rows.personal == rows.label)) == pytest.approx(
        first.ece, abs=1e-4
    )


def test_cifar100_ships_with_its_twenty_groups_of_five() -> None:
    groups = load_groups("cifar100", PUBLISHED["cifar100"].classes)
    assert groups is not None
    assert [len(members) for members in groups.values()] == [5] * 20
    assert sorted(c for members in groups.values() for c in members) == list(range(100))
    names = PUBLISHED["cifar100"].classes
    assert [names[c] for c in groups["aquatic_mammals"]] == ["beaver", "dolphin", "otter", "seal", "whale"]
    assert load_groups("digits", ["0", "1"]) is None


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "cannot be read as JSON"),
        ("[1]", "must look like"),
        ('{"g": [1]}', "must look like"),
        ('{"g": ["a", "zebra"]}', "'zebra' is not a class"),
        ('{"g": ["a"], "h": ["a", "b"]}', "more than one group"),
        ('{"g": ["a"]}', "class 'b' stands in no group"),
    ],
)
def test_a_bad_mapping_file_is_one_sentence(content: str, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "groups.json"
    file.write_text(content)
    with pytest.raises(UserError, match=complaint):
        load_groups("mine", ["a", "b"], file)


def test_a_mapping_file_in_any_order(tmp_path: Path) -> None:
    file = tmp_path / "groups.json"
    file.write_text(json.dumps({"late": ["b"], "early": ["c", "a"]}))
    assert load_groups("mine", ["a", "b", "c"], file) == {"late": [1], "early": [2, 0]}


def test_runs_are_grouped_by_task_and_by_method(tmp_path: Path) -> None:
    settings = [
        {"method.name": "fedavg", "seed": 0},
        {"method.name": "fednh", "seed": 0, "method.rho": 0.5},
        {"method.name": "fednh", "seed": 1, "method.rho": 0.5, "workers": 3, "eval.every": 1},
        {"method.name": "fednh", "seed": 0, "method.rho": 0.9},
        {"method.name": "fedavg", "seed": 0, "train.lr": 0.5},
    ]
    runs = [fake_run(tmp_path / str(i), setting) for i, setting in enumerate(settings)]
    groups = by_setting(runs)
    assert [len(group) for group in groups.values()] == [4, 1]
    assert [label.rpartition(", ")[2] for label in groups] == ["train.lr=0.05", "train.lr=0.5"]
    variants = by_variant(runs[:4])
    assert {label: len(group) for label, group in variants.items()} == {
        "FedAvg": 1,
        "FedNH rho=0.5": 2,
        "FedNH rho=0.9": 1,
    }


def own_look(method: str) -> Look:
    """A method's look where nothing else is shown."""
    return looks([method], [method])[method]


def test_a_method_keeps_its_look_and_no_two_lines_share_a_colour() -> None:
    assert looks(["FedNH", "FedAvg"], ["fednh", "fedavg"]) == {"FedNH": own_look("fednh"), "FedAvg": own_look("fedavg")}
    mixed = looks(["FedNH a", "FedNH b", "FedAvg"], ["fednh", "fednh", "fedavg"])
    assert mixed["FedNH b"] == own_look("fednh")
    assert mixed["FedNH a"].dashes != mixed["FedNH b"].dashes
    assert mixed["FedAvg"] == own_look("fedavg")
    assert len({look.colour for look in mixed.values()}) == 3
    assert own_look("their.package:Method") == own_look("their.package:Method")


@pytest.mark.parametrize("name", ["curves", "convergence"])
def test_a_line_looks_the_same_in_any_company(name: str, tmp_path: Path) -> None:
    lines = [record(r, gm=10.0 * r, gradient_norm=1.0 / r) for r in (1, 2)]
    runs = [fake_run(tmp_path / m, {"method.name": m}, lines) for m in ("fedavg", "fedprior")]
    for company in (runs, runs[1:]):
        ax = FIGURES[name].draw(company, Choice()).figure.axes[0]
        (drawn,) = (one for one in ax.lines if one.get_label() == "FedPrior")
        assert (drawn.get_color(), drawn.get_linestyle()) == (own_look("fedprior").colour, "--")


def lab(colour: str) -> NDArray[np.float64]:
    """CIELAB, in which distances are as the eye sees them."""
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]] @ linear
    x, y, z = np.cbrt(xyz / (0.9505, 1, 1.0888))  # no colour here is so dark that the cube root would not hold
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_every_method_has_a_look_of_its_own() -> None:
    """Colours differ, by much where dashes are the same; no two methods have the same dashes and marker."""
    assert all(method.look for method in METHODS.values())
    look = {name: own_look(name) for name in METHODS}
    assert len({(one.dashes, one.marker) for one in look.values()}) == len(METHODS)
    for a, b in combinations(METHODS, 2):
        apart = np.linalg.norm(lab(look[a].colour) - lab(look[b].colour))
        assert apart > (28 if look[a].dashes == look[b].dashes else 14), (a, b, apart)
    for name, one in look.items():
        assert 35 < lab(one.colour)[0] < 70, f"{name} fades on white or on black"
