"""A person's own images, from the folder to the report, through the real command line."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fednh.data.sources.builtin import digits
from fednh.report.load import load_run
from fednh.runs.model_file import read_model
from tests.helpers.process import fednh


def photos(root: Path) -> None:
    """Digits as files: three sites, JPEG and PNG, grey and in colour, of different sizes; each site lacks classes."""
    data = digits()
    owned = {"east": range(0, 6), "north": range(3, 9), "west": (0, 1, 2, 7, 8, 9)}
    for at, (site, classes) in enumerate(owned.items()):
        for c in classes:
            folder = root / site / str(c)
            folder.mkdir(parents=True)
            for k in np.flatnonzero(data.y_train == c)[12 * at : 12 * at + 12]:
                image = Image.fromarray((data.x_train[k, :, :, 0] * 15).astype(np.uint8)).resize((16 + 4 * at, 16))
                if k % 2:
                    image.convert("RGB").save(folder / f"{k}.png")
                else:
                    image.save(folder / f"{k}.jpg", quality=95)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    photos(folder / "photos")
    return folder


def commands(document: str) -> list[str]:
    """The shell commands of the section "Your own data" of a document."""
    text = (Path(__file__).parent.parent / document).read_text(encoding="utf-8")
    section = re.split(r"^## ", text.partition("## Your own data")[2], flags=re.M)[0]
    found = [line for block in re.findall(r"```sh\n(.*?)```", section, re.S) for line in block.splitlines()]
    return [line.partition("  #")[0].strip() for line in found if line.startswith("fednh ")]


def test_the_readmes_commands_on_a_folder_of_sites(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(work)
    every = commands("README.md")
    look = next(line for line in every if line.startswith("fednh inspect"))
    train = next(line for line in every if line.startswith("fednh run") and "--rounds" in line)
    seen = fednh([*shlex.split(look)[1:], "--format", "json"], work / "a")
    assert (seen.code, seen.stderr) == (0, "")
    facts = json.loads(seen.stdout)
    assert facts["clients"]["names"] == ["east", "north", "west"]
    assert facts["clients"]["missing_share"] == 0.4
    told = fednh(shlex.split(look)[1:], work / "b")
    assert "Who would hold what: site" in told.stdout
    assert "there is no test set" in told.stdout
    ran = fednh(
        [*shlex.split(train)[1:], "--rounds", "6", "--set", "model.name=mlp", "--set", "data.size=8"], work / "c"
    )
    assert ran.code == 0, ran.stderr
    run = load_run(work / "runs" / "photos")
    assert (run.clients, run.config.participation.rate) == (3, 1.0)
    assert run.config.data.name == f"folder:{work / 'photos'}"
    assert (run.summary["gm"], run.summary["pm_l"]) == (None, None)
    assert run.summary["held_share"] > 40  # chance is 17
    assert len(run.summary["clients"]) == 3
    assert {"held_macro", "held_share", "held_gm_macro", "held_gm_share"} <= set(run.summary["clients"][0])
    assert "all classes alike" in ran.stdout
    _, card = read_model(run.layout.personal_model(1))
    assert (card.site, card.preprocessing.size, card.preprocessing.channels) == ("north", [8, 8], 3)
    for command in (["table", "runs/photos"], ["table", "--format", "csv", "runs/photos"]):
        shown = fednh(command, work / "d")
        assert (shown.code, "PM(L)" in shown.stdout) == (0, False)
        assert "held" in shown.stdout
    report = fednh(["report", "runs/photos", "-o", "r.html"], work / "e")
    assert report.code == 0, report.stderr
    page = (work / "r.html").read_text()
    assert "global, all classes alike" in page
    assert '"sites":{"0":"east","1":"north","2":"west"}' in page


def test_a_table_end_to_end_and_resumed_by_the_same_command(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    ages = ["" if k % 11 == 0 else f"{k % 2 * 3 + rng.normal():.3f}" for k in range(120)]
    rows = ["age,blood,label,site", *(f"{age},{'AB'[k % 3 % 2]},{k % 2},s{k % 3}" for k, age in enumerate(ages))]
    (tmp_path / "t.csv").write_text("\n".join(rows))
    command = ["run", "--data", f"csv:{tmp_path / 't.csv'}", "--partition", "site", "--rounds", "3"]
    ran = fednh([*command, "--out", str(tmp_path / "r")], tmp_path / "a")
    assert ran.code == 0, ran.stderr
    assert "values are missing ('age' 11 of 120)" in " ".join(ran.stdout.split())
    assert "finished already" in fednh([*command, "--out", str(tmp_path / "r")], tmp_path / "b").stdout
    _, card = read_model(tmp_path / "r" / "models" / "personal" / "client-000001.safetensors")
    assert card.preprocessing.kind == "table"
    assert len(card.preprocessing.mean) == 1 + 3


def test_mistakes_are_one_sentence(tmp_path: Path) -> None:
    for args, words in {
        ("run", "--data", "folder:nothing"): "not there; give a folder of images",
        ("run", "--data", "digits", "--partition", "site"): "does not say which site a sample comes from",
        ("inspect", "--data", "csv:"): "lacks what comes behind it",
        ("inspect", "--data", "digits", "--set", "data.sise=3"): "data.sise is not a setting; did you mean",
    }.items():
        ended = fednh([*args, *(["--out", str(tmp_path / "r")] if args[0] == "run" else [])], tmp_path / "o")
        assert ended.code == 2
        assert words in ended.stderr
        assert ended.stderr.count("\n") == 1
        assert not (tmp_path / "r").exists()
