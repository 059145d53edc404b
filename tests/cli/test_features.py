"""`fednh features` and what follows from it: the same models as with `model.frozen`, wherever files move afterwards."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fednh
from fednh.data.dataset import Dataset
from fednh.data.sources.npz import write_features
from fednh.data.sources.registry import load
from fednh.errors import ConfigError, DataError, UserError
from fednh.io.files import read_tree
from fednh.models.backbone import Recipe, build_backbone
from fednh.models.features import BLOCK, CHECK, DIGEST, with_features
from tests.helpers.pictures import SLOW, TOY, images, paint, sentence_encoder, toy_onnx, toy_weights
from tests.helpers.process import Process
from tests.helpers.process import fednh as command

SHORT: dict[str, Any] = {"partition": "site", "rounds": 2, "epochs": 1, "partition__min_samples": 2}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with photos and weights, and a cache of its own."""
    monkeypatch.setenv("FEDNH_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    paint(tmp_path / "photos")
    toy_weights(tmp_path / "toy.safetensors")
    return tmp_path


def frozen(here: Path, **settings: Any) -> Any:
    how = {"name": TOY, "frozen": "body", "weights": "toy.safetensors"}
    return fednh.run(data="folder:photos", model=how, out=here / "frozen", features__size=8, **{**SHORT, **settings})


def tensors(run: Path) -> dict[str, torch.Tensor]:
    """All tensors of all models of a run."""
    files = sorted((run / "models").rglob("*.safetensors"))
    return {f"{file.relative_to(run)} {key}": value for file in files for key, value in read_tree(file).items()}


def assert_same(one: Path, other: Path) -> None:
    ours, theirs = tensors(one), tensors(other)
    assert list(ours) == list(theirs)
    assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []


def written(here: Path, *more: str) -> Path:
    words = ["features", "folder:photos", "--model", TOY, "--weights", "toy.safetensors", "--size", "8", *more]
    ended = command([*words, "-o", "f.npz"], here)
    assert ended.code == 0, ended.stderr
    assert "f.npz: 4 features of 32 training samples and 0 test samples; use it with --data npz:f.npz" in ended.stdout
    return here / "f.npz"


@pytest.mark.parametrize("views", [1, 3])
def test_models_of_the_file_are_those_of_a_frozen_body(here: Path, views: int) -> None:
    """To the bit, cards included; and they take images."""
    file = written(here, "--views", str(views))
    images_run = frozen(here, features__views=views)
    run = fednh.run(data=f"npz:{file}", out=here / "run", **SHORT)
    assert_same(run.path, images_run.path)
    of_file, of_images = run.model(), images_run.model()
    cards = [{key: value for key, value in model.info.items() if key != "trained_on"} for model in (of_file, of_images)]
    assert cards[0] == cards[1]
    assert cards[0]["features"]["name"] == TOY
    photo = here / "photos/north/dark/0.png"
    assert np.array_equal(of_file.predict_proba(photo), of_images.predict_proba(photo))
    assert of_file.predict(photo) == "dark"
    for model in (run, images_run):
        result = fednh.evaluate(model, "folder:photos", split="all")
        assert (result.samples, result.accuracy) == (32, fednh.evaluate(images_run, split="train").accuracy)
    own = fednh.evaluate(run)
    assert own.accuracy == fednh.evaluate(images_run).accuracy


def test_a_model_takes_features_of_its_own_network_alone(here: Path) -> None:
    run = fednh.run(data=f"npz:{written(here)}", out=here / "run", **SHORT)
    data = load("npz:f.npz", here)
    photos = sorted(here.glob("photos/north/bright/*.png"))
    model = run.model()
    rows = data.x_train[:8]  # bright comes before dark
    assert np.array_equal(model.predict_proba(rows), model.predict_proba(photos))
    shutil.move("f.npz", "old.npz")
    toy_weights(here / "other.safetensors", seed=1)
    written(here, "--weights", "other.safetensors")  # the last one counts
    with pytest.raises(UserError, match=r"holds features of another network"):
        fednh.evaluate(run, f"npz:{here}/f.npz", split="all")
    np.savez(here / "x.npz", x=rows, recipe=np.load(here / "f.npz")["recipe"])
    with pytest.raises(UserError, match=r"holds features of another network"):
        model.predict(here / "x.npz")
    np.savez(here / "x.npz", x=rows, recipe=np.load(here / "old.npz")["recipe"])
    assert np.array_equal(model.predict(here / "x.npz"), model.predict(rows))
    made = fednh.personalize(run, f"npz:{here}/old.npz", site="north", weights=None)
    assert made.comparison["held_out"] > 0
    how = {"name": TOY, "frozen": "body", "weights": "toy.safetensors"}
    with pytest.raises(DataError, match=r"holds features of tests.helpers.pictures:Toy at 8 pixels, not of the frozen"):
        fednh.run(data="npz:f.npz", model=how, out=here / "other", features__size=9, **SHORT)


def test_the_file_keeps_labels_sites_groups_and_the_test_part(here: Path) -> None:
    body = build_backbone(Recipe(name=TOY, size=8), 2, here / "toy.safetensors")
    y = np.array([0, 1, 1, 0, 1, 0])
    data = Dataset(
        *("noise", images(6), y, images(3, seed=1), y[:3], ("no", "yes")),
        mean=(0.5,) * 3,
        std=(0.2,) * 3,
        sites=("10", "9"),  # in this order, whatever the order of names is
        site_train=np.array([0, 0, 0, 1, 1, 1]),
        site_test=np.array([0, 1, -1]),
        group_train=np.array([0, 0, 1, 2, 2, 3]),
    )
    made = with_features(data, body, 3)
    write_features(here / "all.npz", made)
    read = load(f"npz:{here}/all.npz", here)
    for name in ("x_train", "y_train", "x_test", "y_test", "site_train", "site_test", "group_train", "views"):
        assert np.array_equal(getattr(read, name), getattr(made, name)), name
        assert getattr(read, name).dtype == getattr(made, name).dtype
    for name in ("classes", "sites", "mean", "std", "scale", "fitted", "preprocessing", "augment"):
        assert getattr(read, name) == getattr(made, name), name
    with pytest.raises(DataError, match=r"has further views of its training samples alone"):
        load(f"npz:{here}/all.npz", here, {"merge_test": True})
    one = load(f"npz:{here}/all.npz", here, {"sites": ["9"]})
    assert read.views is not None
    assert one.views is not None
    assert np.array_equal(one.views, read.views[:, 3:])


def test_embeddings_from_elsewhere_stay_vectors(here: Path) -> None:
    arrays = {key: value for key, value in np.load(written(here)).items() if key != "recipe"}
    np.savez(here / "plain.npz", **arrays)
    data = load(f"npz:{here}/plain.npz", here)
    assert data.preprocessing == {"kind": "vector"}
    run = fednh.run(data=f"npz:{here}/plain.npz", out=here / "plain", **SHORT)
    assert run.model().info["model"]["name"] == "mlp"
    assert "features" not in run.model().info


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"recipe": np.array("nonsense")}, "recipe is not what `fednh features` writes"),
        ({"recipe": np.array('{"backbone": 3, "inputs": {}}')}, "recipe is not what `fednh features` writes"),
        ({"recipe": np.array('{"backbone": {"dim": 4}, "inputs": {}}')}, "in a form that is not known"),
        ({"x_train": np.zeros((32, 5), np.float32)}, "does not hold the features that its recipe describes"),
        ({"views": np.zeros((1, 31, 4), np.float32)}, "does not hold the features that its recipe describes"),
    ],
)
def test_a_damaged_file_is_one_sentence(here: Path, change: dict[str, Any], words: str) -> None:
    np.savez(here / "bad.npz", **{**np.load(written(here)), **change})
    with pytest.raises(DataError, match=words):
        fednh.run(data=f"npz:{here}/bad.npz", out=here / "run", **SHORT)


