"""The wiring of a run, pinned by numbers that other code computes: in both engines and on Flower."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fednh.config import Config, load
from fednh.federated.setup import build_federation
from fednh.io.files import read_tree
from fednh.seeding import torch_rng
from tests.helpers.compare import same
from tests.helpers.federation import federate
from tests.helpers.simulator import run_config
from tests.helpers.tiny import tiny_dataset

EXECUTORS = ("loop", "vmap", "flower")
every_executor = pytest.mark.parametrize("executor", EXECUTORS)


def run(executor: str, path: Path, **settings: Any) -> tuple[Config, dict[str, Any]]:
    """A run on digits, its config and its summary."""
    engine = "loop" if executor == "flower" else executor
    quick = {"partition.clients": 3, "participation.rate": 1.0, "model.args": {"hidden": [8]}, "eval.every": 0}
    config = load("digits", {**quick, "engine": engine, **settings})
    if executor == "flower":
        federate(config, path)
    else:
        run_config(path, config)
    return config, json.loads((path / "summary.json").read_text())


@every_executor
def test_the_learning_rate_of_round_t_is_lr_times_decay_to_the_t_minus_1(executor: str, tmp_path: Path) -> None:
    """FedAvg with one full batch a round and plain SGD: steps of 0.5, 0.25 and 0.125 along the gradient."""
    plain = {"train.momentum": 0.0, "train.weight_decay": 0.0, "train.clip": 0.0, "train.epochs": 1}
    steps = {"train.lr": 0.5, "train.lr_decay": 0.5, "train.batch_size": 2000, "rounds": 3}
    config, _ = run(executor, tmp_path, **{"method.name": "fedavg", **plain, **steps})
    fed = build_federation(config)
    model = fed.net.init(torch_rng(config.seed, "init"))
    for step in (0.5, 0.25, 0.125):
        locals_ = []
        for part in fed.parts:
            leaves = {name: value.clone().requires_grad_() for name, value in model.items()}
            loss = F.cross_entropy(fed.net.logits(leaves, fed.train.floats(fed.train.x[part])), fed.train.y[part])
            slope = torch.autograd.grad(loss, list(leaves.values()))
            locals_.append({n: model[n] - step * g for n, g in zip(leaves, slope, strict=True)})
        model = {n: torch.stack([tree[n] for tree in locals_]).mean(0) for n in model}
    same(read_tree(tmp_path / "models/global.safetensors"), model, rtol=1e-4, atol=1e-6)


@every_executor
def test_pm_weighs_class_accuracies_by_the_clients_training_counts(executor: str, tmp_path: Path) -> None:
    _, summary = run(executor, tmp_path, rounds=2, **{"train.epochs": 1, "partition.beta": 0.3})
    counts = np.array(json.loads((tmp_path / "partition.json").read_text())["counts"])
    assert len(summary["clients"]) == 3
    for person in summary["clients"]:
        right, mine = np.array(person["per_class"]), counts[person["client"]]
        assert person["pm_l"] == pytest.approx((mine * right).sum() / mine.sum())
        assert person["pm_v"] == pytest.approx(right[mine > 0].mean())
        assert person["samples"] == mine.sum()
    assert summary["gm"] == pytest.approx(np.mean(summary["per_class"]))


def test_classes_that_the_test_set_lacks_or_has_alone_are_named(tmp_path: Path) -> None:
    """Training labels a, b and c; the test set has a, b and d."""
    data = tiny_dataset()
    kept = data.y_test != 2
    data = replace(data, x_test=data.x_test[kept], y_test=data.y_test[kept])
    settings = {"rounds": 1, "partition.clients": 2, "partition.name": "iid", "partition.min_samples": 1}
    config = load("digits", {**settings, "participation.rate": 1.0, "model.args": {"hidden": [5]}})
    _, summary, told = run_config(tmp_path / "r", config, build_federation(config, data))
    assert "tiny: classes missing in the test set, which are left out of GM, PM(V) and PM(L): c" in told.notes
    said = "tiny: classes of test samples that no training sample has, so no model knows them: d (2)"
    assert said in told.notes
    assert summary["per_class"][2] is None
    assert summary["gm"] == pytest.approx(np.mean([summary["per_class"][c] for c in (0, 1, 3)]))
