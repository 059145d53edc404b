"""How well the cosine to the nearest prototype tells classes that a model has never met from those that it knows.

python docs/examples/novelty.py digits --without 8,9 --seed 0

Trains on the other classes, then compares test samples of both kinds: AUROC of the similarity and, for comparison, of
the largest probability of the same model; and what `--reject` would mark at the stored quantiles.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
from sklearn.metrics import roc_auc_score

import fednh
from fednh.data.sources.registry import load
from fednh.io.cache import data_folder

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("data")
parser.add_argument("--without", default="8,9", help="numbers of the classes that the model never meets")
parser.add_argument("--method", default="fednh")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--rounds", type=int, default=40)
parser.add_argument("--samples", type=int, default=10_000, help="training samples at most")
asked = parser.parse_args()

data = load(asked.data, data_folder())
strange = [int(c) for c in asked.without.split(",")]
known = [c for c in range(data.num_classes) if c not in strange]
here, there = np.isin(data.y_train, known), np.isin(data.y_test, known)
number = np.array([known.index(c) if c in known else -1 for c in range(data.num_classes)])

with tempfile.TemporaryDirectory() as folder:
    np.savez(
        Path(folder) / "known.npz",
        x_train=data.x_train[here][: asked.samples],
        y_train=number[data.y_train[here][: asked.samples]],
        x_test=data.x_test[there],
        y_test=number[data.y_test[there]],
        classes=np.array([data.classes[c] for c in known]),
    )
    result = fednh.run(
        {"data.name": f"npz:{folder}/known.npz", "partition.beta": 0.3},
        out=Path(folder) / "run",
        method=asked.method,
        clients=20,
        participation=0.25,
        rounds=asked.rounds,
        seed=asked.seed,
        train__lr=0.05 if asked.data == "digits" else 0.01,
        eval__every=0,
        checkpoint__every=0,
    )
    model = result.model()
    x = np.concatenate([data.x_test[there], data.x_test[~there]])
    is_known = np.r_[np.ones(there.sum()), np.zeros((~there).sum())]
    near, sure = model.similarity(x), model.predict_proba(x).max(1)
    found = {
        "data": asked.data,
        "method": asked.method,
        "without": [data.classes[c] for c in strange],
        "seed": asked.seed,
        "gm": round(result.summary["gm"], 1),
        "auroc_similarity": round(float(roc_auc_score(is_known, near)), 3),
        "auroc_probability": round(float(roc_auc_score(is_known, sure)), 3),
    }
    for level in ("1%", "5%"):
        marked = near < model.threshold(level)
        found[f"rejected_known_{level}"] = round(100 * float(marked[is_known == 1].mean()), 1)
        found[f"rejected_unknown_{level}"] = round(100 * float(marked[is_known == 0].mean()), 1)
    print(json.dumps(found))
