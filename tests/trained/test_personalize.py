"""A site that never took part: `fednh personalize`, for every method."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import fednh
from fednh.data.sources.builtin import digits
from fednh.errors import UserError
from fednh.methods import METHODS
from fednh.storage.model_file import read_model
from fednh.trained.personalize import personalize
from forked import fednh as command

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
    assert (found["global"] is None) == (method in ("local", "fedproto"))
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


def test_the_command(finished: dict[str, Path], site: str, tmp_path: Path) -> None:
    out = tmp_path / "mine"
    args = ["personalize", str(finished["fednh"]), "--data", site, "--epochs", "2", "-o", str(out)]
    ended = command(args, tmp_path / "io")
    assert ended.code == 0, ended.stderr
    for word in ("global", "personalised", "local only", str(out / "model.safetensors")):
        assert word in ended.stdout
    comparison = json.loads((out / "comparison.json").read_text())
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
        personalize(next(iter(finished.values())).parent, site)
    x, y = DATA.x_train[:40], np.arange(40) % 2
    np.savez(tmp_path / "strange.npz", x_train=x, y_train=y, x_test=x, y_test=y, classes=np.array(["1", "owl"]))
    with pytest.raises(UserError, match="does not know: owl"):
        personalize(finished["fednh"], f"npz:{tmp_path}/strange.npz")
