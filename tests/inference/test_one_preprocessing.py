"""One picture gives one input: by path, as PIL image, as array, in training, and by the documented recipe."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

import fednh
from fednh.data.sources.registry import load
from fednh.errors import UserError
from fednh.inference import inputs
from fednh.inference.eval_data import source_config
from fednh.inference.export import real_samples
from tests.helpers.process import fednh as command

DOCUMENT = Path(__file__).parents[2] / "docs" / "model-files.md"


def picture(seed: int, width: int, height: int) -> Image.Image:
    """Noise with edges: what a reduced decoding and a careless filter change most."""
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (height, width, 3), np.uint8)
    pixels[::7, :, 0] = 255
    return Image.fromarray(pixels)


def album(root: Path) -> list[Path]:
    """Large JPEG, one lying on its side; PNG with alpha, with a palette, grey, small."""
    for place in ("a", "b"):
        (root / place).mkdir(parents=True)
    files = [root / f"{'ab'[k % 2]}" / f"{k}.jpg" for k in range(4)]
    for k, file in enumerate(files):
        image = picture(k, 240 + 17 * k, 180)
        exif = image.getexif()
        exif[0x0112] = (1, 6, 3, 8)[k]
        image.save(file, quality=90, exif=exif)
    picture(9, 100, 90).convert("L").save(root / "a" / "grey.jpg")
    picture(5, 50, 60).convert("RGBA").save(root / "a" / "alpha.png")
    picture(6, 33, 20).convert("P").save(root / "b" / "palette.png")
    picture(7, 9, 30).convert("L").save(root / "b" / "grey.png")
    return sorted(root.glob("*/*"))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path], Path]:
    folder = tmp_path_factory.mktemp("photos")
    files = album(folder / "album")
    settings = {"partition.name": "iid", "partition.clients": 1, "partition.min_samples": 1, "participation.rate": 1.0}
    data = {"data.name": f"folder:{folder / 'album'}", "data.size": [24, 32], "data.holdout": 0.0}
    given = {**data, **settings, "rounds": 1, "train.epochs": 1, "model.name": "mlp", "method.name": "fedavg"}
    return folder / "album", files, fednh.run(given, out=folder / "run").path


def documented() -> Any:
    """The function that the document gives to users of an exported model."""
    (code,) = re.findall(r"```python\n(import numpy.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    place: dict[str, Any] = {}
    exec(code, place)
    return place["sample"]


def test_every_way_gives_the_same_input(photos: tuple[Path, list[Path], Path]) -> None:
    root, files, run = photos
    model = fednh.load_model(run)
    how = model.info["preprocessing"]
    assert how["resize"] == {
        "upright": "exif_transpose",
        "mode": "RGB",
        "filter": "BILINEAR",
        "rule": "stretch",
        "draft": False,
    }
    trained = load(f"folder:{root}", Path("unused"), {"size": (24, 32)})
    recipe = documented()
    for file, stored in zip(files, trained.x_train, strict=True):
        by_path = inputs.samples(file, model.card)[0]
        assert np.array_equal(by_path, stored), file
        assert np.array_equal(inputs.samples(Image.open(file), model.card)[0], by_path), file
        array = np.asarray(ImageOps.exif_transpose(Image.open(file).convert("RGB")))[None]
        if "exif" not in Image.open(file).info:
            assert np.array_equal(inputs.samples(array, model.card)[0], by_path), file
        assert np.array_equal(recipe(file, how), by_path), file


@pytest.mark.parametrize("fit", ["crop", pytest.param("pad", marks=pytest.mark.soak)])
def test_how_images_get_their_size_is_in_the_card(
    photos: tuple[Path, list[Path], Path], tmp_path: Path, fit: str
) -> None:
    root, files, stretched = photos
    trained = load(f"folder:{root}", Path("unused"), {"size": (24, 32), "fit": fit})
    run = tmp_path / "run"
    settings = [f"data.fit={fit}", "data.size=24,32", "data.holdout=0", "model.name=mlp", "partition.min_samples=1"]
    many = [word for setting in settings for word in ("--set", setting)]
    args = ["run", "--data", f"folder:{root}", "--method", "fedavg", "--clients", "1", "--rounds", "1", "--epochs", "1"]
    said = command([*args, "--partition", "iid", *many, "--out", str(run), "--quiet"], tmp_path / "io")
    assert said.code == 0, said.stderr
    model = fednh.load_model(run)
    how = model.info["preprocessing"]
    assert (how["resize"]["rule"], "fit" in how) == (fit, False)
    for file, stored in zip(files, trained.x_train, strict=True):
        with Image.open(file) as picture:
            pixels = np.asarray(ImageOps.exif_transpose(picture).convert("RGB"))[None]
            for raw in (file, picture, pixels):
                assert np.array_equal(inputs.samples(raw, model.card)[0], stored), file
        assert np.array_equal(documented()(file, how), stored), file
    assert not np.array_equal(
        inputs.samples(files, model.card), inputs.samples(files, fednh.load_model(stretched).card)
    )
    assert source_config(model.card, f"folder:{root}").data.fit == fit  # what evaluate and personalize read others by
    checked, origin = real_samples(model)
    assert (origin, np.array_equal(checked, trained.x_train)) == (f"samples of folder:{root}", True)
    told = command(["predict", str(run), str(root), "--format", "json"], tmp_path / "io")
    probabilities = model.predict_proba(files)
    for row, mine in zip(json.loads(told.stdout), probabilities, strict=True):
        assert row["probability"] == round(float(mine.max()), 6)


def test_a_rule_of_another_version_is_refused(photos: tuple[Path, list[Path], Path]) -> None:
    _, files, run = photos
    model = fednh.load_model(run)
    how = {"resize": {"rule": "swirl"}, "size": [24, 32], "channels": 3}
    other = SimpleNamespace(shape=model.card.shape, preprocessing=SimpleNamespace(scale=255.0), sample_form=how)
    with pytest.raises(UserError, match="resizes images by 'swirl', which this version does not know"):
        inputs.samples(files, other)
    how.pop("resize")  # a card of an older version: stretched
    assert np.array_equal(inputs.samples(files, other), inputs.samples(files, model.card))


def test_sixteen_bits_grey_and_other_ranges_by_the_recipe(tmp_path: Path) -> None:
    levels = np.arange(40 * 30, dtype=np.uint16).reshape(40, 30) * 50
    Image.fromarray(levels).save(tmp_path / "deep.png")
    picture(1, 64, 48).save(tmp_path / "colour.jpg")
    for scale in (255.0, 16.0):
        how = {
            "size": [8, 8],
            "channels": 1,
            "scale": scale,
            "resize": {"mode": "L", "filter": "BILINEAR", "rule": "stretch"},
        }
        card = SimpleNamespace(shape=(1, 8, 8), preprocessing=SimpleNamespace(scale=scale), sample_form=how)
        for name in ("deep.png", "colour.jpg"):
            assert np.array_equal(inputs.image(tmp_path / name, card), documented()(tmp_path / name, how))


# --- links -----------------------------------------------------------------------------------------------------------


def test_links_to_folders_are_followed_and_loops_refused(photos: tuple[Path, list[Path], Path], tmp_path: Path) -> None:
    album, files, run = photos
    (tmp_path / "sites" / "north").mkdir(parents=True)
    (tmp_path / "sites" / "south").symlink_to(album)  # a site
    (tmp_path / "sites" / "north" / "a").symlink_to(album / "a")  # a class
    (tmp_path / "sites" / "north" / "b").symlink_to(Path("..") / "south" / "b")
    source = f"folder:{tmp_path / 'sites'}"
    data = load(source, Path("unused"), {"size": (8, 8)})
    assert (data.sites, data.classes) == (("north", "south"), ("a", "b"))
    assert np.bincount(data.site_train).tolist() == [len(files), len(files)]
    said = command(["predict", str(run), str(tmp_path / "sites"), "--format", "csv"], tmp_path / "io")
    assert (said.code, len(said.stdout.splitlines())) == (0, 2 * len(files) + 1), said.stderr
    loop = tmp_path / "sites" / "north" / "again"
    loop.symlink_to(tmp_path / "sites")
    refused = command(["inspect", "--data", source], tmp_path / "io")
    assert (refused.code, refused.stderr.count("\n")) == (2, 1)
    assert f"{loop} links to a folder that it lies in, which has no end; remove the link" in refused.stderr
    said = command(["predict", str(run), str(tmp_path / "sites"), "--format", "csv"], tmp_path / "io")
    assert (said.code, len(said.stdout.splitlines())) == (1, 2 * len(files) + 1)  # the others are done
    loop.unlink()
    loop.symlink_to(tmp_path / "nowhere")
    refused = command(["inspect", "--data", source], tmp_path / "io")
    assert f"{loop} links to {tmp_path / 'nowhere'}, which is not there" in refused.stderr


# --- export ----------------------------------------------------------------------------------------------------------


def test_export_of_a_table_is_checked_on_its_training_data(tmp_path: Path) -> None:
    rows = "".join(f"{k % 3},0{k % 2},{'ja' if k % 2 else 'nö'}\n" for k in range(30))
    file = tmp_path / "t.csv"
    file.write_bytes(f"größe,code,diagnosis\n{rows}".encode("cp1252"))
    settings = {"partition.name": "iid", "partition.clients": 1, "participation.rate": 1.0, "rounds": 1}
    data = {"data.name": f"csv:{file}", "data.label": "diagnosis", "data.encoding": "cp1252"}
    made = fednh.run({**data, **settings, "method.name": "fedavg"}, out=tmp_path / "run")
    x, origin = real_samples(made.model())
    assert (origin, x.shape) == (f"samples of csv:{file}", (30, 4))
    assert x[:2].tolist() == [[0, 1, 0, 0], [1, 0, 1, 0]]
    file.write_text("other,columns\n1,2\n")
    assert (
        "random vectors (the training data cannot be read: the table lacks the column" in real_samples(made.model())[1]
    )
    file.unlink()
    assert real_samples(made.model())[1] == "random vectors (the training data are not here)"
