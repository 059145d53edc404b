"""The server asks only what it may, but cleverly: which sequence of questions singles out a sample of a site?"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import logging
import math
import os
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fednh.config import Config, dump, flat, load
from fednh.config.schema import _keys, build_method
from fednh.data.batches import ClientData, Samples
from fednh.errors import Refused
from fednh.federated.architectures import initial_state
from fednh.federated.checks import _NoOpFit
from fednh.flower import audit as audit_events
from fednh.flower import client_app as sites
from fednh.flower import protocol, signing, transport
from fednh.flower.deploy.scaffold import site_toml
from fednh.flower.protocol import Answer, Hello, Order, to_arrays, to_tree
from fednh.flower.signing import without_signature
from fednh.flower.site_config import for_sites, read_policy
from fednh.io import chain
from fednh.io.files import read_tree
from fednh.methods import METHODS, Method, pfedfda
from fednh.methods.fit import LocalFit, Sgd
from fednh.models import build_net
from tests.helpers.hostile import Scene, config_of, message, problem, question

ROWS = 100
RULES = {"allow.rounds": 5, "allow.epochs": 2, "allow.sites": 2, "allow.methods": "fedavg, fednh"}


def rows() -> NDArray[np.float64]:
    return (np.random.default_rng(5).normal(size=(ROWS, 3)) * 10).round(3)


def lines(count: int = ROWS) -> list[str]:
    return [f"{a:.3f},{b:.3f},{c:.3f},{n % 2}" for n, (a, b, c) in enumerate(rows()[:count])]


def site(folder: Path, count: int = ROWS, **more: Any) -> Scene:
    """A site with 100 rows of three features and two classes, whose owner allows little."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "t.csv").write_text("\n".join(["a,b,c,label", *lines(count), ""]))
    return Scene(folder, **{"data": f"csv:{folder}/t.csv", **RULES, **more})


def ask(scene: Scene, **settings: Any) -> Message:
    return scene.deliver(scene.signed(question(dump(config_of(**settings)))))


def greeting(reply: Message) -> Hello:
    assert problem(reply) == ""
    return Hello.read(without_signature(reply.content))


def recovered(mean: NDArray[Any], std: NDArray[Any]) -> set[int]:
    """Rows of which all values are the mean plus or minus the deviation, as with two samples."""
    near = np.isclose(rows(), mean + std, atol=2e-3) | np.isclose(rows(), mean - std, atol=2e-3)
    return {int(row) for row in np.flatnonzero(near.all(axis=1))}


def agreed_file(scene: Scene) -> Path:
    (file,) = (scene.folder / "state").glob("agreed-*.json")
    return file


# --- which samples count ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("holdout", [0.999, 0.98, None])
def test_no_sequence_of_queries_gives_single_rows(holdout: float | None, tmp_path: Path) -> None:
    """A large holdout once left two samples, whose mean and deviation are their values: 77 rows in 60 queries."""
    scene, found = site(tmp_path), set[int]()
    for seed in range(20):
        reply = ask(scene, seed=seed, **({} if holdout is None else {"data.holdout": holdout}))
        if not problem(reply):
            task = greeting(reply).task
            found |= recovered(np.array(task.mean), np.array(task.std))
    assert found == set()


def test_a_greeting_has_the_statistics_of_all_samples(tmp_path: Path) -> None:
    task = greeting(ask(site(tmp_path), **{"data.holdout": 0.5})).task
    assert task.mean == pytest.approx(rows().mean(axis=0).tolist(), abs=1e-5)
    assert task.std == pytest.approx(rows().std(axis=0).tolist(), abs=1e-5)


def test_a_greeting_is_made_once(tmp_path: Path) -> None:
    """A patient more or less once was the difference of two greetings."""
    scene = site(tmp_path, ROWS - 1)
    first = greeting(ask(scene)).task
    site(tmp_path)  # one row more
    sites._own_data.cache_clear()
    sites._federation.cache_clear()
    assert greeting(ask(scene)).task == first
    log = [json.loads(line) for line in (tmp_path / "state/audit/a.jsonl").read_text().splitlines()]
    assert [row["greeting"] for row in log if row["event"] == "joined"] == [1, 2]
    agreed_file(scene).unlink()  # the owner's word
    assert greeting(ask(scene)).task.mean != first.mean


OTHERS: dict[str, Any] = {
    "seed": 1,
    "data.holdout": 0.5,
    "data.test_share": 0.3,
    "data.classes": ["0", "1"],
    "partition.min_samples": 90,
    "eval.samples": 1,
}


@pytest.mark.parametrize("key", OTHERS)
def test_what_decides_which_samples_count_is_agreed_once(key: str, tmp_path: Path) -> None:
    """Also in an order: two trainings on different samples can be subtracted, too."""
    scene = site(tmp_path)
    assert problem(ask(scene)) == ""
    said = problem(ask(scene, **{key: OTHERS[key]}))
    assert said.startswith(f"refused: {key} = {OTHERS[key]!r}, but this site has agreed to ")
    assert said.endswith(f"by deleting {agreed_file(scene).name} in its folder of state")
    scene.agreed = greeting(ask(scene)).task
    assert f"{key} = " in problem(scene.ordered(config_of(**{key: OTHERS[key]}), Order(client=0, round=1, sites=2)))
    assert problem(ask(scene, rounds=1, **{"train.lr": 0.5})) == "", "how to train is not agreed in this way"


def test_columns_are_agreed_once(tmp_path: Path) -> None:
    scene = site(tmp_path, columns="a, b, c")
    assert problem(ask(scene, **{"data.columns": {"a": "number", "b": "number"}})) == ""
    assert "data.columns = {'a': 'number'}, but this site" in problem(ask(scene, **{"data.columns": {"a": "number"}}))


def test_refusals_are_answers_too(tmp_path: Path) -> None:
    """partition.min_samples, by halves, gave the number of samples; a list of classes, by guesses, their names."""
    scene = site(tmp_path)
    for number in range(10):
        assert "own log says why" in problem(ask(scene, **{"partition.min_samples": 1000 - number}))
    assert "own log says why" in problem(ask(scene, **{"partition.min_samples": 1000})), "the same question again"
    assert "was asked about its samples in 10 different ways" in problem(ask(scene))
    agreed_file(scene).unlink()
    assert problem(ask(scene)) == ""


def test_a_damaged_agreement_is_not_an_empty_one(tmp_path: Path) -> None:
    scene = site(tmp_path)
    assert problem(ask(scene)) == ""
    agreed_file(scene).write_text("{}")
    assert problem(ask(scene)).startswith("UserError")


def test_an_order_before_any_greeting_agrees_too(tmp_path: Path) -> None:
    scene = site(tmp_path)
    scene.agreed = greeting(ask(scene)).task
    agreed_file(scene).unlink()
    assert problem(scene.ordered(config_of(), Order(client=0, round=1, sites=2))) == ""
    assert "seed = 3, but this site has agreed to 0" in problem(ask(scene, seed=3))


