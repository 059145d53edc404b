"""Tables as people have them: separators, decimal commas, dates, labels that are none; later files of the same form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fednh
from fednh.config import load as load_config
from fednh.data.dataset import Dataset
from fednh.data.sources.csv import rows_of_numbers
from fednh.data.sources.registry import load
from fednh.errors import UserError
from fednh.runs.model_file import read_model
from tests.helpers.process import fednh as command


def table(folder: Path, text: str, encoding: str = "utf-8", **options: Any) -> Dataset:
    (folder / "t.csv").write_text(text, encoding=encoding)
    return load(f"csv:{folder / 't.csv'}", Path("unused"), options)


@pytest.mark.parametrize("mark", [",", ";", "\t", "|"])
def test_a_separator_is_found(mark: str, tmp_path: Path) -> None:
    """The label holds other separators within quotes; they do not count."""
    lines = [("a", "b", "label"), (1, 2.5, '"x;y,z"'), (3, 4.5, "x"), (5, 6.5, "x")]
    data = table(tmp_path, "\n".join(mark.join(map(str, line)) for line in lines))
    assert data.x_train.tolist() == [[1, 2.5], [3, 4.5], [5, 6.5]]
    assert data.classes == ("x", "x;y,z")
    assert data.reading == ({} if mark == "," else {"separator": mark})


@pytest.mark.parametrize("mark", [";", "\t"])
def test_decimal_commas_are_found(mark: str, tmp_path: Path) -> None:
    lines = ["a;b;word;label", "3,5;1.234,5;1,5 mg;x", "-0,25;2.000;2;y", "7;,5;2;x", ";1,5e2;2;y"]
    data = table(tmp_path, "\n".join(lines).replace(";", mark))
    np.testing.assert_array_equal(data.x_train[:, 0], [3.5, -0.25, 7, np.nan])
    assert data.x_train[:, 1].tolist() == [1234.5, 2000, 0.5, 150]
    assert data.preprocessing["columns"][2]["values"] == ["1,5 mg", "2"]  # text stays as it is
    assert data.reading == {"separator": mark, "decimal": ","}


def test_a_separator_and_a_decimal_mark_are_said(tmp_path: Path) -> None:
    text = 'a,label\n"3,5",x\n"4,25",y\n'
    assert table(tmp_path, text).preprocessing["columns"][0]["kind"] == "category"  # as ever
    assert table(tmp_path, text, decimal=",").x_train[:, 0].tolist() == [3.5, 4.25]
    assert table(tmp_path, "a:label\n1:x\n2:y\n", separator=":").x_train[:, 0].tolist() == [1, 2]
    unclear = "a;label\n1,234;x\n2,345;y\n"
    assert table(tmp_path, unclear, decimal=",").x_train[:, 0].tolist() == pytest.approx([1.234, 2.345])
    for words, said, options in [
        ("commas in the column 'a' could be decimal commas or thousands; say which with data.decimal", unclear, {}),
        ("the column 'b' has decimal points and 'a' decimal commas", "a;b;label\n1,5;2.5;x\n2,5;3.5;y\n", {}),
        ("'a' has decimal points, but data.decimal says commas", "a;label\n1.5;x\n2.25;y\n", {"decimal": ","}),
        ("has no column 'label'", "a;label\n1;x\n2;y\n", {"separator": ","}),
    ]:
        with pytest.raises(UserError, match=words):
            table(tmp_path, said, **options)


@pytest.mark.parametrize(
    ("key", "given", "found"),
    [("separator", "tab", "\t"), ("separator", "semicolon", ";"), ("separator", ";", ";"), ("decimal", "comma", ",")],
)
def test_marks_have_names_on_the_command_line(key: str, given: str, found: str) -> None:
    assert getattr(load_config(None, {f"data.{key}": given}).data, key) == found


def test_empty_text_is_no_column() -> None:
    assert load_config(None, {"data.site": "", "data.group": "", "data.label": ""}).data.site is None


@pytest.mark.parametrize("setting", [{"data.separator": "ab"}, {"data.separator": "x"}, {"data.decimal": ";"}])
def test_impossible_marks_are_refused(setting: dict[str, str]) -> None:
    with pytest.raises(UserError, match=r"data\.\w+ = .* should be"):
        load_config(None, setting)


def test_rows_of_numbers_have_forms_too(tmp_path: Path) -> None:
    for text in ("1;2,5\n3;4\n", "1\t2.5\n3\t4\n", "1,2.5\n3,4\n"):
        (tmp_path / "n.csv").write_text(text)
        assert np.concatenate(list(rows_of_numbers(tmp_path / "n.csv", 2))).tolist() == [[1, 2.5], [3, 4]]


def test_a_folder_of_parts_has_one_decimal_mark(tmp_path: Path) -> None:
    """The test file alone could mean both; the training file says it."""
    (tmp_path / "train.csv").write_text("a;label\n1,5;x\n2,5;y\n")
    (tmp_path / "test.csv").write_text("a;label\n1,125;x\n2,250;y\n")
    data = load(f"csv:{tmp_path}", Path("unused"))
    assert data.x_test[:, 0].tolist() == [1.125, 2.25]


def test_columns_are_ignored(tmp_path: Path) -> None:
    text = "id,a,label\n1,5,x\n2,7,y\n"
    assert [c["name"] for c in table(tmp_path, text, ignore=["id"]).preprocessing["columns"]] == ["a"]
    for name, words in {
        "ids": "data.ignore: .* has no column 'ids'; did you mean 'id'",
        "label": "data.ignore leaves out the column 'label' of .*, which another setting uses",
    }.items():
        with pytest.raises(UserError, match=words):
            table(tmp_path, text, ignore=[name])
    with pytest.raises(UserError, match=r"the column 'a' of .*, which another setting uses"):
        table(tmp_path, text, ignore=["a"], columns={"a": "number"})


def test_dates_get_advice(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"'when' holds dates, .* such as an age or days, or leave it out with data.ignore"
    ):
        table(tmp_path, "when,label\n2020-01-31,x\n2020-02-01 10:00,y\n")
    (note,) = table(tmp_path, "when,label\n31.1.2020,x\n01/02/20 10:30,y\n").notes
    assert "'when' holds dates such as '31.1.2020'" in note
    assert table(tmp_path, "when,label\n31.1.2020,x\nnever,y\n").notes == ()


def test_labels_that_differ_in_case_or_blanks_are_told_together(tmp_path: Path) -> None:
    labels = ["Ill", "ill", "not ill", "Not  Ill", "well"]
    text = "a,label\n" + "".join(f"{k % 3},{label}\n" for k, label in enumerate(labels * 2))
    (warning,) = table(tmp_path, text).warnings
    assert "classes that differ only in case or blanks: 'Ill' and 'ill', 'Not  Ill' and 'not ill'; if" in warning
    assert table(tmp_path, text, classes=labels).warnings == ()
    seen = command(["inspect", "--data", f"csv:{tmp_path / 't.csv'}", "--format", "json"], tmp_path / "io")
    assert warning in json.loads(seen.stdout)["warnings"]


def test_amounts_are_no_classes(tmp_path: Path) -> None:
    def text(labels: list[Any]) -> str:
        return "a,label\n" + "".join(f"{k % 7},{label}\n" for k, label in enumerate(labels))

    rng = np.random.default_rng(0)
    for labels, different in (
        (range(300), 300),  # whole numbers, each once
        ([k % 150 for k in range(1500)], 150),  # ten rows each
        ([round(v, 3) for v in rng.normal(size=40)], 40),  # fractions
        ([f"{k % 120}.5" for k in range(6000)], 120),
    ):
        words = f"'label' holds {different} different numbers in {len(labels)} rows, an amount .*regression"
        with pytest.raises(UserError, match=words):
            table(tmp_path, text(list(labels)))
    for labels in (
        [k % 90 for k in range(180)],  # many classes, no hundreds
        [k % 120 for k in range(2400)],  # twenty rows each
        [f"p{k}" for k in range(120)],  # names, not numbers
        [f"{k % 9 / 2}" for k in range(60)],  # grades
    ):
        assert table(tmp_path, text(labels)).num_classes == len(set(labels))
    agreed = [str(k) for k in range(300)]
    assert table(tmp_path, text(list(range(300))), classes=agreed).num_classes == 300


GERMAN = ["Größe;Befund;Klinik", *(f"{k % 7 + k % 2 * 9},{k % 10};{'krank' if k % 2 else 'gesund'};{'AB'[k // 20]}"
                                   for k in range(40))]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a table as German spreadsheets write it."""
    folder = tmp_path_factory.mktemp("german")
    (folder / "t.csv").write_text("\n".join(GERMAN), encoding="cp1252")
    settings = {"data.name": f"csv:{folder / 't.csv'}", "data.label": "Befund", "data.site": "Klinik"}
    settings |= {"data.encoding": "cp1252", "partition.name": "site", "method.name": "fedavg", "rounds": 2}
    fednh.run({**settings, "train.lr": 0.1}, out=folder / "run")
    return folder


