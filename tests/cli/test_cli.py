"""End to end through the real command line, each command in a process of its own."""

from __future__ import annotations

import json
import math
import os
import pty
import re
import select
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from typer.testing import CliRunner

from fednh.cli import app
from fednh.cli.app import PANELS
from fednh.data.partitions.kinds import PARTITIONS
from fednh.io.files import read_tree
from fednh.methods import METHODS
from fednh.methods.base import Method
from tests.helpers.method_seconds import TIMED_METHODS
from tests.helpers.process import Ended, fednh
from tests.helpers.tiny import cifar10_file

QUICK = ["--rounds", "8", "--epochs", "2"]


def ok(args: list[str], tmp_path: Path) -> Ended:
    ended = fednh(args, tmp_path / "io")
    assert ended.code == 0, ended.stderr
    return ended


@pytest.mark.parametrize("method", TIMED_METHODS)
def test_every_method_learns_the_digits(method: str, tmp_path: Path) -> None:
    """Chance is 10% for the global model, and about what the largest class holds for a personal one."""
    out = tmp_path / "run"
    ended = ok(["run", "--method", method, *QUICK, "--out", str(out)], tmp_path)
    assert str(out) in ended.stdout
    summary = json.loads((out / "summary.json").read_text())
    assert summary["rounds"] == 8
    if METHODS[method].global_model is not Method.global_model and summary["gm"] is None:
        assert method in ("local", "fedproto", "fedtgp", "lgfedavg")
        assert not (out / "models/global.safetensors").exists()
    else:
        assert summary["gm"] > (11 if method == "fedrep" else 50), "fedrep's global head is never trained"
    assert summary["pm_v"] > 50
    assert summary["pm_l"] > 75
    assert 0 < summary["pm_l_std"] < 30


def test_run_prints_lines_on_a_pipe_and_a_table(tmp_path: Path) -> None:
    ended = ok(
        ["run", "--rounds", "3", "--epochs", "1", "--set", "eval.every=1", "--out", str(tmp_path / "r")], tmp_path
    )
    lines = [line for line in ended.stdout.splitlines() if line.startswith("fednh on digits round")]
    assert len(lines) == 3
    assert re.search(
        r"round 2/3  loss \d\.\d+  GM [\d.]+  PM\(V\) [\d.]+  PM\(L\) [\d.]+  [\d.]+ clients/s  \dm\d\ds left", lines[1]
    )
    assert "fairness" in ended.stdout
    assert ended.stdout.rstrip().endswith(str(tmp_path / "r"))
    assert "\x1b" not in ended.stdout


def test_quiet_prints_the_folder_only(tmp_path: Path) -> None:
    ended = ok(["run", "--rounds", "1", "--epochs", "1", "--quiet", "--out", str(tmp_path / "r")], tmp_path)
    assert ended.stdout.strip() == str(tmp_path / "r")


