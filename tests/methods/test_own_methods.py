"""Methods of one's own: by import path, by entry point, and the one that `fednh new-method` writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fednh.cli.about import names
from fednh.config import load
from fednh.errors import UserError
from fednh.methods.registry import find_method
from tests.helpers.process import fednh

SHORT = ["--rounds", "2", "--clients", "6", "--epochs", "1", "--quiet"]
HEAD = (
    "from dataclasses import dataclass\n"
    "from fednh.methods.base import Method\n"
    "from fednh.methods.fedavg import FedAvg\n"
)
BROKEN = {
    "no_colon": ("", "broken", "is not known"),
    "nowhere": ("", "nowhere_at_all:Mine", "No module named 'nowhere_at_all'; start where nowhere_at_all.py is"),
    "no_such_class": ("", "broken:Mine", "cannot be imported: module 'broken' has no attribute 'Mine'"),
    "syntax": ("class Mine(:", "broken:Mine", "cannot be imported: SyntaxError"),
    "raises": ("1 / 0", "broken:Mine", "cannot be imported: ZeroDivisionError"),
    "no_method": ("class Mine: pass", "broken:Mine", "Mine does not derive from fednh.methods.Method"),
    "no_class": ("Mine = 3", "broken:Mine", "int does not derive"),
    "the_base": ("Mine = Method", "broken:Mine", "does not derive"),
    "no_dataclass": ("class Mine(FedAvg):\n    mu: float = 1.0", "broken:Mine", r"put @dataclass\(frozen=True\)"),
    "abstract": (
        "@dataclass(frozen=True)\nclass Mine(Method):\n    def broadcast(self, server): return server",
        "broken:Mine",
        "lacks client_update",
    ),
    "other_parameters": (
        "@dataclass(frozen=True)\nclass Mine(FedAvg):\n    def client_update(self, net, own, data, fit): ...",
        "broken:Mine",
        r"client_update takes \(net, own, data, fit\), but a run calls it with \(net, kept, received, data, fit\);",
    ),
    "called_name": ("@dataclass(frozen=True)\nclass Mine(FedAvg):\n    name: str = ''", "broken:Mine", "called 'name'"),
    "called_as_a_part_of_every_method": (
        "@dataclass(frozen=True)\nclass Mine(FedAvg):\n    model: str = 'small'",
        "broken:Mine",
        "called 'model', a part of every method; rename it",
    ),
    "no_default": ("@dataclass(frozen=True)\nclass Mine(FedAvg):\n    mu: float", "broken:Mine", "mu has no default"),
    "odd_type": (
        "@dataclass(frozen=True)\nclass Mine(FedAvg):\n    mu: Odd = None\nclass Odd: pass",
        "broken:Mine",
        "type that no setting can have",
    ),
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("broken", "offered", "my_method"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_no_method_is_told_in_a_sentence(case: str, here: Path) -> None:
    text, name, words = BROKEN[case]
    (here / "broken.py").write_text("from __future__ import annotations\n" * (case == "odd_type") + HEAD + text + "\n")
    with pytest.raises(UserError, match=words) as caught:
        load("digits", {"method.name": name})
    assert "\n" not in str(caught.value)


def offer(folder: Path, **points: str) -> None:
    """Install a package's metadata, as pip would leave it on the path."""
    info = folder / "offering-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: offering\nVersion: 1.0\n")
    lines = "".join(f"{name} = {value}\n" for name, value in points.items())
    (info / "entry_points.txt").write_text(f"[fednh.methods]\n{lines}")
    sys.path.insert(0, str(folder))


def test_entry_points(here: Path) -> None:
    text = '@dataclass(frozen=True)\nclass Mine(FedAvg):\n    """Offered [by] a package."""\n    kappa: float = 0.25\n'
    (here / "offered.py").write_text(HEAD + text)
    offer(here, mine="offered:Mine", wrecked="no_such_package:Mine", fedavg="offered:Mine")
    assert load("digits", {"method.name": "mine", "method.kappa": 2.0}).method == {"name": "mine", "kappa": 2.0}
    assert find_method("fedavg").__name__ == "FedAvg", "our own names cannot be taken over"
    with pytest.raises(UserError, match=r"method 'wrecked' .*cannot be imported"):
        load("digits", {"method.name": "wrecked"})
    with pytest.raises(UserError, match="did you mean 'mine'"):
        load("digits", {"method.name": "mime"})
    listed = fednh(["methods"], here / "log")
    assert listed.code == 0
    assert "Offered [by] a package." in listed.stdout
    assert "kappa = 0.25" in listed.stdout
    assert "wrecked" in listed.stdout
    assert "no_such_package" in " ".join(listed.stdout.split())
    assert "McMahan" in listed.stdout