def test_a_card_remembers_how_its_files_are_read(trained: Path) -> None:
    _, card = read_model(trained / "run" / "models" / "global.safetensors")
    known = {"label": "Befund", "site": "Klinik", "encoding": "cp1252", "separator": ";", "decimal": ","}
    assert {key: card.trained_on[key] for key in known} == known


def test_files_of_the_same_form_need_no_settings(trained: Path, tmp_path: Path) -> None:
    """Another clinic's file, for evaluate, personalize and predict; 1,125 alone would not say what its comma means."""
    head, *rows = (line.rpartition(";")[0] for line in GERMAN)
    (tmp_path / "new.csv").write_text("\n".join([head, *rows[:12]]), encoding="cp1252")
    source = f"csv:{tmp_path / 'new.csv'}"
    run = str(trained / "run")
    measured = command(["evaluate", run, "--data", source, "--split", "all", "--format", "json"], tmp_path / "a")
    assert measured.code == 0, measured.stderr
    assert json.loads(measured.stdout)["samples"] == 12
    made = command(["personalize", run, "--data", source, "--holdout", "0.5", "--format", "json"], tmp_path / "b")
    assert made.code == 0, made.stderr
    assert json.loads(made.stdout)["classes"] == {"gesund": 3, "krank": 3}
    both = command(["personalize", run, "--data", f"csv:{trained / 't.csv'}", "--site", "B", "-o", str(tmp_path / "o"),
                    "--format", "json"], tmp_path / "c")  # fmt: skip
    assert json.loads(both.stdout)["trained_on"] == 16, both.stderr
    model = fednh.load_model(run)
    texts = {"one": "Größe\n1,125\n", "english": "label,Größe\nkrank,1.125\n", "tabs": "x\tGröße\n1\t1,125\n"}
    for name, text in texts.items():
        (tmp_path / f"{name}.csv").write_text(text, encoding="utf-8" if name == "english" else "cp1252")
    expected = model.predict_proba(np.array([[1.125]]))
    for name in texts:
        np.testing.assert_array_equal(model.predict_proba(tmp_path / f"{name}.csv"), expected)
    said = command(
        ["predict", run, *(str(tmp_path / f"{name}.csv") for name in texts), "--format", "csv"], tmp_path / "d"
    )
    assert said.code == 0, said.stderr
    assert [float(line.split(",")[2]) for line in said.stdout.splitlines()[1:]] == pytest.approx(
        [float(expected.max())] * 3, abs=1e-4
    )
