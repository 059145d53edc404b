"""A new federation's folder: settings come back as they went in, sites are in order, nothing secret is in the app."""

from __future__ import annotations

import tomllib
import zipfile
from io import BytesIO
from pathlib import Path

import pytest

from fednh import config as settings
from fednh.errors import UserError
from fednh.flower.deploy import certificates, scaffold
from fednh.methods import METHODS
from tests.helpers.process import fednh


@pytest.mark.parametrize("method", METHODS)
def test_settings_come_back_as_they_went_in(method: str, tmp_path: Path) -> None:
    scaffold.write(tmp_path / "fed", 3, [], {"method.name": method, "train.lr": 0.125, "model.args": {"hidden": [7]}})
    config, sites = scaffold.read(tmp_path / "fed")
    assert config.method["name"] == method
    assert (config.train.lr, config.rounds, config.partition.clients) == (
        0.125,
        1 if METHODS[method].training_free else 10,
        3,
    )
    assert config.model.args == {"hidden": [7]}
    assert config.federation.folder == str(tmp_path / "fed" / "run")
    assert (config.federation.start, config.federation.min_clients) == (3, 2)
    assert [site.name for site in sites] == ["site-1", "site-2", "site-3"]


def test_the_kth_site_by_name_has_the_kth_part(tmp_path: Path) -> None:
    sites = scaffold.write(tmp_path / "fed", 11, [], {})
    told = [tomllib.loads(site.node_config.read_text()) for site in scaffold.sites_of(tmp_path / "fed")]
    assert [site.name for site in sites] == sorted(site.name for site in sites)
    assert [row["partition-id"] for row in told] == list(range(11))
    assert {row["num-partitions"] for row in told} == {11}
    assert told[1]["site"] == "site-02"


def test_sources_of_the_sites_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scaffold.write(tmp_path / "fed", None, ["npz:a.npz", "csv:/srv/b.csv"], {})
    told = [tomllib.loads(site.node_config.read_text()) for site in scaffold.sites_of(tmp_path / "fed")]
    assert [row["data"] for row in told] == [f"npz:{tmp_path}/a.npz", "csv:/srv/b.csv"]
    assert "partition-id" not in told[0]
    with pytest.raises(UserError, match="--sites 3 does not fit 2 sources"):
        scaffold.write(tmp_path / "other", 3, ["npz:a.npz", "npz:b.npz"], {})


def test_sites_by_name(tmp_path: Path) -> None:
    ended = fednh(["federation", "init", str(tmp_path / "fed"), "--names", "zurich, basel"], tmp_path / "io")
    assert ended.code == 0, ended.stderr
    assert "a federation of 2 sites, basel, zurich" in ended.stdout
    told = {site.name: tomllib.loads(site.node_config.read_text()) for site in scaffold.sites_of(tmp_path / "fed")}
    assert {name: row["partition-id"] for name, row in told.items()} == {"basel": 0, "zurich": 1}
    sources = ["npz:/srv/z.npz", "npz:/srv/b.npz"]
    scaffold.write(tmp_path / "own", None, sources, {}, ["zurich", "basel"])
    told = {site.name: tomllib.loads(site.node_config.read_text()) for site in scaffold.sites_of(tmp_path / "own")}
    assert {name: row["data"] for name, row in told.items()} == {"zurich": sources[0], "basel": sources[1]}


@pytest.mark.parametrize(
    ("names", "sites", "words"),
    [
        (["a", "a"], None, "has 'a' twice"),
        (["a", "../b"], None, "it is no name of a folder"),
        (["a", ""], None, "it is empty"),
        (["a", "b"], 3, "--sites 3 does not fit 2 names"),
    ],
)
def test_names_that_cannot_be(tmp_path: Path, names: list[str], sites: int | None, words: str) -> None:
    with pytest.raises(UserError, match=words):
        scaffold.write(tmp_path / "fed", sites, [], {}, names)
    assert not (tmp_path / "fed").exists()


