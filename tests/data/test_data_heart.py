"""The four hospitals of UCI Heart Disease, from small files of the same format; and the real ones where they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fednh.cli import app
from fednh.config import load
from fednh.data.published.heart import COLUMNS, SITES, flamby_split
from fednh.data.sources import registry
from fednh.errors import UserError
from fednh.federated.setup import divide, load_data
from fednh.runs.model_file import read_model

GRADES = {"cleveland": 5, "hungary": 2, "switzerland": 5, "va": 5}


def said_by(*words: object) -> str:
    """What a command prints; it succeeds."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.output


def record(grade: int, **values: str) -> str:
    """A line of a file; Cleveland writes 1 as 1.0."""
    usual = dict.fromkeys(COLUMNS, "1") | {"age": str(40 + grade), "chol": "200", "thal": "3", "oldpeak": ".5"}
    return ",".join([*(usual | values).values(), str(grade)])


def write(folder: Path, number: int = 20, **more: list[str]) -> Path:
    """Four files with `number` records each, and `more` for a site."""
    folder.mkdir(parents=True, exist_ok=True)
    for site, (file, _) in SITES.items():
        lines = [record(k % GRADES[site], age=str(30 + k), ca="?") for k in range(number)]
        (folder / file).write_text("".join(f"{line}\n" for line in [*lines, *more.get(site, [])]))
    return folder


@pytest.mark.parametrize("place", ["heart", "heart-disease", "heart+disease", "."])
def test_four_natural_sites_in_each_place(tmp_path: Path, place: str) -> None:
    write(tmp_path / place)
    data = registry.load("heart", tmp_path)
    assert (
        data.sites
        == ("cleveland", "hungary", "switzerland", "va")
        == tuple(registry.PUBLISHED["heart"].sites.split(", "))
    )
    assert data.site_train is not None
    assert np.bincount(data.site_train).tolist() == [20] * 4
    assert data.classes == ("0", "1", "2", "3", "4")
    assert set(data.y_train[data.site_train == 1]) == {0, 1}
    assert [column["name"] for column in data.preprocessing["columns"]] == list(COLUMNS)


def test_values_missing_ones_and_spellings(tmp_path: Path) -> None:
    rows = [record(0, age="63.0", sex="1.0", cp="4.0", chol="0", trestbps="0"), record(1, thal="?", oldpeak="-0.5")]
    write(tmp_path, cleveland=rows)
    data = registry.load("heart", tmp_path)
    first, second = data.x_train[20], data.x_train[21]
    columns = data.preprocessing["columns"]
    width = [1 if column["kind"] == "number" else len(column["values"]) + 1 for column in columns]
    place = dict(zip(COLUMNS, np.cumsum([0, *width]).tolist(), strict=False))
    assert first[place["age"]] == 63
    assert first[place["sex"] : place["sex"] + 3].tolist() == [0, 1, 0]
    assert first[place["cp"] : place["cp"] + 5].tolist() == [0, 0, 0, 1, 0]
    assert np.isnan(first[[place["chol"], place["trestbps"]]]).all()  # no measurement
    assert second[place["oldpeak"]] == np.float32(-0.5)
    assert second[place["thal"] : place["thal"] + 4].tolist() == [0, 0, 0, 1]  # unknown
    raw = registry.load("heart", tmp_path, {"missing": []})
    assert raw.x_train[20][place["chol"]] == 0


def test_settings_of_tables_hold(tmp_path: Path) -> None:
    write(tmp_path)
    data = registry.load("heart", tmp_path, {"without": ["va"], "missing_indicator": True, "test_share": 0.25})
    assert data.sites == ("cleveland", "hungary", "switzerland")
    assert len(data.y_test) > 0
    assert data.shape[0] == registry.load("heart", tmp_path).shape[0] + 6  # numbers
    with pytest.raises(UserError, match="no site 'basel'; choose from cleveland"):
        registry.load("heart", tmp_path, {"sites": ["basel"]})
    few = registry.load("heart", tmp_path, {"columns": {"age": "number", "cp": ["1", "2"]}})
    assert few.shape == (4,)


