"""A site that never took part: `fednh personalize`, for every method."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import fednh
from fednh.data.sources.builtin import digits
from fednh.errors import UserError
from fednh.inference.personalize import personalize
from fednh.methods import METHODS
from fednh.methods.fit import LocalFit
from fednh.report.stats import wilson
from fednh.runs.model_file import read_model
from tests.helpers.process import fednh as command
from tests.helpers.synthetic import real_run

DATA = digits()


@pytest.fixture
def site(tmp_path: Path) -> str:
    """A site with three of the ten classes, in an order of its own."""
    here = np.isin(DATA.y_train, (2, 5, 7))
    number = np.full(10, -1)
    number[[7, 2, 5]] = 0, 1, 2
    there = np.isin(DATA.y_test, (2, 5, 7))
    np.savez(
        tmp_path / "site.npz",
        x_train=DATA.x_train[here][:150],
        y_train=number[DATA.y_train[here][:150]],
        x_test=DATA.x_test[there],
        y_test=number[DATA.y_test[there]],
        classes=np.array(["7", "2", "5"]),
    )
    return f"npz:{tmp_path}/site.npz"


@pytest.mark.parametrize("method", METHODS)
def test_every_method(method: str, finished: dict[str, Path], site: str) -> None:
    made = personalize(finished[method], site, epochs=3)
    found = made.comparison
    there = DATA.y_train[np.isin(DATA.y_train, (2, 5, 7))][:150]
    assert found["classes"] == {c: int((there == int(c)).sum()) for c in "257"}
    assert found["lacks"] == ["0", "1", "3", "4", "6", "8", "9"]
    assert (found["trained_on"], found["epochs"]) == (150, 3)
    assert (found["global"] is None) == (method in ("local", "fedproto", "fedtgp", "lgfedavg"))
    assert found["personalised"]["held_share"] > 50, "three classes: chance is a third"
    again = personalize(finished[method], site, epochs=3)
    assert all(torch.equal(made.params[name], again.params[name]) for name in made.params)


def test_fednh_keeps_the_classes_that_the_site_lacks(finished: dict[str, Path], site: str) -> None:
    """The prototypes stay as they were; body and scale are the site's own; the comparison is what the models say."""
    run = finished["fednh"]
    made = personalize(run, site, epochs=3)
    shared, _ = read_model(run / "models/global.safetensors")
    assert torch.equal(made.params["head.weight"], shared["head.weight"])
    assert not torch.equal(made.params["body.linear1.weight"], shared["body.linear1.weight"])
    there = np.isin(DATA.y_test, (2, 5, 7))
    right = fednh.load_model(run).predict(DATA.x_test[there]) == DATA.y_test[there].astype(str)
    assert made.comparison["global"]["held_share"] == pytest.approx(100 * right.mean())
    assert made.comparison["personalised"]["held_share"] > made.comparison["global"]["held_share"]


