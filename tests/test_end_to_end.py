"""A folder of images sorted by site and class: the README's commands give models, a page and predictions."""

from __future__ import annotations

import csv
import html
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import fednh
from fednh.data.sources.builtin import digits
from fednh.inference.eval_data import Training
from fednh.report.load import load_runs
from fednh.report.sites import SiteTable, site_tables
from fednh.report.verdicts import verdicts
from tests.helpers.process import fednh as command

DOMAINS = ("art", "cartoon", "photo", "sketch")
README = Path(__file__).parents[1] / "README.md"


def commands() -> list[list[str]]:
    blocks = re.findall(r"^```sh\n(.*?)^```", README.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    (block,) = [text for text in blocks if "fednh inspect --data folder:photos" in text]
    return [shlex.split(line, comments=True)[1:] for line in block.splitlines() if " inspect " not in line]


def domains(folder: Path) -> int:
    """Digits as PNG files of 16x16 pixels, three to six of the ten classes a site; returns the number of files.

    The sketches' sixes are what others call nines, and the other way round: no one model fits all.
    """
    data, written = digits(), 0
    owned = {"art": range(5), "cartoon": range(4, 9), "photo": (0, 1, 6, 7, 8, 9), "sketch": (6, 8, 9)}
    for number, (site, classes) in enumerate(owned.items()):
        for i in np.flatnonzero(np.isin(data.y_train, list(classes)))[number::4]:
            name = data.classes[data.y_train[i]]
            pixels = (data.x_train[i, ..., 0] * (255 / 16)).astype(np.uint8)
            name = {"6": "9", "9": "6"}.get(name, name) if site == "sketch" else name
            path = folder / site / name / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).resize((16, 16), Image.Resampling.NEAREST).save(path)
            written += 1
    (folder / "art/0/broken.txt").write_text("not an image, not read")
    return written


def test_from_image_files_to_an_answer_for_every_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written = domains(tmp_path / "photos")
    every = commands()
    assert [words[0] for words in every] == ["run", "run", "report", "compare", "predict"]
    told = {}
    for number, words in enumerate(every):
        quick = ["--set", "model.name=mlp", "--set", "data.size=8"] if number == 0 else []
        ended = command([*words, *quick], tmp_path / "io")
        assert ended.code == 0, f"{words}: {ended.stderr}"
        told[words[0]] = " ".join(ended.stdout.split())

    result = fednh.load_run("runs/photos")
    assert result.summary["gm"] is None, "there is no balanced test set"
    assert result.summary["held_share"] > 80, "chance is about a fifth"
    assert [row["site"] for row in result.summary["clients"]] == list(DOMAINS)
    (table,) = site_tables(load_runs([Path("runs")]))
    assert (table.columns, table.notes) == (("local only", "personal", "global"), ())
    sentences = [found.sentence for found in verdicts(table)]
    page = html.unescape((tmp_path / "photos.html").read_text())
    for row, words in zip(table.rows, sentences, strict=True):
        assert words in page, f"{row.name}: {words}"
    assert "http" + "s://cdn" not in page
    own, shared, _ = table.rows[3].models
    assert own.accuracy > shared.accuracy + 10, "no global model fits the sketches' sixes and nines"
    assert "Classes of photo" in told["compare"]

    with (tmp_path / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == written
    photo = [row for row in rows if "/photo/" in row["input"]]
    right = [row["class"] == Path(row["input"]).parent.name for row in photo]
    assert np.mean(right) > 0.85, "the site's own model, on its own classes"
    info = fednh.load_model("runs/photos", client="photo").info
    assert info["preprocessing"]["size"] == [8, 8]
    assert (info["site"], info["client"]) == ("photo", 2)
    json.dumps(info)
    check_that_no_figure_is_of_samples_that_were_trained_on(table)


def check_that_no_figure_is_of_samples_that_were_trained_on(table: SiteTable) -> None:
    """Predict the held-out files anew, by the saved models: the figures are theirs, and training has none of them."""
    training = Training(Path("runs/photos"))
    train, held = training.parts
    for row in table.rows:
        rows = held[row.client]
        assert not set(rows.tolist()) & set(np.concatenate(train).tolist())
        assert row.n == len(rows)
        for column, model in (
            ("personal", fednh.load_model("runs/photos", client=row.name)),
            ("global", fednh.load_model("runs/photos")),
            ("local only", fednh.load_model("runs/alone", client=row.name)),
        ):
            guessed = model.predict(training.data.x_train[rows])
            right = np.mean(guessed == np.array(training.data.classes)[training.data.y_train[rows]])
            found = row.model(column)
            assert found is not None
            assert found.accuracy == pytest.approx(100 * right)
