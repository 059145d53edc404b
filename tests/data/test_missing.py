"""Missing values of tables: codes that mean missing, indicators, and counts by site; the same in training and later."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fednh.config import load as load_config
from fednh.data.dataset import Dataset
from fednh.data.scaling import category_slots
from fednh.data.sources.registry import load
from fednh.errors import Refused, UserError
from fednh.flower.deploy.scaffold import site_toml
from fednh.flower.site_config import read_policy
from tests.helpers.process import fednh

TABLE = """age,pulse,code,label,site
-9,60,A,-9,north
20,-9.0,-9,1,north
40,80,unknown,-9,south
60,?,B,1,south
"""


def table(folder: Path, text: str = TABLE, **settings: Any) -> Dataset:
    (folder / "t.csv").write_text(text, encoding="utf-8")
    data = load_config(None, {"data.name": f"csv:{folder / 't.csv'}", **{f"data.{k}": v for k, v in settings.items()}})
    return load(data.data.name, folder, data.data.model_dump())


def test_codes_mean_missing_in_features_and_not_in_the_label(tmp_path: Path) -> None:
    nan = np.nan
    data = table(tmp_path, missing=[-9, "unknown"])
    assert data.classes == ("-9", "1")
    expected = [[nan, 60, 1, 0, 0], [20, nan, 0, 0, 1], [40, 80, 0, 0, 1], [60, nan, 0, 1, 0]]
    np.testing.assert_array_equal(data.x_train, np.array(expected, np.float32))
    assert data.mean == (40, 70, 0, 0, 0)  # the codes are in no mean
    assert [column["missing"] for column in data.preprocessing["columns"]] == [["-9", "unknown"]] * 3
    by_column = table(tmp_path, missing={"age": -9, "code": "unknown,-9"})
    np.testing.assert_array_equal(by_column.x_train[:, :2], [[nan, 60], [20, -9], [40, 80], [60, nan]])
    assert table(tmp_path, missing="-9,unknown").fingerprint == data.fingerprint  # as a command line has it
    with pytest.raises(UserError, match=r"data\.missing: .* has no feature 'plse'; did you mean 'pulse'"):
        table(tmp_path, missing={"plse": [1]})
    with pytest.raises(UserError, match=r"data\.missing"):
        load_config(None, {"data.missing": [[1]]})


def test_a_code_of_numbers_in_parquet(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    rows = pa.table({"age": [1.0, -9.0, 3.0], "count": [-9, 5, 6], "label": ["a", "b", "a"]})
    parquet.write_table(rows, tmp_path / "t.parquet")
    data = load(f"parquet:{tmp_path / 't.parquet'}", tmp_path, {"missing": ["-9"]})
    np.testing.assert_array_equal(data.x_train, [[1, np.nan], [np.nan, 5], [3, 6]])


def test_indicators_stand_behind_their_numbers_and_are_not_scaled(tmp_path: Path) -> None:
    data = table(tmp_path, missing=["-9"], missing_indicator=True, ignore="code")
    nan = np.nan
    expected = [[nan, 1, 60, 0], [20, 0, nan, 1], [40, 0, 80, 0], [60, 0, nan, 1]]
    np.testing.assert_array_equal(data.x_train, np.array(expected, np.float32))
    assert category_slots(data.preprocessing) == [1, 3]
    assert (data.mean[1], data.std[1]) == (0, 1)


def test_what_a_run_learned_from_is_what_predictions_see(tmp_path: Path) -> None:
    """A row with a code gets the prediction of the same row with an empty cell; evaluate repeats the run's figures."""
    rng = np.random.default_rng(0)
    value = np.where(np.arange(60) % 5 == 0, -9, np.round(rng.normal(size=60), 3))
    rows = [f"{v:g},{rng.normal():.3f},{'ill' if k % 2 else 'well'},{'ns'[k % 3 % 2]}" for k, v in enumerate(value)]
    (tmp_path / "t.csv").write_text("\n".join(["age,pulse,label,site", *rows]), encoding="utf-8")
    (tmp_path / "codes.csv").write_text("age,pulse\n-9,1\n-9.0,2\n", encoding="utf-8")
    (tmp_path / "gaps.csv").write_text("age,pulse\n,1\nNA,2\n", encoding="utf-8")

    def answer(*words: str) -> str:
        ended = fednh(list(words), tmp_path)
        assert ended.code == 0, ended.stderr
        return ended.stdout

    run, source = str(tmp_path / "run"), f"csv:{tmp_path / 't.csv'}"
    more = ["--set", "data.missing=-9", "--set", "data.missing_indicator=true", "--rounds", "2"]
    answer("run", "--data", source, "--partition", "site", "--method", "fedavg", "--out", run, *more)
    files = [str(tmp_path / name) for name in ("codes.csv", "gaps.csv")]
    lines = answer("predict", run, *files, "--format", "csv").splitlines()
    codes, gaps = ([line.partition(",")[2] for line in lines[at : at + 2]] for at in (1, 3))
    assert codes == gaps
    (tmp_path / "new.csv").write_text((tmp_path / "t.csv").read_text(), encoding="utf-8")
    other = ["--data", f"csv:{tmp_path / 'new.csv'}", "--split", "all"]
    figures = [json.loads(answer("evaluate", run, "--format", "json", *each))["accuracy"]
               for each in (other, ["--data", source, "--split", "all"])]  # fmt: skip
    assert figures[0] == figures[1]


def test_inspect_counts_by_site_in_one_table(tmp_path: Path) -> None:
    table(tmp_path, text="\n".join([TABLE.splitlines()[0], *(TABLE.splitlines()[1:] * 6)]))
    words = ["inspect", "--data", f"csv:{tmp_path / 't.csv'}", "--set", "data.missing=-9,unknown"]
    facts = json.loads(fednh([*words, "--format", "json"], tmp_path).stdout)["missing"]
    assert [(row["column"], row["missing"], row["rows"]) for row in facts] == [
        ("age", 6, 24), ("pulse", 12, 24), ("code", 12, 24)]  # fmt: skip
    assert facts[0]["sites"] == {"north": {"missing": 6, "rows": 12}, "south": {"missing": 0, "rows": 12}}
    shown = fednh(words, tmp_path).stdout
    assert "Missing values" in shown
    assert "6 of 12" in shown


def test_a_site_reads_codes_only_as_its_own_rules_say(tmp_path: Path) -> None:
    source = f"csv:{tmp_path / 't.csv'}"
    asked = '[data]\nmissing = ["-9"]\n[method]\nname = "fedavg"\n[federation]\nmin_clients = 2\n'
    with pytest.raises(Refused, match=r"data\.missing: which values mean missing, this site's site\.toml says"):
        read_policy({}).config(asked, source)
    assert read_policy({"missing": "-9"}).config(asked, source).data.missing == ["-9"]
    with pytest.raises(Refused, match=r"data\.missing"):
        read_policy({"missing": "-9"}).config(asked.replace('missing = ["-9"]', ""), source)
    chosen = load_config(None, {"data.missing": {"age": [-9, 99]}})
    assert 'missing = "age=-9, age=99"' in site_toml({"site": "a", "data": source}, chosen)