# --- what a refusal says ---------------------------------------------------------------------------------------------


def table(folder: Path, word: str, columns: dict[str, list[object]], **rules: Any) -> Scene:
    """A site whose file, columns and words have a name of their own."""
    folder.mkdir(parents=True)
    names = ",".join(name if name == "label" else f"{word}{name}" for name in columns)
    rows_ = [",".join(map(str, row)) for row in zip(*columns.values(), strict=True)]
    (folder / f"{word}.csv").write_text("\n".join([names, *rows_, ""]))
    return Scene(folder, **{"data": f"csv:{folder}/{word}.csv", **RULES, "allow.methods": "fedavg, creff", **rules})


def numbers(count: int, columns: int = 2) -> dict[str, list[object]]:
    features = {f"f{k}": [round(n * 1.7 + k, 2) for n in range(count)] for k in range(columns)}
    return {**features, "label": [n % 2 for n in range(count)]}


WORDS = {"qaq": (137, 3), "wow": (41, 5)}  # rows and columns
REFUSED: dict[str, tuple[Callable[[str, int, int], dict[str, list[object]]], dict[str, Any]]] = {
    "the label names rows": (lambda w, n, k: {**numbers(n, k), "label": [f"{w}{i}" for i in range(n)]}, {}),
    "a column names rows": (lambda w, n, k: {**numbers(n, k), "who": [f"{w}{i}" for i in range(n)]}, {}),
    "classes are not agreed": (lambda w, n, k: {**numbers(n, k), "label": [f"{w}{i % k}" for i in range(n)]}, {}),
    "values are not agreed": (lambda w, n, k: {**numbers(n), **{f"t{j}": ["a", "b"] * n for j in range(k)}}, {}),
    "few samples": (lambda w, n, k: numbers(k, 2), {"partition.min_samples": 1}),
    "few training samples": (lambda w, n, k: numbers(n, k), {"data.holdout": 0.99, "partition.min_samples": 1}),
    "fewer than the server wants": (lambda w, n, k: numbers(n, k), {"partition.min_samples": 1000}),
    "no label": (lambda w, n, k: {f"x{j}": [1] * n for j in range(k)}, {}),
    "a label with gaps": (lambda w, n, k: {**numbers(n, k), "label": [i % 2 if i else "" for i in range(n)]}, {}),
    "other classes": (lambda w, n, k: numbers(n, k), {"data.classes": ["a", "b"]}),
    "a large model": (lambda w, n, k: numbers(n, k), {"model.args": {"hidden": [20_000, 20_000]}}),
    "a large tensor": (
        lambda w, n, k: numbers(n, k),
        {"method.name": "creff", "method.draws": 1, "method.features_per_class": 10**7},
    ),
    "no images": (lambda w, n, k: numbers(n, k), {"model.name": "conv2"}),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_refusal_says_nothing_of_the_data(kind: str, tmp_path: Path) -> None:
    """Two sites with other rows, columns, words and files say the same; the number of rows was once in it."""
    make, settings = REFUSED[kind]
    said = []
    for word, (count, columns) in WORDS.items():
        made = make(word, count if "rows" not in kind else count + 200, columns)
        shortest = min(map(len, made.values()))
        scene = table(tmp_path / word, word, {name: values[:shortest] for name, values in made.items()})
        said.append(problem(ask(scene, **settings)))
    assert said[0].startswith("refused: ")
    assert said[0] == said[1]


def test_the_hash_of_an_audit_line_cannot_be_guessed(tmp_path: Path) -> None:
    """A refusal's line quotes data, and its hash leaves: the number of samples was once found by trying all of them."""
    scene = site(tmp_path, 57)
    reply = ask(scene, **{"partition.min_samples": 1000})
    (asked, refused), (line, digest) = log_of(scene), str(reply.content["said"]["audit"]).split(":")  # type: ignore[arg-type]
    assert ("only 57 training samples" in refused["why"], int(line), digest) == (True, 2, refused["hash"])
    known = {key: value for key, value in refused.items() if key not in ("salt", "hash")}  # by the server, or guessed
    assert hashlib.sha256(json.dumps(known)[:-1].encode()).hexdigest() != digest
    assert len({asked["salt"], refused["salt"]}) == 2


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[Scene]:
    """Two sites that greet."""
    folder = tmp_path_factory.mktemp("pair")
    return [table(folder / word, word, numbers(*size), label="label") for word, size in WORDS.items()]


ODD = [0, -1, 1, 2.5, 10**12, "x", "\x1b", "csv:/etc/passwd", True, [], ["a"], {}, {"f0": "number"}]


@settings(max_examples=25)
@given(st.sampled_from(_keys()), st.sampled_from(ODD))
def test_a_refused_setting_is_quoted_and_nothing_else(pair: list[Scene], key: str, value: Any) -> None:
    tree, (section, _, name) = tomllib.loads(dump(config_of())), key.partition(".")
    tree[section] = {**tree.get(section, {}), name: value} if name else value
    said = []
    for scene in pair:
        for file in (scene.folder / "state").glob("agreed-*"):
            file.unlink()
        said.append(scene.asked(tomli_w.dumps(tree)))
    assert said[0] == said[1] or "" in said
    assert not any(str(word) in each for each in said for word in (*WORDS, "137", "/tmp"))


# --- how many samples are behind a number ----------------------------------------------------------------------------


def test_a_feature_that_few_samples_have_is_not_told(tmp_path: Path) -> None:
    """The mean and deviation of two values are the values."""
    scene = site(tmp_path)
    cells = [line.split(",") for line in lines()]
    table = [",".join((a, b, c if n < 2 else "", label)) for n, (a, b, c, label) in enumerate(cells)]
    (tmp_path / "t.csv").write_text("\n".join(["a,b,c,label", *table, ""]))
    task = greeting(ask(scene)).task
    assert (task.mean[2], task.std[2]) == (0.0, -1.0)
    assert task.mean[0] == pytest.approx(rows()[:, 0].mean(), abs=1e-5)


@pytest.mark.parametrize(("others", "told"), [(1, False), (9, False), (10, True)])
def test_a_feature_in_which_few_samples_differ_is_told_as_constant(others: int, told: bool, tmp_path: Path) -> None:
    """A dose that one patient of 100 was given: mean and deviation were v / 100 and, nearly, v / 10."""
    scene, cells = site(tmp_path), [line.split(",") for line in lines()]
    table = [f"{a},{b},{37.625 if 40 < n <= 40 + others else 2},{label}" for n, (a, b, _, label) in enumerate(cells)]
    (tmp_path / "t.csv").write_text("\n".join(["a,b,c,label", *table, ""]))
    task = greeting(ask(scene)).task
    assert ((task.mean[2], task.std[2]) != (2.0, 0.0)) == told
    assert task.std[0] == pytest.approx(rows()[:, 0].std(), abs=1e-5)


def test_ten_samples_that_all_differ_have_statistics(tmp_path: Path) -> None:
    task = greeting(ask(site(tmp_path, 10), **{"partition.min_samples": 1, "data.holdout": 0.0})).task
    assert task.std == pytest.approx(rows()[:10].std(axis=0).tolist(), abs=1e-5)


def test_few_samples_are_not_trained_on(tmp_path: Path) -> None:
    few = {"partition.min_samples": 1}
    assert "fewer samples than the 10" in problem(ask(site(tmp_path / "few", 9), **few))
    assert "fewer samples than the 10" in problem(ask(site(tmp_path / "held"), **{"data.holdout": 0.95}))
    assert problem(ask(site(tmp_path / "own", 9, **{"allow.samples": 5}), **{**few, "data.holdout": 0.0})) == ""


def test_metrics_of_few_held_out_samples_stay(tmp_path: Path) -> None:
    """The accuracy on one sample says whether a model of the server's choice is right about it."""
    scene, order = site(tmp_path), Order(client=0, evaluate=1)
    reply = scene.ordered(config_of(**{"data.holdout": 0.06}), order)
    assert set(reply.content["figures"]) == {"samples"}  # type: ignore[arg-type]
    agreed_file(scene).unlink()
    reply = scene.ordered(config_of(**{"data.holdout": 0.2}), order)
    assert {"samples", "held_macro", "held_share"} <= set(reply.content["figures"])  # type: ignore[arg-type]


def test_a_site_that_uploads_nothing_does_not_say_whether_training_was_finite(tmp_path: Path) -> None:
    """By scalings under which only values above a bound overflow, that once gave the largest of a column."""
    scene = site(tmp_path, **{"allow.methods": "local", "allow.metrics": ""})
    task = greeting(ask(scene, **{"method.name": "local"})).task
    scene.agreed = task.model_copy(update={"scale": 1e-30, "mean": (0.0,) * 3, "std": (1e-8,) * 3})
    reply = scene.ordered(config_of(**{"method.name": "local"}), Order(client=0, round=1, sites=2))
    assert (problem(reply), set(reply.content["facts"])) == ("", {"client", "round"})  # type: ignore[arg-type]
    assert not states(scene), "it was not finite"


def test_small_batches_are_refused(tmp_path: Path) -> None:
    said = problem(ask(site(tmp_path), **{"train.batch_size": 1}))
    assert said == "refused: train.batch_size = 1 is less than the 10 of this site (allow.samples)"


def test_the_last_batch_has_no_single_sample(tmp_path: Path) -> None:
    """With lr * weight_decay = 1 the upload is the gradient of the last batch: of one sample, if 99 fill the others."""
    scene = site(tmp_path)
    training = {"batch_size": 33, "lr": 1.0, "weight_decay": 1.0, "momentum": 0.0, "clip": 0.0, "epochs": 1}
    config = config_of(**{"data.holdout": 0.0, **{f"train.{key}": value for key, value in training.items()}})
    reply = scene.ordered(config, Order(client=0, round=1, sites=2))
    assert problem(reply) == ""
    arrays = reply.content["upload"]
    assert isinstance(arrays, ArrayRecord)
    upload = to_tree(arrays, "cpu")
    weight = next(value for name, value in upload.items() if name.startswith("body") and value.ndim == 2)
    bias = next(value for name, value in upload.items() if name.startswith("body") and value.ndim == 1)
    seen = (weight / bias[:, None]).double().numpy() * rows().std(axis=0) + rows().mean(axis=0)  # (8, 3)
    found = [row for row in seen if np.isclose(rows(), row, atol=0.05).all(axis=1).any()]
    assert found == [], "a row of the table is in the upload"


@given(st.integers(1, 200), st.integers(1, 70), st.integers(1, 20))
def test_no_batch_is_smaller_than_allowed(count: int, batch: int, fewest: int) -> None:
    x, one = torch.zeros(count, 1), torch.ones(1)
    samples = Samples(x, torch.zeros(count, dtype=torch.int64), 1, one, one * 0, augment=False)
    data = ClientData(samples, np.arange(count), fewest=fewest)
    if fewest > 1 and min(batch, count) < fewest:
        with pytest.raises(Refused, match=f"would be smaller than the {fewest} "):
            next(data.shuffled(batch))
        return
    sizes = [len(y) for _, y in data.shuffled(batch)]
    assert sum(sizes) == count
    assert min(sizes) >= fewest
    assert max(sizes) < batch + fewest
    plain = [len(chunk) for chunk in torch.split(torch.arange(count), batch)]
    assert sizes == plain or 0 < count % batch < fewest


def test_no_draw_is_smaller_than_allowed() -> None:
    """FedALA learns its mixture on a share of the samples, which the server sets."""
    x, one = torch.zeros(50, 1), torch.ones(1)
    samples = Samples(x, torch.zeros(50, dtype=torch.int64), 1, one, one * 0, augment=False)
    data = ClientData(samples, np.arange(50), fewest=10)
    for share, batch in ((0.01, 10), (1.0, 3)):
        with pytest.raises(Refused, match="draw of its samples would be smaller than the 10 that it allows"):
            next(data.drawn(share, batch))
    assert [len(y) for _, y, _ in data.drawn(0.5, 12)] == [12, 13]


def test_creff_draws_no_single_sample(tmp_path: Path) -> None:
    """Its setting draw_size = 1 once put the gradient of one sample of each class into the upload: two rows a round."""
    scene = site(tmp_path, **{"allow.methods": "creff"})
    model = {"data.holdout": 0.0, "model.args": {"hidden": [3], "linear_output": True}}
    scene.wrong = {
        "body.linear1.weight": torch.eye(3),
        "body.linear1.bias": torch.zeros(3),
        "retrained": torch.zeros(2, 3),
    }
    found = []
    for size in (1, 9, 10):
        drawn = {"method.name": "creff", "method.draws": 1, "method.draw_size": size}
        reply = scene.ordered(config_of(**model, **drawn), Order(client=0, round=1, sites=2))
        if not problem(reply):
            gradient = to_tree(reply.content["upload"], "cpu")["gradient"].double()  # type: ignore[arg-type]
            seen = [-2 * gradient[c, c].numpy() * rows().std(axis=0) + rows().mean(axis=0) for c in (0, 1)]
            found += [row for row in seen if np.isclose(rows(), row, atol=0.01).all(axis=1).any()]
    assert found == [], "rows of the table are in the upload"
    assert problem(reply) == "", "ten samples of a class are enough"


# --- how often -------------------------------------------------------------------------------------------------------


def test_evaluations_are_counted(tmp_path: Path) -> None:
    """An accuracy under weights of the server's choice answers any question about the held-out samples."""
    scene = Scene(tmp_path, **{"allow.rounds": 2})
    for client in range(4):
        assert problem(scene.ordered(config_of(), Order(client=client, evaluate=1))) == ""
    said = problem(scene.ordered(config_of(), Order(client=4, evaluate=1)))
    assert said == "refused: this site has evaluated 4 rounds, and its site.toml allows no more"
    assert problem(scene.ordered(config_of(), Order(client=1, round=1))) == "", "training is counted by itself"


def test_a_repeated_order_counts_once(tmp_path: Path) -> None:
    """A server that starts again from a checkpoint repeats orders; their answers say nothing new."""
    scene, order = Scene(tmp_path, **{"allow.rounds": 1}), Order(client=0, round=1)
    first, again = (
        scene.ordered(config_of(rounds=1), each) for each in (order, Order(client=0, round=1, since=1, sites=2))
    )
    one, two = (to_tree(reply.content["upload"], "cpu") for reply in (first, again))  # type: ignore[arg-type]
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert "has trained 1 rounds" in problem(scene.ordered(config_of(rounds=1, **{"train.lr": 0.5}), order))
    assert "has trained 1 rounds" in problem(scene.ordered(config_of(rounds=1), Order(client=1, round=1)))


ONE_UNIT: dict[str, Any] = {  # trained by the gradient of all samples at once
    "data.holdout": 0.0,
    "model.args": {"hidden": [1], "linear_output": True},
    **{f"train.{key}": 0.0 for key in ("momentum", "weight_decay", "clip")},
    **{"train.lr": 1.0, "train.epochs": 1, "train.batch_size": 200},
}


def test_the_same_order_counts_again_after_a_sample_was_added(tmp_path: Path) -> None:
    """The difference of the two uploads is the new sample, digit by digit, and its class is in the sign."""
    scene = site(tmp_path, ROWS - 1)
    scene.agreed = task = greeting(ask(scene, **ONE_UNIT)).task
    scene.wrong = {
        "body.linear1.weight": torch.zeros(1, 3),
        "body.linear1.bias": torch.zeros(1),
        "head.weight": torch.tensor([[1.0], [-1.0]]),
    }
    sums = []
    for count in (ROWS - 1, ROWS):
        site(tmp_path, count)
        sites._own_data.cache_clear()
        sites._federation.cache_clear()
        reply = scene.ordered(config_of(**ONE_UNIT), Order(client=0, round=1, sites=2))
        upload = to_tree(reply.content["upload"], "cpu")  # type: ignore[arg-type]
        sums.append({name: count * value.double() for name, value in upload.items()})
    weight, bias = (sums[1][f"body.linear1.{name}"] - sums[0][f"body.linear1.{name}"] for name in ("weight", "bias"))
    seen = (weight / bias).numpy()[0] * np.array(task.std) + np.array(task.mean)
    assert seen == pytest.approx(rows()[-1], abs=1e-3), "this stays so; but it is counted:"
    (book,) = (tmp_path / "state").glob("orders-*.json")
    assert json.loads(book.read_text())["trained"] == 2


def test_a_changed_test_set_counts_again(tmp_path: Path) -> None:
    tests, order = tmp_path / "tests.csv", Order(client=0, evaluate=1)
    tests.write_text("\n".join(["a,b,c,label", *lines(20), ""]))
    scene = site(tmp_path, test=f"csv:{tests}", **{"allow.rounds": 1})
    for count in (20, 20, 21):
        tests.write_text("\n".join(["a,b,c,label", *lines(count), ""]))
        assert problem(scene.ordered(config_of(rounds=1), order)) == ""
    tests.write_text("\n".join(["a,b,c,label", *lines(22), ""]))
    assert "has evaluated 2 rounds" in problem(scene.ordered(config_of(rounds=1), order))


def test_the_same_order_counts_again_from_another_state(tmp_path: Path) -> None:
    """The state of round 2 is not there, so the newest before it is used, which this order itself has written."""
    scene, config = site(tmp_path, **{"allow.methods": "fedper", "allow.rounds": 2}), {"method.name": "fedper"}
    replies = [scene.ordered(config_of(**config), Order(client=0, round=1, last=2, sites=2)) for _ in range(3)]
    assert [problem(reply) for reply in replies[:2]] == ["", ""]
    one, two = (to_tree(reply.content["upload"], "cpu") for reply in replies[:2])  # type: ignore[arg-type]
    assert any(not torch.equal(one[name], two[name]) for name in one)
    assert "has trained 2 rounds" in problem(replies[2])


def test_what_is_refused_is_not_counted(tmp_path: Path) -> None:
    scene = Scene(tmp_path, **{"allow.rounds": 1, "allow.sites": 2})
    for _ in range(3):
        assert "trains only with 2 or more" in problem(
            scene.ordered(config_of(rounds=1), Order(client=0, round=1, sites=1))
        )
        scene.wrong = {"head.bias": torch.zeros(3)}
        assert problem(scene.ordered(config_of(rounds=1), Order(client=0, round=1, sites=2))).startswith("ValueError")
        scene.wrong = {}
    assert problem(scene.ordered(config_of(rounds=1), Order(client=0, round=1, sites=2))) == ""
    assert "has trained 1 rounds" in problem(scene.ordered(config_of(rounds=1), Order(client=1, round=1, sites=2)))


def test_what_fails_is_counted(tmp_path: Path) -> None:
    """That it fails is an answer: here, that no training sample has a value above a bound of the server's choice."""
    scene = site(tmp_path, **{"allow.methods": "pfedfda", "allow.rounds": 1, "allow.epochs": 10})
    method = {"method.name": "pfedfda", "method.single_beta": True, "method.ridge": 1e-300}
    config = config_of(rounds=1, **{"data.holdout": 0.0, "model.args": {"hidden": [2]}, **method})
    scene.agreed = task = greeting(ask(scene, rounds=1, **{"data.holdout": 0.0, **method})).task
    said = []
    for bound in (25.0, 24.0, 23.0):  # the largest value of the column is 19.012
        scene.wrong = {
            "body.linear1.weight": torch.tensor([[1.0, 0.0, 0.0]]).repeat(2, 1),
            "body.linear1.bias": torch.full((2,), -(bound - task.mean[0]) / task.std[0]),
            "means": torch.tensor([[5.0, 0.0], [0.0, 0.0]]),
            "covariance": torch.eye(2),
        }
        said.append(problem(scene.ordered(config, Order(client=0, evaluate=1))))
    assert said[:2] == ["_LinAlgError; the site's own log says more"] * 2
    assert said[2] == "refused: this site has evaluated 2 rounds, and its site.toml allows no more"


def test_an_order_of_next_year_does_not_shut_out_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(tmp_path)
    day, now = 24 * 3600 * 10**9, time.time_ns()
    for ahead, words in ((2 * day, "dated more than a day ahead"), (365 * day, "dated more than a day ahead")):
        monkeypatch.setattr(scene.server.signer, "_last", now + ahead)
        assert words in scene.asked(config_of())
    monkeypatch.setattr(scene.server.signer, "_last", 0)
    assert scene.asked(config_of()) == ""


# --- what an upload says ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"method.name": "fednh", "method.aggregation": "count"},
        {"method.name": "fedprior", "method.aggregation": "count"},
        {"method.name": "fedpac"},
    ],
    ids=lambda settings: settings["method.name"],
)
def test_an_allowed_method_is_not_widened_to_class_counts(settings: dict[str, Any], tmp_path: Path) -> None:
    name = settings["method.name"]
    closed = Scene(tmp_path / "closed", **{"allow.methods": name})
    said = closed.asked(config_of(**settings))
    assert said.startswith(f"refused: method.name = {name!r} with these settings uploads how many samples")
    assert said.endswith("(allow.counts of its site.toml)")
    assert Scene(tmp_path / "open", **{"allow.methods": name, "allow.counts": True}).asked(config_of(**settings)) == ""