def test_a_written_config_gives_the_same_numbers(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    options = ["--method", "fedrod", "--beta", "1.0", "--seed", "3", "--clients", "6", "--participation", "0.4"]
    ok(["run", "digits", *options, "--rounds", "3", "--epochs", "1", "--out", str(first), "--quiet"], tmp_path)
    ok(["run", str(first / "config.toml"), "--out", str(second), "--quiet"], tmp_path)
    a, b = (json.loads((p / "summary.json").read_text()) for p in (first, second))
    assert (a["gm"], a["clients"]) == (b["gm"], b["clients"])
    config = tomllib.loads((first / "config.toml").read_text())
    assert (config["partition"]["beta"], config["seed"], config["participation"]["rate"]) == (1.0, 3, 0.4)
    assert config["method"] == {"name": "fedrod", "hypernetwork": "auto", "personal_sgd": "train"}


def test_default_folders_are_readable_and_never_taken_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        ok(["run", "--rounds", "1", "--epochs", "1", "--quiet"], tmp_path)
    names = sorted(p.name for p in (tmp_path / "runs").iterdir())
    assert names == ["digits-fednh-dirichlet0.3-seed0", "digits-fednh-dirichlet0.3-seed0-2"]


def test_a_saved_model_says_what_it_is(tmp_path: Path) -> None:
    out = tmp_path / "r"
    ok(["run", "--rounds", "1", "--epochs", "1", "--out", str(out), "--quiet"], tmp_path)
    client = sorted((out / "models/personal").iterdir())[0]
    with safe_open(client, "pt") as file:
        card = json.loads(file.metadata()["fednh"])
    assert card["classes"] == list("0123456789")
    assert card["shape"] == [1, 8, 8]
    assert card["method"]["name"] == "fednh"
    how = {"head": None, "norm": "refuse", "convolution": "fast"}
    assert card["model"] == {"name": "mlp", "args": {"hidden": [128, 64]}, **how}
    assert card["preprocessing"]["scale"] == 16.0
    assert card["client"] == int(client.stem.split("-")[1])


def test_own_data_from_an_npz_with_every_partition(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(3), 80)
    x = rng.normal(size=(240, 5)) + 3 * np.eye(5)[y]
    np.savez(tmp_path / "own.npz", x_train=x, y_train=y, x_test=x[::3], y_test=y[::3])
    for partition in ("dirichlet", "iid", "classes", "shards", "quantity"):
        out = tmp_path / partition
        args = ["run", "--data", f"npz:{tmp_path}/own.npz", "--partition", partition, "--clients", "4", "--rounds", "3"]
        ok([*args, "--participation", "1", "--out", str(out), "--quiet"], tmp_path)
        assert json.loads((out / "summary.json").read_text())["gm"] > 60


@pytest.mark.soak
def test_a_model_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_nets.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self, num_classes):\n"
        "        super().__init__()\n"
        "        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU())\n"
        "        self.head = nn.Linear(32, num_classes)\n"
    )
    monkeypatch.chdir(tmp_path)
    for method in ("fednh", "creff"):
        out = tmp_path / method
        args = ["run", "--method", method, "--set", "model.name=own_nets:Net", "--set", "model.args={}"]
        ok([*args, "--rounds", "4", "--out", str(out), "--quiet"], tmp_path)
        assert json.loads((out / "summary.json").read_text())["gm"] > 40


def test_table_compares(tmp_path: Path) -> None:
    for method in ("fednh", "local"):
        ok(
            [
                "run",
                "--method",
                method,
                "--rounds",
                "1",
                "--epochs",
                "1",
                "--out",
                str(tmp_path / "all" / method),
                "--quiet",
            ],
            tmp_path,
        )
    ended = ok(["table", str(tmp_path / "all")], tmp_path)
    assert "FedNH" in ended.stdout
    assert "Local" in ended.stdout
    assert "–" in ended.stdout, "Local has no global model"


def test_partitions_are_listed_with_their_settings(tmp_path: Path) -> None:
    text = ok(["partitions"], tmp_path).stdout
    assert {line.split()[0] for line in text.splitlines() if line and line[0] != " "} >= set(PARTITIONS)
    assert "beta = 0.3" in text


def test_methods_lists_all_with_settings_and_papers(tmp_path: Path) -> None:
    text = ok(["methods"], tmp_path).stdout
    one = ok(["methods", "ditto"], tmp_path).stdout
    assert one in text
    assert one.startswith("ditto  ")
    assert "fednh  " not in one
    for name, cls in METHODS.items():
        assert re.search(rf"^{name}  ", text, re.MULTILINE)
        assert cls.cite.split(",")[0] in text
    assert "rho = 0.9" in text
    assert "lam = 0.75" in text


def test_datasets_says_what_is_here(tmp_path: Path) -> None:
    text = ok(["datasets", "--data-dir", str(tmp_path)], tmp_path).stdout
    for name in ("digits", "spiral", "cifar10", "cifar100", "tinyimagenet", "fashion_mnist", "mnist", "npz:FILE"):
        assert name in text


@pytest.mark.parametrize(
    ("classes", "dim", "distance"), [(6, 2, 1.0), (100, 192, (2 + 2 / 99) ** 0.5), (4, 3, (8 / 3) ** 0.5)]
)
def test_prototypes(classes: int, dim: int, distance: float, tmp_path: Path) -> None:
    out = tmp_path / "p.safetensors"
    args = ["prototypes", "--classes", str(classes), "--dim", str(dim), "--json", "--out", str(out)]
    facts = json.loads(ok(args, tmp_path).stdout)
    assert facts["min_distance"] == pytest.approx(distance, abs=1e-6)
    assert facts["max_cosine"] == pytest.approx(1 - distance**2 / 2, abs=1e-6)
    assert "closed form" in facts["how"]
    assert read_tree(out)["prototypes"].shape == (classes, dim)
    assert "min_distance" in ok(["prototypes", "--classes", str(classes), "--dim", str(dim)], tmp_path).stdout


