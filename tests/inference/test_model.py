"""A model file is complete: it predicts what the run's own evaluation saw, on every kind of input."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import fednh
from fednh.data.sources.builtin import digits
from fednh.errors import UserError
from fednh.federated.similarity import similarity_quantiles
from fednh.inference.model import _listed, find_model
from fednh.io.files import write_tree
from fednh.methods import METHODS
from fednh.runs.model_file import FORMAT, read_model, write_model

DATA = digits()
NAMES = np.array(DATA.classes)


@pytest.mark.parametrize("method", METHODS)
def test_predictions_are_those_that_the_run_measured(method: str, finished: dict[str, Path]) -> None:
    summary = fednh.load_run(finished[method]).summary
    first = summary["clients"][0]
    personal = fednh.load_model(finished[method], client=first["client"])
    hits = personal.predict(DATA.x_test) == NAMES[DATA.y_test]
    per_class = [100 * hits[DATA.y_test == c].mean() for c in range(10)]
    np.testing.assert_allclose(per_class, first["per_class"], atol=1e-6)
    if summary["gm"] is not None:
        shared = fednh.load_model(finished[method])
        hits = shared.predict(DATA.x_test) == NAMES[DATA.y_test]
        assert 100 * np.mean([hits[DATA.y_test == c].mean() for c in range(10)]) == pytest.approx(summary["gm"])
    probabilities = personal.predict_proba(DATA.x_test[:5])
    np.testing.assert_allclose(probabilities.sum(1), 1, atol=1e-5)


def test_a_model_says_where_it_comes_from(finished: dict[str, Path]) -> None:
    info = fednh.load_model(finished["fednh"]).info
    assert info["format"] == FORMAT
    assert info["fednh"] == fednh.__version__
    assert info["method"]["rho"] == 0.9
    assert info["classes"] == list("0123456789")
    assert info["preprocessing"]["kind"] == "image"
    origin = info["trained_on"]
    assert (origin["data"], origin["seed"], origin["rounds"]) == ("digits", 0, 8)
    assert origin["run"].startswith("digits-fednh")
    json.dumps(info)


def test_the_same_image_in_every_form(finished: dict[str, Path], tmp_path: Path) -> None:
    """Grey levels 0 to 16 become 0 to 255 in a file; read back, full brightness is full brightness again."""
    model = fednh.load_model(finished["fednh"])
    stored = DATA.x_test[:3]
    pixels = [Image.fromarray(np.rint(x[..., 0] * (255 / 16)).astype(np.uint8)) for x in stored]
    files = []
    for i, picture in enumerate(pixels):
        files.append(tmp_path / f"{i}.png")
        picture.save(files[-1])
    wanted = model.predict_proba(stored)
    for x in (stored[..., 0], pixels, files, [str(file) for file in files], np.repeat(stored, 3, axis=3)):
        np.testing.assert_allclose(model.predict_proba(x), wanted, atol=1e-6)
    np.testing.assert_allclose(model.predict_proba(pixels[0]), wanted[:1], atol=1e-6)
    larger = np.kron(stored[..., 0], np.ones((1, 4, 4), np.uint8))  # every pixel as 4x4: shrinks back to nearly itself
    assert (model.predict(larger) == model.predict(stored)).all()
    assert model.predict(stored[:0]).shape == (0,)


@pytest.mark.parametrize(
    ("x", "says"),
    [
        (np.zeros((2, 8, 8), np.float32), "not float32"),
        (np.zeros((8, 8), np.uint8), r"not an array of shape \(8, 8\); for one image, x\[None\]"),
        (np.zeros((2, 8, 8, 7), np.uint8), "not an array of shape"),
        ("nowhere.png", "nowhere.png does not exist"),
        (np.zeros((2, 3, 8, 9), np.uint8), r"channels come last, x.transpose\(0, 2, 3, 1\)"),
        (np.zeros((9, 8, 3), np.uint8), r"not an array of shape \(9, 8, 3\); for one image, x\[None\]"),
        ([[1], [2, 3]], "cannot be made one array"),
    ],
)
def test_inputs_that_do_not_fit(x: object, says: str, finished: dict[str, Path]) -> None:
    with pytest.raises(UserError, match=says):
        fednh.load_model(finished["fednh"]).predict(x)


def test_vectors(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(3), 40)
    x = rng.normal(size=(120, 5)) + 4 * np.eye(5)[y]
    np.savez(tmp_path / "own.npz", x_train=x, y_train=y, x_test=x[::3], y_test=y[::3], classes=["a", "b", "c"])
    result = fednh.run(data=f"npz:{tmp_path}/own.npz", clients=3, participation=1.0, rounds=4, out=tmp_path / "run")
    model = result.model()
    assert (model.predict(x) == np.array(["a", "b", "c"])[y]).mean() > 0.9
    for wrong in (x[:, :4], x[0], x.astype(str)):
        with pytest.raises(UserError, match=r"takes numbers of shape \(N, 5\)"):
            model.predict(wrong)
    with pytest.raises(UserError, match="NaN or infinite"):
        model.predict(np.full((1, 5), np.nan))


def test_which_model_of_a_folder(finished: dict[str, Path], tmp_path: Path) -> None:
    run = finished["fednh"]
    assert find_model(run) == run / "models/global.safetensors"
    assert find_model(run, 3) == run / "models/personal/client-000003.safetensors"
    for path, client, says in (
        (run, 9, "no personal model of client 9; there are those of 0 to 3"),
        (finished["local"], None, "no global model"),
        (tmp_path, None, "holds no models"),
        (tmp_path / "nothing", None, "does not exist"),
        (run / "models/global.safetensors", 1, "is not a folder"),
    ):
        with pytest.raises(UserError, match=says):
            find_model(path, client)


def test_broken_and_foreign_files(finished: dict[str, Path], tmp_path: Path) -> None:
    whole = find_model(finished["fednh"])
    params, card = read_model(whole)
    plain = card.model_dump(mode="json", exclude_none=True)

    def refused(says: str) -> None:
        with pytest.raises(UserError, match=says) as error:
            fednh.load_model(tmp_path / "m")
        assert "\n" not in str(error.value)

    (tmp_path / "m").write_bytes(b"no model at all")
    refused("is not a model saved by fednh")
    (tmp_path / "m").write_bytes(whole.read_bytes()[:5000])
    refused("is not a model saved by fednh")
    save_file({"w": torch.zeros(2)}, tmp_path / "m")
    refused("without a card")
    write_tree(tmp_path / "m", params, {"fednh": "{"})
    refused("is not a model saved by fednh")
    write_tree(tmp_path / "m", params, {"fednh": "[1]"})
    refused("a card that cannot be used")
    write_model(tmp_path / "m", params, {**plain, "classes": 3})
    refused("classes = 3")
    write_model(tmp_path / "m", params, {**plain, "format": FORMAT + 1})
    refused("upgrade fednh")
    write_model(tmp_path / "m", params, {**plain, "classes": ["a", "b"]})
    refused("do not fit")
    write_model(tmp_path / "m", {"head.weight": params["head.weight"]}, plain)
    refused("do not fit")
    write_model(tmp_path / "m", params, {**plain, "method": {"name": "fedwhat"}})
    refused("fedwhat")
    write_model(tmp_path / "m", params, {**plain, "model": {"name": "not_there:Net"}})
    refused("not_there:Net")
    shutil.copy(whole, tmp_path / "m")
    assert fednh.load_model(tmp_path / "m").classes == tuple("0123456789")


def test_a_card_can_name_networks_only(finished: dict[str, Path], tmp_path: Path) -> None:
    """A model file may come from anybody: its card must not be able to call whatever can be imported."""
    params, card = read_model(find_model(finished["fednh"]))
    harm = tmp_path / "harm"
    model = {"name": "subprocess:check_call", "args": {"args": ["touch", str(harm)]}}
    write_model(tmp_path / "m", params, {**card.model_dump(mode="json", exclude_none=True), "model": model})
    with pytest.raises(UserError, match="does not derive from Module"):
        fednh.load_model(tmp_path / "m")
    assert not harm.exists()


def test_a_network_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_net_file.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self, num_classes):\n"
        "        super().__init__()\n"
        "        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU())\n"
        "        self.head = nn.Linear(8, num_classes)\n"
    )
    monkeypatch.chdir(tmp_path)
    result = fednh.run(method="fedavg", rounds=1, epochs=1, model={"name": "my_net_file:Net", "args": {}}, out="run")
    assert len(result.model().predict(DATA.x_test[:2])) == 2


def test_similarity_by_hand(finished: dict[str, Path]) -> None:
    model = fednh.load_model(finished["fednh"])
    near = model.similarity(DATA.x_test)
    scale, samples = float(model.params["scale"]), model.scores(DATA.x_test)
    np.testing.assert_allclose(near, samples.logits.max(1) / scale, rtol=1e-5)
    assert (np.abs(near) <= 1 + 1e-5).all()
    stored = model.info["novelty"]
    train = model.similarity(DATA.x_train)
    assert stored["samples"] == len(DATA.x_train)
    for q in ("0.01", "0.05"):
        assert stored["quantiles"][q] == pytest.approx(np.quantile(train, float(q)), abs=1e-3)
    assert model.threshold("auto") == model.threshold("5%") == stored["quantiles"]["0.05"]
    assert model.threshold("0.5") == 0.5
    for level, says in (("much", "should be a cosine"), ("7%", "not stored in the model")):
        with pytest.raises(UserError, match=says):
            model.threshold(level)
    other = fednh.load_model(finished["fedavg"])
    with pytest.raises(UserError, match="fedavg has no cosines"):
        other.similarity(DATA.x_test[:1])
    assert "novelty" not in other.info


def test_a_large_set_is_sampled(finished: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from fednh.data.batches import samples_of

    model = fednh.load_model(finished["fednh"])
    monkeypatch.setattr("fednh.federated.similarity.MOST", 100)
    train = samples_of(DATA, "train")
    found = similarity_quantiles(model.method, model.net, model.params, train, np.arange(len(train)), seed=0)
    assert found is not None
    assert found["samples"] == 100
    again = similarity_quantiles(model.method, model.net, model.params, train, np.arange(len(train)), seed=0)
    assert found == again


def test_numbers_in_words() -> None:
    assert _listed([0, 1, 3, 5, 6]) == "0, 1, 3, 5 and 6"
    assert _listed([0, 1, 2, 3, 5]) == "0 to 3 and 5"
    assert _listed([4]) == "4"
    assert _listed([0, 1, 2]) == "0 to 2"
    assert _listed(list(range(0, 100, 2)), most=3) == "0, 2, 4 and more"
