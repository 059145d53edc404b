"""The server asks only what it may, but cleverly: which sequence of questions singles out a sample of a site?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Message
from hostile import Scene, config_of, problem, question
from numpy.typing import NDArray

from fednh.config import dump
from fednh.flower.messages import Hello
from fednh.flower.signing import unsealed

ROWS = 100
RULES = {"allow.rounds": 5, "allow.epochs": 2, "allow.sites": 2, "allow.methods": "fedavg"}


def rows() -> NDArray[np.float64]:
    return np.random.default_rng(5).normal(size=(ROWS, 3)).round(4) * 10


def site(folder: Path, **more: Any) -> Scene:
    """A site with 100 rows of three features and two classes, whose owner allows little."""
    lines = [f"{a:.3f},{b:.3f},{c:.3f},{n % 2}" for n, (a, b, c) in enumerate(rows())]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "t.csv").write_text("\n".join(["a,b,c,label", *lines]) + "\n")
    return Scene(folder, **{"data": f"csv:{folder}/t.csv", **RULES, **more})


def greeting(reply: Message) -> Hello | None:
    return None if problem(reply) else Hello.read(unsealed(reply.content))


def recovered(greetings: list[Hello]) -> int:
    """Rows of which all values are the mean plus or minus the deviation in one greeting, as with two samples."""
    found = set()
    for hello in greetings:
        mean, std = np.array(hello.task.mean), np.array(hello.task.std)
        near = np.isclose(rows(), mean + std, atol=2e-3) | np.isclose(rows(), mean - std, atol=2e-3)
        found |= set(np.flatnonzero(near.all(axis=1)))
    return len(found)


def test_no_sequence_of_queries_gives_single_rows(tmp_path: Path) -> None:
    """With other seeds and a large holdout two samples were left each time; their mean and deviation are the samples."""
    scene, heard = site(tmp_path), []
    for seed in range(60):
        asked = config_of(seed=seed, **{"data.holdout": 0.999, "method.name": "fedavg"})
        hello = greeting(scene.deliver(scene.signed(question(dump(asked)))))
        heard += [] if hello is None else [hello]
    assert recovered(heard) == 0
