"""Image files as people have them: formats, depths, colours, pages, shapes, damage, and folders of several layouts.

Files are written by Pillow, or byte by byte where Pillow writes no such file; pixels are computed by hand.
"""

from __future__ import annotations

import io
import json
import struct
import tomllib
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

import fednh
from fednh.config import dump
from fednh.config import load as load_config
from fednh.data.sources.images import decode
from fednh.data.sources.registry import load
from fednh.errors import UserError
from fednh.inference.eval_data import load_for
from fednh.inference.export import real_samples
from tests.helpers.process import fednh as command


def own(root: Path, **settings: Any) -> Any:
    return load(f"folder:{root}", Path("unused"), settings)


def put(path: Path, image: Image.Image, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)
    return path


def grey(*rows: list[int], kind: Any = np.uint8) -> Image.Image:
    return Image.fromarray(np.array(rows, kind))


def tiff(pixels: NDArray[Any], photometric: int, sample_format: int = 1, bits: int | None = None) -> bytes:
    """An uncompressed little-endian TIFF, also of kinds that Pillow reads but does not write."""
    height, width = pixels.shape[:2]
    count, data = pixels[0, 0].size, pixels.tobytes()
    depths = struct.pack(f"<{count}H", *[bits or 8 * pixels.itemsize] * count)
    data += b"\0" * (len(data) % 2)
    inline = len(depths) <= 4
    values = {  # tag: type (3: short, 4: long), count, value
        256: (3, 1, width),
        257: (3, 1, height),
        258: (3, count, int.from_bytes(depths, "little") if inline else 8 + len(data)),
        259: (3, 1, 1),
        262: (3, 1, photometric),
        273: (4, 1, 8),
        277: (3, 1, count),
        278: (3, 1, height),
        279: (4, 1, pixels.nbytes),
        339: (3, 1, sample_format),
    }
    entries = b"".join(struct.pack("<HHII", tag, *value) for tag, value in values.items())
    start = 8 + len(data) + len(depths)
    return b"II*\0" + struct.pack("<I", start) + data + depths + struct.pack("<H", len(values)) + entries + bytes(4)


# --- formats ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".bmp", ".tif", ".TIFF", ".webp", ".gif", ".pgm", ".png"])
def test_every_format_without_loss_gives_the_same_pixels(tmp_path: Path, suffix: str) -> None:
    levels = [[0, 64, 128], [192, 255, 7]]
    options = {"lossless": True} if suffix == ".webp" else {}
    for label in "ab":
        put(tmp_path / label / f"0{suffix}", grey(*levels), **options)
    data = own(tmp_path)
    assert data.x_train[0, :, :, 0].tolist() == levels
    assert data.x_train.shape == (2, 2, 3, 3 if suffix in (".webp", ".gif") else 1)  # these have no grey


def test_sixteen_bits_keep_their_upper_eight(tmp_path: Path) -> None:
    deep = np.array([[0x00FF, 0x0100], [0x80FF, 0xFFFF]], np.uint16)
    for label, compression in (("a", None), ("b", "tiff_lzw"), ("c", "tiff_adobe_deflate")):
        put(tmp_path / label / "0.tif", Image.fromarray(deep), compression=compression)
    (tmp_path / "c" / "big.tif").write_bytes(put(tmp_path / "x.tif", Image.fromarray(deep.astype(">u2"))).read_bytes())
    (tmp_path / "x.tif").unlink()
    data = own(tmp_path)
    assert data.x_train.shape == (4, 2, 2, 1)
    for image in data.x_train:
        assert image[:, :, 0].tolist() == [[0, 1], [0x80, 0xFF]]
    colour = np.array([[[0x1234, 0x00FF, 0xFF00]]], "<u2")
    (tmp_path / "rgb.tif").write_bytes(tiff(colour, photometric=2))
    assert decode(tmp_path / "rgb.tif", (1, 1), 3).tolist() == [[[0x12, 0, 0xFF]]]


