"""`personal.calibrate`: a client chooses its temperature and the weight of its prior on folds of its samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fednh
from fednh.config.schema import PersonalConfig
from fednh.data.batches import ClientData, Samples, samples_of
from fednh.data.dataset import Dataset
from fednh.data.sources.builtin import digits
from fednh.federated import client
from fednh.federated.client import FOLDS, TAUS, TEMPERATURES, best_pair, folds_of
from fednh.methods.fedavg import FedAvg
from fednh.models import build_net
from fednh.tree import Tree
from tests.helpers.compare import identical
from tests.helpers.reference import SGD
from tests.helpers.tiny import CLIENTS

CALIBRATED = PersonalConfig(calibrate=True)


def test_folds_divide_every_class() -> None:
    y = torch.tensor([0, 1, 0, 0, 0, 1, 0, 0, 2])
    assert FOLDS == 5
    assert folds_of(y).tolist() == [0, 0, 1, 2, 3, 1, 4, 0, 0]


def test_the_temperature_by_hand() -> None:
    """Three of four samples are right with logits of 4 log 3 and 0: a quarter of that gives 3/4. No prior, no tau."""
    logits = torch.zeros(4, 2, dtype=torch.float64)
    logits[:, 0] = 4 * np.log(3)
    assert best_pair(logits, torch.zeros(4, 2), torch.tensor([0, 0, 0, 1]), TAUS) == (4.0, 0.0)


def test_tau_by_hand() -> None:
    """Logits say nothing; shares of 9/10 and 1/10 with tau = 0.5 give 3/4, which is how often class 0 occurs."""
    shares = torch.tensor([0.9, 0.1], dtype=torch.float64).log().expand(4, 2)
    zero = torch.zeros(4, 2, dtype=torch.float64)
    assert best_pair(zero, shares, torch.tensor([0, 0, 1, 0]), TAUS) == (1.0, 0.5)
    assert best_pair(zero, shares, torch.tensor([0, 0, 1, 0]), (2.0,)) == (1.0, 2.0)


def test_where_nothing_decides_nothing_changes() -> None:
    assert best_pair(torch.zeros(3, 4), torch.zeros(3, 4), torch.tensor([0, 1, 2]), TAUS) == (1.0, 0.0)
    assert {1.0, 1 / 16, 16.0} < set(TEMPERATURES)
    assert {0.0, 1.0, 2.0} < set(TAUS)


def test_the_prior_of_a_sample_has_the_counts_of_other_folds(tiny: Samples, monkeypatch: pytest.MonkeyPatch) -> None:
    """Client 0 has four of class 0, in folds 0 to 3, and two of class 1, in folds 0 and 1."""
    seen: list[Tensor] = []
    monkeypatch.setattr(client, "best_pair", lambda logits, shares, y, taus: seen.append(shares) or (2.0, 0.5))
    net, data = build_net("linear", (4,), 4), ClientData(tiny, CLIENTS[0])
    model = client.personal_model(FedAvg(), net, {}, net.init(torch.Generator()), data, SGD, how=CALIBRATED)
    folds = folds_of(data.y).tolist()
    assert data.y.tolist() == [0, 0, 0, 1, 1, 0]
    assert folds == [0, 1, 2, 0, 1, 3]
    others = np.array([[3, 1, 0, 0], [3, 1, 0, 0], [3, 2, 0, 0], [3, 1, 0, 0], [3, 1, 0, 0], [3, 2, 0, 0]]) + 0.1
    np.testing.assert_allclose(seen[0].numpy(), np.log(others / others.sum(1, keepdims=True)))
    whole = np.array([4, 2, 0, 0]) + 0.1
    torch.testing.assert_close(model["prior"].double(), torch.from_numpy(0.5 * np.log(whole / 6.4)), rtol=1e-5, atol=0)
    assert float(model["temperature"]) == 2.0


def test_a_given_prior_stays(tiny: Samples) -> None:
    net, data = build_net("linear", (4,), 4), ClientData(tiny, CLIENTS[0])
    how = PersonalConfig(calibrate=True, prior=0.3)
    model = client.personal_model(FedAvg(), net, {}, net.init(torch.Generator()), data, SGD, how=how)
    whole = torch.tensor([4.1, 2.1, 0.1, 0.1])
    torch.testing.assert_close(model["prior"], 0.3 * (whole / whole.sum()).log())


def expected_calibration_error(scores: Tensor, y: Tensor) -> float:
    """The mean distance of confidence and accuracy over ten bins of confidence, by the samples in each."""
    confidence, guessed = scores.softmax(1).max(1)
    right, bins = (guessed == y).double(), (confidence * 10).long().clamp(max=9)
    parts = [bins == k for k in range(10)]
    return sum(abs(float((confidence[p] - right[p]).mean())) * float(p.double().mean()) for p in parts if p.any())


@pytest.mark.parametrize("factor", [8.0, 0.125])
def test_a_model_that_is_too_sure_or_not_sure_enough_is_calibrated(factor: float) -> None:
    """Labels are drawn with probabilities softmax(W x); the model has factor * W. Measured on samples of its own."""
    rng = np.random.default_rng(3)
    w, x = rng.normal(size=(3, 4)), rng.normal(size=(4000, 4)).astype(np.float32)
    y = (x @ w.T + rng.gumbel(size=(4000, 3))).argmax(1)
    data = Dataset("drawn", x[:2500], y[:2500], x[2500:], y[2500:], ("a", "b", "c"), (0.0,), (1.0,), scale=1.0)
    net, train, test = build_net("linear", (4,), 3), samples_of(data, "train"), samples_of(data, "test")
    received: Tree = {"head.weight": torch.from_numpy(factor * w).float()}
    errors = {}
    for calibrate in (False, True):
        how = PersonalConfig(calibrate=calibrate)
        own = ClientData(train, np.arange(2500))
        model = client.personal_model(FedAvg(), net, {}, received, own, SGD, how=how)
        errors[calibrate] = expected_calibration_error(FedAvg().scores(net, model, test.x), test.y)
    assert model["temperature"] == pytest.approx(factor, rel=0.5)
    assert errors[True] < 0.05 < 0.1 < errors[False]


SMALL = {"rounds": 2, "train.epochs": 1, "partition.clients": 40, "participation.rate": 1.0, "partition.min_samples": 5}


@pytest.mark.parametrize("method", ["fedncm", "fedavg"])
def test_threads_and_vmap_choose_the_same(method: str, tmp_path: Path) -> None:
    runs: list[Any] = []
    for engine in ("loop", "vmap"):
        out = tmp_path / engine
        fednh.run("digits", method=method, out=out, engine=engine, **SMALL, **{"personal.calibrate": True})
        runs.append([fednh.load_model(out, client=k).params for k in range(40)])
    for one, other in zip(*runs, strict=True):
        identical({"temperature": one["temperature"]}, {"temperature": other["temperature"]})
        identical({"prior": one["prior"]}, {"prior": other["prior"]})
    assert len({float(model["temperature"]) for model in runs[0]}) > 1


def test_what_is_saved_predicts_with_it_and_the_similarity_is_the_cosine(tmp_path: Path) -> None:
    """On by default with a method that trains nothing; off where it is set so."""
    few = {"partition.clients": 4, "model.name": "linear", "model.args": {}}
    fednh.run("digits", method="fedncm", out=tmp_path / "r", **few)
    plain = fednh.run("digits", method="fedncm", out=tmp_path / "plain", **few, **{"personal.calibrate": False})
    assert not {"temperature", "prior"} & fednh.load_model(plain.path, client=0).params.keys()
    model, shared = fednh.load_model(tmp_path / "r", client=0), fednh.load_model(tmp_path / "r")
    x = digits().x_test[:50]
    np.testing.assert_allclose(model.similarity(x), shared.similarity(x), atol=1e-5)
    bare = np.log(shared.predict_proba(x)) / float(model.params["temperature"]) + model.params["prior"].numpy()
    odds = np.exp(bare) / np.exp(bare).sum(1, keepdims=True)
    np.testing.assert_allclose(model.predict_proba(x), odds, atol=1e-5)
    assert shared.params.keys() == {"head.weight", "scale"}
    quantiles = model.info["novelty"]["quantiles"]
    assert all(-1 <= level <= 1 for level in quantiles.values())
