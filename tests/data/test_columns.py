"""What a table's columns hold is decided at training or agreed, never by the file at hand; text is read as written."""

from __future__ import annotations

import datetime as dt
import logging
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import fednh
from fednh.config import dump, load
from fednh.data.sources.csv import read
from fednh.data.sources.registry import load as load_source
from fednh.errors import Notice, UserError
from fednh.inference.eval_data import load_for
from tests.helpers.process import fednh as command

flower = pytest.importorskip("fednh.flower.client_app")
site_config = pytest.importorskip("fednh.flower.site_config")


def own(source: str, **options: Any) -> Any:
    return load_source(source, Path("unused"), options)


def written(folder: Path, text: str, name: str = "t.csv", encoding: str = "utf-8") -> str:
    (folder / name).write_bytes(text.encode(encoding))
    return f"csv:{folder / name}"


def slots(source: str, values: list[str]) -> list[int]:
    """The slot of the agreed category `code` that every row falls into; the last is for everything else."""
    data = own(source, columns={"code": values}, classes=("a", "b"))
    assert data.x_train.sum(1).tolist() == [1] * len(data.x_train)
    return [int(at) for at in data.x_train.argmax(1)]


# --- the same value in every file ------------------------------------------------------------------------------------

AGREED = {
    "codes": (["01", "02", "A1"], [0, 1, 0]),
    "whole numbers": (["1", "2"], [0, 1, 0]),
    "truth": (["true", "false"], [0, 1, 0]),
    "days": (["2020-01-01", "2020-01-02"], [0, 1, 0]),
}
FIRST, SECOND = dt.date(2020, 1, 1), dt.date(2020, 1, 2)
SAME = {
    "codes": [pa.array(["01", "02", " 01 "]), pa.array(["01", "02", "01"]).dictionary_encode()],
    "whole numbers": [
        pa.array([1, 2, 1], pa.int8()),
        pa.array([1.0, 2.0, 1.0], pa.float32()),
        pa.array(["1", "2.0", "1.00"]),
        pa.array([Decimal("1.00"), Decimal("2.00"), Decimal("1.00")]),
        pa.array(["1", "2", "1"], pa.large_string()),
    ],
    "truth": [pa.array([True, False, True]), pa.array(["True", "FALSE", "true"])],
    "days": [
        pa.array([FIRST, SECOND, FIRST]),
        pa.array([FIRST, SECOND, FIRST]).cast(pa.timestamp("ns")),
        pa.array(["2020-01-01", "2020-01-02 00:00:00", "2020-01-01T00:00"]),
    ],
}


@pytest.mark.parametrize("kind", SAME)
def test_one_agreement_reads_every_kind_of_source_alike(kind: str, tmp_path: Path) -> None:
    values, expected = AGREED[kind]
    for at, column in enumerate(SAME[kind]):
        file = tmp_path / f"{at}.parquet"
        pq.write_table(pa.table({"code": column, "label": ["a", "b", "a"]}), file)
        assert slots(f"parquet:{file}", values) == expected, column.type
        if pa.types.is_string(column.type):  # the same as CSV
            rows = [f"{value},{label}" for value, label in zip(column.to_pylist(), "aba", strict=True)]
            assert slots(written(tmp_path, "\n".join(["code,label", *rows])), values) == expected


def test_a_site_with_numeric_codes_only_keeps_their_zeros(tmp_path: Path) -> None:
    """Of codes 01, 02 and A1 this site has the first two: nothing in its file looks like text."""
    assert slots(written(tmp_path, "code,label\n01,a\n02,b\n1,a\n"), ["01", "02", "A1"]) == [0, 1, 3]


def test_spellings_that_could_be_two_values_are_not_guessed(tmp_path: Path) -> None:
    """Codes of diseases: 250.0 and 250.00 are two, and 250 is neither."""
    source = written(tmp_path, "code,label\n250.0,a\n250.00,b\n250,a\n1E5,b\n100000,a\n")
    assert slots(source, ["250.0", "250.00", "1E5"]) == [0, 1, 3, 2, 3]


