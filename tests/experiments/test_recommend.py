"""`fednh recommend`: the choice by hand, the answer through the real command line, and what a kill leaves behind."""

from __future__ import annotations

import html
import json
import os
import shlex
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression

import fednh
from fednh.config import load
from fednh.data.dataset import Dataset
from fednh.data.sources.builtin import digits
from fednh.errors import UserError
from fednh.experiments.recommend import Recommendation
from fednh.experiments.search import (
    CANDIDATES,
    ON_FEATURES,
    Choice,
    Pair,
    candidates_for,
    ranked,
    score,
    steps,
    survivors,
)
from fednh.federated.setup import build_federation
from fednh.methods.fedavg import FedAvg
from fednh.report.load import load_run
from fednh.runs.run_folder import read_config
from tests.helpers.process import Process
from tests.helpers.process import fednh as command

A, B, C, D = choices = [(name, "personal") for name in "abcd"]
Scored = dict[Choice, dict[Pair, float]]


def tried(values: dict[Choice, list[float]], pairs: list[Pair]) -> Scored:
    return {choice: dict(zip(pairs, row, strict=False)) for choice, row in values.items()}


# --- the choice by hand --------------------------------------------------------------------------------------------


def test_all_candidates_see_two_folds_then_the_other_folds_then_other_seeds() -> None:
    assert steps(3, 2) == [[(0, 0), (1, 0)], [(2, 0)], [(0, 1), (1, 1), (2, 1)]]
    assert steps(2, 1) == [[(0, 0), (1, 0)]]


def test_half_is_dropped_after_a_step_and_what_was_not_tried_is_not_chosen() -> None:
    plan = steps(3, 1)
    scores = tried({A: [10, 10], B: [30, 10], C: [20, 30], D: [90]}, [(0, 0), (1, 0)])
    assert survivors(scores, plan[:1]) == [C, B]  # means 10, 20, 25; D lacks a fold
    scores[B][2, 0], scores[C][2, 0] = 90.0, 10.0
    assert survivors(scores, plan) == [B, C]  # means 43.3 and 20
    del scores[C][2, 0]
    assert survivors(scores, plan) == [C, B]  # the third fold is not complete: it does not count
    scores[C][2, 0] = scores[B].pop((2, 0))
    assert survivors(scores, plan) == [C, B]


def test_the_choice_for_a_fold_does_not_look_at_it() -> None:
    scores = tried({A: [90, 10], B: [10, 20]}, [(0, 0), (1, 0)])
    assert survivors(scores, steps(2, 1))[0] == A
    assert survivors(scores, steps(2, 1), without=0)[0] == B
    assert survivors(scores, steps(2, 1), without=1)[0] == A


@given(st.data())
def test_nothing_on_a_fold_changes_the_choice_for_it(data: st.DataObject) -> None:
    plan, fold = steps(4, 2), data.draw(st.integers(0, 3))
    values = st.floats(0, 100)
    pairs = [pair for step in plan for pair in step]
    scores: Scored = {choice: {pair: data.draw(values) for pair in pairs} for choice in choices}
    before = survivors(scores, plan, fold)
    for choice in choices:
        scores[choice] |= {pair: data.draw(values) for pair in pairs if pair[0] == fold}
    assert survivors(scores, plan, fold) == before


def test_of_equals_the_first_candidate_is_better() -> None:
    assert ranked(tried({A: [5], B: [7], C: [7]}, [(0, 0)]), [A, B, C], [(0, 0)]) == [B, C, A]


def test_tables_also_have_linear_models_unless_the_user_chose_one() -> None:
    config = load(None, {"data.name": "npz:x.npz", "partition.name": "site"})
    names = [one.name for one in candidates_for(config, vectors=True)]
    assert names[:4] == ["local", "local-linear", "fedavg", "fedavg-linear"]
    assert candidates_for(config, vectors=False) == (*ON_FEATURES, *CANDIDATES)
    assert candidates_for(config, vectors=False)[0].alone
    with_body = load(None, {"data.name": "npz:x.npz", "partition.name": "site", "model.name": "conv2"})
    assert candidates_for(with_body, vectors=False) == CANDIDATES
    chosen = load(None, {"data.name": "npz:x.npz", "partition.name": "site", "model.name": "mlp"})
    assert candidates_for(chosen, vectors=True) == CANDIDATES


# --- the whole -----------------------------------------------------------------------------------------------------