def variants() -> list[tuple[str, Method]]:
    counting = ({"name": name, "aggregation": "count"} for name in ("fednh", "fedprior"))
    by_count = [(f"{section['name']} by count", build_method(section)) for section in counting]
    return [*((name, build_method({"name": name})) for name in METHODS), *by_count]


@pytest.mark.parametrize(("name", "method"), variants(), ids=lambda value: value if isinstance(value, str) else "")
def test_a_method_says_whether_its_upload_has_the_counts(name: str, method: Method) -> None:
    """Every sample twice changes no mean, but every count."""
    net = build_net("mlp", (3,), 2, {"hidden": [4]})
    x = torch.from_numpy(rows()[:20].astype(np.float32))
    one, y = torch.ones(1), torch.arange(20) % 2
    samples = Samples(x, y, 2, one, one * 0, augment=False)
    server = method.init(net, torch.Generator().manual_seed(0))
    kept, received = method.enroll(server), method.broadcast(server)
    once, twice = (
        method.client_update(net, kept, received, ClientData(samples, np.tile(np.arange(20), n)), _NoOpFit())[1]
        for n in (1, 2)
    )
    ratios = [float((twice[key].norm() / once[key].norm()).nan_to_num(1.0)) for key in once]
    assert any(math.isclose(ratio, 2.0, rel_tol=0.01) for ratio in ratios) == method.upload.tells_counts