def test_wrong_files_are_named(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "processed.va.data").write_text("1,2,3\n")
    with pytest.raises(UserError, match=r"processed\.va\.data has a line of 3 values instead of 14"):
        registry.load("heart", tmp_path)
    (tmp_path / "processed.va.data").unlink()
    with pytest.raises(UserError, match=r"lacks processed\.va\.data; put all four files there"):
        registry.load("heart", tmp_path)


def test_a_heading_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path)
    file = tmp_path / "processed.va.data"
    file.write_text(",".join([*COLUMNS, "target"]) + "\n" + file.read_text())
    assert len(registry.load("heart", tmp_path).y_train) == 80


def test_flamby_leaves_out_columns_and_records_and_holds_out_its_test_records(tmp_path: Path) -> None:
    gaps = [record(3, fbs="?"), record(3, slope="?")]  # slope is left out, so the second is kept
    write(tmp_path, va=gaps)
    config = load("heart_flamby", {"data.dir": str(tmp_path)})
    data = load_data(config)
    assert data.site_train is not None
    assert np.bincount(data.site_train).tolist() == [20, 20, 20, 21]
    assert [column["name"] for column in data.preprocessing["columns"]] == list(COLUMNS)[:10]
    assert data.classes == ("0", "1")
    parts, held = divide(data, config)
    assert [(len(p), len(h)) for p, h in zip(parts, held, strict=True)] == [(13, 7)] * 3 + [(13, 8)]
    other = divide(data, load("heart_flamby", {"data.dir": str(tmp_path), "seed": 5}))[1]
    assert all((a == b).all() for a, b in zip(held, other, strict=True))
    folds = divide(data, load("heart_flamby", {"data.dir": str(tmp_path), "data.folds": 5}))[1]
    assert [len(h) for h in folds] == [4, 4, 4, 5]


def test_flamby_split_is_scikit_learns() -> None:
    """Of 6 and 3 records of two classes 34% are four: stratified, so the rarer class has one or two of them."""
    split = flamby_split(list("000000111"))
    assert split.count("test") == 4
    assert 1 <= sum(s == "test" for s in split[6:]) <= 2
    assert flamby_split(list("0000001")).count("test") == 3  # a class with one record: not stratified


def test_commands_on_sites_by_name(tmp_path: Path) -> None:
    write(tmp_path / "heart", 30)
    inspected = said_by("inspect", "--data", "heart", "--data-dir", tmp_path)
    assert "Who would hold what: site" in inspected
    assert "would refuse" not in inspected
    listed = " ".join(said_by("datasets", "--data-dir", tmp_path).replace("│", " ").split())
    assert "natural sites:" in listed
    run, patient = tmp_path / "run", tmp_path / "patient.csv"
    said_by("run", "heart", "--data-dir", tmp_path, "--rounds", 1, "--out", run, "--quiet")
    _, card = read_model(run / "models" / "global.safetensors")
    assert card.trained_on["label"] == "num"
    patient.write_text(",".join(COLUMNS) + "\n54,1,4,130,?,0,1,112,1,3,2,,\n")
    assert "patient.csv[0]" in said_by("predict", run, "--site", "hungary", patient)
    patient.write_text(",".join([*COLUMNS, "num"]) + "\n54,1,4,130,?,0,1,112,1,3,2,,,0\n")
    assert "1 samples" in said_by("evaluate", run, "--data", f"csv:{patient}", "--split", "all")


def test_the_real_hospitals() -> None:
    home = Path.home() / ".cache" / "fednh"
    if registry.PUBLISHED["heart"].find(home) is None:
        pytest.skip(f"{home} has no heart")
    data = registry.load("heart", home)
    assert data.site_train is not None
    assert np.bincount(data.site_train).tolist() == [303, 294, 123, 200]
    config = load("heart_flamby", {"data.dir": str(home)})
    parts, held = divide(load_data(config), config)
    assert [(len(p), len(h)) for p, h in zip(parts, held, strict=True)] == [(199, 104), (172, 89), (30, 16), (85, 45)]