def test_a_killed_command_goes_on_where_it_stopped(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three blocks those that were written are not computed again; there is no file before there is a whole one."""
    number = 2 * BLOCK + 64
    np.savez(here / "many.npz", x_train=images(number), y_train=np.arange(number) % 2)
    args = ["features", "npz:many.npz", "--model", SLOW, "--weights", "toy.safetensors", "--size", "8", "-o", "f.npz"]

    def computed(log: str) -> int:
        return sum(map(int, (here / log).read_text().split()))

    monkeypatch.setenv("FEDNH_TEST_LOG", str(here / "first"))
    process = Process(args, here / "killed")
    while not (kept := list(here.glob("cache/features/*/keys"))) or not kept[0].stat().st_size:
        assert not process.ended(), process.wait().stderr
        time.sleep(0.01)
    process.kill()
    assert process.wait().code < 0
    assert not (here / "f.npz").exists()
    done = kept[0].stat().st_size // (DIGEST + CHECK)
    assert 0 < done < number
    monkeypatch.setenv("FEDNH_TEST_LOG", str(here / "second"))
    ended = command(args, here / "again")
    assert ended.code == 0, ended.stderr
    assert (
        number - done <= computed("second") < number - done + 32 + 100
    )  # a last batch is filled up; the network is tried
    assert len(np.load(here / "f.npz")["x_train"]) == number


def test_what_the_command_refuses(here: Path) -> None:
    for words, sentence in (
        (["photos", "--model", TOY, "-o", "f.npz"], "needs pretrained weights for model.name"),
        (["photos", "--model", TOY, "-o", "f.csv"], "f.csv should be a file with the ending .npz"),
        (["spiral", "--model", TOY, "--weights", "toy.safetensors", "-o", "f.npz"], "needs images, but spiral holds"),
        (["photos", "--model", "auto", "-o", "f.npz"], "needs a pretrained network"),
    ):
        ended = command(["features", *words], here)
        assert (ended.code, sentence in ended.stderr) == (2, True), ended.stderr
        assert "Traceback" not in ended.stderr


# --- networks in ONNX files, and weights that are elsewhere -----------------------------------------------------------


def of_onnx(here: Path, **settings: Any) -> Any:
    how = {"name": "onnx:body.onnx", "frozen": "body"}
    return fednh.run(data="folder:photos", model=how, out=here / "run", features__size=8, **{**SHORT, **settings})


def test_a_run_of_an_onnx_network_keeps_it_and_moves_with_it(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy_onnx(here / "body.onnx")
    run = of_onnx(here)
    assert run.config.model.name == f"onnx:{here}/body.onnx"
    wanted = run.model().predict_proba("photos")
    assert (run.path / "weights.onnx").read_bytes() == (here / "body.onnx").read_bytes()
    (here / "body.onnx").unlink()
    moved = here / "elsewhere/run"
    moved.parent.mkdir()
    run.path.rename(moved)
    monkeypatch.chdir("elsewhere")
    for client in (None, "north"):
        model = fednh.load_model(moved, client)
        assert client is not None or np.array_equal(model.predict_proba("../photos"), wanted)
    (moved / "weights.onnx").rename(here / "kept.onnx")
    photo = str(here / "photos/north/dark/0.png")
    ended = command(["predict", str(moved), photo], here / "out")
    assert ended.code == 2
    assert "are not on this machine" in ended.stderr
    weights = ["--weights", str(here / "kept.onnx")]
    assert command(["predict", str(moved), photo, *weights], here / "out").code == 0
    assert (
        command(["evaluate", str(moved), "--data", f"folder:{here}/photos", "--split", "all", *weights], here).code == 0
    )
    data = ["--data", f"folder:{here}/photos", "--site", "north"]
    assert command(["personalize", str(moved), *data, *weights], here / "out").code == 0
    assert command(["export", str(moved), "-o", "m.onnx", *weights], here / "out").code == 0
    with pytest.raises(UserError, match=r"toy.safetensors does not hold the agreed weights"):
        fednh.load_model(moved, weights=here / "toy.safetensors")
    plain = fednh.run("digits", rounds=1, epochs=1, clients=2, out=here / "plain")
    with pytest.raises(UserError, match=r"has no frozen body, so it needs none"):
        plain.model(weights=here / "kept.onnx")


def test_a_run_is_not_resumed_with_another_onnx_network(here: Path) -> None:
    toy_onnx(here / "body.onnx")
    run = of_onnx(here)
    toy_onnx(here / "body.onnx", seed=1)
    with pytest.raises(UserError, match=r"body.onnx are not those that the run .*restore them from .*weights.onnx"):
        fednh.resume(run.path, rounds=3)
    (here / "moved").mkdir()
    shutil.copy(run.path / "weights.onnx", here / "moved/body.onnx")
    config = run.path / "config.toml"
    config.write_text(config.read_text().replace(f"onnx:{here}/body.onnx", f"onnx:{here}/moved/body.onnx"))
    assert fednh.resume(run.path, rounds=3).summary["rounds"] == 3


@pytest.mark.parametrize(("pooled", "method"), [(True, "fednh"), (False, "fedavg")])
def test_the_export_of_an_onnx_body_is_one_file(here: Path, pooled: bool, method: str) -> None:
    """It needs neither the body's file nor fednh, and takes any number of images."""
    import onnxruntime

    toy_onnx(here / "body.onnx", pooled=pooled)
    run = of_onnx(here, method=method)
    facts = fednh.export(run, here / "model.onnx")
    assert facts["difference"] < 1e-5
    stored = load("folder:photos", here, {"size": [8, 8]}).x_train[:5]
    wanted = run.model().predict_proba(stored)
    shutil.rmtree(run.path)
    (here / "body.onnx").unlink()
    session = onnxruntime.InferenceSession(here / "model.onnx")
    assert [each.name for each in session.get_inputs()] == ["input"]
    names = [each.name for each in session.get_outputs()]
    assert names == ["probabilities", "logits", "similarity"][: 3 if method == "fednh" else 2]
    assert np.allclose(session.run(["probabilities"], {"input": stored})[0], wanted, atol=1e-5)
    assert json.loads(session.get_modelmeta().custom_metadata_map["fednh"])["features"]["name"] == "onnx:body.onnx"


def test_names_of_frozen_networks_are_for_frozen_bodies(here: Path) -> None:
    for model, words in (
        ({"name": "efficientnet_lite0"}, "computes features; set model.frozen = 'body'"),
        ({"name": "onnx:body.onnx"}, "computes features; set model.frozen = 'body'"),
    ):
        with pytest.raises(ConfigError, match=words):
            fednh.run(data="folder:photos", model=model, out=here / "run")


def test_another_size_is_another_recipe(here: Path) -> None:
    """The key of the cache and of the card follows the size, so nothing of one is used for the other."""
    body = build_backbone(Recipe(name=TOY, size=8), 2, here / "toy.safetensors")
    larger = build_backbone(Recipe(name=TOY, size=16), 2, here / "toy.safetensors")
    data = replace(load("folder:photos", here, {"size": [16, 16]}), notes=())
    assert not np.array_equal(with_features(data, body).x_train, with_features(data, larger).x_train)


# --- texts ----------------------------------------------------------------------------------------------------------


@pytest.mark.soak
def test_texts_become_features_and_models_take_texts(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    sentence_encoder(here / "encoder")
    sport, food = ["goal match", "team", "match team goal", "goal"], ["soup salt", "bread", "salt bread soup", "soup"]
    rows = [f"{i},{(sport, food)[i % 2][i // 2 % 4]},{('sport', 'food')[i % 2]},{'ns'[i // 8 % 2]}" for i in range(48)]
    (here / "notes.csv").write_text("id,note,topic,site\n" + "\n".join(rows) + "\n")
    args = ["features", "csv:notes.csv", "--model", "sentence:encoder", "--set", "data.label=topic", "-o", "t.npz"]
    ended = command([*args, "--text", "note"], here)
    assert ended.code == 0, ended.stderr
    assert "t.npz: 16 features of 48 training samples" in ended.stdout
    data = load(f"npz:{here}/t.npz", here)
    assert (data.sites, data.classes) == (("n", "s"), ("food", "sport"))
    by_text = {row.split(",")[1]: data.x_train[i] for i, row in enumerate(rows)}
    assert all(np.array_equal(data.x_train[i], by_text[row.split(",")[1]]) for i, row in enumerate(rows))
    run = fednh.run(data=f"npz:{here}/t.npz", out=here / "run", method="fedavg", lr=0.5, **{**SHORT, "epochs": 40})
    model = run.model()
    assert model.predict(["match goal", "salt soup"]).tolist() == ["sport", "food"]
    assert model.predict("bread") == "food"
    assert np.array_equal(model.predict_proba(["soup salt"])[0], model.predict_proba(by_text["soup salt"][None])[0])
    ended = command(["predict", str(run.path), "notes.csv", "--format", "csv"], here)
    assert ended.code == 0, ended.stderr
    assert [line.split(",")[1] for line in ended.stdout.splitlines()[1:]] == [row.split(",")[2] for row in rows]
    for words, sentence in (
        (["export", str(run.path), "-o", "m.onnx"], "a model that takes texts cannot be exported"),
        (["evaluate", str(run.path), "--data", "csv:notes.csv"], "is measured on features: write them with"),
        (["predict", str(run.path), "photos"], "this model takes texts"),
        (args, "--text COLUMN and --model sentence:FOLDER belong together"),
        ([*args, "--text", "nota"], "has no column 'nota' with texts; did you mean 'note'?"),
        ([*args, "--text", "note", "--size", "32"], "features.size is for images"),
        (["features", "photos", *args[2:], "--text", "note"], "texts are read from tables"),
        ([*args[:2], "--model", "sentence:photos", "--text", "note", "-o", "t.npz"], "cannot be read as a sentence"),
    ):
        ended = command(words, here)
        assert (ended.code, sentence in ended.stderr) == (2, True), (words, ended.stderr)
    shutil.move("encoder", "moved")
    with pytest.raises(UserError, match=r"encoder is not a folder; say with weights where the sentence encoder is"):
        run.model()
    assert run.model(weights=here / "moved").predict("bread") == "food"
    (here / "moved/config_sentence_transformers.json").write_text("{}")
    with pytest.raises(UserError, match=r"does not hold the agreed sentence encoder"):
        run.model(weights=here / "moved")