def test_a_terminal_shows_a_bar(tmp_path: Path) -> None:
    """In a real pseudo-terminal, by the installed module."""
    leader, follower = pty.openpty()
    env = {**os.environ, "COLUMNS": "140", "TERM": "xterm"}
    args = [sys.executable, "-m", "fednh", "run", "--rounds", "3", "--epochs", "1", "--out", str(tmp_path / "r")]
    process = subprocess.Popen(args, stdout=follower, stderr=follower, env=env)
    os.close(follower)
    text, deadline = "", time.monotonic() + 120
    while time.monotonic() < deadline:
        if select.select([leader], [], [], 0.2)[0]:
            try:
                text += os.read(leader, 65536).decode(errors="replace")
            except OSError:
                break
        elif process.poll() is not None:
            break
    os.close(leader)
    assert process.wait(30) == 0
    assert "━" in text
    assert "clients/s" in text
    assert "GM" in text


HEAVY = ("torch", "numpy", "scipy", "sklearn", "pydantic")


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["run", "--help"]], ids=" ".join)
def test_help_and_version_import_nothing_heavy(args: list[str]) -> None:
    code = (
        f"import sys; sys.argv = ['fednh', *{args}]\nfrom fednh.cli import main\ntry: main()\nexcept SystemExit: pass\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.rstrip().endswith("[]"), done.stdout
    assert "fednh" in done.stdout


def test_help_groups_the_commands_in_panels() -> None:
    """Every command is in one panel; panels and the commands in them are in the order in which a person needs them."""
    help = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "100", "TERM": "dumb"}).output
    shown: dict[str, list[str]] = {}
    for line in help.splitlines():
        if panel := re.match(r"╭─ ([\w ]+?) ─", line):
            names = shown.setdefault(panel[1], [])
        elif command := re.match(r"│ ([a-z][a-z-]+) ", line):
            names.append(command[1])
    assert shown.pop("Options") == []
    assert shown == {panel: list(names) for panel, names in PANELS.items()}
    own = [info.name or getattr(info.callback, "__name__", "") for info in app.registered_commands]
    own += [str(group.name) for group in app.registered_groups]
    assert sorted(own) == sorted(name for names in shown.values() for name in names)


def test_a_run_on_digits_starts_without_what_it_does_not_need(tmp_path: Path) -> None:
    """Each of these takes as long to import as the first round takes to train."""
    code = (
        f"import sys; sys.argv = ['fednh', 'run', '--rounds', '1', '--quiet', '--out', {str(tmp_path / 'r')!r}]\n"
        "from fednh.cli import main\ntry: main()\nexcept SystemExit: pass\n"
        "print([name for name in ('scipy', 'sklearn', 'pandas', 'torch._dynamo', 'onnx') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines() == [str(tmp_path / "r"), "[]"], done.stderr


@pytest.mark.soak
@pytest.mark.skipif(not cifar10_file().exists(), reason="CIFAR-10 is not in the data folder; see `fednh datasets`")
def test_real_cifar10_rises(tmp_path: Path) -> None:
    """FedNH, Dir(0.3), 100 clients, a few rounds; judged on every tenth test image, to be quick."""
    with np.load(cifar10_file()) as real:
        arrays = {
            key: real[key][::10] if key.endswith("test") else real[key]
            for key in ("x_train", "y_train", "x_test", "y_test")
        }
    np.savez(tmp_path / "cifar10.npz", **arrays)
    out = tmp_path / "r"
    args = [
        "run",
        "cifar10",
        "--data-dir",
        str(tmp_path),
        "--rounds",
        "4",
        "--epochs",
        "2",
        "--out",
        str(out),
        "--quiet",
    ]
    ok([*args, "--set", "eval.every=1", "--set", "participation.rate=0.04"], tmp_path)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((out / "summary.json").read_text())
    assert max(line["gm"] for line in lines) > 14, "chance is 10"
    assert all(line["train_loss"] < math.log(10) for line in lines), "better than guessing, on every round's clients"
    assert summary["pm_l"] > 35
    assert {len(line["clients"]) for line in lines} == {4}
    parameters = 4864 + 102464 + 614784 + 73920 + 1920 + 1
    assert lines[0]["bytes_up"] == lines[0]["bytes_down"] == 4 * 4 * parameters