def sites(sizes: dict[str, int], seed: int = 0, shift: float = 2.0) -> tuple[Any, Any, Any]:
    """Two classes in the plane of three features, the second rarer, alike at all sites."""
    rng = np.random.default_rng(seed)
    y = np.concatenate([np.arange(n) % 3 == 0 for n in sizes.values()]).astype(np.int64)
    x = rng.normal(size=(len(y), 3)) + shift * y[:, None]
    return x.astype(np.float32), y, np.repeat(list(sizes), list(sizes.values()))


THREE = {"east": 40, "north": 30, "west": 36}
QUICK: dict[str, Any] = {"rounds": 2, "train__epochs": 1, "data__folds": 3, "methods": ["fedavg"], "seeds": 1}


def write(path: Path, sizes: dict[str, int] = THREE) -> Path:
    x, y, site = sites(sizes)
    rows = [
        ",".join([*map(str, row), "ill" if sick else "well", where])
        for row, sick, where in zip(x, y, site, strict=True)
    ]
    path.write_text("\n".join(["a,b,c,label,site", *rows]) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of three sites and the answer for it, by the command line."""
    folder = tmp_path_factory.mktemp("recommend")
    write(folder / "table.csv")
    ended = command(words(folder), folder / "process")
    assert ended.code == 0, ended.stderr
    (folder / "told.txt").write_text(ended.stdout)
    return folder


def words(folder: Path, *more: str) -> list[str]:
    """A search that ends before its time: few rounds, folds and methods."""
    fixed = ["--rounds", "2", "--epochs", "1", "--set", "data.folds=3", "--method", "fedavg,fednh", "--seeds", "1"]
    return ["recommend", "--data", f"csv:{folder / 'table.csv'}", *fixed, "--out", str(folder / "answer"), *more]


def test_the_answer_has_a_sentence_a_site_a_page_and_models_that_predict(answered: Path) -> None:
    told, out = (answered / "told.txt").read_text(), answered / "answer"
    said = json.loads((out / "answer.json").read_text())
    assert [site["site"] for site in said["sites"]] == list(THREE)
    for site in said["sites"]:
        assert site["sentence"] in told.replace("\n", " ") or site["sentence"] in told
    assert "took no part in the choice" in told
    assert "Local" in told
    assert "FedAvg" in told
    assert said["headline"] in (out / "report.html").read_text()
    assert "What was tried" in (out / "report.html").read_text()
    for site in THREE:
        model = fednh.load_model(out / "models" / f"{site}.safetensors")
        assert model.card.site == site
        assert set(model.predict({"a": [0.0], "b": [0.0], "c": [0.0]})) <= {"ill", "well"}


def test_the_winners_command_makes_the_same_models(answered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(answered)
    program, *args = shlex.split(json.loads((answered / "answer" / "answer.json").read_text())["command"])
    ended = command(args, answered / "again")
    assert (program, ended.code) == ("fednh", 0), ended.stderr
    for file in sorted((answered / "answer" / "final" / "models" / "personal").iterdir()):
        assert file.read_bytes() == (answered / "runs/winner/models/personal" / file.name).read_bytes()


def test_the_models_are_trained_on_all_samples(answered: Path) -> None:
    counts = load_run(answered / "answer" / "final").partition["counts"]
    assert [sum(row) for row in counts] == list(THREE.values())


def test_every_sample_is_held_out_and_compared_once(answered: Path) -> None:
    said = json.loads((answered / "answer" / "answer.json").read_text())
    assert [site["n"] for site in said["sites"]] == list(THREE.values())


def test_a_finished_answer_is_given_again_without_a_run(answered: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (answered / "answer").rglob("*") if path.is_file()}
    ended = command(words(answered), answered / "b")
    assert ended.code == 0
    assert "fold 1" not in ended.stdout
    assert (answered / "told.txt").read_text().rpartition("What was tried")[2] in ended.stdout
    after = {path: path.stat().st_mtime_ns for path in (answered / "answer").rglob("*") if path.is_file()}
    assert {path: when for path, when in after.items() if ".sweep" not in path.parts} == before


def test_a_killed_search_goes_on_and_repeats_nothing_that_is_finished(tmp_path: Path) -> None:
    write(tmp_path / "table.csv")
    process = Process(words(tmp_path), tmp_path / "a")
    runs = tmp_path / "answer" / "runs"
    deadline = time.monotonic() + 60
    while len(list(runs.glob("*/summary.json"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.wait()
    there = {path: path.stat().st_mtime_ns for path in runs.glob("*/summary.json")}
    assert len(there) >= 2
    ended = command(words(tmp_path), tmp_path / "b")
    assert ended.code == 0, ended.stderr
    assert {path: path.stat().st_mtime_ns for path in there} == there
    assert (tmp_path / "answer" / "report.html").exists()


def test_in_python_from_arrays(tmp_path: Path) -> None:
    answer = fednh.recommend(data=sites(THREE), out=tmp_path / "answer", **QUICK)
    assert [one.site for one in answer.sites] == list(THREE)
    assert list(answer.to_frame().index) == list(THREE)
    assert list(answer.models) == list(THREE)
    assert answer.report.is_file()
    assert answer.winner in repr(answer)
    assert len(repr(answer)) < 600
    assert "<table>" in answer._repr_html_()
    assert "data=data" in answer.command  # no command can read what a program gave


def test_the_score_is_half_accuracy_and_half_balanced_accuracy(answered: Path) -> None:
    run = load_run(next((answered / "answer" / "runs").glob("local-fold0*")))
    by_site = []
    for client in range(3):
        found = run.outcomes(client)
        assert found is not None
        right = found.personal == found.label
        by_site.append((right.mean() + (right[found.label == 0].mean() + right[found.label == 1].mean()) / 2) / 2)
    assert score(run, "personal") == pytest.approx(100 * np.mean(by_site))
    assert score(run, "global") is None  # nobody shares anything


# --- what cannot be answered ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "more", "sentence"),
    [
        (sites({"east": 40}), {}, "has one site, east: there is nobody to federate with"),
        (sites(THREE)[:2], {}, "does not say which site a sample comes from"),
        (sites(THREE), {"data__test_share": 0.2}, "has a test set"),
        ((sites(THREE)[0], np.repeat([0, 1, 1], list(THREE.values())), sites(THREE)[2]), {}, "has a single class"),
        (sites(THREE), {"data__holdout": 0.3}, "the search holds out folds"),
        (sites(THREE), {"minutes": 0.0}, "minutes = 0 should be more than 0"),
        (sites(THREE), {"minutes": 0.001, "rounds": 1000}, "too little time"),
    ],
)
def test_what_cannot_be_answered_is_one_sentence_and_nothing_written(
    tmp_path: Path, data: Any, more: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        fednh.recommend(data, out=tmp_path / "answer", **more)
    assert not (tmp_path / "answer").exists()


def test_a_folder_with_the_answer_for_other_data_or_with_something_else_is_refused(
    answered: Path, tmp_path: Path
) -> None:
    other = write(tmp_path / "other.csv", {"east": 40, "north": 30})
    with pytest.raises(UserError, match="holds the answer for other data"):
        fednh.recommend(f"csv:{other}", out=answered / "answer", minutes=0.2)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").touch()
    with pytest.raises(UserError, match="is not empty and holds no answer"):
        fednh.recommend(f"csv:{other}", out=tmp_path / "full", minutes=0.2)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"rounds": 3}, "was begun with rounds = 2, not 3"),
        ({"data__folds": 2}, "was begun with data.folds = 3, not 2"),
        ({"train__lr": 0.3}, "train.lr is 0.01 there and 0.3 here"),
    ],
)
def test_a_search_does_not_go_on_with_other_settings(answered: Path, more: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        fednh.recommend(f"csv:{answered / 'table.csv'}", out=answered / "answer", **{**QUICK, **more})


CALLS = count()


@dataclass(frozen=True)
class Diverging(FedAvg):
    """Fails after its first two folds with both models: four runs of 7 calls, one of them a check before the run."""

    def client_update(self, *given: Any) -> Any:
        if next(CALLS) >= 28:
            raise ValueError("not a number")
        return super().client_update(*given)


def test_a_method_that_fails_on_the_way_is_left_out(tmp_path: Path) -> None:
    methods = ["fedavg", f"{__name__}:Diverging"]
    answer = fednh.recommend(sites(THREE), out=tmp_path / "answer", **{**QUICK, "methods": methods, "engine": "loop"})
    assert next(CALLS) > 28
    assert [one.n for one in answer.sites] == list(THREE.values())  # the third fold counts for the others
    assert "chosen" not in [row[-1].text for row in answer.tried.rows if "Diverging" in row[0].text]


def test_a_run_of_sites_says_how_to_get_the_answer_unless_a_run_alone_is_beside_it(
    answered: Path, tmp_path: Path
) -> None:
    start = ["run", "--data", f"csv:{answered / 'table.csv'}", "--partition", "site", "--rounds", "1"]
    first = command([*start, "--method", "fedavg", "--out", str(tmp_path / "a")], tmp_path / "x")
    assert f"fednh recommend --data csv:{answered / 'table.csv'} --out answer" in first.stdout
    alone = command([*start, "--method", "local", "--out", str(tmp_path / "b")], tmp_path / "y")
    assert "fednh recommend" not in alone.stdout
    again = command([*start, "--method", "fedavg", "--out", str(tmp_path / "a")], tmp_path / "z")
    assert "fednh recommend" not in again.stdout


# --- real data, real time ------------------------------------------------------------------------------------------


def logistic_regression_alone(out: Path, data: Dataset | None = None) -> dict[str, float]:
    """What scikit-learn's logistic regression achieves at each site alone, on the folds of an answer; in percent."""
    right: dict[str, list[bool]] = {}
    for path in sorted((out / "runs").glob("local-fold*-seed0")):
        fed = build_federation(read_config(path), data)
        x, y = fed.train.floats(fed.train.x).numpy().reshape(len(fed.train), -1), fed.train.y.numpy()
        for site, train, held in zip(fed.sites, fed.parts, fed.held_out, strict=True):
            model = LogisticRegression(max_iter=2000).fit(x[train], y[train])
            right.setdefault(site, []).extend(model.predict(x[held]) == y[held])
    return {site: 100 * float(np.mean(those)) for site, those in right.items()}


def accuracies(answer: Recommendation, kind: str) -> dict[str, float]:
    return {row.name: m.accuracy for row in answer.table.rows for m in row.models if m.kind == kind}


def mean(values: dict[str, float]) -> float:
    return sum(values.values()) / len(values)


@pytest.mark.soak
@pytest.mark.skipif(
    "FEDNH_HEART" not in os.environ, reason="FEDNH_HEART does not name the folder of UCI's heart disease"
)
def test_four_hospitals(tmp_path: Path) -> None:
    """The answer stands beside logistic regression alone and the commonest class, and neither is better."""
    source = f"csv:{os.environ['FEDNH_HEART']}/*.data"
    answer = fednh.recommend(data=source, data__label="target", out=tmp_path / "answer")
    usual = logistic_regression_alone(tmp_path / "answer")
    together, alone = accuracies(answer, "personal"), accuracies(answer, "local")
    commonest = {row.name: row.constant.accuracy for row in answer.table.rows if row.constant is not None}
    assert len(answer.sites) == len(usual) == 4
    assert mean(alone) > mean(usual) - 2
    assert mean(together) > mean(usual) - 2
    assert max(mean(alone), mean(together)) > mean(commonest) + 5
    assert not [one.site for one in answer.sites if one.kind == "federate"]  # here nobody gains by it
    page = answer.report.read_text()
    assert all(html.escape(one.sentence, quote=False) in page or one.sentence in page for one in answer.sites)


@pytest.mark.soak
def test_three_hospitals_with_skewed_labels(tmp_path: Path) -> None:
    """On the breast-cancer table FedNH with the default settings is worse than training alone: the answer is not."""
    x, y = load_breast_cancer(return_X_y=True)
    rng = np.random.default_rng(0)
    site = np.array([rng.choice(["a", "b", "c"], p=[0.6, 0.3, 0.1] if label else [0.1, 0.3, 0.6]) for label in y])
    answer = fednh.recommend(data=(x.astype(np.float32), y, site), minutes=5, out=tmp_path / "answer")
    together, alone = accuracies(answer, "personal"), accuracies(answer, "local")
    assert mean(together) > mean(alone) - 0.5
    assert mean(alone) > 94
    assert "alone" not in {one.kind for one in answer.sites}


@pytest.mark.soak
def test_four_sites_with_fifty_images_each_within_the_time(tmp_path: Path) -> None:
    data = digits()
    for at in range(200):
        folder = tmp_path / "photos" / ("north", "south", "east", "west")[at % 4] / f"digit-{data.y_train[at] % 5}"
        folder.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray((data.x_train[at, ..., 0] * 15).astype(np.uint8)).resize((32, 32)).convert("RGB")
        image.save(folder / f"{at}.png")
    began = time.monotonic()
    answer = fednh.recommend(data=f"folder:{tmp_path / 'photos'}", minutes=3, out=tmp_path / "answer")
    assert time.monotonic() - began < 1.1 * 180
    assert {row.n for row in answer.table.rows} <= {20, 30, 40, 50}, "as many folds as there was time for, each of ten"
    assert len(answer.models) == 4
