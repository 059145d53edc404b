"""A frozen body: its features are computed once, clients train what follows, and models take images all the same."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fednh
from fednh.errors import ConfigError, DataError
from fednh.methods import METHODS

SIDE, CLASSES, DIM = 12, 3, 16
BODY = f"{__name__}:TinyBody"
TRAINING = {"partition.name": "site", "rounds": 3, "train.epochs": 2, "train.lr": 0.1, "train.batch_size": 8}


class TinyBody(nn.Module):
    """A convolution with batch normalisation, averaged: as small as a pretrained network can be."""

    def __init__(self, shape: tuple[int, ...], num_classes: int):
        super().__init__()
        layers = OrderedDict[str, nn.Module](
            conv=nn.Conv2d(shape[0], DIM, 3, stride=2), norm=nn.BatchNorm2d(DIM), relu=nn.ReLU()
        )
        self.body = nn.Sequential(OrderedDict(**layers, pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten()))
        self.head = nn.Linear(DIM, num_classes, bias=False)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    module = TinyBody((3, SIDE, SIDE), CLASSES)
    with torch.no_grad():
        module.body.norm.running_mean.uniform_(-0.5, 0.5)  # type: ignore[union-attr, operator]
        module.body.norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr, operator]
    file = tmp_path_factory.mktemp("weights") / "body.safetensors"
    save_file(module.state_dict(), file)
    return file


@pytest.fixture(scope="module")
def samples() -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Two sites with 30 images each; a class is a colour."""
    rng = np.random.default_rng(0)
    label = rng.integers(CLASSES, size=60)
    images = rng.integers(0, 120, (60, SIDE, SIDE, 3), dtype=np.uint8)
    images[np.arange(60), :, :, label] += 100
    return images, label, ["north"] * 30 + ["south"] * 30


def settings(weights: Path, **more: object) -> dict[str, object]:
    usual = {"model.name": BODY, "model.frozen": "body", "model.weights": str(weights), "features.size": SIDE}
    return {**usual, **TRAINING, **more}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDNH_CACHE", str(tmp_path / "cache"))


def by_hand(weights: Path, images: np.ndarray, label: np.ndarray | None = None) -> np.ndarray:
    """The body's features, without anything of the library's."""
    from safetensors.torch import load_file

    module = TinyBody((3, SIDE, SIDE), CLASSES)
    module.load_state_dict(load_file(weights))
    module.eval()
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    x = ((torch.from_numpy(images).float() / 255 - mean) / std).permute(0, 3, 1, 2)
    with torch.no_grad():
        return np.asarray(module.body(x))


def test_features_are_the_bodys(weights: Path, samples: tuple, tmp_path: Path) -> None:
    images, label, sites = samples
    result = fednh.run(method="fedavg", data=(images, label, sites), out=tmp_path / "run", **settings(weights))
    model = fednh.load_model(result.path)
    vectors = by_hand(weights, images)
    logits = vectors @ model.params["head.weight"].numpy().T
    assert np.abs(model.scores(images).logits - logits).max() < 1e-4
    assert (model.predict(images) == np.array(model.classes)[logits.argmax(1)]).all()
    assert set(model.params) == {"head.weight"}
    assert result.summary["bytes_up"] == 3 * 2 * 4 * CLASSES * DIM


def test_training_equals_training_on_the_vectors(weights: Path, samples: tuple, tmp_path: Path) -> None:
    images, label, sites = samples
    ours = fednh.run(method="fednh", data=(images, label, sites), out=tmp_path / "images", **settings(weights))
    from fednh.federated.setup import backbone_of
    from fednh.models.features import compute
    from fednh.runs.run_folder import read_config

    vectors = compute(images, backbone_of(read_config(ours.path), CLASSES))
    assert np.abs(vectors - by_hand(weights, images)).max() < 1e-5
    scaling = {"mean": (0.0,), "std": (1.0,), "scale": 1.0}
    where = {"sites": ("north", "south"), "site_train": np.repeat([0, 1], 30)}
    names = tuple(map(str, range(CLASSES)))
    data = fednh.Dataset("vectors", vectors, label, vectors[:0], label[:0], names, **scaling, **where)
    plain = fednh.run(method="fednh", model="linear", data=data, out=tmp_path / "vectors", **TRAINING)
    trees = [fednh.load_model(run.path).params for run in (ours, plain)]
    assert all(torch.equal(trees[0][name], trees[1][name]) for name in ("head.weight", "scale"))


