"""No skew between training and use: a network sees the same numbers, to the bit, of the same raw input.

The network here writes down what reaches it. Tables have gaps, and columns whose mean is large beside their deviation,
where two ways to compute (v - mean) / std differ most.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import fednh
from fednh.inference.export import export
from fednh.inference.personalize import personalize
from fednh.runs.model_file import write_model

SEEN: list[Tensor] = []


class Watching(nn.Module):
    """Writes down its inputs."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.body = Front()
        self.head = nn.Linear(3, num_classes, bias=False)


class Front(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(x.detach().clone())
        return x.flatten(1)[:, :3] * self.scale


@pytest.fixture(autouse=True)
def _watch() -> Iterator[None]:
    SEEN.clear()
    yield
    SEEN.clear()


def rows() -> set[bytes]:
    """Everything that reached the network since the last call, sample by sample."""
    found = {row.contiguous().numpy().tobytes() for batch in SEEN for row in batch}
    SEEN.clear()
    return found


SETTINGS = {
    "model.name": f"{__name__}:Watching",
    "method.name": "fedavg",
    "rounds": 1,
    "train.epochs": 1,
    "participation.rate": 1.0,
    "partition.min_samples": 1,
    "workers": 1,
    "engine": "loop",
    "data.holdout": 0.0,
}
NUMBERS = {"year": 4.0, "mass": 0.011, "pulse": 0.7, "height": 0.09, "salt": 33.0, "dose": 900.0}  # their deviations
COLUMNS = ",".join([*NUMBERS, "blood", "label"])


def table(path: Path, middle: int, number: int = 40) -> Path:
    """Numbers around `middle` with gaps, and a category."""
    rng = np.random.default_rng(middle)
    lines = []
    for k in range(number):
        values = [rng.normal(middle, width) for width in NUMBERS.values()]
        cells = ["" if (k + c) % 9 == 4 else f"{value:.4f}" for c, value in enumerate(values)]
        lines.append(",".join([*cells, "AB"[k % 2], "xy"[(k // 2) % 2]]))
    path.write_text("\n".join([COLUMNS, *lines, ""]))
    return path


def served(run: Path, raw: Any, client: int | None = None) -> set[bytes]:
    model = fednh.load_model(run, client)
    rows()  # a model is tried when it is loaded
    model.predict(raw)
    return rows()


def test_rows_of_a_table(tmp_path: Path) -> None:
    file = table(tmp_path / "t.csv", 1990)
    divided = {"partition.name": "iid", "partition.clients": 2}
    run = fednh.run({**SETTINGS, **divided, "data.name": f"csv:{file}"}, out=tmp_path / "run").path
    trained, used = rows(), served(run, file)
    assert len(used) == 40
    assert used <= trained
    assert served(run, file, client=1) == used


def test_rows_of_natural_sites(tmp_path: Path) -> None:
    files = [table(tmp_path / f"{site}.csv", year) for site, year in (("north", 1990), ("south", 16_000))]
    lines = [f"{line},{file.stem}" for file in files for line in file.read_text().splitlines()[1:]]
    (tmp_path / "both.csv").write_text("\n".join([f"{COLUMNS},site", *lines, ""]))
    source = {"data.name": f"csv:{tmp_path / 'both.csv'}", "partition.name": "site"}
    run = fednh.run({**SETTINGS, **source}, out=tmp_path / "run").path
    trained = rows()
    used = [served(run, file, client) for client, file in enumerate(files)]
    assert used == [served(run, file) for file in files], "the global model sees what personal ones see"
    assert [len(each) for each in used] == [40, 40]
    assert used[0] | used[1] <= trained
    assert not used[0] & used[1]
    new = table(tmp_path / "east.csv", 700)
    made = personalize(run, f"csv:{new}", holdout=0.25)
    trained = rows()
    write_model(tmp_path / "east.safetensors", made.params, made.card)
    assert served(tmp_path / "east.safetensors", new) <= trained


def test_images(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for k in range(12):
        (tmp_path / "album" / "ab"[k % 2]).mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (9 + k, 14, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / "album" / "ab"[k % 2] / f"{k}.png")
    x = rng.integers(0, 256, (12, 5, 6, 3), np.uint8)
    np.savez(tmp_path / "x.npz", x_train=x, y_train=np.arange(12) % 2)
    divided = {"partition.name": "iid", "partition.clients": 1}
    files = sorted((tmp_path / "album").glob("*/*.png"))
    for name, source, raw in (("a", f"folder:{tmp_path / 'album'}", files), ("b", f"npz:{tmp_path / 'x.npz'}", x)):
        run = fednh.run({**SETTINGS, **divided, "data.name": source, "data.size": 8}, out=tmp_path / name).path
        trained, used = rows(), served(run, raw)
        assert len(used) == 12
        assert used <= trained


def test_rows_at_the_sites_of_a_real_federation(tmp_path: Path) -> None:
    from fednh.config import load
    from tests.helpers.federation import deployed, serve, server_identity

    columns = {**dict.fromkeys(NUMBERS, "number"), "blood": ["A", "B"]}
    agreed = {"data.columns": columns, "data.classes": ["x", "y"]}
    rules = {"columns": ", ".join(columns), "allow.models": SETTINGS["model.name"]}
    sites = {"north": 1990, "south": 16_000}
    nodes: dict[int, dict[str, Any]] = {}
    for number, (site, year) in enumerate(sites.items()):
        file = table(tmp_path / f"{site}.csv", year)
        nodes[number + 1] = {"data": f"csv:{file}", "site": site, **rules}
    config = load(None, {**SETTINGS, "data.name": "own", "federation.name": "own", **agreed})
    serve(config, deployed(tmp_path, nodes), tmp_path / "run", identity=server_identity(tmp_path, "own"))
    trained = rows()
    for site in sites:
        model = tmp_path / "state" / "own" / site / "personal.safetensors"
        used = served(model, tmp_path / f"{site}.csv")
        assert len(used) == 40
        assert used <= trained


def test_an_exported_model_fills_gaps_too(tmp_path: Path) -> None:
    file = table(tmp_path / "t.csv", 1990)
    divided = {"partition.name": "iid", "partition.clients": 1, "model.name": "mlp"}
    made = fednh.run({**SETTINGS, **divided, "data.name": f"csv:{file}"}, out=tmp_path / "run")
    facts = export(made.model(), tmp_path / "model")
    assert facts["checked_on"] == f"samples of csv:{file}"
    assert (facts["samples"], facts["difference"] < 1e-5) == (40, True)
