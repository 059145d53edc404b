"""Kinds of sources register themselves: from one class follow settings, messages, listings, policies and documents.

A kind that is added here, as a person would add it, is one new file and one changed line; everything else derives.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fednh
from fednh.cli.options import OFFERED
from fednh.config import Config
from fednh.data.published import PublishedImages, RemoteFile
from fednh.data.sources import Source
from fednh.data.sources import registry as sources
from fednh.data.sources.registry import PUBLISHED, SOURCES
from fednh.errors import UserError
from fednh.flower.site_config import SAFE_DATA, Policy

ROOT = Path(__file__).parents[2]
KIND = '''
"""Text files with a label and then numbers on every line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fednh.data.dataset import Dataset
from fednh.data.sources.npz import from_arrays
from fednh.data.sources import Source
from fednh.data.sources import AGREED


@dataclass(frozen=True)
class Lines(Source):
    prefix = "lines"
    address = "TEXT"
    example = "points.lines"
    help = "a label and numbers on every line"
    suffixes = (".lines",)

    skip: Annotated[int, Field(ge=0, le=9), AGREED] = 0  # lines at the beginning

    def read(self, name: str, address: str) -> Dataset:
        rows = np.loadtxt(Path(address), skiprows=self.skip)
        arrays = {"x_train": rows[:, 1:], "y_train": rows[:, 0].astype(int)}
        return from_arrays(name, address, arrays, self.classes or ())

    def unlabelled(
        self, path: Path, shape: tuple[int, ...], preprocessing: Mapping[str, Any]
    ) -> Iterator[NDArray[Any]]:
        yield np.loadtxt(path)[:, 1:]
