"""`fednh predict` through the real command line."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import fednh
from fednh.data.sources.builtin import digits
from tests.helpers.process import fednh as command

DATA = digits()


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Image files in folders of any depth, of several forms and sizes."""
    folder = tmp_path / "photos"
    for i, (name, size) in enumerate([("a.png", 8), ("deep/b.JPG", 40), ("deep/er/c.bmp", 17)]):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.rint(DATA.x_test[i, ..., 0] * (255 / 16)).astype(np.uint8)
        Image.fromarray(pixels).resize((size, size)).save(path)
    (folder / "notes.txt").write_text("not an image")
    return folder


def test_folders_in_every_format(photos: Path, finished: dict[str, Path], tmp_path: Path) -> None:
    model = str(finished["fednh"])
    ended = command(["predict", model, str(photos), "--format", "csv", "--top", "3"], tmp_path / "io")
    assert (ended.code, ended.stderr) == (0, "")
    rows = list(csv.DictReader(io.StringIO(ended.stdout)))
    names = [str(photos / name) for name in ("a.png", "deep/b.JPG", "deep/er/c.bmp")]
    assert [row["input"] for row in rows] == names
    wanted = fednh.load_model(model)
    assert [row["class"] for row in rows] == wanted.predict(names).tolist()
    assert float(rows[0]["probability"]) == pytest.approx(float(wanted.predict_proba(names).max(1)[0]), abs=1e-5)
    assert rows[0]["class"] != rows[0]["class2"] != rows[0]["class3"]

    ended = command(["predict", model, str(photos), "--format", "json", "--reject", "2"], tmp_path / "io")
    found = json.loads(ended.stdout)
    assert [row["input"] for row in found] == names
    assert [row["known"] for row in found] == [False] * 3, "no cosine reaches 2"
    assert len(found[0]["top"]) == 1

    ended = command(["predict", model, str(photos), "--reject", "auto", "--client", "1"], tmp_path / "io")
    assert [line.split()[0] for line in ended.stdout.splitlines()] == names
    assert "similarity 0." in ended.stdout


def test_an_unreadable_image_is_named_and_the_rest_is_done(
    photos: Path, finished: dict[str, Path], tmp_path: Path
) -> None:
    (photos / "broken.png").write_bytes((photos / "a.png").read_bytes()[:40])
    (tmp_path / "empty").mkdir()
    out = tmp_path / "out.json"
    args = ["predict", str(finished["fedavg"]), str(photos), str(tmp_path / "empty"), "--format", "json"]
    ended = command([*args, "-o", str(out)], tmp_path / "io")
    assert ended.code == 1
    assert ended.stdout == ""
    assert "broken.png is not an image" in ended.stderr
    assert "empty holds no image files" in ended.stderr
    assert len(json.loads(out.read_text())) == 3
    assert list(tmp_path.glob(".out*")) == []


def test_arrays_and_tables(finished: dict[str, Path], tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=DATA.x_test[:300])
    ended = command(["predict", str(finished["fednh"]), str(tmp_path / "x.npz"), "--format", "csv"], tmp_path / "io")
    rows = list(csv.DictReader(io.StringIO(ended.stdout)))
    assert [row["input"] for row in rows] == [f"{tmp_path}/x.npz[{i}]" for i in range(300)], "more than one batch"
    assert [row["class"] for row in rows] == fednh.load_model(finished["fednh"]).predict(DATA.x_test[:300]).tolist()

    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(3), 40)
    x = (rng.normal(size=(120, 4)) + 4 * np.eye(4)[y]).astype(np.float32)
    np.savez(tmp_path / "own.npz", x_train=x, y_train=y, x_test=x[::3], y_test=y[::3])
    fednh.run(data=f"npz:{tmp_path}/own.npz", clients=3, rounds=2, epochs=1, out=tmp_path / "run")
    wanted = fednh.load_model(tmp_path / "run").predict(x[:5]).tolist()
    for head in ("", "a,b,c,d\n"):
        text = head + "".join(",".join(map(repr, map(float, row))) + "\n" for row in x[:5])
        (tmp_path / "x.csv").write_text(text)
        ended = command(
            ["predict", str(tmp_path / "run"), str(tmp_path / "x.csv"), "--format", "json"], tmp_path / "io"
        )
        assert [row["class"] for row in json.loads(ended.stdout)] == wanted


def test_what_cannot_be_predicted(photos: Path, finished: dict[str, Path], tmp_path: Path) -> None:
    np.savez(tmp_path / "two.npz", a=DATA.x_test[:1], b=DATA.x_test[:1])
    (tmp_path / "broken.npz").write_bytes(b"PK\x03\x04 and no more")
    (tmp_path / "t.csv").write_text("1,2\n")
    fednh_, avg = str(finished["fednh"]), str(finished["fedavg"])
    for args, says in (
        ([fednh_, str(tmp_path / "none")], "none does not exist"),
        ([fednh_, str(tmp_path / "two.npz")], "the inputs should be called x"),
        ([fednh_, str(tmp_path / "broken.npz")], "cannot be read as an .npz file"),
        ([fednh_, str(tmp_path / "t.csv")], "takes images, not tables"),
        ([avg, str(photos), "--reject", "auto"], "fedavg has no cosines"),
        ([fednh_, str(photos), "--reject", "much"], "should be a cosine"),
        ([str(photos / "a.png"), str(photos)], "is not a model saved by fednh"),
        ([str(finished["local"]), str(photos)], "pick a client's by client = "),
    ):
        out = tmp_path / "out.csv"
        ended = command(["predict", *args, "-o", str(out)], tmp_path / "io")
        assert ended.code == 2, args
        assert says in ended.stderr
        assert ended.stderr.count("\n") == 1
        assert not out.exists()
