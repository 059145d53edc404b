"""A run that goes on beyond its planned end is the run that was planned with that end."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import fednh
from fednh.errors import UserError
from fednh.runs import run_folder
from fednh.runs.layout import RunLayout
from tests.helpers.compare import outcome
from tests.helpers.process import fednh as command
from tests.helpers.synthetic import site_table

SETTINGS = {
    "method.name": "fedbabu",  # its personal models are fine-tuned at the end
    "partition.name": "site",
    "participation.rate": 0.4,
    "train.epochs": 1,
    "model.args": {"hidden": [4]},
    "eval.every": 2,
    "eval.final": 2,  # drawn anew for every end: the models of the first end must go
    "checkpoint.every": 4,
    "workers": 1,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of 3 and of 6 rounds."""
    folder = tmp_path_factory.mktemp("planned")
    (folder / "rows.csv").write_text("\n".join(site_table("abcde", 12)) + "\n")
    for rounds in (3, 6):
        fednh.run({**SETTINGS, "data.name": f"csv:{folder}/rows.csv", "rounds": rounds}, out=folder / str(rounds))
    return folder


@pytest.fixture
def three(runs: Path, tmp_path: Path) -> Path:
    """The run of 3 rounds, to go on with."""
    return Path(shutil.copytree(runs / "3", tmp_path / "run"))


def personal(run: Path) -> set[int]:
    return set(RunLayout(run).clients_with_models())


def test_it_is_the_run_that_was_planned_so(three: Path, runs: Path, tmp_path: Path) -> None:
    """Round 3 was evaluated as the last one, and two personal models were saved; in a run of 6 rounds neither is so."""
    assert personal(three) - personal(runs / "6")
    ended = command(["resume", str(three), "--rounds", "6", "--workers", "2", "--quiet"], tmp_path / "io")
    assert ended.code == 0, ended.stderr
    assert outcome(three) == outcome(runs / "6")
    assert (three / "fingerprint.json").read_bytes() == (runs / "6" / "fingerprint.json").read_bytes()


def test_twice_and_cut_off_in_between(three: Path, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut off anywhere, the folder is an unfinished run of the old or of the new length, and can be asked again."""
    write = run_folder.write_bytes

    def cut_off(path: Path, content: bytes) -> str:
        if path.name == "config.toml":
            raise KeyboardInterrupt
        return write(path, content)

    with monkeypatch.context() as patched:
        patched.setattr(run_folder, "write_bytes", cut_off)
        with pytest.raises(KeyboardInterrupt):
            fednh.resume(three, rounds=5)
    assert not (three / "summary.json").exists()
    assert (three / "models/global.safetensors").exists()
    assert fednh.resume(three, rounds=5).summary["rounds"] == 5
    (three / "summary.json").unlink()
    text = (three / "config.toml").read_text()
    (three / "config.toml").write_text(text.replace("rounds = 5", "rounds = 100"))  # cut off before the fingerprint
    assert fednh.resume(three, rounds=6).summary["rounds"] == 6  # an earlier end is one, too
    assert outcome(three) == outcome(runs / "6")
    assert fednh.resume(three).summary["rounds"] == 6


def test_what_cannot_be_extended_is_told_and_stays_as_it_was(three: Path, tmp_path: Path) -> None:
    before = outcome(three)
    ended = command(["resume", str(three), "--rounds", "2"], tmp_path / "io")
    assert ended.code == 2
    assert ended.stderr.strip().splitlines()[-1] == (
        f"fednh: {three} has done 3 rounds, so it cannot end after 2; give more rounds"
    )
    with pytest.raises(UserError, match="rounds = 0 should be greater than or equal to 1"):
        fednh.resume(three, rounds=0)
    with pytest.raises(UserError, match=r"go on with it: fednh resume \S+ --rounds 6, or choose another folder"):
        fednh.run(three / "config.toml", out=three, rounds=6)
    for gone in ("clients", "checkpoints"):
        shutil.rmtree(three / gone)
        with pytest.raises(UserError, match="a finished run without checkpoints that can be read, so it cannot go on;"):
            fednh.resume(three, rounds=6)
    assert outcome(three) == before