def test_cmyk_palette_and_alpha_become_colours(tmp_path: Path) -> None:
    cmyk = [[255, 0, 0, 0], [0, 0, 255, 0], [0, 0, 0, 255], [0, 0, 0, 0]]
    inks = Image.frombytes("CMYK", (4, 1), np.array(cmyk, np.uint8).tobytes())
    put(tmp_path / "inks.tif", inks)
    colours = [[0, 255, 255], [255, 255, 0], [0, 0, 0], [255, 255, 255]]  # cyan, yellow, black, paper
    assert decode(tmp_path / "inks.tif", (1, 4), 3)[0].tolist() == colours
    put(tmp_path / "inks.jpg", inks.resize((32, 8), Image.Resampling.NEAREST), quality=100, subsampling=0)
    near = decode(tmp_path / "inks.jpg", (8, 32), 3)[4, 4::8].astype(int)
    assert np.abs(near - colours).max() <= 3  # as a JPEG of Adobe's has them: inverted
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putpixel((1, 0), 1)
    put(tmp_path / "p.png", palette, transparency=b"\0\xff")
    clear = Image.fromarray(np.array([[[10, 20, 30, 0], [40, 50, 60, 255]]], np.uint8))
    put(tmp_path / "a.webp", clear, lossless=True, exact=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("p.png", "a.webp"):  # stored colours, whatever they are covered with
            assert decode(tmp_path / name, (1, 2), 3)[0].tolist() == [[10, 20, 30], [40, 50, 60]]


@pytest.mark.parametrize("suffix", [".tif", ".webp", ".png", ".jpg"])
def test_every_format_is_turned_upright(tmp_path: Path, suffix: str) -> None:
    picture = Image.new("RGB", (16, 8))
    picture.paste((255, 255, 255), (8, 0, 16, 8))  # white at the right
    exif = picture.getexif()
    exif[0x0112] = 6  # turn it by 90 degrees clockwise to see it upright: white comes to the bottom
    for label in "ab":
        put(tmp_path / label / f"0{suffix}", picture, exif=exif, **({"lossless": True} if suffix == ".webp" else {}))
    data = own(tmp_path)
    assert data.x_train.shape == (2, 16, 8, 3)  # the size that it has when it is upright
    assert (data.x_train[0, :8].max(), data.x_train[0, 8:].min()) == (0, 255)


REFUSED = {
    "fractions": (tiff(np.zeros((1, 1), "<f4"), 1, 3), "signed, fractions or of 32 bits"),
    "signed": (tiff(np.zeros((1, 1), "<i2"), 1, 2), "signed, fractions or of 32 bits"),
    "long": (tiff(np.zeros((1, 1), "<u4"), 1, 1), "signed, fractions or of 32 bits"),
    "negative": (tiff(np.zeros((1, 1), "<u2"), 0, 1), "12 bits, or 0 is white"),
    "twelve": (tiff(np.zeros((2, 2), "<u2"), 1, 1, bits=12), "12 bits, or 0 is white"),
    "bands": (tiff(np.zeros((1, 1, 7), "u1"), 1), "cannot identify image file"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_pixels_without_a_known_range_are_refused(tmp_path: Path, what: str) -> None:
    content, words = REFUSED[what]
    for label in "ab":
        put(tmp_path / label / "0.png", grey([1, 2]))
    (tmp_path / "a" / "1.tif").write_bytes(content)
    with pytest.raises(UserError, match=rf"1 of 3 images cannot be read: a/1.tif \(.*{words}.*data.on_bad=skip$"):
        own(tmp_path)
    assert len(own(tmp_path, on_bad="skip").y_train) == 2


def test_of_several_pages_the_first_is_used_and_that_is_said(tmp_path: Path) -> None:
    pages = [grey([level, level]) for level in (10, 20, 30)]
    put(tmp_path / "a" / "stack.tif", pages[0], save_all=True, append_images=pages[1:])
    put(tmp_path / "b" / "film.gif", pages[1], save_all=True, append_images=pages[2:])
    data = own(tmp_path)
    assert data.x_train[:, 0, 0, 0].tolist() == [10, 20]
    (note,) = data.notes
    assert note.endswith("several pages or frames the first is used: a/stack.tif has 3, b/film.gif has 2")


# --- damaged files ---------------------------------------------------------------------------------------------------


def damaged(root: Path) -> Path:
    """Grey images of two classes; one file is empty, one is half a colour JPEG, one link leads nowhere."""
    for k in range(6):
        put(root / "ab"[k % 2] / f"{k}.png", grey([k, k, k]))
    (root / "a" / "empty.png").write_bytes(b"")
    whole = io.BytesIO()
    Image.effect_noise((60, 60), 50).convert("RGB").save(whole, "JPEG")
    (root / "b" / "half.jpg").write_bytes(whole.getvalue()[: len(whole.getvalue()) // 2])
    (root / "b" / "gone.png").symlink_to(root / "nowhere.png")
    return root


def test_unreadable_files_are_left_out_as_if_they_were_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = damaged(tmp_path / "photos")
    with pytest.raises(UserError, match=r"links to .*nowhere"):
        own(root)
    for _ in range(2):  # read, and from the cache
        data = own(root, on_bad="skip")
        assert data.x_train.shape == (6, 1, 3, 1)  # grey and small: half a colour image decides nothing
        assert data.x_train[:, 0, 0, 0].tolist() == [0, 2, 4, 1, 3, 5]
        told = " ".join(data.notes)
        assert "gone.png links to" in told
        assert "2 of 8 images cannot be read and are left out: a/empty.png (cannot identify" in told
        assert "b/half.jpg (image file is truncated" in told
        monkeypatch.setattr("fednh.data.sources.images.decode_all", lambda *_: pytest.fail("decoded again"))


def test_a_class_that_is_lost_and_a_folder_without_a_readable_image(tmp_path: Path) -> None:
    for label in "abc":
        put(tmp_path / label / "0.png", grey([1]))
    (tmp_path / "c" / "0.png").write_bytes(b"no image")
    data = own(tmp_path, on_bad="skip")
    assert data.classes == ("a", "b")
    assert "no image of the class c could be read" in data.notes
    assert own(tmp_path, on_bad="skip", classes=["a", "b", "c"]).classes == ("a", "b", "c")
    for label in "ab":
        (tmp_path / label / "0.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"3 of 3 images cannot be read: .*; repair or remove them$"):
        own(tmp_path, on_bad="skip")


def test_the_command_line_names_what_it_leaves_out(tmp_path: Path) -> None:
    root = damaged(tmp_path / "photos")
    (root / "b" / "gone.png").unlink()
    look = ["inspect", "--data", f"folder:{root}"]
    refused = command(look, tmp_path / "io")
    assert (refused.code, refused.stderr.count("\n")) == (2, 1)
    assert "1 of 8 images cannot be read: a/empty.png" in refused.stderr
    done = command([*look, "--set", "data.on_bad=skip"], tmp_path / "io")
    assert done.code == 0, done.stderr
    assert "are left out: a/empty.png" in done.stdout
    wrong = command([*look, "--set", "data.on_bad=ignore"], tmp_path / "io")
    assert wrong.stderr == "fednh: data.on_bad = 'ignore' should be 'refuse' or 'skip'\n"


# --- shapes ----------------------------------------------------------------------------------------------------------


def test_stretch_crop_and_pad_by_hand(tmp_path: Path) -> None:
    """A band of 12x4: a third black, a third grey, a third white; it becomes 4x4."""
    band = Image.fromarray(np.repeat(np.array([[0] * 4 + [120] * 4 + [255] * 4], np.uint8), 4, axis=0))
    for label in "ab":
        put(tmp_path / label / "0.png", band)
    assert (own(tmp_path, size=[4, 4], fit="crop").x_train == 120).all()  # the middle alone
    padded = own(tmp_path, size=[12, 12], fit="pad").x_train[0, :, :, 0]
    assert not padded[:4].any()
    assert not padded[8:].any()
    assert np.array_equal(padded[4:8], np.asarray(band))  # as it was, with black above and below
    row = own(tmp_path, size=[4, 4]).x_train[0, 0, :, 0].tolist()
    # The filter for a third is a triangle six pixels wide, cut off and renewed at the ends.
    weights = [max(0, 1 - abs((k + 0.5 - 1.5) / 3)) for k in range(12)]
    first = sum(w * v for w, v in zip(weights, np.asarray(band)[0], strict=True)) / sum(weights)
    assert row[0] == round(first)
    assert own(tmp_path, size=[4, 4]).preprocessing == {"kind": "image", "size": [4, 4], "channels": 1}
    assert own(tmp_path, size=[4, 4], fit="pad").preprocessing["fit"] == "pad"
    with pytest.raises(UserError, match=r"data.fit = 'zoom' should be 'stretch', 'crop' or 'pad'"):
        load_config(None, {"data.fit": "zoom"})


# --- folders ---------------------------------------------------------------------------------------------------------

SITES = {"north": [("train", "a"), ("train", "b"), ("test", "a")], "south": [("train", "b"), ("train", "a")]}


@pytest.mark.parametrize("form", ["{site}/{part}/{label}", "{part}/{site}/{label}"])
@pytest.mark.parametrize("train", ["train", "Training"])
def test_sites_with_parts_in_either_order(tmp_path: Path, form: str, train: str) -> None:
    level = 0
    for site, images in SITES.items():
        for part, label in [*images, ("val", "a")]:
            place = form.format(site=site, part=train if part == "train" else part, label=label)
            put(tmp_path / place / "0.png", grey([level := level + 1]))
    put(tmp_path / form.format(site="east", part="test", label="b") / "0.png", grey([99]))  # it trains nothing
    data = own(tmp_path)
    assert (data.sites, data.classes) == (("north", "south"), ("a", "b"))
    found = {
        (data.sites[s], data.classes[y]): int(x[0, 0, 0])
        for x, y, s in zip(data.x_train, data.y_train, data.site_train, strict=True)
    }
    assert found == {("north", "a"): 1, ("north", "b"): 2, ("south", "b"): 5, ("south", "a"): 6}
    tests = zip(data.x_test[:, 0, 0, 0].tolist(), data.y_test.tolist(), data.site_test.tolist(), strict=True)
    assert sorted(tests) == [(3, 0, 0), (99, 1, -1)]  # of north, and of a site that nobody knows
    assert [note for note in data.notes if "val is left out" in note]


def test_a_layout_says_what_folders_mean(tmp_path: Path) -> None:
    for name in ("cat/p1", "cat/p2", "dog/p3"):
        put(tmp_path / "people" / name / "0.png", grey([1]))
    with pytest.raises(UserError, match=r"could be SITE/CLASS/image or CLASS/something/image.*data.layout"):
        own(tmp_path / "people")
    assert own(tmp_path / "people", layout="CLASS/*").classes == ("cat", "dog")
    data = own(tmp_path / "people", layout="CLASS/SITE")
    assert (data.classes, data.sites) == (("cat", "dog"), ("p1", "p2", "p3"))
    for name in ("cat/train", "cat/test", "dog/train"):
        put(tmp_path / "inside" / name / "0.png", grey([1]))
    data = own(tmp_path / "inside", layout="CLASS/PART")
    assert (data.classes, len(data.y_train), len(data.y_test)) == (("cat", "dog"), 2, 1)
    for name in ("train", "bus"):
        put(tmp_path / "traffic" / name / "0.png", grey([1]))
    with pytest.raises(UserError, match=r"holds train and also bus.*data.layout"):
        own(tmp_path / "traffic")
    assert own(tmp_path / "traffic", layout="CLASS").classes == ("bus", "train")
    with pytest.raises(UserError, match=r"lies 1 folders deep, not as SITE/CLASS/image"):
        own(tmp_path / "traffic", layout="SITE/CLASS")
    with pytest.raises(UserError, match=r"cat/p1/0.png lies below cat, where train or test should be"):
        own(tmp_path / "people", layout="PART/CLASS")
    for layout, words in {"SITE": "should name CLASS once", "class": "a path of the words CLASS, SITE, PART"}.items():
        with pytest.raises(UserError, match=words):
            load_config(None, {"data.layout": layout})


def test_a_model_remembers_the_layout(tmp_path: Path) -> None:
    for k in range(8):
        put(tmp_path / "people" / ("cat", "dog")[k % 2] / f"p{k}" / "0.png", grey([k, 9 * k, 0]))
        put(tmp_path / "new" / ("cat", "dog")[k % 2] / f"q{k}" / "0.png", grey([k, 7 * k, 1]))
        put(tmp_path / "flat" / ("cat", "dog")[k % 2] / f"{k}.png", grey([k, 7 * k, 1]))
    quick = {"method": "fedavg", "rounds": 1, "epochs": 1, "clients": 1, "partition": "iid", "model__name": "mlp"}
    quick |= {"participation": 1.0, "partition__min_samples": 1, "data__layout": "CLASS/*"}
    run = fednh.run(data=f"folder:{tmp_path / 'people'}", out=tmp_path / "run", **quick).path
    card = fednh.load_model(run).card
    for name in ("new", "flat"):  # what evaluate and personalize read
        assert load_for(card, f"folder:{tmp_path / name}").y_train.tolist() == [0] * 4 + [1] * 4
    assert real_samples(fednh.load_model(run))[1] == f"samples of folder:{tmp_path / 'people'}"
    with pytest.raises(UserError, match=r"data.layout = 'here' should be a path of the words"):
        own(tmp_path / "new", layout="here")  # as a card may have it


# --- a site of a federation ------------------------------------------------------------------------------------------


def test_a_site_says_how_its_own_files_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The federation decides how samples are made (data.fit); what may be left out, and what folders mean, does not."""
    from fednh.flower.client_app import Site
    from fednh.flower.deploy.scaffold import site_toml
    from fednh.flower.site_config import read_site_config

    root = tmp_path / "photos"
    for k in range(4):
        put(root / ("well", "ill")[k % 2] / f"p{k}" / "0.png", grey([k, 100 + k, k]))
    (root / "well" / "p0" / "bad.png").write_bytes(b"no image")
    agreed = {"data.classes": ["ill", "well"], "data.size": 1, "data.fit": "crop", "data.holdout": 0.0}
    asked = {**agreed, "data.on_bad": "skip", "data.layout": "CLASS/*", "data.name": "own", "partition.min_samples": 1}
    config = load_config(None, asked)
    node = {"data": f"folder:{root}", "site": "ward", "state": str(tmp_path / "state"), "allow.samples": 2}
    with pytest.raises(UserError, match="its data cannot be used"):
        Site(read_site_config(node), dump(config), None)
    assert "holds the class 'p0'" in caplog.text
    with pytest.raises(UserError, match="its data cannot be used"):
        Site(read_site_config({**node, "layout": "CLASS/*"}), dump(config), None)
    assert "1 of 5 images cannot be read" in caplog.text
    site = Site(read_site_config({**node, "layout": "CLASS/*", "on-bad": "skip"}), dump(config), None)
    assert site.fed.dataset.x_train[:, 0, 0, 0].tolist() == [101, 103, 100, 102]  # the middle of each
    assert "left out: well/p0/bad.png" in caplog.text
    task = site.hello()[0].task
    assert (json.loads(task.preprocessing)["fit"], "well/p0" in task.text()) == ("crop", False)
    for key, words in {"on-bad": "should be 'refuse' or 'skip'", "layout": "should be a path of the words"}.items():
        with pytest.raises(UserError, match=f"site.toml: {key} = 'ignore' {words}"):
            read_site_config({**node, key: "ignore"})
    written = tomllib.loads(site_toml({"data": "folder:x"}, config))
    assert (written["layout"], written["on-bad"]) == ("CLASS/*", "skip")
    assert "on-bad" not in tomllib.loads(site_toml({"data": "folder:x"}, load_config(None, agreed)))
