"""A run goes on only with what it began with: its settings, its data and its weights; and it locks before it looks."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import fednh
from fednh.config import load
from fednh.data.dataset import Dataset
from fednh.errors import UserError
from fednh.runs import fingerprint, run_folder
from fednh.runs.run_folder import RunFolder
from tests.helpers.process import fednh as command
from tests.helpers.synthetic import site_table

QUICK = {
    "method.name": "fedper",
    "rounds": 3,
    "partition.name": "site",
    "train.epochs": 1,
    "checkpoint.every": 1,
    "eval.every": 0,
    "model.name": "mlp",
    "model.args": {"hidden": [4]},
    "workers": 1,
}


def weights(path: Path, value: float) -> Path:
    save_file({"body.linear1.weight": torch.full((4, 2), value), "body.linear1.bias": torch.zeros(4)}, path)
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with rows.csv, start.safetensors and the finished run made of them."""
    here = tmp_path_factory.mktemp("whole")
    (here / "rows.csv").write_text("\n".join(site_table()) + "\n")
    weights(here / "start.safetensors", 0.5)
    settings = {"data.name": f"csv:{here}/rows.csv", "model.weights": str(here / "start.safetensors")}
    fednh.run({**QUICK, **settings}, out=here / "run")
    return here


@pytest.fixture
def cut(whole: Path) -> Iterator[Path]:
    """The run as if it had been killed in its last round; data, weights and settings as they were."""
    before = {name: (whole / name).read_bytes() for name in ("rows.csv", "start.safetensors")}
    shutil.copytree(whole / "run", whole / "cut")
    for gone in ("summary.json", "checkpoints/round-000003.json"):
        (whole / "cut" / gone).unlink()
    yield whole
    shutil.rmtree(whole / "cut")
    for name, content in before.items():
        (whole / name).write_bytes(content)


def go_on(here: Path) -> fednh.api.Result:
    return fednh.run(here / "cut" / "config.toml", out=here / "cut")


def rows(change: Callable[[list[str]], list[str]]) -> Callable[[Path], None]:
    def edit(here: Path) -> None:
        head, *lines = (here / "rows.csv").read_text().splitlines()
        (here / "rows.csv").write_text("\n".join([head, *change(lines)]) + "\n")

    return edit


def setting(old: str, new: str) -> Callable[[Path], None]:
    def edit(here: Path) -> None:
        file = here / "cut" / "config.toml"
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new))

    return edit


def shuffled(lines: list[str]) -> list[str]:
    return random.Random(3).sample(lines, len(lines))


