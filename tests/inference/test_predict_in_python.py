"""What a program gives to a model, in every form, has the result of the real `fednh predict` on the same in files."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import fednh
from fednh.errors import Notice, UserError
from tests.helpers.process import fednh as command

ROWS = 300  # more than one batch
QUICK: dict[str, Any] = {"method": "fednh", "rounds": 1, "epochs": 1, "clients": 2, "partition": "iid"}
QUICK |= {"participation": 1.0, "train__lr": 0.1}


def table() -> pd.DataFrame:
    """Numbers with gaps, a category with a word that training rows lack, truth values, whole numbers."""
    rng = np.random.default_rng(1)
    y = np.arange(ROWS) % 3
    found = pd.DataFrame({"age": np.round(rng.normal(40 + 9 * y, 5), 2), "dose": rng.integers(0, 50, ROWS) + 5 * y})
    found.loc[::7, "age"] = np.nan
    found["blood"] = np.array(["A", "B", "0"])[rng.integers(0, 3, ROWS)]
    found["smokes"] = rng.random(ROWS) < 0.3
    return found.assign(label=np.array(["ill", "no", "well"])[y])


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a table, one of arrays and one of images, with inputs for each in files."""
    root = tmp_path_factory.mktemp("work")
    rows, rng = table(), np.random.default_rng(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Notice)
        fednh.run(data=rows[:150], out=root / "table", **QUICK)
    rows.loc[[3, 5], "blood"] = "C"
    rows.drop(columns="label").to_parquet(root / "new.parquet")
    rows.drop(columns="label").to_csv(root / "new.csv", index=False)
    x = rng.normal(size=(ROWS, 4)).astype(np.float32)
    fednh.run(data=(x, np.arange(ROWS) % 2), out=root / "vectors", **QUICK)
    np.savez(root / "x.npz", x=x)
    pq.write_table(pa.table({name: x[:, k] for k, name in enumerate("abcd")}), root / "x.parquet")
    pictures = rng.integers(0, 256, (12, 9, 7, 3), np.uint8)
    for k, pixels in enumerate(pictures):
        (root / "album" / "ab"[k % 2]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(root / "album" / "ab"[k % 2] / f"{k:02}.png")
    images = {**QUICK, "data__size": [8, 8], "data__fit": "pad", "model__name": "mlp", "partition__min_samples": 1}
    fednh.run(data=f"folder:{root / 'album'}", out=root / "images", **images)
    return root


def told(model: Path, *inputs: Path) -> list[tuple[dict[str, float], float, str]]:
    """What the command says of each input: all probabilities by class, the similarity, the class."""
    args = ["predict", str(model), *map(str, inputs), "--format", "json", "--top", "3"]
    ended = command(args, model / "io")
    assert ended.code == 0, ended.stderr
    rows = json.loads(ended.stdout)
    return [({c["class"]: c["probability"] for c in r["top"]}, r["similarity"], r["class"]) for r in rows]


def mine(model: fednh.Model, x: Any) -> list[tuple[dict[str, float], float, str]]:
    """The same in Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Notice)
        chances, near, names = model.predict_proba(x), model.similarity(x), model.predict(x)
    return [
        ({c: round(float(p), 6) for c, p in zip(model.classes, row, strict=True)}, round(float(cos), 6), str(name))
        for row, cos, name in zip(chances, near, names, strict=True)
    ]


def test_rows_of_a_table(work: Path) -> None:
    model, frame = fednh.load_model(work / "table"), pd.read_parquet(work / "new.parquet")
    wanted = told(work / "table", work / "new.parquet")
    assert len(wanted) == ROWS
    plain = frame.astype(object).where(frame.notna(), None)
    text = pd.read_csv(work / "new.csv", dtype=str, keep_default_na=False)
    shuffled = frame[["smokes", "age", "blood", "dose"]].assign(note="x", when=3)
    forms: dict[str, Any] = {
        "parquet": work / "new.parquet",
        "csv": str(work / "new.csv"),
        "pandas": frame,
        "filtered": frame.set_index(np.arange(ROWS) + 7),
        "other order, more columns": shuffled,
        "arrow": pa.table(frame),
        "batch": pa.RecordBatch.from_pandas(frame),
        "rows": plain.to_dict("records"),
        "rows of text": text.to_dict("records"),
        "columns": {name: frame[name].to_numpy() for name in frame},
        "columns as lists": plain.to_dict("list"),
    }
    exact = model.predict_proba(work / "new.parquet")
    for name, x in forms.items():
        assert mine(model, x) == wanted, name
        assert np.array_equal(model.predict_proba(x), exact), name  # to the bit
    one = plain.iloc[0].to_dict()
    assert model.predict(one).tolist() == model.predict([one]).tolist() == model.predict(frame[:1]).tolist()
    with pytest.warns(Notice, match=r"the table: values are missing \('age' 1 of 1\)"):
        model.predict({**one, "age": None})
    with pytest.warns(Notice, match=r"1 of 1 values of 'blood' were never seen in training"):
        model.predict({**one, "age": 3, "blood": 17})
    assert model.predict([]).shape == (0,)


class Exchanged:
    """A data frame of a library that knows the interchange protocol alone."""

    def __init__(self, frame: Any):
        self.columns = list(frame.columns)
        self._frame = frame

    def __dataframe__(self, **options: Any) -> Any:
        return pa.table(self._frame).__dataframe__(**options)


def test_a_frame_of_another_library(work: Path) -> None:
    model, frame = fednh.load_model(work / "table"), pd.read_parquet(work / "new.parquet")
    assert np.array_equal(model.predict_proba(Exchanged(frame)), model.predict_proba(frame))


def test_rows_of_numbers(work: Path) -> None:
    model, x = fednh.load_model(work / "vectors"), np.load(work / "x.npz")["x"]
    wanted = told(work / "vectors", work / "x.npz")
    frame = pd.DataFrame(x, columns=list("abcd"))
    exact = model.predict_proba(x)
    assert told(work / "vectors", work / "x.parquet") == wanted
    for form in (x, x.tolist(), torch.tensor(x), torch.tensor(x, requires_grad=True), frame, pa.table(frame)):
        assert mine(model, form) == wanted
        assert np.array_equal(model.predict_proba(form), exact)
    for path in (work / "x.npz", work / "x.parquet"):
        assert np.array_equal(model.predict_proba(path), exact)
    both = model.predict_proba([work / "x.npz", str(work / "x.parquet")])
    assert np.array_equal(both, np.concatenate([exact, exact]))


def test_images(work: Path) -> None:
    model, files = fednh.load_model(work / "images"), sorted((work / "album").glob("*/*.png"))
    wanted = told(work / "images", work / "album")
    assert told(work / "images", *files) == wanted  # one by one as in a folder
    pixels = np.stack([np.asarray(Image.open(file)) for file in files])
    exact = model.predict_proba(work / "album")
    pictures = [Image.open(file) for file in files]
    many: list[Any] = [work / "album", files, [str(file) for file in files], tuple(pictures), pixels]
    many += [torch.tensor(pixels), [work / "album" / "a", *files[6:]], [*pictures[:3], *files[3:]]]
    for form in many:
        assert mine(model, form) == wanted
        assert np.array_equal(model.predict_proba(form), exact)
    assert (
        model.predict(files[0]).tolist() == model.predict(pictures[0]).tolist() == model.predict(str(files[0])).tolist()
    )


def test_what_a_model_does_not_take_is_one_sentence(work: Path, tmp_path: Path) -> None:
    images, vectors, rows = (fednh.load_model(work / name) for name in ("images", "vectors", "table"))
    (tmp_path / "bad.png").write_bytes(b"no image")
    frame, one = pd.read_parquet(work / "new.parquet"), {"age": 3, "dose": 2, "blood": "A", "smokes": True}
    what = r"this model takes images: files, folders of them, PIL images, or uint8 arrays \(N, 8, 8, 3\)"
    columns = r"takes rows with the columns age, dose, blood, smokes: a .csv or .parquet file, a data frame, or dicts"
    array = "takes rows of 4 numbers: an .npz, .csv or .parquet file, or an array"
    cases: list[tuple[fednh.Model, Any, str]] = [
        (images, frame, f"{what}; it was given a table"),
        (images, pa.table(frame), f"{what}; it was given a table"),
        (images, [one], f"{what}; it was given dicts"),
        (images, work / "new.parquet", "this model takes images, not tables: image files, folders"),
        (images, tmp_path / "bad.png", "bad.png is not an image that can be read"),
        (images, [work / "album", tmp_path / "bad.png"], "bad.png is not an image that can be read"),
        (images, tmp_path / "none", "none does not exist"),
        (images, torch.zeros(2, 3, 8, 9, dtype=torch.uint8), "channels come last"),
        (vectors, one, f"{array}; it was given dicts"),
        (vectors, work / "album", f"{array}; it was given images"),
        (vectors, Image.new("L", (8, 8)), f"{array}; it was given images"),
        (vectors, frame[["age", "dose"]], "takes rows of 4 numbers, but this table has 2 columns: age, dose"),
        (vectors, work / "new.parquet", "the column 'blood' should hold numbers"),
        (vectors, frame[["age", "dose", "smokes", "dose"]], "two columns|duplicate|Duplicate"),
        (rows, frame[["age"]], "the table lacks the column 'dose'"),
        (rows, [one, {"age": 3}], "row 1 lacks the column 'dose'; None stands for a value that is missing"),
        (rows, {**one, "age": "old"}, "the column 'age' should hold numbers"),
        (rows, {**one, "blood": object()}, "object in the column 'blood'"),
        (rows, {"age": [1, 2], "dose": [1], "blood": ["A"], "smokes": [True]}, "cannot be read as a table"),
        (rows, work / "album" / "a" / "00.png", f"{columns}; it was given images"),
        (rows, np.array([["3", "A"]]), columns),
        (rows, Image.new("L", (8, 8)), f"{columns}; it was given images"),
    ]
    for model, x, words in cases:
        with pytest.raises(UserError, match=words) as error:
            model.predict(x)
        assert "\n" not in str(error.value)
    ended = command(["predict", str(work / "vectors"), str(work / "new.parquet")], tmp_path / "io")
    assert (ended.code, ended.stderr.count("\n"), "UTF-8" in ended.stderr) == (2, 1, False)
