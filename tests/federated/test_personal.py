"""`[personal]`: personal models that are the global one, and the client's class prior in any method's models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fednh
from fednh.config import Config, load
from fednh.data.sources.builtin import digits
from fednh.errors import UserError
from fednh.inference.personalize import personalize
from fednh.io.files import read_tree
from fednh.methods import METHODS
from fednh.methods.fit import LocalFit
from fednh.runs.layout import RunLayout
from tests.helpers.compare import identical, timeless
from tests.helpers.federation import federate
from tests.helpers.simulator import run_config

SMALL = {"rounds": 2, "train.epochs": 1, "partition.clients": 4, "participation.rate": 0.5, "eval.every": 1}
SWITCHED = {"personal.model": "global", "personal.prior": 0.5, "personal.smoothing": 0.7}


def config(**settings: Any) -> Config:
    return load("digits", {**SMALL, **settings})


@pytest.mark.parametrize("method", ["fedavg", "fedrod", "creff"])
def test_personal_models_are_the_global_one_with_the_prior(method: str, tmp_path: Path) -> None:
    """What is saved is the global model and the prior by hand; what is measured is what they predict."""
    more: dict[str, Any] = {"method.name": method, **({"method.retrain_epochs": 3} if method == "creff" else {})}
    simulation, plain, _ = run_config(tmp_path / "a", config(**more))
    switched, own, _ = run_config(tmp_path / "b", config(**more, **SWITCHED))
    identical(switched.server, simulation.server)  # training knows nothing of it
    assert own["pm_l"] != plain["pm_l"]
    client = own["clients"][0]["client"]
    model = read_tree(RunLayout(tmp_path / "b").personal_model(client))
    prior = model.pop("prior")
    identical(model, read_tree(tmp_path / "b/models/global.safetensors"))
    counts = torch.tensor(simulation.executor.fed.class_counts()[client]) + 0.7  # type: ignore[attr-defined]
    torch.testing.assert_close(prior, 0.5 * (counts / counts.sum()).log())
    shared, x = fednh.load_model(tmp_path / "b"), digits().x_test
    scores = shared.logits(torch.from_numpy(x), shared.params, shared.normalisation) + prior
    y, owned = torch.from_numpy(digits().y_test), counts > 0.7
    right = torch.stack([(scores.argmax(1)[y == c] == c).double().mean() for c in range(10)])
    assert own["clients"][0]["pm_v"] == pytest.approx(float(100 * right[owned].mean()))
    assert fednh.load_model(tmp_path / "b", client=client).predict(x).tolist() == [
        str(k) for k in scores.argmax(1).tolist()
    ]


def test_a_prior_in_the_methods_own_model(tmp_path: Path) -> None:
    simulation, _, _ = run_config(tmp_path / "r", config(**{"method.name": "fedper", "personal.prior": 1}))
    client = sorted(simulation.progress.members)[0]
    prior = read_tree(RunLayout(tmp_path / "r").personal_model(client))["prior"]
    counts = torch.tensor(simulation.executor.fed.class_counts()[client]) + 0.1  # type: ignore[attr-defined]
    torch.testing.assert_close(prior, (counts / counts.sum()).log())


def test_sites_do_the_same(tmp_path: Path) -> None:
    found = config(**{"method.name": "fednh", **SWITCHED, "engine": "loop"})
    _, here, told = run_config(tmp_path / "pool", found)
    _, watcher = federate(found, tmp_path / "flower")
    assert [r["pm_l"] for r in watcher.records] == [r["pm_l"] for r in told.records]
    assert timeless(here)["pm_v"] > 0


@pytest.mark.parametrize("method", METHODS)
def test_a_method_has_it_or_says_why_not(method: str, tmp_path: Path) -> None:
    quick = {"creff": {"method.retrain_epochs": 3}, "fedetf": {"method.turns": 1, "method.turn_epochs": 1}}
    small = {"rounds": 1, "participation.rate": 0.25, "method.name": method, **SWITCHED}
    sends_none = {"local", "fedproto", "fedtgp", "lgfedavg"}
    # Clients of the last two receive heads and places of their own.
    sends_part = {"fedper", "fedrep", "fedbabu", "fedas", "fedpac", "floco"}
    found = config(**{**small, **quick.get(method, {})})
    if method not in sends_none | sends_part:
        _, summary, _ = run_config(tmp_path / "run", found)
        assert summary["pm_l"] > 0
        return
    why = "has no global model" if method in sends_none else "does not send all of its global model to clients"
    with pytest.raises(UserError, match=f"personal.model = 'global' is not supported by method {method}, which {why}"):
        run_config(tmp_path / "run", found)
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_a_newcomer_needs_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_config(tmp_path / "run", config(**{"method.name": "fedavg", "rounds": 1, **SWITCHED}))
    data = digits()
    mine = np.flatnonzero(np.isin(data.y_train, (2, 5)))[:60]
    np.savez(
        tmp_path / "site.npz",
        **{"x_train": data.x_train[mine], "y_train": data.y_train[mine], "x_test": data.x_test, "y_test": data.y_test},
        classes=np.array(data.classes),
    )
    trained, batchwise = [], LocalFit.batchwise
    monkeypatch.setattr(LocalFit, "batchwise", lambda *args, **named: trained.append(1) or batchwise(*args, **named))
    made = personalize(tmp_path / "run", f"npz:{tmp_path}/site.npz", epochs=1)
    assert len(trained) == 1, "the local model to compare with"
    prior = made.params.pop("prior")
    identical(made.params, read_tree(tmp_path / "run/models/global.safetensors"))
    counts = torch.bincount(torch.from_numpy(data.y_train[mine]).long(), minlength=10) + 0.7
    torch.testing.assert_close(prior, 0.5 * (counts / counts.sum()).log())
