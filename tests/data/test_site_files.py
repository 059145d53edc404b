"""Several files as sites: a folder or a pattern, each file in a dialect of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fednh.data.dataset import Dataset
from fednh.data.sources.registry import load
from fednh.errors import UserError
from tests.helpers.process import fednh

# Exports of the same columns: comma and UTF-8; semicolon, decimal comma, cp1252 and columns in another order; tab.
NORTH = "age,blood,label\n1.5,A,ill\n2.5,B,well\n3.5,A,ill\n"
SOUTH = "label;blood;age\nill;Ä;10,5\nwell;B;20,5\n"
WEST = "age\tblood\tlabel\n?\tB\twell\n7\t0\till\n"


@pytest.fixture
def hospitals(tmp_path: Path) -> Path:
    folder = tmp_path / "hospitals"
    folder.mkdir()
    (folder / "north.csv").write_text(NORTH, encoding="utf-8")
    (folder / "south.csv").write_bytes(SOUTH.encode("cp1252"))
    (folder / "west.tsv").write_text(WEST, encoding="utf-8")
    (folder / "README.txt").write_text("no table", encoding="utf-8")
    (folder / ".hidden.csv").write_text("no table", encoding="utf-8")
    return folder


def read(address: Path, **settings: Any) -> Dataset:
    return load(f"csv:{address}", Path("unused"), settings)


def test_each_file_is_a_site_in_its_own_dialect(hospitals: Path) -> None:
    """data.encoding holds for the file that is no UTF-8, and for no other."""
    (hospitals / "north.csv").write_text(NORTH.replace("B", "Ö"), encoding="utf-8")
    data = read(hospitals, encoding="cp1252")
    assert data.sites == ("north", "south", "west")
    assert data.site_train is not None
    assert data.site_train.tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert data.classes == ("ill", "well")
    assert data.y_train.tolist() == [0, 1, 0, 0, 1, 1, 0]
    np.testing.assert_array_equal(data.x_train[:, 0], [1.5, 2.5, 3.5, 10.5, 20.5, np.nan, 7])
    blood = data.preprocessing["columns"][1]
    assert blood == {"name": "blood", "kind": "category", "values": ["0", "A", "B", "Ä", "Ö"]}  # of all sites
    assert data.x_train[:, 1:].argmax(1).tolist() == [1, 4, 1, 3, 2, 2, 0]
    assert data.reading == {}  # no dialect is that of all


def test_a_pattern_chooses_files_of_any_suffix(hospitals: Path) -> None:
    (hospitals / "east.export").write_text(NORTH, encoding="utf-8")
    assert read(hospitals / "[ew]*.*").sites == ("east", "west")
    assert read(hospitals / "*.csv", encoding="cp1252", without=["south"]).sites == ("north",)
    with pytest.raises(UserError, match=r"no file is called .*xlsx; check the pattern"):
        read(hospitals / "*.xlsx")


def test_the_same_dialect_is_recorded_for_later_files(hospitals: Path) -> None:
    for name in ("north.csv", "south.csv", "west.tsv"):
        (hospitals / name).write_text("age;label\n1,5;ill\n2,5;well\n", encoding="utf-8")
    assert read(hospitals).reading == {"separator": ";", "decimal": ","}


def test_files_with_other_columns_are_named(hospitals: Path) -> None:
    (hospitals / "south.csv").write_text("age,label\n1,ill\n2,well\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"south\.csv lacks the column 'blood', which north\.csv has"):
        read(hospitals)
    assert read(hospitals, ignore=["blood"]).x_train.shape == (7, 1)
    (hospitals / "south.csv").write_text("age,ward,blood,label\n1,3,A,ill\n2,4,B,well\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"south\.csv has the column 'ward', which north\.csv lacks; .*data\.ignore"):
        read(hospitals)
    assert read(hospitals, ignore=["ward"]).sites == ("north", "south", "west")
    assert read(hospitals, columns={"age": "number"}).x_train.shape == (7, 1)  # others do not matter


def test_a_site_column_beside_files_is_decided_by_the_user(hospitals: Path) -> None:
    for name in ("north.csv", "south.csv", "west.tsv"):
        (hospitals / name).write_text("age,site,label\n1,lung,ill\n2,skin,well\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"its files are the sites, but they have a column 'site' as well"):
        read(hospitals)
    assert read(hospitals, ignore=["site"]).sites == ("north", "south", "west")
    assert read(hospitals, site="site").sites == ("lung", "skin")


def test_a_column_of_words_at_one_site_alone_is_told(hospitals: Path) -> None:
    (hospitals / "west.tsv").write_text("age\tblood\tlabel\nold\tB\twell\n7\t0\till\n", encoding="utf-8")
    told = [words for words in read(hospitals, encoding="cp1252").warnings if "'age'" in words]
    assert len(told) == 1
    assert "'age' has words at west and numbers at north, south, so it is a category" in told[0]
    mended = read(hospitals, encoding="cp1252", missing=["old"])
    assert not mended.warnings
    assert mended.preprocessing["columns"][0]["kind"] == "number"


def test_two_files_of_one_name_are_refused(hospitals: Path) -> None:
    (hospitals / "north.data").write_text(NORTH, encoding="utf-8")
    with pytest.raises(UserError, match="two files are called 'north'; rename one"):
        read(hospitals, encoding="cp1252")


def test_csv_and_parquet_files_are_sites_together(hospitals: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    (hospitals / "south.csv").unlink()
    rows = pa.table({"label": ["ill", "well"], "age": [4, 5], "blood": ["A", "B"]})
    parquet.write_table(rows, hospitals / "south.parquet")
    data = read(hospitals)
    np.testing.assert_array_equal(data.x_train[:, 0], [1.5, 2.5, 3.5, 4, 5, np.nan, 7])
    assert data.preprocessing["columns"][0]["kind"] == "number"


def test_commands_take_several_files(tmp_path: Path) -> None:
    """A run, its evaluation on the held-out rows, predictions for a folder, a file with its own dialect."""
    folder, rng = tmp_path / "sites", np.random.default_rng(0)
    folder.mkdir()
    for at, name in enumerate(("alpha", "beta", "gamma")):
        mark, point = (";", ",") if at == 1 else (",", ".")
        rows = [mark.join([f"{v:.4f}".replace(".", point), "ill" if v > 0 else "well"]) for v in rng.normal(size=24)]
        (folder / f"{name}.csv").write_text("\n".join([f"value{mark}label", *rows]), encoding="utf-8")

    def answer(*words: str) -> str:
        ended = fednh(list(words), tmp_path)
        assert ended.code == 0, ended.stderr
        return ended.stdout

    out, all_files = str(tmp_path / "run"), f"csv:{folder}/*.csv"
    answer("run", "--data", all_files, "--partition", "site", "--method", "fedavg", "--rounds", "2", "--out", out)
    shown = json.loads(answer("inspect", "--data", f"csv:{folder}", "--format", "json"))
    assert shown["sites"] == ["alpha", "beta", "gamma"]
    measured = json.loads(answer("evaluate", out, "--format", "json"))
    assert measured["samples"] == sum(shown["clients"]["held_out"])
    lines = answer("predict", out, str(folder), str(folder / "beta.csv"), "--format", "csv").splitlines()
    assert len(lines) == 1 + 72 + 24
    assert f"{folder}/beta.csv[0]" in lines[25]
    assert lines[73:] == lines[25:49]


def test_a_column_that_is_lacking_is_looked_for_among_the_columns_of_the_files(hospitals: Path) -> None:
    with pytest.raises(UserError, match=r"no column 'quux'; choose from age, blood, label; say which one it is"):
        read(hospitals, encoding="cp1252", label="quux")
