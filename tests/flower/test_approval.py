"""A site's list of apps: what is not on it is not even unpacked."""

from __future__ import annotations

import hashlib
import inspect
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_disk
from flwr.supernode.runtime import run_clientapp

from fednh.errors import RunError, UserError
from fednh.flower import layout
from fednh.flower.deploy import scaffold
from tests.helpers.process import fednh


@pytest.fixture
def fed(tmp_path: Path) -> Path:
    scaffold.write(tmp_path / "fed", 2, [], {})
    return tmp_path / "fed"


def test_the_hash_is_that_of_the_bundle_that_flower_sends(fed: Path) -> None:
    app = scaffold.app_of(fed)
    assert app.hash == hashlib.sha256(build_fab_from_disk(fed)).hexdigest()
    assert app.files == ("README.md", "pyproject.toml")


def test_only_what_is_on_the_list_passes(fed: Path, tmp_path: Path) -> None:
    file, content = tmp_path / "approved", build_fab_from_disk(fed)
    with pytest.raises(UserError, match="has not approved the app"):
        scaffold.check_approved(file, content)
    assert scaffold.approve(file, hashlib.sha256(content).hexdigest())
    scaffold.check_approved(file, content)
    with pytest.raises(UserError, match="has not approved the app"):
        scaffold.check_approved(file, content + b"x")
    assert not scaffold.approve(file, hashlib.sha256(content).hexdigest()), "it is there already"
    file.write_text(f"# ours\n\n{hashlib.sha256(content).hexdigest().upper()} the app of May")
    scaffold.check_approved(file, content)
    assert scaffold.approve(file, "a" * 64)
    assert scaffold.approved(file) == [hashlib.sha256(content).hexdigest(), "a" * 64]


def test_flower_unpacks_an_app_where_we_check_it_and_before_it_loads_it() -> None:
    """A Flower that does it otherwise would go around the list; real processes try it in test_strangers.py."""
    words = inspect.getsource(run_clientapp.run_clientapp)
    steps = [words.index(step) for step in ("pull_task_input(", "install_from_fab(fab.content", "load_client_app_fn(")]
    assert steps == sorted(steps)


def test_the_command(fed: Path, tmp_path: Path) -> None:
    ended = fednh(["federation", "approve", str(fed)], tmp_path / "io")
    app = scaffold.app_of(fed)
    assert ended.code == 0, ended.stderr
    assert f"app {app.hash}\nholds README.md, pyproject.toml\n" in ended.stdout
    site = fed / "sites/site-1"
    assert scaffold.approved(site / "approved") == [app.hash] == scaffold.approved(fed / "sites/site-2/approved")
    assert fednh(["federation", "approve", str(site), "B" * 64], tmp_path / "io").code == 0
    assert fednh(["federation", "approve", str(site)], tmp_path / "io").stdout.split() == [app.hash, "b" * 64]
    for words, why in (
        ([str(site), "abc"], "is not the hash of an app"),
        ([str(fed), "b" * 64], "is not a site's folder"),
        ([str(tmp_path)], "has no sites"),
    ):
        ended = fednh(["federation", "approve", *words], tmp_path / "io")
        assert ended.code == 2
        assert why in ended.stderr


def test_what_a_site_lacks_is_told_before_it_starts(fed: Path, tmp_path: Path) -> None:
    site = fed / "sites/site-1"
    join = ["federation", "join", str(site), "--server", "fl.example.org:8443"]
    for name, why in (
        ("ca.crt", "ca.crt does not exist: the server's owner has it"),
        ("key", "key does not exist: it is made by"),
        ("approved", "names no app, so this site would do nothing"),
    ):
        ended = fednh(join, tmp_path / "io")
        assert ended.code == 2
        assert why in " ".join(ended.stderr.split())
        (site / name).write_text("")
    ended = fednh([*join[:-1], "https://fl.example.org"], tmp_path / "io")
    assert ended.code == 2
    assert "is not NAME:PORT" in ended.stderr


def test_a_finished_run_is_not_begun_again(fed: Path, tmp_path: Path) -> None:
    (fed / "run").mkdir()
    (fed / "run/config.toml").write_text("rounds = 10")  # as many as the scaffold's
    (fed / "run/summary.json").write_text("{}")
    ended = fednh(["federation", "run", str(fed)], tmp_path / "io")
    assert ended.code == 2
    assert "holds a finished run; raise rounds in" in " ".join(ended.stderr.split())


def test_a_run_with_rounds_that_changed_nothing_is_no_success(tmp_path: Path) -> None:
    """What `federation run` and `federation up` look at last."""
    (tmp_path / "summary.json").write_text('{"rounds": 3}')
    layout.check_end(tmp_path)
    (tmp_path / "summary.json").write_text('{"rounds": 3, "lost": [2]}')
    with pytest.raises(RunError, match="1 of 3 rounds changed nothing"):
        layout.check_end(tmp_path)
