"""A folder of images sorted by site and class: three commands of the README give models, a report and predictions."""

from __future__ import annotations

import csv
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import fednh
from fednh.data.sources.builtin import digits
from forked import fednh as command

README = Path(__file__).parents[1] / "README.md"


def three_commands() -> list[list[str]]:
    blocks = re.findall(r"^```sh\n(.*?)^```", README.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    (block,) = [text for text in blocks if "folder:photos" in text]
    return [shlex.split(line, comments=True)[1:] for line in block.splitlines() if " inspect " not in line]


def test_from_image_files_to_predictions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three sites that own five, five and six of the ten classes, as PNG files of 16x16 pixels."""
    monkeypatch.chdir(tmp_path)
    data, owned = digits(), {"east": range(5), "north": range(4, 9), "west": (0, 1, 6, 7, 8, 9)}
    written = 0
    for number, (site, classes) in enumerate(owned.items()):
        for i in np.flatnonzero(np.isin(data.y_train, list(classes)))[number::3]:
            path = tmp_path / "photos" / site / data.classes[data.y_train[i]] / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = (data.x_train[i, ..., 0] * (255 / 16)).astype(np.uint8)
            Image.fromarray(pixels).resize((16, 16), Image.Resampling.NEAREST).save(path)
            written += 1
    (tmp_path / "photos/east/0/broken.txt").write_text("not an image, not read")

    run, report, predict = three_commands()
    assert [words[0] for words in (run, report, predict)] == ["run", "report", "predict"]
    for words in (run, report, predict):
        ended = command(words, tmp_path / "io")
        assert ended.code == 0, f"{words}: {ended.stderr}"

    result = fednh.load_run("runs/photos")
    assert len(result.clients) == 3
    assert result.summary["gm"] is None, "there is no balanced test set"
    assert result.summary["held_share"] > 80, "chance is about a fifth"
    page = (tmp_path / "photos.html").read_text()
    assert "<table" in page
    assert "http" + "s://cdn" not in page
    with (tmp_path / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == written
    east = [row for row in rows if "/east/" in row["input"]]
    right = [row["class"] == Path(row["input"]).parent.name for row in east]
    assert np.mean(right) > 0.85, "the first site's own model, on its own classes"
    info = fednh.load_model("runs/photos", client=0).info
    assert info["preprocessing"]["size"] == [16, 16]
    assert info["site"] == "east"
    json.dumps(info)