def test_what_a_column_holds_is_seen_in_training_rows_only(tmp_path: Path) -> None:
    head = "a,b,c,d,e,label,split\n"
    train = "01,1.5,True,x,,p,train\n10,-2,false,y,,q,train\n"
    plain = own(written(tmp_path, head + train + "02,3,true,x,,p,test\n"))
    kinds = {c["name"]: c.get("values", c["kind"]) for c in plain.preprocessing["columns"]}
    assert kinds == {"a": ["01", "10"], "b": "number", "c": "number", "d": ["x", "y"], "e": "number"}
    assert "'a' holds codes such as '01'" in plain.notes[0]
    other = own(written(tmp_path, head + train + "7,4,0,9,,p,test\n"))
    assert other.preprocessing == plain.preprocessing
    assert np.array_equal(other.x_test, [[0, 0, 1, 4, 0, 0, 0, 1, np.nan]], equal_nan=True)
    assert other.x_train[:, 4].tolist() == [1, 0]
    with pytest.raises(UserError, match=r"'b' should hold numbers, but 1 of 3 values are none, such as 'many'"):
        own(written(tmp_path, head + train + "7,many,true,x,,p,test\n"))


def test_labels_and_sites_are_read_as_written(tmp_path: Path) -> None:
    data = own(written(tmp_path, "x,label,site\n1,01,007\n2,1,7\n3,01,7\n"))
    assert (data.classes, data.y_train.tolist()) == (("01", "1"), [0, 1, 0])
    assert (data.sites, data.site_train.tolist()) == (("007", "7"), [0, 1, 1])
    data = own(written(tmp_path, "x,label\n1,1.0\n2,0\n3,1\n"))
    assert (data.classes, data.y_train.tolist()) == (("0", "1"), [1, 0, 1])
    data = own(written(tmp_path, "x,label\n1,TRUE\n2,False\n"), classes=("false", "true"))
    assert data.y_train.tolist() == [1, 0]
    data = own(written(tmp_path, "x,label\n1,None\n2,b\n"), classes=("None", "b"))
    assert data.y_train.tolist() == [0, 1]


def test_what_is_missing_or_never_seen_is_counted_and_told(tmp_path: Path) -> None:
    source = written(tmp_path, "code,age,label\nA,1,a\n ,?,b\nNA,2,a\nZ,3,b\nY,4,a\nZ,5,b\n")
    data = own(source, columns={"code": ["A", "B"], "age": "number"})
    assert [note.partition(": ")[2] for note in data.notes] == [
        "values are missing ('code' 2 of 6, 'age' 1 of 6); numbers take the mean, categories are unknown",
        "3 of 6 values of 'code' were never seen in training or data.columns ('Z', 'Y') and count as unknown",
    ]
    kept = own(source, columns={"code": ["A", "NA"]})  # Namibia
    assert kept.x_train.argmax(1).tolist() == [0, 2, 1, 2, 2, 2]


def test_awkward_columns_are_one_sentence(tmp_path: Path) -> None:
    pq.write_table(pa.table({"when": [FIRST, SECOND], "l": [[1], [2]], "label": ["a", "b"]}), tmp_path / "t.parquet")
    source = f"parquet:{tmp_path / 't.parquet'}"
    for columns, words in (
        ({"when": "number"}, r"'when' should hold numbers, but holds date32"),
        ({"l": ["1"]}, r"'l' holds list<.*convert it to text or leave it out"),
        ({}, r"'when' holds dates, neither numbers nor text; .* leave it out with data.ignore"),
    ):
        with pytest.raises(UserError, match=words):
            own(source, columns=columns)
    for value in ("1e308", "-4e38", "1e400"):
        with pytest.raises(UserError, match=r"'x' holds an infinite value or one beyond 3.4e38"):
            own(written(tmp_path, f"x,label\n{value},a\n2,b\n"))


# --- a model on files that look different ----------------------------------------------------------------------------

CODES = {"01": "well", "02": "sick", "A1": "sick"}


