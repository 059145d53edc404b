"""Which samples `fednh evaluate` and `fednh personalize` measure on, and that trained ones are told."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fednh
from fednh.data.batches import ClientData
from fednh.errors import UserError
from fednh.inference.eval_data import EvalSamples, select_eval_samples
from fednh.inference.personalize import personalize
from fednh.methods.fedavg import FedAvg
from fednh.tree import Tree
from tests.helpers.process import fednh as command

SEEN: set[tuple[float, ...]] = set()  # the rows that clients were really given to train on
QUICK = {
    "method.name": f"{__name__}:Watching",
    "rounds": 2,
    "train.epochs": 2,
    "eval.every": 0,
    "participation.rate": 1.0,
    "model.name": "mlp",
    "model.args": {"hidden": [4]},
    "workers": 1,
}


@dataclass(frozen=True)
class Watching(FedAvg):
    """FedAvg that writes down what it trains on."""

    def client_update(self, net: Any, kept: Tree, received: Tree, data: ClientData, fit: Any) -> tuple[Tree, Tree]:
        SEEN.update(map(tuple, data.samples.x[data.index].tolist()))
        return super().client_update(net, kept, received, data, fit)


def table() -> list[str]:
    """No two rows are alike; three sites of other scales."""
    rng, lines = np.random.default_rng(5), ["x,y,site,label"]
    for number, site in enumerate("abc"):
        for _ in range(40):
            label = int(rng.integers(2))
            x, y = (rng.normal(size=2) + np.array([1.5 * label, number])) * (1 + number)
            lines.append(f"{x:.6f},{y:.6f},{site},{'sick' if label else 'well'}")
    return lines


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """rows.csv, and the runs `mixed` (three clients by chance) and `sites` (by its column)."""
    here = tmp_path_factory.mktemp("measured")
    (here / "rows.csv").write_text("\n".join(table()) + "\n")
    data = {**QUICK, "data.name": f"csv:{here}/rows.csv"}
    fednh.run({**data, "method.name": "fedavg", "partition.name": "site"}, out=here / "sites")
    SEEN.clear()
    fednh.run({**data, "partition.name": "iid", "partition.clients": 3}, out=here / "mixed")
    SEEN.difference_update({(0.0, 0.0)})  # the blank samples of the first try
    return here


def chosen(
    run: Path, split: str | None = None, client: int | None = None, source: str | None = None, **more: Any
) -> EvalSamples:
    settings = {key.replace("__", "."): value for key, value in more.items()}
    return select_eval_samples(fednh.load_model(run, client).card, run, source, split, settings)


def rows(x: Any) -> set[tuple[float, ...]]:
    return set(map(tuple, np.asarray(x).tolist()))


def test_held_out_samples_are_exactly_those_that_nobody_trained_on(here: Path) -> None:
    found = chosen(here / "mixed")
    assert (found.split, found.trained_on, found.warning) == ("held", 0, None)
    everything = rows(chosen(here / "mixed", "all").x)
    assert len(everything) == 120, "every row is unique"
    assert len(SEEN) == 96
    assert rows(found.x) == everything - SEEN
    assert len(found.y) == 24


def test_the_figures_are_those_of_the_run(here: Path, tmp_path: Path) -> None:
    """Of natural sites too, each of which scales by its own statistics; a client is measured on what it held out."""
    summary = json.loads((here / "sites" / "summary.json").read_text())
    ended = command(["evaluate", str(here / "sites"), "--format", "json"], tmp_path / "io")
    assert (ended.code, "warning" in ended.stderr) == (0, False), ended.stderr  # a slow machine shows progress there
    record = json.loads(ended.stdout)
    assert (record["split"], record["trained_on"], record["samples"]) == ("held", 0, 24)
    held = [len(chosen(here / "sites", client=k).y) for k in range(3)]
    right = sum(n * person["held_gm_share"] / 100 for n, person in zip(held, summary["clients"], strict=True))
    assert 24 * record["accuracy"] == pytest.approx(right)
    for client, person in enumerate(summary["clients"]):
        model, found = fednh.load_model(here / "sites", client), chosen(here / "sites", client=client)
        guess = model.predict(found.x)
        assert 100 * np.mean(guess == np.array(model.classes)[found.y]) == pytest.approx(person["held_share"])


@pytest.mark.parametrize(
    ("split", "more", "number", "of"),
    [("train", {}, 96, 120), ("all", {}, 96, 120), ("test", {"data__test_share": 0.25}, None, 30)],
)
def test_samples_that_were_trained_on_are_told(
    split: str, more: dict[str, Any], number: int | None, of: int, here: Path
) -> None:
    found = chosen(here / "mixed", split, **more)
    trained = len(rows(found.x) & SEEN)
    assert len(found.y) == of
    assert trained == found.trained_on == (number or trained) > 0
    assert found.warning == f"the model was trained on {trained} of these {of} samples, so the metrics are too good"
    copied = here / "copy.csv"
    copied.write_bytes((here / "rows.csv").read_bytes())
    assert chosen(here / "mixed", split, source=f"csv:{copied}", **more).trained_on == trained, (
        "by content, not by name"
    )


def test_the_command_warns(here: Path, tmp_path: Path) -> None:
    args = ["evaluate", str(here / "mixed"), "--data", f"csv:{here}/rows.csv", "--split"]
    ended = command([*args, "train"], tmp_path / "io")
    assert ended.code == 0
    told = [line for line in ended.stderr.splitlines() if "warning" in line]
    assert told == ["fednh: warning: the model was trained on 96 of these 120 samples, so the metrics are too good"]
    ended = command([*args, "test"], tmp_path / "io")
    assert (ended.code, "split = train" in ended.stderr) == (2, False)


def test_changed_data_are_refused_or_told(here: Path) -> None:
    before = (here / "rows.csv").read_text()
    head, *lines = before.splitlines()
    try:
        (here / "rows.csv").write_text("\n".join([head, *lines[1:], lines[0]]) + "\n")
        for split in (None, "held"):
            with pytest.raises(UserError, match=r"are not those that the run .* began with: the training samples"):
                chosen(here / "mixed", split)
        found = chosen(here / "mixed", "all")
        assert found.trained_on is None
        assert "may have been trained on these samples (the data are not those" in str(found.warning)
    finally:
        (here / "rows.csv").write_text(before)


def test_a_model_without_its_run(here: Path, tmp_path: Path) -> None:
    file = shutil.copy(here / "mixed" / "models" / "global.safetensors", tmp_path)
    card = fednh.load_model(file).card
    with pytest.raises(UserError, match=r"is not in a run folder.*give data"):
        select_eval_samples(card, Path(file), None, None)
    with pytest.raises(UserError, match="split = held needs the data of the model's own run, in its run folder"):
        select_eval_samples(card, Path(file), f"csv:{here}/rows.csv", "held")
    found = select_eval_samples(card, Path(file), f"csv:{here}/rows.csv", "all")
    assert "may have been trained on these samples (a model file alone does not say)" in str(found.warning)
    inside = select_eval_samples(card, here / "mixed" / "models" / "global.safetensors", None, None)
    assert (inside.split, len(inside.y)) == ("held", 24)


def test_an_edited_config_is_refused(here: Path, tmp_path: Path) -> None:
    run = shutil.copytree(here / "mixed", tmp_path / "run")
    config = run / "config.toml"
    config.write_text(config.read_text().replace("seed = 0", "seed = 1"))
    for act in (lambda: chosen(run), lambda: personalize(run, f"csv:{here}/rows.csv", site="a")):
        with pytest.raises(UserError, match="was edited after the run began: seed was 0 and is 1"):
            act()


def test_a_run_without_a_fingerprint_does_not_say_what_it_was_trained_on(here: Path, tmp_path: Path) -> None:
    run = shutil.copytree(here / "mixed", tmp_path / "run")
    (run / "fingerprint.json").unlink()
    with pytest.raises(UserError, match=r"has no fingerprint\.json.*or measure on what they are now, by split"):
        chosen(run)
    assert "may have been trained on these samples" in str(chosen(run, split="all").warning)


def test_a_source_of_several_sites_is_personalised_for_one(here: Path, tmp_path: Path) -> None:
    source = f"csv:{here}/rows.csv"
    with pytest.raises(
        UserError, match=r"holds 3 sites \(a, b, c\), but a personal model is for one: choose it by site"
    ):
        personalize(here / "sites", source)
    with pytest.raises(UserError, match="has no site 'z'; it has a, b, c"):
        personalize(here / "sites", source, site="z")
    args = ["personalize", str(here / "sites"), "--data", source, "--site", "b", "-o", str(tmp_path / "b")]
    ended = command(args, tmp_path / "io")
    assert ended.code == 0, ended.stderr
    found = json.loads((tmp_path / "b" / "comparison.json").read_text())
    assert found["trained_on"] + found["held_out"] == 40
    assert found["site"] == "b"
    assert 0 < found["held_out_trained_on"] <= found["held_out"] == 8
    words = f"warning: the run was trained on {found['held_out_trained_on']} of the 8 samples to compare on"
    assert words in ended.stderr
