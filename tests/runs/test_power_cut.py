"""A power cut at any moment: a run is finished with all its results, or goes on and ends as if nothing had happened."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import fednh
from fednh.cli import app
from fednh.io.files import commit_file
from fednh.runs.model_file import write_model
from tests.helpers.compare import assert_same, outcome
from tests.helpers.counts import count
from tests.helpers.power_cut import Disk, State, put

SMALL = {
    **{"rounds": 3, "checkpoint.every": 1, "eval.every": 2, "train.epochs": 1, "workers": 1, "store.memory": 600},
    **{
        "partition.clients": 4,
        "participation.rate": 1.0,
        "model.args.hidden": [3],
        "data.holdout": 0.1,
        "method.name": "fedper",
    },
}


def run(folder: Path) -> fednh.Result:
    return fednh.run("digits", out=folder, **SMALL)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Disk, dict[str, Any]]]:
    """A small run on a disk that forgets, in a folder two levels below one that is there, and what came out of it."""
    root = tmp_path_factory.mktemp("disk")
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(root, patch)
        run(root / "runs" / "r")
    yield disk, outcome(root / "runs" / "r")
    disk.close()


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def survives(state: State, root: Path, expected: dict[str, Any]) -> None:
    """Finished means whole; whatever is not finished goes on by the same command."""
    put(state, root)
    folder = root / "runs" / "r"
    if (folder / "summary.json").exists():
        assert_same(folder, expected)
    else:
        run(folder)
        assert_same(folder, expected)
    count("faults injected")


def test_what_is_finished_is_on_disk_for_good(watched: tuple[Disk, dict[str, Any]], tmp_path: Path) -> None:
    disk, expected = watched
    put(disk.strict[-1], tmp_path / "cut")
    assert (tmp_path / "cut/runs/r/summary.json").exists()
    assert_same(tmp_path / "cut/runs/r", expected)


def test_results_are_synced_before_the_summary_says_finished(watched: tuple[Disk, dict[str, Any]]) -> None:
    """The order of calls, by name: contents, names, then the rename that makes the run finished, then its name."""
    disk, _ = watched
    end = disk.events.index(("rename", "runs/r/summary.json"))
    before = {path for what, path in disk.events[:end] if what == "fsync"}
    models = {path for path in files(disk.root) if path.startswith("runs/r/models/")}
    assert len(models) == 6, "four personal ones, the global one and what is sent to newcomers"
    assert models | {"runs/r/models/personal", "runs/r/models", "runs/r/metrics.jsonl", "runs/r"} <= before
    assert {".", "runs"} <= before, "the folders' own names"
    appended = max(i for i, event in enumerate(disk.events) if event == ("fsync", "runs/r/metrics.jsonl"))
    assert max(i for i, (what, path) in enumerate(disk.events) if path.startswith("runs/r/models/")) < end
    assert appended < end
    assert ("fsync", "runs/r") in disk.events[end:]


def test_a_checkpoint_is_synced_before_its_manifest_names_it(watched: tuple[Disk, dict[str, Any]]) -> None:
    disk, _ = watched
    named = [i for i, (what, path) in enumerate(disk.events) if what == "rename" and "/round-" in path]
    assert len(named) == 3
    for number, at in enumerate(named, start=1):
        before = {path for what, path in disk.events[:at] if what == "fsync"}
        states = [path for path in before if f".round-{number:06d}." in path and "/clients/" in path]
        assert states, "the states of the round's clients"
        assert {"runs/r/clients", "runs/r/checkpoints", "runs/r/checkpoints/journal.jsonl"} <= before
        states_named = max(i for i, event in enumerate(disk.events[:at]) if event == ("fsync", "runs/r/clients"))
        assert ("fsync", "runs/r") in disk.events[states_named:at], "the folder of the states has its name"


@pytest.mark.parametrize("kind", ["strict", "loose"])
def test_a_power_cut_while_the_run_ends(kind: str, watched: tuple[Disk, dict[str, Any]], tmp_path: Path) -> None:
    disk, expected = watched
    for number, state in enumerate(getattr(disk, kind)[-2:]):
        survives(state, tmp_path / str(number), expected)


def test_files_for_others_are_on_disk_when_the_command_says_so(
    watched: tuple[Disk, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_folder, image = watched[0].root / "runs" / "r", tmp_path / "image.png"
    Image.new("L", (8, 8)).save(image)
    (tmp_path / "out").mkdir()
    disk = Disk(tmp_path / "out", monkeypatch)
    new = tmp_path / "out" / "a" / "b"
    for words in (
        ["predict", str(run_folder), str(image), "--format", "csv", "-o", str(new / "predictions.csv")],
        ["figure", "partition", str(run_folder), "-o", str(new / "partition.svg")],
        ["report", str(run_folder), "-o", str(new / "report.html")],
    ):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
    write_model(new / "model.safetensors", {"w": torch.ones(2)}, {})
    (tmp_path / "out" / "draft").write_text("complete")
    commit_file(tmp_path / "out" / "draft", new / "model.onnx")
    there = {path.relative_to(disk.root).as_posix(): path.read_bytes() for path in new.iterdir()}
    assert len(there) == 6
    assert {name: disk.strict[-1].get(name) for name in there} == there
    disk.close()


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["strict", "loose"])
def test_a_power_cut_at_any_moment(kind: str, watched: tuple[Disk, dict[str, Any]], tmp_path: Path) -> None:
    disk, expected = watched
    for number, state in enumerate(getattr(disk, kind)):
        survives(state, tmp_path / str(number), expected)
