"""What a round is worth: the figures that sites send, as far as they can be true, and the server's own test set."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fednh.core import evaluate
from fednh.core.meter import Meter
from fednh.core.tree import Tree, arranged
from fednh.data.batches import Samples
from fednh.flower.messages import Answer, Number
from fednh.methods import Method
from fednh.models import Net

HELD = ("held_macro", "held_share", "held_gm_macro", "held_gm_share")
Person = dict[str, Number]  # one site's figures


class Evaluation:
    """The figures of the round that was evaluated last."""

    def __init__(self, method: Method, net: Net, test: Samples | None):
        self.method, self.net, self.test = method, net, test
        self.people: dict[int, Person] = {}
        self.correct: torch.Tensor | None = None  # (C,) of the global model on the server's test set

    def look(self, server: Tree, answers: Sequence[Answer], meter: Meter) -> None:
        """Take the figures that the sites sent, and measure the global model."""
        self.people = {a.client: _checked(a.figures, self.net.num_classes) for a in answers if a.figures}
        model = self.method.global_model(server)
        if model is None or self.test is None:
            self.correct = None
            return
        model = arranged(model)
        meter.begin(len(self.test))

        def predict(x: torch.Tensor) -> torch.Tensor:
            meter(len(x))
            return self.method.logits(self.net, model, x)

        self.correct = evaluate.correct_per_class(predict, self.test)

    def figures(self, whom: Iterable[int]) -> dict[str, float | None]:
        """Of the global model, and the mean over these clients' personal models."""
        people, gm = self._of(whom), None
        if self.correct is not None and self.test is not None:
            total = evaluate.total_per_class(self.test)
            gm = evaluate.accuracy(self.correct, total, torch.ones_like(total))
        held = {key: _mean(people, key) for key in HELD} if any(key in row for row in people for key in HELD) else {}
        return {"gm": gm, "pm_v": _mean(people, "pm_v"), "pm_l": _mean(people, "pm_l"), **held}

    def summary(self, whom: Iterable[int]) -> dict[str, Any]:
        """The same with spreads, by class and by client: for the run's summary."""
        people, per_class = self._of(whom), None
        if self.correct is not None and self.test is not None:
            per_class = evaluate.per_class(self.correct, evaluate.total_per_class(self.test))
        empty: dict[str, Any] = {"pm_v": None, "pm_l": None, "per_class": None}
        held = {"held_share_std": _spread(people, "held_share")} if any("held_share" in row for row in people) else {}
        return {
            **self.figures(whom),
            "pm_l_std": _spread(people, "pm_l"),
            **held,
            "per_class": per_class,
            "clients": [{**empty, **row, **self._measured(row)} for row in people],
        }

    def _measured(self, person: Person) -> dict[str, Any]:
        """A site's accuracy by class; a message has no word for a class that the test set lacks."""
        rows = person.get("per_class")
        if not isinstance(rows, list) or self.test is None:
            return {}
        total = evaluate.total_per_class(self.test).tolist()
        return {"per_class": [right if there else None for right, there in zip(rows, total, strict=True)]}

    def _of(self, whom: Iterable[int]) -> list[Person]:
        chosen = set(whom)
        return [{"client": client, **row} for client, row in sorted(self.people.items()) if client in chosen]


def _checked(figures: Person, classes: int) -> Person:
    """Of the figures those that can be true: accuracies in percent, and a number of samples."""
    found: Person = {}
    for key in ("pm_v", "pm_l", *HELD):
        value = figures.get(key)
        if isinstance(value, int | float) and 0 <= value <= 100:
            found[key] = float(value)
    rows = figures.get("per_class")
    if isinstance(rows, list) and len(rows) == classes and all(0 <= value <= 100 for value in rows):
        found["per_class"] = rows
    samples = figures.get("samples")
    return {**found, "samples": samples if isinstance(samples, int) else 0}


def _mean(people: list[Person], key: str) -> float | None:
    return evaluate.mean_and_spread(_column(people, key))[0]


def _spread(people: list[Person], key: str) -> float | None:
    return evaluate.mean_and_spread(_column(people, key))[1]


def _column(people: list[Person], key: str) -> list[float]:
    return [float(value) for row in people if isinstance(value := row.get(key), int | float)]
