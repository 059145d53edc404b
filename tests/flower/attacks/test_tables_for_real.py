"""Two sites with tables of patients, as processes of their own: what the server gets, keeps and logs, and the audit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fednh.flower.audit_report import find
from fednh.io import chain
from tests.helpers.deployment import SMALL, Trial, trial
from tests.helpers.hospitals import AGREED, NAMES, tables
from tests.helpers.process import fednh

pytestmark = pytest.mark.soak


def begun(made: Trial, folder: Path, settings: dict[str, object]) -> None:
    """A federation by the documented command."""
    words = ["federation", "init", str(made.folder), "--rounds", "2"]
    for place in tables(folder).values():
        words += ["--data", str(place["data"])]
    chosen = {key: value for key, value in SMALL.items() if key != "model.args"} | settings
    for key, value in {"data.label": "diagnosis", **chosen}.items():
        text = json.dumps(value)
        if isinstance(value, dict):
            text = "{" + ", ".join(f"{name} = {json.dumps(each)}" for name, each in value.items()) + "}"
        words += ["--set", f"{key}={text}"]
    ended = fednh(words, folder / "other")
    assert ended.code == 0, ended.stderr


def at_the_server(made: Trial) -> list[Path]:
    """All that is not a site's own."""
    own = {made.folder / "sites", made.folder / "trial", *(made.folder / "logs").glob("site-*")}
    files = [path for path in made.folder.rglob("*") if path.is_file() and not own & {path, *path.parents}]
    return [path for path in files if path.name != "executor.log"]  # what runs the sites' apps in a trial


def test_names_stay_and_the_audit_tells_what_left(tmp_path: Path) -> None:
    with trial(tmp_path) as made:
        begun(made, tmp_path, AGREED)
        process = made.up()
        made.wait_for(lambda: len(made.lines()) >= 1, process)
        shown = fednh(["federation", "status", str(made.folder)], tmp_path / "other")
        assert shown.code == 0, shown.stderr
        assert process.wait(240).code == 0, made.said()
    rows = [line.split() for line in shown.stdout.splitlines()[1:]]
    assert [(row[0], row[3]) for row in rows] == [("site-1", "online"), ("site-2", "online")]
    for path in at_the_server(made):
        assert not any(name.encode() in path.read_bytes() for name in NAMES), path
    logs = [place.path for place in find(made.folder) if place.path.is_file()]
    assert len(logs) == 3
    told = fednh(["federation", "audit", str(made.folder)], tmp_path / "other")
    assert told.code == 0, told.stderr
    assert told.stdout.count("upload (the method's upload): 2 times in rounds 1 to 2") == 2
    assert not any(name in told.stdout for name in NAMES)
    log = logs[1]
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:-1]))
    assert chain.read(log).problem is None
    told = fednh(["federation", "audit", str(made.folder)], tmp_path / "other")
    assert told.code == 1
    assert "the end of the log was cut off" in told.stderr


def test_a_federation_without_an_agreement_does_not_begin(tmp_path: Path) -> None:
    with trial(tmp_path) as made:
        begun(made, tmp_path, {})
        assert made.up().wait(240).code == 1
    assert "site site-1 (node " in made.said()
    assert "the values of its text columns are not agreed" in made.said()
    for path in at_the_server(made):
        assert not any(name.encode() in path.read_bytes() for name in NAMES), path
