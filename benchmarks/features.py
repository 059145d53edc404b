"""Frozen bodies: a round on features, features of images and their cache, an upload, and a small site's whole way.

A round is measured through the simulator on features that exist, made of random numbers; the best of a few rounds
counts. The way of a site goes through the real command line: image files, a run, a personal model as ONNX.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
from PIL import Image

from benchmarks.row import Row
from fednh.backends import threads
from fednh.callbacks import Callback
from fednh.config import load
from fednh.data.dataset import Dataset
from fednh.federated.setup import build_federation
from fednh.models import features
from fednh.models.backbone import LITE, Recipe, build_backbone
from fednh.runs.run_folder import RunFolder

DIM, CLASSES, CLIENTS, EACH = 1280, 10, 100, 150  # numbers in a feature of EfficientNet-Lite0; samples of a client
ROUNDS = {"fedavg": 6, "fedncm": 1, "afl": 1}  # those that train nothing have one round


def rows() -> Iterator[Row]:
    yield from rounds()
    yield from of_images()
    yield from one_site()


def rounds() -> Iterator[Row]:
    """A round of all clients, through the simulator."""
    rng = np.random.default_rng(0)
    label = np.arange(CLIENTS * EACH) % CLASSES
    x = rng.standard_normal((len(label), DIM), np.float32)
    names = tuple(map(str, range(CLASSES)))
    data = Dataset("features", x, label, x[:CLASSES], label[:CLASSES], names, (0.0,), (1.0,), 1.0)
    for method in ROUNDS:
        seconds, upload = one_run(method, data)
        setting = f"{CLIENTS} clients of {EACH} features of {DIM} numbers, {CLASSES} classes, all take part"
        how = f"5 epochs, best of {ROUNDS[method]} rounds" if ROUNDS[method] > 1 else "its one round, best of 3 runs"
        yield Row(f"features: a round of {method}", seconds, "s", 0.2, True, f"{setting}; {how}")
        if method == "fedncm":
            yield Row("features: an upload of fedncm", upload / 1000, "kB", 60, True, setting)


def one_run(method: str, data: Dataset) -> tuple[float, float]:
    """The seconds of the shortest round, of three runs if a run has one; bytes of an upload."""
    settings = {"method.name": method, "model.name": "linear", "data.name": "npz:unused", "eval.every": 0}
    settings |= {"partition.name": "iid", "partition.clients": CLIENTS, "participation.rate": 1.0, "eval.final": 1}
    config = load(None, {**settings, "rounds": ROUNDS[method], "checkpoint.every": 0})
    fed = build_federation(config, data)
    parts = np.arange(len(data.y_train)).reshape(CLIENTS, EACH)
    fed = replace(fed, parts=list(parts), held_out=[np.empty(0, np.int64)] * CLIENTS)
    records = []
    for _ in range(1 if ROUNDS[method] > 1 else 3):
        with tempfile.TemporaryDirectory() as place, RunFolder(Path(place) / "run") as folder:
            simulation = threads.make_run(config, fed, folder, Callback())
            simulation.run()
            records += simulation.progress.records
    return min(record["seconds"] for record in records), records[0]["bytes_up"] / CLIENTS


def of_images() -> Iterator[Row]:
    """Features of 1,000 random images of 32x32 pixels at 112 pixels; then once more, from the cache."""
    images = np.random.default_rng(0).integers(0, 256, (1000, 32, 32, 3), np.uint8)
    backbone = build_backbone(Recipe(name=LITE), CLASSES)
    with tempfile.TemporaryDirectory() as place, patch.dict(os.environ, {"FEDNH_CACHE": place}):
        seconds = [_seconds_of_features(images, backbone) for _ in range(2)]
    how = f"1,000 images of 32x32x3 at {backbone.recipe.size} pixels, {LITE}"
    yield Row("features of 1,000 images", seconds[0], "s", 15, True, how)
    yield Row("features of 1,000 images, from the cache", seconds[1], "s", 0.5, True, how)


def _seconds_of_features(images: features.Images, backbone: features.Backbone) -> float:
    started = time.perf_counter()
    features.features(images, backbone)
    return time.perf_counter() - started


def one_site() -> Iterator[Row]:
    """Two sites of 50 image files: `fednh run` on them, then the personal model of one as ONNX."""
    with tempfile.TemporaryDirectory() as place:
        here = Path(place)
        paint(here / "photos")
        started = time.perf_counter()
        frozen = ["--set", f"model.name={LITE}", "--set", "model.frozen=body"]
        _fednh(here, "run", "--data", "folder:photos", "--partition", "site", *frozen, "--quiet", "--out", "run")
        _fednh(here, "export", "run", "--client", "north", "-o", "north.onnx")
        seconds = time.perf_counter() - started
        assert (here / "north.onnx").stat().st_size > 1_000_000  # the body is in it
    yield Row("from 50 image files to a personal model as ONNX", seconds, "s", 60, True, f"two sites, {LITE}, FedNH")


def paint(folder: Path) -> None:
    """50 photos a site, of two colours, 64 pixels a side."""
    rng = np.random.default_rng(0)
    for number in range(100):
        site, kind = ("north", "south")[number % 2], number // 2 % 2
        file = folder / site / ("red", "blue")[kind] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 160, (64, 64, 3), np.uint8)
        pixels[..., 2 * kind] += 90
        Image.fromarray(pixels).save(file)


def _fednh(folder: Path, *words: str) -> None:
    environment = {**os.environ, "FEDNH_CACHE": str(folder / "cache")}
    command = [sys.executable, "-m", "fednh", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"fednh {words[0]} failed: {done.stderr.strip()[-2000:]}")


if __name__ == "__main__":
    for row in rows():
        print(f"{row.name}: {row.value:.3f} {row.unit} (goal {row.goal:g}; {row.detail})")
