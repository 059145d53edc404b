"""data.sites and data.without: one site is held out of a run without copying files, whatever the kind of source."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fednh.config import load as load_config
from fednh.data.dataset import Dataset
from fednh.data.sources.registry import SOURCES, load, taken
from fednh.errors import UserError
from fednh.inference.eval_data import select_eval_samples
from fednh.runs.model_file import read_model
from tests.helpers.process import fednh

SITES = ("north", "south", "west")
# Value, label and site of 18 samples; the site "west" has values of its own and alone has the class "c".
ROWS = [(10 * k + at, "abc"[(k + at) % (3 if site == "west" else 2)], site)
        for at, site in enumerate(SITES) for k in range(6)]  # fmt: skip


def written(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """ROWS as a source of a kind; what a program gives is a table."""
    folder.mkdir(exist_ok=True)
    values, labels, sites = zip(*ROWS, strict=True)
    if kind == "folder":
        for value, label, site in ROWS:
            file = folder / site / label / f"{value}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (4, 4), value).save(file)
        return f"folder:{folder}"
    if kind in ("npz", "py"):
        arrays = {"x_train": np.array(values, float)[:, None], "y_train": ["abc".index(c) for c in labels]}
        arrays |= {"site_train": np.array(sites), "classes": np.array(["a", "b", "c"])}
        np.savez(folder / "a.npz", **arrays)
        if kind == "npz":
            return f"npz:{folder / 'a.npz'}"
        (folder / "chosen_sites.py").write_text(
            f"import numpy as np\ndef load():\n    return dict(np.load({str(folder / 'a.npz')!r}))\n"
        )
        monkeypatch.syspath_prepend(folder)
        sys.modules.pop("chosen_sites", None)
        return "py:chosen_sites:load"
    lines = ["value,word,label,site", *(f"{v},{s[0]},{y},{s}" for v, y, s in ROWS)]
    (folder / "t.csv").write_text("\n".join(lines))
    if kind == "csv":
        return f"csv:{folder / 't.csv'}"
    import pyarrow as pa
    from pyarrow import parquet

    table = pa.table({"value": values, "word": [s[0] for s in sites], "label": labels, "site": sites})
    if kind == "memory":
        return table
    parquet.write_table(table, folder / "t.parquet")
    return f"{kind}:{folder / 't.parquet'}"


@pytest.fixture
def source(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    return written(request.param, tmp_path / "data", monkeypatch)


def own(source: Any, **options: Any) -> Dataset:
    return load(source, Path("unused"), options) if isinstance(source, str) else taken(source, options)


@pytest.mark.parametrize("source", SOURCES, indirect=True)
def test_every_kind_reads_the_chosen_sites_alone(source: Any) -> None:
    whole, two = own(source), own(source, without=["west"])
    assert (whole.sites, two.sites) == (SITES, ("north", "south"))
    assert two.site_train is not None
    assert np.bincount(two.site_train).tolist() == [6, 6]
    kept = [row for row in ROWS if row[2] != "west"]
    if two.is_image:
        assert sorted(two.x_train[:, 0, 0, 0].tolist()) == sorted(v for v, _, _ in kept)
    else:
        assert two.x_train[:, 0].tolist() == [v for v, _, _ in kept]
        assert two.mean[0] == pytest.approx(sum(v for v, _, _ in kept) / 12)  # the other site was not measured
    if two.preprocessing["kind"] == "table":
        assert two.preprocessing["columns"][1]["values"] == ["n", "s"]  # nor are its words known
    numbered = str(source).startswith(("npz:", "py:"))  # their labels are numbers, so classes are not found but counted
    assert two.classes == (("a", "b", "c") if numbered else ("a", "b"))
    one = own(source, sites=["west"])
    assert (one.sites, len(one.y_train)) == (("west",), 6)
    assert own(source, sites=["west", "south"], without=["south"]).sites == ("west",)
    for options, words in {
        ("sites", "wets"): "data.sites: .* has no site 'wets'; did you mean 'west'",
        ("without", "x"): "data.without: .* has no site 'x'; choose from north, south, west",
    }.items():
        with pytest.raises(UserError, match=words):
            own(source, **{options[0]: [options[1]]})
    with pytest.raises(UserError, match=r"leave no site of .*; it has north, south, west"):
        own(source, without=list(SITES))


def test_sources_that_name_no_sites_say_so(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,label\n1,x\n2,y\n")
    np.savez(tmp_path / "a.npz", x_train=np.eye(4), y_train=[0, 1, 0, 1])
    for name in ("digits", f"csv:{tmp_path / 't.csv'}", f"npz:{tmp_path / 'a.npz'}"):
        with pytest.raises(UserError, match=r"data\.without chooses sites, but .* does not say which site"):
            own(name, without=["x"])


def test_test_samples_of_a_site_that_is_left_out_are_left_out(tmp_path: Path) -> None:
    rows = "".join(f"{k},{'xy'[k % 2]},{'ns'[k // 2 % 2]},{'test' if k > 7 else 'train'}\n" for k in range(12))
    (tmp_path / "t.csv").write_text("a,label,site,split\n" + rows)
    assert own(f"csv:{tmp_path / 't.csv'}", sites=["s"]).x_test[:, 0].tolist() == [10, 11]
    arrays = {"x_train": np.eye(4), "y_train": [0, 1, 0, 1], "site_train": ["n", "n", "s", "s"]}
    np.savez(tmp_path / "a.npz", **arrays, x_test=np.eye(4), y_test=[0, 1, 0, 1])
    kept = own(f"npz:{tmp_path / 'a.npz'}", sites=["s"])
    assert (len(kept.y_test), len(kept.y_train)) == (4, 2)
    assert "do not say which site they come from" in kept.notes[0]


@pytest.mark.parametrize(
    ("given", "names"), [("photo", ["photo"]), ("a, b", ["a", "b"]), (["a", 2], ["a", "2"]), (7, ["7"])]
)
def test_names_as_the_command_line_and_files_write_them(given: Any, names: list[str]) -> None:
    assert load_config(None, {"data.sites": given}).data.sites == names


def test_one_domain_is_held_out_and_gets_its_model_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of docs/own-data.md: train without a site, then a personal model for it from the same source."""
    source = written("csv", tmp_path / "data", monkeypatch)
    run, small = str(tmp_path / "run"), ["--set", "partition.min_samples=2", "--rounds", "1", "--quiet"]
    command = ["run", "--data", source, "--partition", "site", "--method", "fedavg", "--out", run, *small]
    ran = fednh([*command, "--set", "data.without=west", "--set", "data.classes=a,b,c"], tmp_path / "a")
    assert ran.code == 0, ran.stderr
    settings = json.loads((tmp_path / "run" / "fingerprint.json").read_text())
    assert settings["settings"]["data.without"] == ["west"]
    assert list(settings["data"]["sites"]) == ["north", "south"]
    _, card = read_model(tmp_path / "run" / "models" / "global.safetensors")
    assert card.preprocessing.columns[1]["values"] == ["n", "s"]
    other = fednh([*command, "--set", "data.without=south", "--set", "data.classes=a,b,c"], tmp_path / "b")
    assert other.code == 2
    assert "data.without is ['west'] there and ['south'] here" in other.stderr
    made = fednh(
        ["personalize", run, "--data", source, "--site", "west", "--holdout", "0.4", "--format", "json"], tmp_path / "c"
    )
    assert made.code == 0, made.stderr
    found = json.loads(made.stdout)
    assert (found["site"], found["trained_on"] + found["held_out"], found["held_out_trained_on"]) == ("west", 6, 0)
    measured = select_eval_samples(card, tmp_path / "run", source, "all", {"data.sites": "west"})
    assert (len(measured.y), measured.trained_on) == (6, 0)