# --- what stays open, as docs/what-leaves-a-site.md says -------------------------------------------------------------


def test_one_order_with_chosen_weights_gives_all_rows(tmp_path: Path) -> None:
    """Units that differ in their thresholds alone: where two neighbours' gradients differ, one sample is between."""
    count, units = 20, 4000
    scene = site(tmp_path, count)
    settings = {**ONE_UNIT, "data.holdout": 0.2, "model.args": {"hidden": [units]}, "train.lr": 1e6}
    scene.agreed = task = greeting(ask(scene, **settings)).task
    weight, bias = torch.tensor([[1.0, 0.0, 0.0]]).repeat(units, 1), torch.linspace(3.5, -3.5, units)
    head = torch.tensor([[1e-6], [-1e-6]]).repeat(1, units)
    scene.wrong = {"body.linear1.weight": weight, "body.linear1.bias": bias, "head.weight": head}
    reply = scene.ordered(config_of(**settings), Order(client=0, round=1, sites=2))
    upload = to_tree(reply.content["upload"], "cpu")  # type: ignore[arg-type]
    moved = (upload["body.linear1.weight"] - weight).double().diff(dim=0).numpy()
    size = (upload["body.linear1.bias"] - bias).double().diff().numpy()
    steps = np.flatnonzero(np.abs(size) > 0.5 * np.abs(size).max())
    seen = moved[steps] / size[steps, None] * np.array(task.std) + np.array(task.mean)
    near = np.abs(rows()[:count, None] - seen).max(axis=2) < 0.01  # (rows, found)
    assert near.any(axis=1).sum() == 16, "all that are not held out"
    assert ((size[steps] < 0) == (near.argmax(axis=0) % 2 == 0)).all(), "and their classes"