@pytest.mark.parametrize("engine", ["loop", "vmap"])
@pytest.mark.parametrize("adapter", ["none", "mlp"])
def test_adapters_and_engines(weights: Path, samples: tuple, tmp_path: Path, engine: str, adapter: str) -> None:
    images, label, sites = samples
    more = settings(weights, engine=engine, **{"model.adapter": adapter, "model.width": 8})
    result = fednh.run(method="fedavg", data=(images, label, sites), out=tmp_path / "run", **more)
    names = set(fednh.load_model(result.path).params)
    assert names == {"head.weight"} | ({"body.linear1.weight", "body.linear1.bias"} if adapter == "mlp" else set())
    assert result.summary["held_share"] > 60


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_or_is_refused(weights: Path, samples: tuple, tmp_path: Path, method: str) -> None:
    images, label, sites = samples
    more = settings(weights, rounds=1, **{"train.epochs": 1, "eval.every": 0})
    refused = method in ("fedper", "fedrep", "fedbabu", "feduh")
    expected = pytest.raises(ConfigError, match="shares the body alone") if refused else nullcontext()
    with expected:
        result = fednh.run(method=method, data=(images, label, sites), out=tmp_path / "run", **more)
        assert result.summary["rounds"] == 1


def test_personal_models_export_and_newcomers(weights: Path, samples: tuple, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    images, label, sites = samples
    result = fednh.run(method="fednh", data=(images, label, sites), out=tmp_path / "run", **settings(weights))
    model = fednh.load_model(result.path, "south")
    done = fednh.export(model, tmp_path / "south.onnx")
    assert done["difference"] < 1e-4
    import onnxruntime

    session = onnxruntime.InferenceSession(tmp_path / "south.onnx")
    probabilities = session.run(["probabilities"], {"input": images[:5]})[0]
    assert np.abs(probabilities - model.predict_proba(images[:5])).max() < 1e-4
    np.savez(tmp_path / "new.npz", x_train=images[:20], y_train=label[:20], x_test=images[20:30], y_test=label[20:30])
    personal = fednh.personalize(result.path, f"npz:{tmp_path / 'new.npz'}")
    assert personal.model.predict(images[:3]).shape == (3,)


def test_a_moved_run_folder_has_its_weights(weights: Path, samples: tuple, tmp_path: Path) -> None:
    images, label, sites = samples
    file = tmp_path / "mine.safetensors"
    file.write_bytes(weights.read_bytes())
    result = fednh.run(method="fedavg", data=(images, label, sites), out=tmp_path / "run", **settings(file))
    before = fednh.load_model(result.path).predict_proba(images)
    file.unlink()
    moved = result.path.rename(tmp_path / "elsewhere")
    assert np.array_equal(fednh.load_model(moved).predict_proba(images), before)
    (moved / "weights.safetensors").unlink()
    with pytest.raises(fednh.UserError, match="are not on this machine"):
        fednh.load_model(moved)
    assert np.array_equal(fednh.load_model(moved, weights=weights).predict_proba(images), before)


def test_grey_images_and_views(weights: Path, samples: tuple, tmp_path: Path) -> None:
    images, label, sites = samples
    grey = images.mean(3).astype(np.uint8)[..., None]
    more = settings(weights, **{"features.views": 3})
    result = fednh.run(method="fedavg", data=(grey, label, sites), out=tmp_path / "run", **more)
    assert fednh.load_model(result.path).predict(grey[:2]).shape == (2,)
    plain = fednh.run(method="fedavg", data=(grey, label, sites), out=tmp_path / "plain", **settings(weights))
    heads = [fednh.load_model(run.path).params["head.weight"] for run in (result, plain)]
    assert not torch.equal(*heads)  # the copies were trained on


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"model.weights": None}, "needs pretrained weights"),
        ({"model.frozen": "none", "model.adapter": "mlp"}, "takes adapter only behind a frozen body"),
        ({"model.name": "auto"}, "needs a pretrained network"),
        ({"features.size": 4}, "features.size = 4"),
    ],
)
def test_settings_that_cannot_be(weights: Path, samples: tuple, tmp_path: Path, more: dict, words: str) -> None:
    given = {key: value for key, value in settings(weights, **more).items() if value is not None}
    with pytest.raises(ConfigError, match=words):
        fednh.run(method="fedavg", data=samples, out=tmp_path / "run", **given)
    assert not (tmp_path / "run" / "config.toml").exists()


def test_vectors_have_no_images(weights: Path, tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(40, 5)).astype(np.float32)
    with pytest.raises(DataError, match="needs images"):
        fednh.run(
            method="fedavg", data=(x, np.arange(40) % 2, ["a", "b"] * 20), out=tmp_path / "r", **settings(weights)
        )
