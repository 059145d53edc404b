"""What a site would have to tell about its data, against what is agreed: counted by hand, and never quoted."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fednh.config import load
from fednh.data.dataset import Dataset
from fednh.data.disclosure import not_agreed
from fednh.errors import Notice
from fednh.federated.setup import build_federation, load_data
from tests.helpers.process import fednh

Row = Callable[[int], object]  # what a row has, by its number
NAMES = ["Anna Ode", "Bert Ulm", "Cora Ims", "Dora Eck"]


def table(folder: Path, rows: int = 40, label: Row = lambda k: k % 2, name: Row = lambda k: NAMES[k % 4]) -> str:
    """Two sites, a number, a name, and a blood group."""
    made = [f"{k},{name(k)},{'AB'[k % 2]},{'ab'[k % 2]},{label(k)}" for k in range(rows)]
    (folder / "t.csv").write_text("\n".join(["age,patient,blood,site,label", *made, ""]))
    return f"csv:{folder}/t.csv"


def problem(source: str, **more: object) -> str | None:
    config = load(None, {"data.name": source, "partition.name": "site", **more})
    return not_agreed(load_data(config), config.data.classes, config.data.columns)


def test_text_columns_and_class_names(tmp_path: Path) -> None:
    source = table(tmp_path)
    told = problem(source)
    assert told is not None
    assert told.startswith("the values of its text columns are not agreed")  # patient and blood; numbers are no text
    assert "data.columns" in told
    assert "classes" not in told  # 0 and 1 are no names
    agreed = {"age": "number", "blood": ["A", "B"]}
    assert problem(source, **{"data.columns": agreed}) is None
    assert problem(source, **{"data.columns": {**agreed, "patient": NAMES[:2]}}) is None  # what they agreed on
    source = table(tmp_path, label=lambda k: ["ill", "well"][k % 2])
    told = problem(source, **{"data.columns": agreed})
    assert (
        told == "the names of its classes are not agreed: list all classes in data.classes of the federation's config"
    )
    assert problem(source, **{"data.columns": agreed, "data.classes": ["well", "ill"]}) is None
    both = problem(source)
    assert both is not None
    assert "data.classes" in both
    assert "data.columns" in both
    assert not any(word in both for word in (*NAMES, "ill", "well", "patient", "blood"))


def test_a_column_that_names_rows_stays_even_if_it_is_listed(tmp_path: Path) -> None:
    """150 names in 200 rows; 101 is the first number that is many, if it is more than half."""
    people = [f"patient {k}" for k in range(150)]
    source = table(tmp_path, 200, name=lambda k: f"patient {k % 150}")
    told = problem(source, **{"data.columns": {"patient": people}})
    assert told == "a text column names rows rather than describing them: leave it out of data.columns"
    source = table(tmp_path, 400, name=lambda k: f"patient {k % 150}")
    assert problem(source, **{"data.columns": {"patient": people}}) is None


def test_a_label_that_names_rows(tmp_path: Path) -> None:
    source = table(tmp_path, 202, label=lambda k: f"person {k % 101}")
    classes = {"data.classes": [f"person {k}" for k in range(101)], "data.columns": {"age": "number"}}
    assert problem(source, **classes) is None  # two rows each: exactly half
    source = table(tmp_path, 201, label=lambda k: f"person {k % 101}")
    assert str(problem(source, **classes)).startswith("the label names rows")


def test_a_table_without_names_of_columns(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("".join(f"{k / 7:.3f},{k % 2},{'ab'[k % 2]}\n" for k in range(40)))
    told = problem(f"csv:{tmp_path}/t.csv", **{"data.label": "0", "data.site": "a"})
    assert told is not None
    assert "a name of its columns is a number" in told
    assert "0.000" not in told


def test_images_in_folders_have_class_names_too(tmp_path: Path) -> None:
    from PIL import Image

    for k in range(24):
        path = tmp_path / "photos" / "ab"[k % 2] / NAMES[k % 3] / f"{k}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8), k, np.uint8)).save(path)
    source = f"folder:{tmp_path}/photos"
    assert str(problem(source)).startswith("the names of its classes are not agreed")
    assert problem(source, **{"data.classes": NAMES}) is None


def test_arrays_with_and_without_names() -> None:
    x, y = np.zeros((6, 2), np.float32), np.arange(6) % 3
    plain = Dataset("x", x, y, x[:0], y[:0], ("0", "1", "2"), (0.0,) * 2, (1.0,) * 2, 1.0)
    assert not_agreed(plain, None, None) is None
    named = Dataset("x", x, y, x[:0], y[:0], ("a", "b", "c"), (0.0,) * 2, (1.0,) * 2, 1.0)
    assert not_agreed(named, None, None) is not None
    assert not_agreed(named, ("a", "b", "c"), None) is None
    assert not_agreed(named, ("a", "b", "d"), None) is not None


def test_inspect_says_what_sites_would_refuse_and_a_simulation_does_not(tmp_path: Path) -> None:
    source = table(tmp_path)

    def warned(*settings: str) -> list[str]:
        ended = fednh(["inspect", "--data", source, "--format", "json", *settings], tmp_path / "io")
        assert ended.code == 0, ended.stderr
        words = [each for each in json.loads(ended.stdout)["warnings"] if "would refuse to take part" in each]
        assert not any(name in each for name in NAMES for each in words)
        return words

    assert len(warned()) == 1
    assert not warned("--set", 'data.columns={age="number"}')
    with warnings.catch_warnings():
        warnings.simplefilter("error", Notice)
        build_federation(load(None, {"model.name": "mlp", "data.name": source, "partition.name": "site"}))