CHANGES = {
    "shuffled": (rows(shuffled), "the training samples of the site 'a' are others, or in another order"),
    "interleaved": (
        rows(
            lambda lines: [line for three in zip(lines[:30], lines[30:60], lines[60:], strict=True) for line in three]
        ),
        "the training samples of the sites follow each other in another order",
    ),
    "renamed": (
        rows(lambda lines: [line.replace(",b,", ",z,") for line in lines]),
        "the site 'b' is missing and the site 'z' is new",
    ),
    "removed": (rows(lambda lines: lines[30:]), "the site 'a' is missing"),
    "shorter": (rows(lambda lines: lines[:-1]), "the site 'c' had 30 training samples and has 29"),
    "a value": (
        rows(lambda lines: ["9.25" + lines[0].partition(",")[1] + lines[0].partition(",")[2], *lines[1:]]),
        "the training samples of the site 'a' are others",
    ),
    "a class": (
        rows(lambda lines: [line.replace("sick", "ill") for line in lines]),
        "the classes were sick, well and are ill, well",
    ),
    "lr": (setting("lr = 0.01", "lr = 0.5"), "train.lr was 0.01 and is 0.5"),
    "seed": (setting("seed = 0", "seed = 1"), "seed was 0 and is 1"),
    "weights": (lambda here: weights(here / "start.safetensors", 0.25), "are not those that the run"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_changed_is_named_and_nothing_is_written(case: str, cut: Path) -> None:
    change, words = CHANGES[case]
    change(cut)
    before = {p: p.read_bytes() for p in sorted((cut / "cut").rglob("*")) if p.is_file()}
    with pytest.raises(UserError) as caught:
        go_on(cut)
    assert words in str(caught.value)
    assert "start another run" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert before == {p: p.read_bytes() for p in sorted((cut / "cut").rglob("*")) if p.is_file()}


def test_the_command_refuses_with_one_line_and_code_2(cut: Path, tmp_path: Path) -> None:
    CHANGES["renamed"][0](cut)
    ended = command(["resume", str(cut / "cut"), "--quiet"], tmp_path / "io")
    assert ended.code == 2
    assert ended.stderr.startswith("fednh: the data are not those that the run in ")
    assert ended.stderr.count("\n") == 1


def test_what_says_only_where_things_lie_may_change(cut: Path) -> None:
    """The same rows in another file, at another place, give the very run that was not interrupted."""
    lines = (cut / "rows.csv").read_text().splitlines()
    (cut / "moved.csv").write_text("\r\n".join(lines) + "\r\n")
    (cut / "rows.csv").write_text("gone")
    setting("rows.csv", "moved.csv")(cut)
    setting('memory = "25%"', 'memory = "20%"')(cut)
    go_on(cut)
    for name in ("models/global.safetensors", "models/personal/client-000001.safetensors"):
        ours, theirs = (here / name for here in (cut / "cut", cut / "run"))
        if ours.exists() or theirs.exists():
            assert torch.equal(*(fednh.load_model(p).params["head.weight"] for p in (ours, theirs)))


def test_a_run_without_a_fingerprint_does_not_go_on(cut: Path) -> None:
    (cut / "cut" / "fingerprint.json").unlink()
    before = {p: p.read_bytes() for p in sorted((cut / "cut").rglob("*")) if p.is_file()}
    with pytest.raises(UserError, match=r"cut has no fingerprint\.json, which says what the run began with;"):
        go_on(cut)
    assert before == {p: p.read_bytes() for p in sorted((cut / "cut").rglob("*")) if p.is_file()}


def test_a_setting_that_was_added_since_had_its_default(cut: Path) -> None:
    file = cut / "cut" / "fingerprint.json"
    recorded = json.loads(file.read_text())
    del recorded["settings"]["aggregator"], recorded["settings"]["trim"]
    file.write_text(json.dumps(recorded))
    setting("trim = 0.2", "trim = 0.3")(cut)
    with pytest.raises(UserError, match=r"trim was 0\.2 and is 0\.3;"):
        go_on(cut)
    setting("trim = 0.3", "trim = 0.2")(cut)
    go_on(cut)


def test_other_settings_are_named_with_both_values(whole: Path) -> None:
    settings = {"train.lr": 0.5, "data.label": "label", "method.name": "fedavg", "seed": 4, "rounds": 9}
    with pytest.raises(UserError) as caught:
        fednh.run(
            whole / "run" / "config.toml", out=whole / "run", **{k.replace(".", "__"): v for k, v in settings.items()}
        )
    told = str(caught.value)
    assert "(data.label is not set there and 'label' here, method.name is 'fedper' there and 'fedavg' here" in told
    assert "rounds is 3 there and 9 here and 2 more); choose another folder" in told


@pytest.mark.parametrize("how", ["python", "command"])
def test_settings_are_checked_under_the_lock(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process begins a run in the folder after it was looked at and before it is locked."""
    settings = {"rounds": 1, "partition.clients": 5, "train.epochs": 1, "workers": 1}
    other, folder = load("digits", {**settings, "train.lr": 0.02}), RunFolder(tmp_path / "run")
    lock = run_folder.exclusive

    def late(*places: Path) -> object:
        if not folder.started:
            folder.begin(other, ["a"], [[1]])
        return lock(*places)

    monkeypatch.setattr(run_folder, "exclusive", late)
    if how == "python":
        with pytest.raises(UserError, match=r"train\.lr is 0\.02 there and 0\.05 here"):
            fednh.run(load("digits", settings), out=folder.path)
    else:
        given = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        ended = command(["run", "digits", *given, "--out", str(folder.path)], tmp_path / "io", inherit=True)
        assert (ended.code, "train.lr is 0.02 there and 0.05 here" in ended.stderr) == (2, True)
    assert "lr = 0.02" in folder.config_file.read_text()
    assert not (folder.path / "metrics.jsonl").exists()


def test_what_cannot_begin_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot give"):
        fednh.run("digits", out=tmp_path / "deep" / "down" / "run", clients=5000)
    assert not list(tmp_path.iterdir())


def test_contents_are_told_apart() -> None:
    x, y = np.arange(12, dtype=np.float32).reshape(6, 2), np.array([0, 1] * 3)
    sites = np.array([0, 0, 1, 1, 0, 1])

    def data(**other: object) -> Dataset:
        plain = {"x_train": x, "y_train": y, "x_test": x[:2], "y_test": y[:2], "classes": ("a", "b")}
        plain |= {"mean": (0.0,), "std": (1.0,), "sites": ("s", "t"), "site_train": sites}
        return Dataset("d", **{**plain, **other})  # type: ignore[arg-type]

    one = data().fingerprint
    assert one == data(x_train=x.copy(order="F")).fingerprint, "how it lies in memory does not matter"
    changed = [data(x_train=x + 1), data(y_train=1 - y), data(site_train=1 - sites), data(classes=("a", "c"))]
    changed += [data(sites=("t", "s")), data(x_test=x[1:3]), data(y_test=y[1:3]), data(std=(2.0,))]
    changed += [data(sites=(), site_train=None), data(site_test=np.array([0, 1]))]
    assert len({json.dumps(each.fingerprint) for each in changed} - {json.dumps(one)}) == len(changed)


@pytest.mark.parametrize(("was", "same"), [([], True), ([0.5, 0.5], False)])
def test_a_setting_that_is_gone_changed_nothing_if_it_was_empty(was: list[float], same: bool) -> None:
    now = fingerprint.of_settings(load("digits", {}))
    changed = fingerprint.settings_changed({**now, "eval.gone": was}, now, "{key} was {was}")
    assert changed == (None if same else "eval.gone was [0.5, 0.5]")