def test_a_method_without_a_head_tells_the_shares_of_classes_too(tmp_path: Path) -> None:
    """With a body that sees nothing, the gradient of its bias is the difference of the shares."""
    scene = site(tmp_path)
    table = [f"{line.rpartition(',')[0]},{int(n < 6)}" for n, line in enumerate(lines())]
    (tmp_path / "t.csv").write_text("\n".join(["a,b,c,label", *table, ""]))
    scene.wrong = {
        "body.linear1.weight": torch.zeros(2, 3),
        "body.linear1.bias": torch.tensor([1.0, 0.0]),
        "head.weight": torch.tensor([[0.0, 1.0], [0.0, -1.0]]),
        "scale": torch.tensor(1.0),
    }
    settings = {**ONE_UNIT, "model.args": {"hidden": [2], "linear_output": True}, "method.name": "fednh"}
    reply = scene.ordered(config_of(**settings), Order(client=0, round=1, sites=2))
    upload = to_tree(reply.content["upload"], "cpu")  # type: ignore[arg-type]
    assert float(upload["body.linear1.bias"][1]) == pytest.approx(0.94 - 0.06, abs=1e-5)


def test_pm_l_of_chosen_models_tells_the_class_counts(tmp_path: Path) -> None:
    """It weighs a test set's classes by the site's shares of them: a model that is right about one gives its count."""
    counts, tests = [94, 5, 1], tmp_path / "tests.csv"
    labels = [c for c, number in enumerate(counts) for _ in range(number)]
    for file, column in ((tmp_path / "t.csv", labels), (tests, [n % 3 for n in range(30)])):
        cells = zip(lines(), column, strict=False)
        file.write_text("\n".join(["a,b,c,label", *(f"{line.rpartition(',')[0]},{c}" for line, c in cells), ""]))
    scene = Scene(tmp_path, data=f"csv:{tmp_path}/t.csv", test=f"csv:{tests}", **RULES)
    settings, found = {"data.holdout": 0.0, "model.args": {"hidden": [1]}}, []
    for c in range(3):
        head = torch.zeros(3, 1).index_fill_(0, torch.tensor(c), 1.0)
        scene.wrong = {
            "body.linear1.weight": torch.zeros(1, 3),
            "body.linear1.bias": torch.ones(1),
            "head.weight": head,
        }
        figures = scene.ordered(config_of(**settings), Order(client=0, evaluate=1)).content["figures"]
        found.append(figures["pm_l"] / 100 * figures["samples"])  # type: ignore[index, operator]
    assert found == pytest.approx(counts)


