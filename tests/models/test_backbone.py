"""Frozen networks: what their features depend on, where their weights come from, and what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fednh import extras
from fednh.errors import ConfigError, UserError
from fednh.io import cache
from fednh.io.files import sha256
from fednh.models.backbone import LITE, Backbone, Recipe, build_backbone, find_weights
from fednh.models.features import compute
from tests.helpers.pictures import TOY, images, toy_onnx, toy_weights


def toy(folder: Path, **fields: Any) -> Backbone:
    return build_backbone(Recipe(name=TOY, **{"size": 8, **fields}), 2, toy_weights(folder / "toy.safetensors"))


def test_features_are_those_of_the_body(tmp_path: Path) -> None:
    """Computed by hand: scaled pixels, a convolution, the mean over space."""
    stored = images(3)
    body = toy(tmp_path, mean=(0.5, 0.5, 0.5), std=(0.25, 0.5, 1.0))
    weights = load_file(tmp_path / "toy.safetensors")
    x = (torch.from_numpy(stored).permute(0, 3, 1, 2) / 255 - 0.5) / torch.tensor([0.25, 0.5, 1.0]).view(1, 3, 1, 1)
    maps = torch.nn.functional.conv2d(x, weights["body.0.weight"], weights["body.0.bias"], padding=1).relu()
    assert body.recipe.dim == 4
    torch.testing.assert_close(torch.from_numpy(compute(stored, body)), maps.mean((2, 3)))


def test_images_are_brought_to_the_size_and_grey_ones_have_three_equal_channels(tmp_path: Path) -> None:
    body = toy(tmp_path)
    grey = images(2, channels=1)
    assert np.array_equal(compute(grey, body), compute(np.repeat(grey, 3, axis=3), body))
    blocks = np.repeat(np.repeat(images(2), 2, axis=1), 2, axis=2)  # each pixel four times: its mean is the pixel
    assert np.allclose(compute(blocks, body), compute(images(2), body), atol=1e-5)
    assert compute(images(2, size=5), body).shape == (2, 4)


def test_the_key_depends_on_every_field_but_the_place_of_the_file() -> None:
    recipe = Recipe(name="a", sha256="00", dim=3)
    others: dict[str, Any] = {
        "name": "b",
        "args": {"width": 8},
        "head": "fc",
        "size": 64,
        "mean": (0.1, 0.2, 0.3),
        "std": (0.5, 0.5, 0.5),
        "sha256": "11",
        "dim": 4,
    }
    assert set(others) == set(Recipe.model_fields) - {"file"}
    keys = {recipe.key, *(recipe.model_copy(update={key: value}).key for key, value in others.items())}
    assert len(keys) == 1 + len(others)
    moved = recipe.model_copy(update={"file": "/elsewhere"})
    assert moved.same(recipe)
    assert Recipe.model_validate(recipe.model_dump(mode="json")) == recipe


def test_a_description_without_weights_agrees_with_the_recipe_that_was_made_of_it(tmp_path: Path) -> None:
    made = toy(tmp_path).recipe
    assert Recipe(name=TOY, size=8).agrees(made)
    assert not Recipe(name=TOY, size=16).agrees(made)
    assert not Recipe(name="resnet18", size=8).agrees(made)


def test_other_weights_are_refused_and_known_places_are_searched(tmp_path: Path) -> None:
    file = toy_weights(tmp_path / "toy.safetensors")
    recipe = toy(tmp_path).recipe
    assert recipe.sha256 == sha256(file)
    assert find_weights(recipe) == file
    wrong = toy_weights(tmp_path / "other.safetensors", seed=1)
    with pytest.raises(ConfigError, match=r"other.safetensors does not hold the agreed weights"):
        find_weights(recipe, wrong)
    with pytest.raises(ConfigError, match=r"nothing.safetensors does not exist"):
        find_weights(recipe, tmp_path / "nothing.safetensors")
    run = tmp_path / "run"
    (run / "models/personal").mkdir(parents=True)
    file.rename(run / "weights.safetensors")
    with pytest.raises(ConfigError, match=r"are not on this machine \(they were in .*toy.safetensors\); say where"):
        find_weights(recipe)
    assert find_weights(recipe, near=run / "models/personal") == run / "weights.safetensors"
    wrong.rename(run / "models/weights.safetensors")  # nearer, but of another network
    assert find_weights(recipe, near=run / "models/personal") == run / "weights.safetensors"
    cached = cache.folder("weights") / f"{recipe.sha256}.safetensors"
    cached.parent.mkdir(parents=True, exist_ok=True)
    (run / "weights.safetensors").rename(cached)
    assert find_weights(recipe) == cached
    cached.unlink()


def test_a_network_needs_weights_and_images_of_a_size_that_it_takes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs pretrained weights for model.name = 'conv2'.*model.weights"):
        build_backbone(Recipe(name="conv2"), 2)
    toy_onnx(tmp_path / "body.onnx", size=8)
    with pytest.raises(ConfigError, match=r"does not accept images of 16x16 pixels \(.*\); set features.size"):
        build_backbone(Recipe(name=f"onnx:{tmp_path}/body.onnx", size=16), 2)
    recipe = toy(tmp_path).recipe.model_copy(update={"dim": 7})
    with pytest.raises(ConfigError, match=r"gives 4 features; 7 are agreed on"):
        build_backbone(recipe, 2)


@pytest.mark.parametrize("pooled", [True, False])
def test_an_onnx_network_gives_the_features_of_its_torch_original(tmp_path: Path, pooled: bool) -> None:
    """Seed 0 on both sides: the same weights, in one file each."""
    file = toy_onnx(tmp_path / "body.onnx", pooled=pooled)
    body = build_backbone(Recipe(name=f"onnx:{file}", size=8), 2)
    assert body.recipe.name == "onnx:body.onnx"  # its folder is no part of what features depend on
    assert body.recipe.sha256 == sha256(file)
    torch.manual_seed(0)
    stored = images(5)
    assert np.allclose(compute(stored, body), compute(stored, toy(tmp_path)), atol=1e-5)


def test_what_is_no_onnx_network_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match=r"bad.onnx cannot be read as an ONNX network: "):
        build_backbone(Recipe(name=f"onnx:{tmp_path}/bad.onnx"), 2)
    with pytest.raises(ConfigError, match=r"none.onnx does not exist"):
        build_backbone(Recipe(name=f"onnx:{tmp_path}/none.onnx"), 2)
    file = toy_onnx(tmp_path / "body.onnx")
    with pytest.raises(ConfigError, match=r"has the inputs x and the outputs features; .*names one of the outputs"):
        build_backbone(Recipe(name=f"onnx:{file}", args={"output": "logits"}, size=8), 2)
    with pytest.raises(ConfigError, match=r"model.args.depth is not an argument of an ONNX backbone"):
        build_backbone(Recipe(name=f"onnx:{file}", args={"depth": 3}, size=8), 2)
    monkeypatch.setitem(extras.MODULES, "onnx", ("a_module_that_nobody_has",))
    with pytest.raises(UserError, match=r"needs the extra `onnx`"):
        build_backbone(Recipe(name=f"onnx:{file}", size=8), 2)


def test_efficientnet_lite0_with_its_published_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = build_backbone(Recipe(name=LITE, size=32), 10)
    assert body.recipe.dim == 1280
    made = compute(images(3, size=32), body)
    assert np.isfinite(made).all()
    assert len(np.unique(made, axis=0)) == 3
    assert np.array_equal(made[:1], compute(images(3, size=32)[:1], body))
    other = toy_weights(tmp_path / "other.safetensors")
    with pytest.raises(ConfigError, match=r"other.safetensors does not hold the published weights of efficientnet"):
        build_backbone(Recipe(name=LITE), 10, other)
    monkeypatch.setitem(extras.MODULES, "backbones", ("a_module_that_nobody_has",))
    with pytest.raises(UserError, match=r"needs the extra `backbones`: pip install"):
        build_backbone(Recipe(name=LITE), 10)
