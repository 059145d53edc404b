"""Models by the name of a site, on the command line and in Python; a number stays a number."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import fednh
from fednh.errors import UserError
from tests.helpers.process import fednh as command

SITES = ("2", "Plant 4", "north")  # in the order of their names: client 0 is called 2


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sites in a table, one of them with a number for a name, and one with a single class."""
    folder = tmp_path_factory.mktemp("names")
    rng = np.random.default_rng(0)
    labels = [0 if k % 3 == 1 else k % 2 for k in range(90)]
    rows = [f"{label * 3 + rng.normal():.3f},{label},{SITES[k % 3]}" for k, label in enumerate(labels)]
    (folder / "t.csv").write_text("\n".join(["age,label,site", *rows]))
    settings = {"data.name": f"csv:{folder / 't.csv'}", "partition.name": "site", "rounds": 1}
    return fednh.run(settings, out=folder / "r").path


@pytest.mark.filterwarnings("ignore::fednh.errors.Notice")
@pytest.mark.parametrize(
    ("client", "site"),
    [("north", "north"), ("Plant 4", "Plant 4"), ("2", "2"), (2, "north"), (0, "2"), ("1", "Plant 4")],
)
def test_a_model_is_found_by_name_or_number(run: Path, client: int | str, site: str) -> None:
    assert fednh.load_model(run, client=client).info["site"] == site
    assert fednh.load_run(run).model(client).info["site"] == site


def test_the_summary_names_sites_and_leaves_out_the_one_with_a_single_class(run: Path) -> None:
    found = fednh.load_run(run)
    summary = found.summary
    assert [row["site"] for row in summary["clients"]] == list(SITES)
    shares = [row["held_share"] for row in summary["clients"]]
    assert (summary["one_class"], summary["held_share"]) == ([1], pytest.approx((shares[0] + shares[2]) / 2))
    assert found.metrics[-1]["held_share"] == summary["held_share"], "the curve is of the same sites"


def test_an_unknown_name_lists_those_that_there_are(run: Path) -> None:
    with pytest.raises(
        UserError, match=r"has no site 'plant 5' \(did you mean 'Plant 4'\?\); it has 2, Plant 4, north$"
    ):
        fednh.load_model(run, client="plant 5")
    with pytest.raises(UserError, match=r"has no personal model of client 7; there are those of 0 to 2"):
        fednh.load_model(run, client=7)


def test_commands_take_names(run: Path, tmp_path: Path) -> None:
    """--client 2 is the third client as ever; the site called 2 is --site 2, and a warning says so."""
    (tmp_path / "rows.csv").write_text("age\n0.1\n2.9\n")
    for option, site, client, warned in (
        (["--client", "2"], "north", 2, True),
        (["--site", "2"], "2", 0, False),
    ):
        told = command(["evaluate", str(run), "--format", "json", *option], tmp_path / "o")
        record = json.loads(told.stdout)
        assert (told.code, record["client"], record["site"]) == (0, client, site)
        assert ("the site called 2 is --site 2" in told.stderr) == warned
    predicted = command(["predict", str(run), str(tmp_path / "rows.csv"), "--client", "Plant 4"], tmp_path / "o")
    assert (predicted.code, predicted.stderr) == (0, "")
    for args, words in (
        (["evaluate", str(run), "--client", "0", "--site", "north"], "--client and --site mean the same"),
        (["export", str(run), "-o", str(tmp_path / "m.onnx"), "--site", "south"], "it has 2, Plant 4, north"),
        (["compare", str(run), "--site", "plant4"], "did you mean 'Plant 4'?"),
    ):
        ended = command(args, tmp_path / "o")
        assert (ended.code, ended.stderr.count("\n")) == (2, 1)
        assert words in ended.stderr


def test_clients_without_names_are_chosen_by_number(finished: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="have no names: choose one by its number instead of 'photo'"):
        fednh.load_model(finished["fednh"], client="photo")
    assert fednh.load_model(finished["fednh"], client="1").info["client"] == 1
