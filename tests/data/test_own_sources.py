"""Data of one's own: every source with a true file and with a broken one."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fednh import extras
from fednh.config import load as load_config
from fednh.data.sources import registry
from fednh.data.sources.csv import read
from fednh.data.sources.images import decode
from fednh.data.sources.registry import load
from fednh.data.sources.table import encode
from fednh.errors import UserError

NOWHERE = Path("unused")


def paint(path: Path, value: int = 100, size: tuple[int, int] = (6, 5), mode: str = "L") -> None:
    """An image of one colour, `size` wide and high."""
    path.parent.mkdir(parents=True, exist_ok=True)
    colour = value if mode == "L" else (value, 10, 20)
    Image.new(mode, size, colour).save(path)


def own(source: str, **options: Any) -> Any:
    return load(source, NOWHERE, options)


# --- folders -------------------------------------------------------------------------------------------------------


def test_a_folder_of_classes(tmp_path: Path) -> None:
    for k in range(4):
        paint(tmp_path / "cat" / f"{k}.png", 50 + k)
        paint(tmp_path / "dog" / f"{k}.png", 150 + k)
    (tmp_path / "cat" / "notes.txt").write_text("x")
    data = own(f"folder:{tmp_path}")
    assert data.classes == ("cat", "dog")
    assert data.x_train.shape == (8, 5, 6, 1)  # small and all alike: as they are
    assert data.x_train[:, 0, 0, 0].tolist() == [50, 51, 52, 53, 150, 151, 152, 153]
    assert (len(data.y_test), data.sites) == (0, ())
    assert data.preprocessing == {"kind": "image", "size": [5, 6], "channels": 1}
    assert "1 files that are no images of a known kind are left out (.txt)" in data.notes[0]
    cut = own(f"folder:{tmp_path}", test_share=0.25)
    assert np.bincount(cut.y_test).tolist() == [1, 1]
    assert np.bincount(cut.y_train).tolist() == [3, 3]


def test_train_and_test_folders_and_any_size(tmp_path: Path) -> None:
    paint(tmp_path / "train" / "a" / "0.jpg", size=(90, 70), mode="RGB")
    paint(tmp_path / "train" / "b" / "1.png", size=(20, 10))
    paint(tmp_path / "test" / "a" / "2.PNG", size=(10, 10))
    paint(tmp_path / "val" / "a" / "3.png")
    data = own(f"folder:{tmp_path}")
    assert data.x_train.shape == (2, 32, 32, 3)  # one is in colour, so all are
    assert data.y_test.tolist() == [0]
    assert any("resized to 32x32; choose with data.size" in note for note in data.notes)
    assert own(f"folder:{tmp_path}", size=(8, 12)).shape == (3, 8, 12)


def test_a_folder_of_sites(tmp_path: Path) -> None:
    for site, label in (("south", "a"), ("north", "a"), ("north", "b"), ("south", "b")):
        paint(tmp_path / site / label / "0.png")
    data = own(f"folder:{tmp_path}")
    assert (data.sites, data.classes) == (("north", "south"), ("a", "b"))
    assert data.site_train.tolist() == [0, 0, 1, 1]
    assert (data.mean, data.std) == ((0.5,), (0.25,))  # nobody's images were measured


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([], "holds no image"),
        (["0.png"], "lies in no class folder"),
        (["a/0.png", "b/c/0.png"], "is a mixture"),
        (["train/a/0.png", "train/b/0.png", "dogs/c/0.png"], "holds train and also dogs"),
        (["test/a/0.png"], "test but no train"),
        (["train/val/0.png", "train/b/0.png", "test/a/b/0.png"], "is a mixture: train/b/0.png beside test/a/b/0.png"),
        (["cat/train/0.png", "dog/train/0.png"], "2 folders deep, .* such as CLASS/PART$"),
        (["n/train/a/0.png", "n/train/b/0.png", "s/a/0.png"], "is a mixture|could be|folders deep"),
        (["a/b/c/0.png"], "3 folders deep"),
        (["a/0.png"], "holds only the class 'a'"),
        (["a/p1/0.png", "b/p2/0.png"], "could be SITE/CLASS/image or CLASS/something/image"),
    ],
)
def test_folders_that_could_be_anything_are_refused(tmp_path: Path, files: list[str], words: str) -> None:
    for name in files:
        paint(tmp_path / name)
    with pytest.raises(UserError, match=words):
        own(f"folder:{tmp_path}")


def test_a_site_that_lacks_classes_names_them(tmp_path: Path) -> None:
    paint(tmp_path / "b" / "0.png")
    data = own(f"folder:{tmp_path}", classes=("c", "b", "a"))
    assert (data.classes, data.y_train.tolist()) == (("c", "b", "a"), [1])
    with pytest.raises(UserError, match=r"holds the class 'b', which is not one of data.classes"):
        own(f"folder:{tmp_path}", classes=("c", "a"))


def test_broken_images_are_named(tmp_path: Path) -> None:
    paint(tmp_path / "a" / "good.png")
    (tmp_path / "a" / "empty.png").write_bytes(b"")
    whole = io.BytesIO()
    Image.effect_noise((60, 60), 50).save(whole, "JPEG")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "half.jpg").write_bytes(whole.getvalue()[: len(whole.getvalue()) // 2])
    with pytest.raises(UserError, match=r"1 of 3 images cannot be read: a/empty.png"):
        own(f"folder:{tmp_path}")
    (tmp_path / "a" / "empty.png").unlink()
    with pytest.raises(UserError, match=r"1 of 2 images cannot be read: b/half.jpg"):
        own(f"folder:{tmp_path}")


def test_the_cache_answers_until_something_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDNH_CACHE", str(tmp_path / "cache"))
    photos = tmp_path / "photos"
    for label in "ab":
        paint(photos / label / "0.png", 7)
    first = own(f"folder:{photos}")
    with monkeypatch.context() as patch:
        patch.setattr("fednh.data.sources.images.decode_all", lambda *_: pytest.fail("decoded again"))
        assert np.array_equal(own(f"folder:{photos}").x_train, first.x_train)
    paint(photos / "b" / "0.png", 9)
    assert own(f"folder:{photos}").x_train[1, 0, 0, 0] == 9
    assert len(list((tmp_path / "cache" / "images").iterdir())) == 1  # the old one is gone
    next((tmp_path / "cache" / "images").iterdir()).write_bytes(b"damaged")
    assert own(f"folder:{photos}").x_train[1, 0, 0, 0] == 9


def test_a_photo_lying_on_its_side_is_turned_upright(tmp_path: Path) -> None:
    picture = Image.fromarray(np.array([[0, 0, 0, 255]] * 2, np.uint8))  # white at the right
    exif = picture.getexif()
    exif[0x0112] = 6  # turn it by 90 degrees clockwise to see it upright
    picture.save(tmp_path / "p.png", exif=exif)
    assert decode(tmp_path / "p.png", (4, 2), 1)[:, :, 0].tolist() == [[0, 0], [0, 0], [0, 0], [255, 255]]


def test_sixteen_bits_become_eight(tmp_path: Path) -> None:
    Image.fromarray(np.full((2, 2), 0x8001, np.uint16)).save(tmp_path / "p.png")
    assert decode(tmp_path / "p.png", (2, 2), 1).max() == 0x80


# --- tables --------------------------------------------------------------------------------------------------------

TABLE = """age,blood,label,site,split
20,A,well,north,train
40,B,ill,north,train
,A,well,south,train
60,,ill,south,train
80,0,ill,south,test
"""


def table(tmp_path: Path, text: str = TABLE, name: str = "t.csv") -> str:
    (tmp_path / name).write_text(text)
    return f"csv:{tmp_path / name}"


def test_a_table(tmp_path: Path) -> None:
    data = own(table(tmp_path))
    assert (data.classes, data.sites) == (("ill", "well"), ("north", "south"))
    assert (data.y_train.tolist(), data.y_test.tolist()) == ([1, 0, 1, 0], [0])
    assert (data.site_train.tolist(), data.site_test.tolist()) == ([0, 0, 1, 1], [1])
    columns = data.preprocessing["columns"]
    assert columns == [{"name": "age", "kind": "number"}, {"name": "blood", "kind": "category", "values": ["A", "B"]}]
    nan = np.nan  # age, then A, B, and everything else
    expected = [[20, 1, 0, 0], [40, 0, 1, 0], [nan, 1, 0, 0], [60, 0, 0, 1]]
    assert np.array_equal(data.x_train, np.array(expected, np.float32), equal_nan=True)
    assert data.x_test.tolist() == [[80, 0, 0, 1]]  # blood group 0 is in no training row
    assert data.mean == (40.0, 0.0, 0.0, 0.0)
    assert data.std == pytest.approx((np.sqrt(800 / 3), 1, 1, 1))
    assert [note.partition(": ")[2].partition(";")[0] for note in data.notes] == [
        "values are missing ('age' 1 of 5, 'blood' 1 of 5)",
        "1 of 5 values of 'blood' were never seen in training or data.columns ('0') and count as unknown",
    ]
    again = encode(read(tmp_path / "t.csv"), data.preprocessing, "")[0]  # what a model card is enough for
    assert np.array_equal(again[:4], data.x_train, equal_nan=True)


def test_parquet_and_folders_of_two_files_are_the_same(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    data = own(table(tmp_path))
    pq.write_table(read(tmp_path / "t.csv"), tmp_path / "t.parquet")
    both = tmp_path / "both"
    both.mkdir()
    head, *rows = [line.rsplit(",", 1)[0] for line in TABLE.splitlines()]
    (both / "train.csv").write_text("\n".join([head, *rows[:4]]))
    (both / "test.csv").write_text("\n".join([head, rows[4]]))
    for source in (f"parquet:{tmp_path / 't.parquet'}", f"csv:{both}"):
        other = own(source)
        assert np.array_equal(other.x_train, data.x_train, equal_nan=True)
        assert (other.y_test.tolist(), other.classes, other.sites) == ([0], data.classes, data.sites)


def test_agreed_columns_and_classes_give_every_site_the_same_form(tmp_path: Path) -> None:
    source = table(tmp_path, "id,age,blood,diagnosis\nx1,5,B,ill\n")
    agreed = {"columns": {"age": "number", "blood": ["A", "B"]}, "classes": ("well", "ill"), "label": "diagnosis"}
    data = own(source, **agreed)
    assert (data.x_train.tolist(), data.y_train.tolist()) == ([[5, 0, 1, 0]], [1])


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("a,b\n1,2\n", {}, "no column 'label'; choose from a, b; say which one it is with data.label"),
        ("a,label\n1,x\n2,x\n", {}, "holds only the class 'x'"),
        ("a,label\n1,x\n2,\n", {}, "1 of 2 rows have nothing in the column 'label'"),
        ("a,label\n1,x\n\n2,y,z\n", {}, "line 4 has 3 values where the heading has 2"),
        ('a,label\n1,"x\n"\n2\n', {}, "line 4 has 1 values where the heading has 2"),
        ("a,a,label\n1,1,x\n", {}, "two columns named 'a'"),
        ("label\nx\ny\n", {}, "holds no feature"),
        ("a,label\ninf,x\n2,y\n", {}, "holds an infinite value"),
        ("a,label\n1,x\n2,y\n", {"site": "ward"}, "no column 'ward'"),
        ("a,label\n1,x\n2,y\n", {"columns": {"b": "number"}}, "lacks the column 'b' of data.columns"),
        ("a,label\np,x\nq,y\n", {"columns": {"a": "number"}}, "'a' should hold numbers"),
        ("when,label\n2020-01-01,x\n2020-01-02,y\n", {}, "holds dates, neither numbers nor text"),
        ("who,label\n" + "".join(f"n{k},{k % 2}\n" for k in range(150)), {}, "names rows rather than describing"),
        ("a,label\n", {}, "holds no row"),
        ("", {}, "cannot be read as a table"),
    ],
)
def test_broken_tables_are_refused(tmp_path: Path, text: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        own(table(tmp_path, text), **options)


def test_broken_parquet_and_missing_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t.parquet").write_bytes(b"PAR1 and then nonsense")
    with pytest.raises(UserError, match="cannot be read as a table"):
        own(f"parquet:{tmp_path / 't.parquet'}")
    for source in ("csv", "parquet", "folder", "npz"):
        with pytest.raises(UserError, match=r"does not exist|not there"):
            own(f"{source}:{tmp_path / 'nothing'}")
        with pytest.raises(UserError, match="lacks what comes behind it"):
            own(f"{source}:")


@pytest.mark.parametrize(("source", "extra"), [("csv", "tables"), ("parquet", "tables"), ("hf", "hf")])
def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, extra: str) -> None:
    table(tmp_path)
    monkeypatch.setitem(extras.MODULES, extra, ("a_module_that_nobody_has",))
    with pytest.raises(UserError, match=rf"pip install 'fednh\[{extra}\]'"):
        own(f"{source}:{tmp_path / 't.csv'}")


# --- Hugging Face, Python, npz ---------------------------------------------------------------------------------------


def test_hugging_face_images_and_rows_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    import datasets as hf

    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("the network was asked"))
    kinds = hf.Features({"image": hf.Image(), "label": hf.ClassLabel(names=["dog", "cat"]), "site": hf.Value("string")})
    rows = {"image": [Image.new("L", (4, 4), v) for v in (1, 2, 3)], "label": [0, 1, 1], "site": ["n", "s", "n"]}
    train = hf.Dataset.from_dict(rows, features=kinds)
    hf.DatasetDict({"train": train, "test": train.select([0])}).save_to_disk(str(tmp_path / "saved"))
    data = own(f"hf:{tmp_path / 'saved'}")
    assert (data.classes, data.sites) == (("dog", "cat"), ("n", "s"))
    assert (data.x_train[:, 0, 0, 0].tolist(), data.y_train.tolist()) == ([1, 2, 3], [0, 1, 1])
    assert data.site_train.tolist() == [0, 1, 0]
    assert len(data.y_test) == 1
    damaged = {**rows, "image": [{"bytes": b"no image", "path": None}, *rows["image"][1:]]}
    hf.Dataset.from_dict(damaged, features=kinds).save_to_disk(str(tmp_path / "damaged"))
    with pytest.raises(UserError, match=r"1 of 3 images cannot be read: image 0 .*data.on_bad=skip"):
        own(f"hf:{tmp_path / 'damaged'}")
    left = own(f"hf:{tmp_path / 'damaged'}", on_bad="skip", size=[2, 4], fit="pad")
    assert left.x_train[:, 0, :, 0].tolist() == [[0, 2, 2, 0], [0, 3, 3, 0]]
    assert (left.y_train.tolist(), left.site_train.tolist(), left.preprocessing["fit"]) == ([1, 1], [1, 0], "pad")
    (tmp_path / "parquet").mkdir()
    flat = hf.Dataset.from_dict({"a": [1.0, 2.0, None], "label": ["x", "y", "x"]})
    flat.to_parquet(str(tmp_path / "parquet" / "train-0.parquet"))
    table = own(f"hf:{tmp_path / 'parquet'}")
    assert np.array_equal(table.x_train[:, 0], np.array([1, 2, np.nan], np.float32), equal_nan=True)
    with pytest.raises(UserError, match="no column 'diagnosis'"):
        own(f"hf:{tmp_path / 'parquet'}", label="diagnosis")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "state.json").write_text("{")
    with pytest.raises(UserError, match="cannot be loaded"):
        own(f"hf:{tmp_path / 'broken'}")
    with pytest.raises(UserError, match="does not exist"):
        own(f"hf:{tmp_path / 'nothing'}")


MODULE = """
import numpy as np
x, y = np.eye(4, dtype="f4"), np.array([0, 1, 0, 1])
pair = lambda: (x, y)
named = lambda: {"x_train": x, "y_train": y, "site_train": np.array(["s", "n", "s", "n"])}
def wrong(): return 3
def fails(): raise RuntimeError("no connection")
"""


def test_a_python_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_data.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    assert own("py:my_own_data:pair").x_train.tolist() == np.eye(4).tolist()
    data = own("py:my_own_data:named")
    assert (data.sites, data.site_train.tolist()) == (("n", "s"), [1, 0, 1, 0])
    for name, words in {
        "wrong": "is of the type int; give",
        "fails": "RuntimeError: no connection",
        "nothing": "has no attribute 'nothing'",
    }.items():
        with pytest.raises(UserError, match=words):
            own(f"py:my_own_data:{name}")
    with pytest.raises(UserError, match=r"should be py:package.module:function"):
        own("py:my_own_data")
    with pytest.raises(UserError, match="No module named"):
        own("py:no_such_module:f")


def test_an_npz_with_sites_and_without_a_test_set(tmp_path: Path) -> None:
    arrays = {"x_train": np.zeros((4, 2)), "y_train": [0, 1, 0, 1]}
    np.savez(tmp_path / "a.npz", **arrays, site_train=[1, 1, 0, 0], sites=["west", "east"])
    data = own(f"npz:{tmp_path / 'a.npz'}")
    assert (data.sites, data.site_train.tolist(), len(data.y_test)) == (("east", "west"), [0, 0, 1, 1], 0)
    np.savez(tmp_path / "b.npz", **arrays, site_train=[1, 1])
    with pytest.raises(UserError, match="site_train has 2 entries for 4"):
        own(f"npz:{tmp_path / 'b.npz'}")
    np.savez(tmp_path / "c.npz", **arrays, x_test=np.zeros((4, 2)))
    with pytest.raises(UserError, match="lacks y_test"):
        own(f"npz:{tmp_path / 'c.npz'}")
    np.savez(tmp_path / "d.npz", x_train=np.zeros((2, 2)), y_train=[1, 1])
    assert own(f"npz:{tmp_path / 'd.npz'}", classes=("a", "b", "c")).num_classes == 3
    with pytest.raises(UserError, match="only class 1"):
        own(f"npz:{tmp_path / 'd.npz'}")


def test_settings_reach_the_reader_and_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    flat = {"data.name": "csv:t.csv", "data.classes": "a, b", "data.size": "24x32", "data.columns.x": "u,v"}
    data = load_config(None, flat).data
    assert data.name == f"csv:{tmp_path / 't.csv'}"
    assert (data.classes, data.size, data.columns) == (["a", "b"], [24, 32], {"x": ["u", "v"]})
    assert load_config(None, {"data.size": 28}).data.size == [28, 28]
    with pytest.raises(UserError, match=r"data.size = 0 should be a number of pixels"):
        load_config(None, {"data.size": 0})
    assert set(registry.SOURCES) == {"npz", "folder", "csv", "parquet", "hf", "py", "memory"}