'''
SESSION = """
import json, warnings
from pathlib import Path
from typer.testing import CliRunner
import fednh
from fednh.cli import app
from fednh.data.sources.registry import download, load, with_prefix
from fednh.errors import UserError
from fednh.flower.site_config import SAFE_DATA

def say(*words):
    ended = CliRunner().invoke(app, list(words))
    return str(ended.exception or "") + ended.output if ended.exit_code else ended.stdout

def refused(function, *args):
    try:
        function(*args)
    except UserError as error:
        return str(error)

facts = json.loads(say("inspect", "--data", "lines:p.lines", "--set", "data.skip=1", "--format", "json"))
settings = {"partition.name": "iid", "partition.clients": 2, "participation.rate": 1.0, "rounds": 1, "data.skip": 1}
run = fednh.run({**settings, "data.name": "lines:p.lines", "method.name": "fedavg"}, out="run")
Path("q.lines").write_text(Path("p.lines").read_text().partition("\\n")[2])
print(json.dumps({
    "inspected": facts["samples"]["train"],
    "listed": say("datasets"),
    "written": run.config.data.name,
    "skip": run.config.data.skip,
    "fingerprint": json.loads(Path("run/fingerprint.json").read_text())["data"]["bytes"],
    "predicted": len(say("predict", "run", "q.lines", "--format", "csv").splitlines()) - 1,
    "unknown": refused(load, "zzzz", Path("nowhere")),
    "empty": refused(load, "lines:", Path("nowhere")),
    "range": say("inspect", "--data", "lines:p.lines", "--set", "data.skip=10"),
    "setting": say("inspect", "--data", "lines:p.lines", "--set", "data.skipp=1"),
    "download": refused(download, "lines:p.lines", Path("nowhere")),
    "bare": with_prefix("p.lines"),
    "safe": "skip" in SAFE_DATA,
}))
"""


@pytest.mark.soak
def test_a_new_kind_is_one_file_and_one_line(tmp_path: Path) -> None:
    package = tmp_path / "copy" / "fednh"
    shutil.copytree(Path(fednh.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "data" / "sources" / "lines.py").write_text(KIND)
    registry = package / "data" / "sources" / "registry.py"
    line = "from fednh.data.sources.lines import Lines\n\\1Lines, "
    text, changed = re.subn(r"(?m)^(SOURCES: [^(]* for kind in \()", line, registry.read_text())
    assert changed == 1
    registry.write_text(text)
    points = "".join(f"{k % 3} {k}.5 {k % 7} {-k}\n" for k in range(60))
    (tmp_path / "p.lines").write_text(f"# a heading that is no number\n{points}")
    command = [sys.executable, "-W", "ignore", "-c", SESSION]
    ended = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path / "copy")}, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    said = json.loads(ended.stdout)
    assert (said["inspected"], said["predicted"]) == (60, 60)
    assert (said["written"], said["skip"]) == (f"lines:{tmp_path}/p.lines", 1)
    assert said["fingerprint"] == (tmp_path / "p.lines").stat().st_size
    listed = " ".join(said["listed"].replace("│", " ").split())
    assert "lines:TEXT" in listed
    assert "a label and numbers" in listed
    assert "lines:TEXT, memory:NAME" in said["unknown"]
    assert said["empty"] == "'lines:' lacks what comes behind it; write for example lines:points.lines"
    assert "data.skip = 10 should be less than or equal to 9" in said["range"]
    assert "data.skipp is not a setting; did you mean 'data.skip'?" in said["setting"]
    assert said["download"] == "lines:p.lines is data of your own: there is nothing to download"
    assert said["bare"] == f"lines:{tmp_path}/p.lines"
    assert said["safe"] is True


def test_a_new_published_set_is_one_description(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = np.arange(10 * 16, dtype=np.uint8).reshape(10, 4, 4, 1), np.arange(10) % 2
    np.savez(tmp_path / "original.npz", x_train=x, y_train=y, x_test=x[:4], y_test=y[:4])
    content = (tmp_path / "original.npz").read_bytes()
    file = RemoteFile("stars.npz", hashlib.sha256(content).hexdigest(), ((tmp_path / "original.npz").as_uri(),))
    stars = PublishedImages(
        name="stars",
        description="stars, 4x4 grey",
        shape=(4, 4, 1),
        mean=(0.5,),
        std=(0.2,),
        classes=("near", "far"),
        accepts="stars.npz",
        places=(),
        read=Path.read_bytes,
        files=(file,),
    )
    monkeypatch.setitem(PUBLISHED, "stars", stars)
    data = tmp_path / "data"
    with pytest.raises(UserError, match=r"stars is not in the data folder .*: run `fednh data get stars`"):
        sources.load("stars", data)
    assert ("stars", "stars, 4x4 grey", False, f"{data}: stars.npz", "") in sources.available(data)
    assert sources.download("stars", data) == f"stars: downloaded stars.npz to {data}"
    found = sources.load("stars", data)
    assert (found.classes, found.mean, len(found.y_train), len(found.y_test)) == (("near", "far"), (0.5,), 10, 4)
    assert sources.file_of("stars", data) == data / "stars.npz"
    assert Policy().applied({"data": {"name": "stars"}}, None)["data"] == {"name": "stars"}
    assert "stars" in OFFERED["data"]("")
    with pytest.raises(UserError, match="spiral_imbalanced, stars, tinyimagenet"):
        sources.load("zzzz", data)


@pytest.mark.parametrize("kind", SOURCES.values(), ids=SOURCES)
def test_every_kind_is_complete_and_documented(kind: type[Source]) -> None:
    for fact in (kind.prefix, kind.address, kind.example, kind.help):
        assert fact
    assert f"`{kind.form()}`" in (ROOT / "docs" / "own-data.md").read_text(encoding="utf-8")
    extras = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert kind.extra is None or re.search(rf"^{kind.extra} = \[", extras, re.MULTILINE)
    with pytest.raises(UserError, match=f"write for example {kind.prefix}:{kind.example}"):
        sources.load(f"{kind.prefix}:", Path("unused"))


def test_the_settings_of_data_are_those_of_the_kinds() -> None:
    """By hand: which keys there are, which of them a server may decide for sites, and which a kind uses."""
    fixed = {"name", "dir", "augment", "holdout", "merge_test", "limit", "folds", "fold"}
    of_kinds = {"size", "label", "site", "classes", "columns", "encoding", "test_share", "sites", "without"}
    of_kinds |= {"fit", "on_bad", "layout", "ignore", "separator", "decimal", "group", "missing", "missing_indicator"}
    assert set(type(Config().data).model_fields) == fixed | of_kinds
    assert set(SAFE_DATA) == {"augment", "holdout", "size", "fit", "classes", "encoding", "test_share"} | {
        "missing_indicator"
    }
    common, table = {"classes", "test_share", "sites", "without", "group"}, {"label", "site", "columns", "ignore"}
    table |= {"missing", "missing_indicator"}
    pictures = {"size", "fit", "on_bad"}
    expected = {
        "npz": common,
        "py": common,
        "folder": common | pictures | {"layout"},
        "csv": common | table | {"encoding", "separator", "decimal"},
        "parquet": common | table | {"encoding", "separator", "decimal"},
        "hf": common | table | pictures,
        "memory": common | table,
    }
    assert {name: {f.name for f in dataclasses.fields(kind)} for name, kind in SOURCES.items()} == expected


def test_two_kinds_that_disagree_on_a_setting_are_a_fault_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass(frozen=True)
    class Other(SOURCES["npz"]):  # type: ignore[name-defined,misc]
        prefix = "other"
        test_share: float = 0.5

    monkeypatch.setitem(SOURCES, "other", Other)
    with pytest.raises(TypeError, match=r"Other.test_share is not as in another source"):
        sources.settings()


def test_paths_without_a_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, found in {"a.npz": "npz", "b.csv": "csv", "c.parquet": "parquet"}.items():
        assert sources.with_prefix(name) == f"{found}:{tmp_path / name}"
    (tmp_path / "photos").mkdir()
    assert sources.with_prefix("photos") == f"folder:{tmp_path / 'photos'}"
    assert [sources.with_prefix(text) for text in ("digits", "csv:x.csv")] == ["digits", "csv:x.csv"]
    assert sources.absolute("py:my:load") == "py:my:load"
    assert sources.absolute("hf:not/here") == "hf:not/here"
    assert sources.absolute("hf:photos") == f"hf:{tmp_path / 'photos'}"
    assert sources.absolute("npz:a.npz") == f"npz:{tmp_path / 'a.npz'}"
    assert sources.absolute("unknown:a") == "unknown:a"