@pytest.mark.soak
def test_a_new_method_runs_everywhere(here: Path) -> None:
    """Written, tested by plain pytest, run, stopped and resumed, swept, tabled; tables do not need its code."""
    made = fednh(["new-method", "MyMethod"], here / "log")
    assert made.code == 0
    assert "fednh run --method my_method:MyMethod --rounds 5" in made.stdout
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_method.py"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert tested.returncode == 0, tested.stdout
    assert "2 passed" in tested.stdout
    again = fednh(["new-method", "my_method"], here / "log")
    assert again.code == 2
    assert "exists already" in again.stderr

    command = ["run", "--method", "my_method:MyMethod", *SHORT, "--set", "method.eta=0.5"]
    ended = fednh([*command, "--out", "runs/a"], here / "log")
    assert ended.code == 0, ended.stderr
    card = json.loads((here / "runs/a/summary.json").read_text())
    assert card["method"] == "my_method:MyMethod"
    ended = fednh(["sweep", "--method", "my_method:MyMethod", *SHORT, "--out", "runs"], here / "log")
    assert ended.code == 0, ended.stderr
    assert fednh(["resume", "runs/a", "--quiet"], here / "log").code == 0
    config = fednh(["run", "runs/a/config.toml", "--out", "runs/b", "--quiet"], here / "log")
    assert config.code == 0
    assert (here / "runs/a/models/global.safetensors").read_bytes() == (
        here / "runs/b/models/global.safetensors"
    ).read_bytes()

    (here / "my_method.py").unlink()
    table = fednh(["table", "runs"], here / "log")
    assert table.code == 0, table.stderr
    assert "MyMethod" in table.stdout
    report = fednh(["report", "runs", "-o", "report.html"], here / "log")
    assert report.code == 0, report.stderr
    gone = fednh([*command, "--out", "runs/c"], here / "log")
    assert gone.code == 2
    assert "cannot be imported" in gone.stderr
    assert not (here / "runs/c").exists()


def test_an_interrupted_run_of_ones_own_method_goes_on(here: Path) -> None:
    (here / "offered.py").write_text(HEAD + "@dataclass(frozen=True)\nclass Mine(FedAvg):\n    kappa: float = 0.25\n")
    args = ["--method", "offered:Mine", *SHORT, "--rounds", "3", "--set", "checkpoint.every=1"]
    assert fednh(["run", *args, "--out", "whole"], here / "log").code == 0
    assert fednh(["run", *args, "--out", "cut"], here / "log").code == 0
    for gone in ("summary.json", "checkpoints/round-000003.json"):  # as if it had been killed in the last round
        (here / "cut" / gone).unlink()
    resumed = fednh(["resume", "cut", "--quiet"], here / "log")
    assert resumed.code == 0, resumed.stderr
    whole, cut = (here / f / "models" / "global.safetensors" for f in ("whole", "cut"))
    assert whole.read_bytes() == cut.read_bytes()


@pytest.mark.parametrize("name", ["2fast", "a b", "class", "../up", "", "ünder", "x" * 61, "torch", "fednh", "json"])
def test_bad_names_are_refused(name: str, here: Path) -> None:
    ended = fednh(["new-method", "--", name], here / "log")
    assert ended.code == 2
    assert not list(here.glob("*.py"))


def test_names() -> None:
    expected = ("my_method", "MyMethod")
    assert names("MyMethod") == names("my_method") == names("my-method") == expected
    assert names("FedXY2") == ("fed_xy2", "FedXY2")


@pytest.mark.soak
def test_the_page_on_adding_a_method(here: Path) -> None:
    """Its method in 40 lines is run by its own commands, and mixes as the paper says."""
    page = (Path(__file__).parents[2] / "docs" / "adding-a-method.md").read_text()
    blocks = page.split("```")
    code = next(b for b in blocks if b.startswith("python")).partition("\n")[2]
    assert len(code.splitlines()) <= 50
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 40
    (here / "apfl.py").write_text(code)
    commands = [line for b in blocks if b.startswith("sh") for line in b.splitlines() if line.startswith("fednh ")]
    assert len(commands) == 3
    for line in commands:
        quick = [] if " table " in line else ["--epochs", "1", "--clients", "6", "--quiet"]
        ended = fednh([*line.split()[1:], *quick], here / "log")
        assert ended.code == 0, f"{line}: {ended.stderr}"
    assert "APFL" in ended.stdout
    method = find_method("apfl:APFL")(alpha=0.25)
    kept = {"head.weight": torch.tensor(1.0), "v.head.weight": torch.tensor(5.0)}
    received = {"head.weight": torch.tensor(99.0)}
    mixed = method.personal_model(None, kept, received, None, None)  # type: ignore[arg-type]
    assert mixed == {"head.weight": torch.tensor(2.0)}