@pytest.fixture(scope="module")
def clinic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on codes 01 (well), 02 and A1 (sick), and flags."""
    folder = tmp_path_factory.mktemp("clinic")
    rows = [f"{code},{flag},{label}" for flag in ("True", "False") * 10 for code, label in CODES.items()]
    source = written(folder, "\n".join(["code,flag,label", *rows]), "train.csv")
    settings = {"partition.name": "iid", "partition.clients": 2, "participation.rate": 1.0, "train.lr": 0.1}
    fednh.run({"data.name": source, "rounds": 5, **settings, "method.name": "fedavg"}, out=folder / "run")
    return folder


FILES = {
    "with A1": "code,flag\n01,True\n02,False\nA1,True\n",
    "without A1": "code,flag\n01,True\n02,False\n",
    "alone": "code,flag\n01,1\n",
}


def test_a_row_is_predicted_alike_whatever_else_its_file_holds(clinic: Path) -> None:
    model = fednh.load_model(clinic / "run")
    for name, text in FILES.items():
        file = clinic / f"{name}.csv"
        file.write_text(text)
        codes = [line.partition(",")[0] for line in text.splitlines()[1:]]
        said = command(["predict", str(clinic / "run"), str(file), "--format", "csv"], clinic / "io")
        assert said.code == 0, said.stderr
        assert [row.split(",")[1] for row in said.stdout.splitlines()[1:]] == [CODES[code] for code in codes]
        assert said.stderr == ""
        assert model.predict(str(file)).tolist() == [CODES[code] for code in codes]
    typed = pa.table({"code": pa.array(["01", "02"]).dictionary_encode(), "flag": [True, False]})
    assert model.predict(typed).tolist() == ["well", "sick"]
    assert np.array_equal(model.predict_proba(typed), model.predict_proba(clinic / "without A1.csv"))
    pandas = pytest.importorskip("pandas")
    assert model.predict(pandas.DataFrame({"code": ["02", "01"], "flag": [1, 0]})).tolist() == ["sick", "well"]


def test_predict_evaluate_and_personalize_tell_of_values_never_seen(clinic: Path) -> None:
    rows = "".join(f"{code},True,{label}\n" for code, label in [("01", "well"), ("02", "sick"), ("9", "sick")] * 6)
    source = written(clinic, "code,flag,label\n" + rows, "new.csv")
    told = "6 of 18 values of 'code' were never seen in training or data.columns ('9') and count as unknown"
    run = str(clinic / "run")
    for args in (
        ["predict", run, str(clinic / "new.csv")],
        ["evaluate", run, "--data", source, "--split", "train"],
        ["personalize", run, "--data", source, "-o", str(clinic / "personal")],
    ):
        ended = command(args, clinic / "io")
        assert (ended.code, ended.stderr.count(told)) == (0, 1), ended.stderr
    with pytest.warns(Notice, match="6 of 18 values of 'code' were never seen"):
        data = load_for(fednh.load_model(run).card, source)
    assert data.x_train[:3, :4].tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1]]


def test_a_flower_site_reads_as_agreed_and_tells_its_owner(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = "".join(f"{code},{label}\n" for code, label in [("01", "a"), ("02", "b"), ("5", "a")] * 10)
    written(tmp_path, "köde,label\n" + rows, "site.csv", "cp1252")
    agreed = {"data.classes": ["a", "b"], "data.columns.köde": ["01", "02", "A1"], "data.name": "csv:agreed.csv"}
    toml = dump(load(None, agreed))
    node = {"data": str(tmp_path / "site.csv"), "site": "s", "state": str(tmp_path / "state")}
    node |= {"encoding": "cp1252", "columns": "köde"}
    with caplog.at_level(logging.WARNING, "flwr"):
        logging.getLogger("flwr").addHandler(caplog.handler)
        site = flower.Site(site_config.read_site_config(node), toml, None)
        logging.getLogger("flwr").removeHandler(caplog.handler)
    assert site.fed.dataset.preprocessing["columns"][0]["values"] == ["01", "02", "A1"]
    assert site.fed.dataset.x_train[:3].tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1]]
    assert "10 of 30 values of 'köde' were never seen in training or data.columns ('5')" in caplog.text
    with pytest.raises(UserError, match=r"site.toml: encoding = 'klingon' is not an encoding"):
        site_config.read_site_config({**node, "encoding": "klingon"})


# --- encodings -------------------------------------------------------------------------------------------------------

TOWNS = "Größe,label,site\n1,ja,Köln\n2,nein,Köln\n3,ja,Łódź\n"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "cp1250", "utf-16", "utf-16-le"])
def test_text_in_any_encoding_that_is_said(encoding: str, tmp_path: Path) -> None:
    said = {} if encoding.startswith("utf-8") else {"encoding": encoding}
    data = own(written(tmp_path, TOWNS, encoding=encoding), **said)
    assert (data.sites, data.preprocessing["columns"]) == (("Köln", "Łódź"), [{"name": "Größe", "kind": "number"}])
    pq.write_table(pa.table({"x": [1, 2], "label": ["ä", "b"]}), tmp_path / "t.parquet")
    assert own(f"parquet:{tmp_path / 't.parquet'}", **said).classes == ("b", "ä")


@pytest.mark.parametrize(
    ("text", "encoding", "said", "words"),
    [
        (
            "x,label,site\n1,a,Köln\n",
            "cp1252",
            None,
            r"is not UTF-8 text \(line 2 holds the byte 0xf6\).*data.encoding=cp",
        ),
        ("größe,label\n1,a\n", "latin-1", None, r"is not UTF-8 text \(line 1 holds the byte 0xf6\)"),
        ("x,label\n1,a\n", "utf-16", None, r"is not UTF-8 text .*data.encoding=utf-16"),
        ("x,label\n1,a\n", "utf-16-le", None, r"is not UTF-8 text \(it holds zero bytes\).*data.encoding=utf-16"),
        ("x,label\n1,\u0141\n", "utf-8", "ascii", r"is not text in the encoding ascii \(line 2 holds the byte 0xc5\)"),
    ],
)
def test_another_encoding_is_named_as_the_problem(
    text: str, encoding: str, said: str | None, words: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=words):
        own(written(tmp_path, text, encoding=encoding), encoding=said)


def test_the_encoding_on_the_command_line(clinic: Path, tmp_path: Path) -> None:
    source = written(tmp_path, "code,flag,label,größe\n01,True,well,1\n02,False,sick,2\n", encoding="cp1252")
    run, file = str(clinic / "run"), source.partition(":")[2]
    refused = command(["predict", run, file], tmp_path / "io")
    assert (refused.code, refused.stderr.count("\n")) == (2, 1)
    assert "is not UTF-8 text (line 1 holds the byte 0xf6)" in refused.stderr
    said = ["--set", "data.encoding=cp1252"]
    assert command(["predict", run, file, *said], tmp_path / "io").stdout.count("[") == 2
    assert command(["evaluate", run, "--data", source, "--split", "train", *said], tmp_path / "io").code == 0
    assert "größe" in command(["inspect", "--data", source, *said, "--format", "json"], tmp_path / "io").stdout
    for wrong, words in {
        "data.encoding=klingon": "data.encoding = 'klingon' is not an encoding that Python knows",
        "data.label=x": "only data.encoding, data.separator and data.decimal can be set",
    }.items():
        ended = command(["predict", run, file, "--set", wrong], tmp_path / "io")
        assert (ended.code, words in ended.stderr) == (2, True), ended.stderr


def test_a_number_too_large_is_a_sentence_and_no_warning(clinic: Path, tmp_path: Path) -> None:
    source = written(tmp_path, "x,label\n1e308,a\n2,b\n")
    ended = command(["inspect", "--data", source], tmp_path / "io")
    assert (ended.code, ended.stderr.count("\n")) == (2, 1), ended.stderr
    assert "RuntimeWarning" not in ended.stderr
    with pytest.raises(UserError, match="NaN or infinite"), np.errstate(all="raise"):
        fednh.load_model(clinic / "run").predict(np.full((1, 5), 1e308))


def test_a_csv_file_read_as_text_says_so(tmp_path: Path) -> None:
    written(tmp_path, "a,b\n01,\n")
    assert read(tmp_path / "t.csv").to_pylist() == [{"a": "01", "b": ""}]