def test_an_upload_tells_the_number_of_steps(tmp_path: Path) -> None:
    """A weight that nothing uses decays once a step, so sizes of batches of the server's choice count the samples."""
    scene = site(tmp_path, 97, **{"allow.metrics": ""})
    scene.wrong = {"body.linear1.weight": torch.ones(1, 3), "body.linear1.bias": torch.full((1,), -1e6)}
    training = {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.0, "batch_size": 17, "epochs": 1}
    config = {"data.holdout": 0.0, "model.args": {"hidden": [1]}, **{f"train.{k}": v for k, v in training.items()}}
    reply = scene.ordered(config_of(**config), Order(client=0, round=1, sites=2))
    assert set(reply.content["facts"]) == {"client", "round"}  # type: ignore[arg-type]
    weight = to_tree(reply.content["upload"], "cpu")["body.linear1.weight"]  # type: ignore[arg-type]
    assert float(weight.log().mean()) / math.log(0.99) == pytest.approx(97 // 17 + 1, abs=1e-3)


# --- how much it writes ----------------------------------------------------------------------------------------------


def written(scene: Scene) -> int:
    """Bytes that the site keeps."""
    return sum(path.stat().st_size for path in (scene.folder / "state").rglob("*") if path.is_file())


def log_of(scene: Scene) -> list[dict[str, Any]]:
    found = chain.read(scene.folder / "state/audit/a.jsonl")
    assert found.problem is None
    return found.lines


def unsigned(scene: Scene) -> Message:
    return message(RecordDict({"huge": ConfigRecord({"x" * 100_000: 1})}), 11)


def refused(scene: Scene) -> Message:
    return scene.signed(question("rounds = 0"))


def refused_at_length(scene: Scene) -> Message:
    return scene.signed(question('train.batch_size = "' + "x" * 100_000 + '"'))


def with_many_names(scene: Scene) -> Message:
    return scene.signed(RecordDict({f"{n:0100d}": ConfigRecord({"x": 1}) for n in range(700)}))


def with_a_long_round(scene: Scene) -> Message:
    return message(scene.signed(question("")).content, 11, round_=10**4_000)


def notice(scene: Scene) -> Message:
    return scene.signed(protocol.notice("x" * 100_000), kind=protocol.NOTICE)


def again(scene: Scene) -> Message:
    return scene.signed(question(dump(config_of())))


@pytest.mark.parametrize(
    ("make", "number", "each", "most"),
    [
        (unsigned, 160, 10, 20_000),
        (refused, 160, 10, 30_000),
        pytest.param(refused, 3_200, 100, 250_000, marks=pytest.mark.soak),
        (refused_at_length, 20, 10, 100_000),
        (with_many_names, 20, 10, 30_000),
        (with_a_long_round, 20, 10, 20_000),
        (notice, 160, 10, 30_000),
        (again, 41, 10, 60_000),  # the first is new
    ],
)
def test_messages_do_not_fill_the_disk(
    make: Callable[[Scene], Message],
    number: int,
    each: int,
    most: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each message once had its lines in the audit log, of the length that its sender chose, without end."""
    monkeypatch.setattr(audit_events, "EACH", each)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # seconds
    scene = site(tmp_path)
    heads = set()
    for _ in range(number):
        said = scene.wire.deliver(11, make(scene)).content["said"]
        heads.add(said["audit"])  # type: ignore[index]
    rows = log_of(scene)
    assert written(scene) < most
    last = [row for row in rows if row["event"] != "asked"]
    assert len(last) < each + 10
    assert sum(row.get("times", 1) for row in last) == number, "and the log says how many there were"
    assert heads == {f"{row['line']}:{row['hash']}" for row in last}, "each answer has the newest line"
    before = len(rows)
    assert problem(ask(scene, rounds=1)) == "", "others are still answered"
    scene.agreed = greeting(ask(scene)).task
    assert problem(scene.ordered(config_of(), Order(client=0, round=1, sites=2))) == ""
    assert [row["event"] for row in log_of(scene)[before:]][-2:] == ["asked", "left"], "what is new has its own lines"


def test_a_greeting_that_is_new_has_its_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_events, "EACH", 2)
    scene = site(tmp_path)
    for _ in range(4):
        assert problem(ask(scene)) == ""
    assert [row.get("times") for row in log_of(scene) if row["event"] == "joined"] == [None, None, None]
    agreed_file(scene).unlink()
    assert problem(ask(scene)) == ""
    joined = [row for row in log_of(scene) if row["event"] == "joined"]
    assert [row["greeting"] for row in joined] == [1, 2, 3, 1]


def test_an_order_is_not_repeated_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing new, but takes as long as the first time."""
    monkeypatch.setattr(signing, "REPEATS", 1)
    scene, order = Scene(tmp_path, **{"allow.rounds": 1}), Order(client=0, round=1)
    said = [problem(scene.ordered(config_of(rounds=1), order)) for _ in range(4)]
    assert said == ["", "", "", "refused: this site has answered 2 repeated orders, and answers no more of them"]


# --- what it costs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [True, False])
def test_a_model_is_counted_before_it_is_built(own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers of 20,000 once took 3.4 GB at the site, in a query."""

    def built(*_: object) -> None:
        raise AssertionError("it was built")

    monkeypatch.setattr(sites, "build_federation", built)
    scene = site(tmp_path) if own else Scene(tmp_path)
    said = scene.asked(config_of(**{"model.args": {"hidden": [20000, 20000]}}))
    assert "more than the 100,000,000 parameters that this site allows (allow.parameters of its site.toml)" in said
    assert "characters" in scene.asked(config_of(**{"model.args": {"hidden": [1] * 10_000}}))


LARGE_STATES: dict[str, dict[str, Any]] = {
    "fednh": {"model.args": {"hidden": [10_001]}},  # a rotation of its first prototypes, features x features
    "fedrod": {"model.args": {"hidden": [9_000]}, "method.hypernetwork": "on"},  # classes x features x features
    "creff": {"method.features_per_class": 10_000_000},
    "pfedfda": {"model.args": {"hidden": [10_001]}},
    "fedetf": {"model.args": {"hidden": [10_001]}},
    "fedgela": {"model.args": {"hidden": [10_001]}},
}


@pytest.mark.parametrize("method", LARGE_STATES)
def test_a_small_model_makes_no_large_tensor(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FedNH turns its first prototypes by a matrix of features x features: of 20,000 it takes 3.2 GB."""

    def made(*_: object) -> None:
        raise AssertionError("it was made")

    scene, config = site(tmp_path, **{"allow.methods": method, "allow.epochs": 20}), {"method.name": method}
    scene.agreed = task = greeting(ask(scene, **config)).task
    monkeypatch.setattr(sites, "initial_state", made)
    toml = dump(config_of(**config, **LARGE_STATES[method]))
    content = Order(client=0, round=1, sites=2).write(toml, task, to_arrays({}), to_arrays({}))
    said = problem(scene.deliver(scene.signed(content, kind="train", round_=1, site="a")))
    assert said.startswith(
        "refused: with this model and these settings the method makes a tensor of more than the 100,0"
    )


MULTIPLIED = {
    "fedrep": {"head_epochs": 3},
    "fedpac": {"head_epochs": 3},
    "fedbabu": {"finetune_epochs": 3},
    "fedala": {"mix_epochs": 3},
    "fedetf": {"turns": 1, "turn_epochs": 2},  # 2 * 1 * 2 epochs
    "creff": {"draws": 3},
    "pfedfda": {"grid": 3},
}


@pytest.mark.parametrize("method", MULTIPLIED)
def test_work_that_a_method_multiplies_has_the_limit_of_epochs(method: str, tmp_path: Path) -> None:
    """`fedetf.turns`, `creff.draws` and `pfedfda.grid` could once make a site work for hours."""
    rules = {"allow.methods": method, "allow.counts": True, "allow.epochs": 2}
    scene, usual = Scene(tmp_path, **rules), {"turns": 1, "turn_epochs": 1}
    fields = MULTIPLIED[method]
    asked = {f"method.{key}": value for key, value in fields.items()}
    said = scene.asked(config_of(**{"method.name": method, **asked}))
    key, number = (f"method.{min(fields)}", 3) if method != "fedetf" else ("2 * method.turns * method.turn_epochs", 4)
    assert said == f"refused: {key} = {number} is more than the 2 that this site allows (allow.epochs)"
    fewer = {f"method.{key}": usual.get(key, 2) for key in fields}
    assert scene.asked(config_of(**{"method.name": method, **fewer})) == ""
    if method != "fedpac":  # its default is 1
        rest = dump(config_of()).partition("[method]")[0]
        said = scene.asked(f'{rest}[method]\nname = "{method}"\n[train]\nepochs = 1\n')
        assert "is more than the 2 that" in said, "the method's own default is asked for, too"


class Counted(ClientData):
    """A client's data that count how often somebody goes through them."""

    looks = 0

    def shuffled(self, batch_size: int) -> Any:
        self.looks += 1
        return super().shuffled(batch_size)

    def batches(self) -> Any:
        self.looks += 1
        return super().batches()

    def drawn(self, share: float, batch_size: int) -> Any:
        self.looks += 1
        return super().drawn(share, batch_size)

    def random(self, times: int, size: int | None = None) -> torch.Tensor:
        self.looks += -(-times // 8)  # a few numbers a sample are less than a look at it
        return super().random(times, size)


MANY = 40
WHOLE = [(m, f.name) for m, kind in METHODS.items() for f in dataclasses.fields(kind) if type(f.default) is int]


@pytest.mark.parametrize(("name", "setting"), [*WHOLE, *((name, "") for name in METHODS)])
def test_a_method_declares_its_work(name: str, setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No whole number among its settings makes a client look at its samples more often than `passes` says."""
    ones = {key: 2 if key == "endpoints" else 1 for m, key in WHOLE if m == name}  # the least that each takes
    method = build_method({"name": name, **ones, **({setting: MANY} if setting else {})})
    net = build_net("mlp", (2,), 3, {"hidden": [30]})
    one = torch.ones(1)
    samples = Samples(torch.randn(30, 2), torch.arange(30) % 3, 3, one, one * 0, augment=False)
    data, tried = Counted(samples, np.arange(30)), list[object]()
    solve = pfedfda.weights
    monkeypatch.setattr(pfedfda, "weights", lambda *given: tried.append(given) or solve(*given))  # type: ignore[func-returns-value]
    initial = initial_state(method, net, 0)
    kept, fit = method.enroll(initial), LocalFit(data, Sgd(epochs=1))
    largest = max(value.numel() for value in net.init(torch.Generator()).values())
    for _ in range(2):
        kept, upload = method.client_update(net, kept, method.broadcast(initial), data, fit)
        sizes = {key: value.numel() for key, value in {**initial, **upload, **kept}.items()}
        assert max(sizes.values()) <= max(largest, method.numbers(3, net.dim)), sizes
    method.personal_model(net, kept, method.broadcast(initial), data, fit)
    assert data.looks + len(tried) // 4 <= 5 * sum(method.passes(1).values()) + 10


@pytest.mark.parametrize("method", METHODS)
def test_rules_as_init_writes_them_allow_their_config_and_no_more_work(method: str, tmp_path: Path) -> None:
    config = load("digits", {"method.name": method, "rounds": 3})
    facts = {"site": "a", "data": "csv:t.csv", "state": "state"}
    policy = read_policy(flat(tomllib.loads(site_toml(facts, config))))
    assert policy.config(dump(for_sites(config)), "csv:t.csv").method == config.method
    most = max(config.build_method().passes(config.train.epochs).values())
    tree = tomllib.loads(dump(for_sites(config)))
    others = [("train", "epochs"), *(("method", key) for name, key in WHOLE if name == method)]
    for section, key in others:
        changed = {**tree, section: {**tree[section], key: 10**6}}
        passes = build_method(changed["method"]).passes(changed["train"]["epochs"])
        if max(passes.values()) > most:
            with pytest.raises(Refused, match=r"that this site allows \(allow.epochs\)"):
                policy.config(tomli_w.dumps(changed), "csv:t.csv")
    for key, value in (("rounds", 4), ("data", {**tree["data"], "size": [65, 64]})):
        with pytest.raises(Refused, match="that this site allows"):
            policy.config(tomli_w.dumps({**tree, key: value}), "csv:t.csv")


MANY_PARTS = ".".join("a" * 3_000)
HIDDEN = ["", 'x = "#"\n', "x = ['''a'''', '''b''']\n", 'x = ["""a\\"""""", """b"""]\n', 'x = \'"\' # """\n']


@pytest.mark.parametrize("before", HIDDEN)
@pytest.mark.parametrize(
    "key", [f"{MANY_PARTS} = 1", f"[{MANY_PARTS}]", f"x.y = {{{MANY_PARTS} = 1}}", "'a' . " * 3_000]
)
def test_a_key_of_many_parts_is_not_parsed(before: str, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the square of their number: 5 s for 16,000, so most of a day for the 4 MB of a query."""
    tomllib.loads(before)
    monkeypatch.setattr(tomllib, "loads", lambda _: pytest.fail("it was parsed"))
    with pytest.raises(Refused, match="not valid TOML"):
        read_policy({}).config(before + key, "csv:t.csv")


def test_texts_with_many_dots_are_no_keys() -> None:
    dots = "a." * 50
    text = f"x = [\"{dots}\", '{dots}', \"\"\"{dots}\n\"\"\", '''{dots}''', 0.5] # {dots}"
    assert transport.read_toml(text) == tomllib.loads(text)


def test_images_are_not_made_large(tmp_path: Path) -> None:
    """Forty images of 20 x 20 pixels once took 2.8 GB at a site, in a query for 3,000 x 3,000."""
    from PIL import Image

    for k in range(24):
        file = tmp_path / f"images/{k % 2}/{k}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((20, 20), k, np.uint8)).save(file)
    scene = Scene(tmp_path / "site", data=f"folder:{tmp_path}/images", **{"allow.pixels": 400})
    said = problem(ask(scene, **{"data.size": [20, 21]}))
    assert said == "refused: data.size = [20, 21] is more than the 400 pixels that this site allows (allow.pixels)"
    assert problem(ask(scene, **{"data.size": 20})) == ""
    usual = Scene(tmp_path / "usual", data=f"folder:{tmp_path}/images")
    assert "more than the 1,000,000 pixels" in problem(ask(usual, **{"data.size": [3000, 3000]}))


def test_states_do_not_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that never says that it needs an old one no more."""
    monkeypatch.setattr(sites, "STATES", 3)
    scene = Scene(tmp_path)
    config = config_of(**{"method.name": "fedper"})
    for round_ in range(1, 6):
        assert problem(scene.ordered(config, Order(client=0, round=round_, since=0))) == ""
    names = sorted(path.name for path in (tmp_path / "state").rglob("state.round-*"))
    assert names == [f"state.round-{n:06d}.safetensors" for n in (3, 4, 5)]


def test_the_number_of_parameters_is_the_owners(tmp_path: Path) -> None:
    number = 3 * 8 + 8 + 8 * 2  # the head has no bias
    assert problem(ask(site(tmp_path / "enough", **{"allow.parameters": number}))) == ""
    said = problem(ask(site(tmp_path / "few", **{"allow.parameters": number - 1})))
    assert said.startswith(f"refused: the model has more than the {number - 1} parameters that this site allows")


DEEP = """
from torch import nn

class Deep(nn.Module):
    made = 0

    def __init__(self, shape, num_classes, depth):
        super().__init__()
        self.body = nn.Sequential(*(self.layer(shape[0]) for _ in range(depth)))
        self.head = nn.Linear(shape[0], num_classes)

    def layer(self, width):
        Deep.made += 1
        return nn.Linear(width, width)
"""


def test_a_deep_model_is_not_made_to_count_its_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server says how deep a class is that the owner allows: 100,000 layers took 40 seconds, in a query."""
    (tmp_path / "deep_net.py").write_text(DEEP)
    monkeypatch.syspath_prepend(tmp_path)
    scene = site(tmp_path / "site", **{"allow.models": "deep_net:Deep", "allow.parameters": 300})
    model = {"model.name": "deep_net:Deep"}
    said = problem(ask(scene, **model, **{"model.args": {"depth": 3000}}))
    assert said.startswith("refused: the model has more than the 300 parameters that this site allows")
    assert importlib.import_module("deep_net").Deep.made < 100
    assert problem(ask(scene, **model, **{"model.args": {"depth": 20}})) == ""


def test_layers_without_parameters_have_a_limit_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "idle_net.py").write_text(DEEP.replace("return nn.Linear(width, width)", "return nn.Identity()"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("fednh.models.LAYERS", 50)
    scene = site(tmp_path / "site", **{"allow.models": "idle_net:Deep"})
    model = {"model.name": "idle_net:Deep"}
    assert "the model has more than 50 layers" in problem(ask(scene, **model, **{"model.args": {"depth": 60}}))
    assert problem(ask(scene, **model, **{"model.args": {"depth": 20}})) == ""


# --- what a site keeps -----------------------------------------------------------------------------------------------


def states(scene: Scene) -> dict[str, bytes]:
    found = sorted((scene.folder / "state/fednh/a").glob("*.round-*.safetensors"))
    return {path.name.removesuffix(".safetensors"): path.read_bytes() for path in found}


def test_the_server_cannot_delete_what_a_site_has_learned(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    for round_ in (1, 2, 3, 4):
        assert problem(scene.ordered(config_of(), Order(client=0, round=round_, last=round_ - 1))) == ""
    before = states(scene)
    assert list(before) == [f"state.round-00000{n}" for n in (1, 2, 3, 4)]
    assert problem(scene.ordered(config_of(), Order(client=0, round=5, last=4, since=10**9))) == ""
    assert list(states(scene)) == [f"state.round-00000{n}" for n in (2, 3, 4, 5)], "one comes, one goes"
    for round_ in (6, 7, 8, 9):
        scene.ordered(config_of(), Order(client=0, round=round_, last=5, since=10**9))
    assert list(states(scene)) == [f"state.round-00000{n}" for n in (6, 7, 8, 9)]


def test_the_newest_two_states_stay(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    for round_ in (1, 2):
        scene.ordered(config_of(), Order(client=0, round=round_, since=10**9))
    assert list(states(scene)) == ["state.round-000001", "state.round-000002"]
    scene.ordered(config_of(), Order(client=0, round=3, since=10**9))
    assert list(states(scene)) == ["state.round-000002", "state.round-000003"]


def test_a_state_that_is_replaced_is_set_aside(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.ordered(config_of(), Order(client=0, round=1))
    first = states(scene)["state.round-000001"]
    scene.ordered(config_of(), Order(client=0, round=1, since=1))
    assert list(states(scene)) == ["state.round-000001"], "the same again"
    for lr in (0.5, 0.7):
        scene.ordered(config_of(**{"train.lr": lr}), Order(client=0, round=1))
    assert states(scene)["replaced.round-000001"] == first
    read_tree(scene.folder / "state/fednh/a/replaced.round-000001.safetensors")


def test_a_file_that_is_gone_is_named_in_the_sites_own_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scene = site(tmp_path)
    scene.agreed = greeting(ask(scene)).task
    (tmp_path / "t.csv").unlink()
    sites._own_data.cache_clear()
    sites._federation.cache_clear()
    with caplog.at_level(logging.ERROR, "flwr"):
        said = problem(scene.ordered(config_of(), Order(client=0, round=1, sites=2)))
    assert "t.csv does not exist" in next(line for line in caplog.messages if line.startswith("refused"))
    last = json.loads((tmp_path / "state/audit/a.jsonl").read_text().splitlines()[-1])
    assert (last["event"], "t.csv does not exist" in last["why"]) == ("refused", True)
    assert str(tmp_path) not in said
    assert "own log" in said


# --- what the server believes ----------------------------------------------------------------------------------------

WRONG: dict[str, tuple[str, Any]] = {
    "pm_v": ("figures", 1e9),
    "pm_l": ("figures", -1.0),
    "held_share": ("figures", [50.0]),
    "per_class": ("figures", [50.0, 101.0]),
    "novelty": ("figures", [0.5, 2.0]),
    "samples": ("figures", -5),
    "../x": ("figures", 5.0),
    "loss_sum": ("facts", -1e300),
    "gradient_norm": ("facts", -1.0),
}


@pytest.mark.parametrize("key", WRONG)
def test_metrics_have_names_and_ranges(key: str) -> None:
    record, value = WRONG[key]
    fine = {"facts": {"client": 0, "round": 0, "loss_sum": 1.0}, "figures": {"pm_v": 50.0, "per_class": [-1.0, 100.0]}}
    said = ConfigRecord({"format": protocol.FORMAT})

    def content() -> RecordDict:
        return RecordDict({"said": said, **{name: MetricRecord(dict(row)) for name, row in fine.items()}})

    assert Answer.read(content(), None).metrics["pm_v"] == 50.0
    fine[record][key] = value
    with pytest.raises(ValueError, match="is not known" if key == "../x" else key):
        Answer.read(content(), None)


def test_a_config_of_the_server_is_what_is_compared() -> None:
    """Every setting that decides which samples count is among those that are agreed."""
    from fednh.flower.site_config import SAFE_DATA, about_samples

    found = about_samples(Config())
    assert set(found) == {
        "seed",
        *(f"data.{key}" for key in SAFE_DATA),
        "data.columns",
        "data.missing",
        "partition.min_samples",
        "eval.samples",
    }