def test_the_app_that_flower_builds_is_the_app_and_nothing_else(tmp_path: Path) -> None:
    """Also when the .gitignore is lost, and for folders that nobody thought of."""
    from flwr.cli.build import build_fab_from_disk

    folder = tmp_path / "fed"
    sites = scaffold.write(folder, 2, [], {})
    certificates.make(folder, [site.name for site in sites])
    others = (
        "run/config.toml",
        "run2/summary.json",
        "run2/metrics.jsonl",
        "deep/er/run.md",
        "notes/a.py",
        "results.json",
    )
    for name in (*others, "logs/x.md", "sites/site-1/state/x.json", ".flwr/local/config.toml", "trial/site-1/x.toml"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    (folder / "mine.py").write_text("x = 1\n")
    for lost in (False, True):
        if lost:
            (folder / ".gitignore").unlink()
        with zipfile.ZipFile(BytesIO(build_fab_from_disk(folder))) as bundle:
            assert sorted(bundle.namelist()) == [".info/CONTENT", "README.md", "mine.py", "pyproject.toml"]


def test_the_command_and_what_it_refuses(tmp_path: Path) -> None:
    out = tmp_path / "fed"
    ended = fednh(
        ["federation", "init", str(out), "--sites", "2", "--method", "ditto", "--rounds", "4"], tmp_path / "io"
    )
    assert ended.code == 0, ended.stderr
    assert f"fednh federation up {out} --local" in ended.stdout
    config, _ = scaffold.read(out)
    assert (config.method["name"], config.rounds) == ("ditto", 4)
    refused = [
        (["federation", "init", str(out)], "is not empty"),
        (["federation", "init", str(tmp_path / "n"), "--method", "fednn"], "did you mean 'fednh'?"),
        (["federation", "init", str(tmp_path / "n"), "--set", "train.lr=-1"], "train.lr = -1"),
        (["federation", "up", str(out)], "add --local"),
        (["federation", "up", str(tmp_path / "n"), "--local"], "is not a federation"),
        (["federation", "certs", str(tmp_path / "n")], "has no sites"),
    ]
    for words, why in refused:
        ended = fednh(words, tmp_path / "io")
        assert ended.code == 2, words
        assert why in ended.stderr
        assert "Traceback" not in ended.stderr
    assert not (tmp_path / "n").exists()


@pytest.mark.parametrize(("word", "name"), [("fed", "fed"), ("a b_c.d", "a-b-c-d"), ("7x", "fed-7x"), ("ü", "fed")])
def test_names_that_flower_takes(word: str, name: str) -> None:
    assert scaffold.project_name(word) == name


def test_a_pyproject_without_settings_is_named(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    with pytest.raises(UserError, match=r"has no \[tool.flwr.app.config\]"):
        scaffold.read(tmp_path)


def test_run_config_has_only_what_flower_takes() -> None:
    flat = settings.flat(scaffold.run_config(settings.load("digits", {})))
    assert all(isinstance(value, int | float | str | bool) for value in flat.values())
    assert flat["model.args.hidden"] == "[128, 64]"


def test_sites_ask_for_the_privacy_that_the_config_has(tmp_path: Path) -> None:
    """With the budget of its planned rounds; a config without a budget is refused."""
    asked = {"privacy.level": "sample", "privacy.epsilon": 8.0, "privacy.delta": 1e-6}
    scaffold.write(tmp_path / "fed", 2, [], asked)
    for site in scaffold.sites_of(tmp_path / "fed"):
        allow = tomllib.loads(site.node_config.read_text())["allow"]
        assert (allow["privacy"], allow["epsilon"], allow["delta"]) == ("sample", 8.0, 1e-6)
    scaffold.write(tmp_path / "plain", 2, [], {})
    assert "privacy" not in tomllib.loads((tmp_path / "plain/sites/site-1/site.toml").read_text())["allow"]
    noise = {"privacy.level": "sample", "privacy.noise": 2.0}
    for wrong, words in ((noise, "give privacy.epsilon"), ({**asked, "privacy.level": "client"}, "of simulations")):
        with pytest.raises(UserError, match=words):
            scaffold.write(tmp_path / "wrong", 2, [], wrong)