def test_fedprior_needs_class_counts_alone(site: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newcomer's model is the global one with its class prior; only the local model to compare with is trained."""
    run = real_run(tmp_path / "run", {"method.name": "fedprior", **STILL}).path
    trained, batchwise = [], LocalFit.batchwise
    monkeypatch.setattr(LocalFit, "batchwise", lambda *args, **named: trained.append(1) or batchwise(*args, **named))
    made = personalize(run, site, epochs=1)
    assert len(trained) == 1
    shared, _ = read_model(run / "models/global.safetensors")
    counts = torch.tensor([made.comparison["classes"].get(str(c), 0) for c in range(10)])
    prior = ((counts + 0.1) / (counts + 0.1).sum()).log()
    assert made.params.keys() == {*shared, "prior"}
    assert all(torch.equal(made.params[name], shared[name]) for name in shared)
    torch.testing.assert_close(made.params["prior"], prior)

    monkeypatch.setattr(METHODS["fedprior"], "kept_is_trained", True)
    again = personalize(run, site, epochs=1)
    assert len(trained) == 3
    assert all(torch.equal(made.params[name], again.params[name]) for name in again.params)
    assert again.comparison == made.comparison


def test_the_command(finished: dict[str, Path], site: str, tmp_path: Path) -> None:
    out = tmp_path / "mine"
    args = ["personalize", str(finished["fednh"]), "--data", site, "--epochs", "2", "-o", str(out)]
    ended = command(args, tmp_path / "io")
    assert ended.code == 0, ended.stderr
    for word in ("global", "personal", "local only", str(out / "model.safetensors")):
        assert word in ended.stdout
    comparison = json.loads((out / "comparison.json").read_text())
    n, share = comparison["held_out"], comparison["personalised"]["held_share"]
    low, high = wilson(round(share * n / 100), n)
    shown = next(line for line in ended.stdout.splitlines() if "personal" in line and "to" in line)
    assert f"{share:.1f}" in shown
    assert f"{low:.1f} to {high:.1f}" in shown
    assert comparison["verdict"] in ended.stdout
    assert re.search(r"alone|tell", comparison["verdict"])
    model = fednh.load_model(out)
    there = np.isin(DATA.y_test, (2, 5, 7))
    right = model.predict(DATA.x_test[there]) == DATA.y_test[there].astype(str)
    assert comparison["personalised"]["held_share"] == pytest.approx(100 * right.mean())
    assert model.info["trained_on"]["personalised_on"] == site
    assert model.threshold("auto") < 1
    ended = command(args, tmp_path / "io")
    assert (ended.code, "choose another folder" in ended.stderr) == (2, True)


def test_a_share_is_held_out(finished: dict[str, Path], site: str) -> None:
    found = personalize(finished["fednh"], site, epochs=1, holdout=0.4).comparison
    assert found["trained_on"] + found["held_out"] == 150
    assert found["held_out"] == pytest.approx(60, abs=3)


def test_what_cannot_be_personalised(finished: dict[str, Path], site: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run folder"):
        personalize(finished["fednh"].parent, site)
    x, y = DATA.x_train[:40], np.arange(40) % 2
    np.savez(tmp_path / "strange.npz", x_train=x, y_train=y, x_test=x, y_test=y, classes=np.array(["1", "owl"]))
    with pytest.raises(UserError, match="does not know: owl"):
        personalize(finished["fednh"], f"npz:{tmp_path}/strange.npz")


STILL = {"rounds": 1, "partition.clients": 4, "train.lr": 1e-9, "eval.every": 0}  # nothing moves far from its start


def test_a_newcomer_starts_from_the_weights_that_the_run_started_from(
    finished: dict[str, Path], site: str, tmp_path: Path
) -> None:
    """FedBABU on a trained model: at this learning rate all three are that model, whatever becomes of its file."""
    start = tmp_path / "start.safetensors"
    shutil.copy(finished["fedavg"] / "models/global.safetensors", start)
    settings = {"method.name": "fedbabu", "method.finetune_epochs": 1, "model.weights": str(start), **STILL}
    run = real_run(tmp_path / "run", settings).path
    there = np.isin(DATA.y_test, (2, 5, 7))
    right = fednh.load_model(finished["fedavg"]).predict(DATA.x_test[there]) == DATA.y_test[there].astype(str)
    assert right.mean() > 0.4, "a fresh model has a tenth"
    start.unlink()
    found = personalize(run, site, epochs=1).comparison
    for which in ("global", "personalised", "local"):
        assert found[which]["held_share"] == pytest.approx(100 * right.mean())

    save_file({"body.linear1.bias": torch.zeros(1)}, run / "weights.safetensors")
    with pytest.raises(UserError, match=r"the weights in .* are not those that the run in .* began with; restore them"):
        personalize(run, site, epochs=1)
    (run / "weights.safetensors").unlink()
    with pytest.raises(UserError, match="are not those that the run"):
        personalize(run, site, epochs=1)
    (run / "fingerprint.json").unlink()
    with pytest.raises(UserError, match=r"has no fingerprint\.json, which says what the run began with"):
        personalize(run, site, epochs=1)


class Normalised(nn.Module):
    """A body with batch normalisation."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.ReLU())
        self.head = nn.Linear(6, num_classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("method", ["fedavg", "fedprior"])
def test_and_from_their_normalisation(method: str, site: str, tmp_path: Path) -> None:
    state = Normalised(10).state_dict()
    state["body.2.weight"] = torch.full((6,), 3.0)
    state["body.2.running_var"] = torch.full((6,), 1e6)
    save_file(state, tmp_path / "start.safetensors")
    settings = {"method.name": method, "model.name": f"{__name__}:Normalised", "model.norm": "local"}
    run = real_run(tmp_path / "run", {**settings, "model.weights": str(tmp_path / "start.safetensors"), **STILL}).path
    made = personalize(run, site, epochs=1)
    assert torch.allclose(made.params["body.2.weight"], torch.tensor(3.0))
    variance = made.params["body.2.running_var"]
    assert (variance > 1e5).all(), "three batches forget less than a third"
    assert (variance < 9e5).all(), "a round moves it, whatever the method keeps"
