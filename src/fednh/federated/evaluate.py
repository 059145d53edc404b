"""Accuracy, the paper's way: one pass over the test set gives all metrics; nothing here knows any method.

With the accuracy a of every class, acc(w) = sum(w * a) / sum(w) over the classes that the test set has, in percent:
    GM      w = 1                                    the global model, all classes equally
    PM(V)   w = 1 where the client owns the class    the personal model, all its classes equally
    PM(L)   w = the client's class share             the personal model, on its own class distribution
The paper's test sets are balanced; there GM is plain accuracy. These weights keep the definitions valid on others.
Fairness is the standard deviation of PM(L) over clients.

What clients hold out of their own data is another measure, with names of its own and never mixed with these:
    held_macro   the mean over the classes in the held-out samples of the accuracy on each
    held_share   plain accuracy on them, so every class counts by its share
for the personal model, and held_gm_macro and held_gm_share for the global model on the same samples. Their means leave
out natural sites with a single class or very few held-out samples. Where the predictions are in one place, in a
simulation, there are also
    held_pooled, held_gm_pooled   correct samples of all clients over all their held-out samples: a large client counts
                                  for more, as in PFLlib; in the summary also `..._best`, of the best of the rounds
                                  in which the summary's clients were measured; the last is one of them
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fednh.data.batches import EVAL_BATCH, Samples
from fednh.metric_names import HELD, POOLED
from fednh.runs.model_file import Outcomes


@dataclass(frozen=True)
class Personal:
    """What one client's personal model achieves, in percent."""

    client: int
    pm_v: float | None  # None: there is no test set, or it has none of the client's classes
    pm_l: float | None
    per_class: list[float | None] | None  # None in the list: a class without test samples
    held_macro: float | None = None  # on the client's held-out samples, if it has any
    held_share: float | None = None
    held_gm_macro: float | None = None  # the global model on the same samples
    held_gm_share: float | None = None
    samples: int = 0  # training samples of the client
    outcomes: Outcomes | None = field(default=None, compare=False, repr=False)  # sample by sample, where these are here

    @property
    def measures_held_out(self) -> bool:
        return any(getattr(self, key) is not None for key in HELD)

    def record(self) -> dict[str, Any]:
        """For the summary: held-out metrics only where there are some, and nothing about single samples."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "outcomes"}
        return {key: value for key, value in values.items() if key not in HELD or value is not None}


@torch.no_grad()
def logits_of(predict: Callable[[Tensor], Tensor], test: Samples) -> Tensor:  # (N, C)
    """What `predict` (x -> logits) says of each sample."""
    return torch.cat([predict(test.floats(x)) for x in torch.split(test.x, EVAL_BATCH)])


def with_confidence(person: Personal, held: Samples, *models: Callable[[Tensor], Tensor]) -> Personal:
    """The same with the probability that each model (x -> logits) gives to its prediction for each held-out sample.

    The first is the personal model, the second, if there is one, the global model.
    """
    if person.outcomes is None:
        return person
    shares = [logits_of(predict, held).softmax(1).amax(1).cpu().numpy().astype(np.float32) for predict in models]
    shared = shares[1] if len(shares) > 1 else None
    return replace(person, outcomes=replace(person.outcomes, confidence=shares[0], shared_confidence=shared))


def count_correct(guessed: Tensor, test: Samples) -> Tensor:  # (C,)
    """How many samples of each class were taken for what they are."""
    return torch.bincount(test.y[guessed == test.y], minlength=test.num_classes).cpu().to(torch.float64)


def total_per_class(test: Samples) -> Tensor:  # (C,)
    return torch.bincount(test.y, minlength=test.num_classes).cpu().to(torch.float64)


def accuracy(correct: Tensor, total: Tensor, weight: Tensor) -> float | None:
    """The weighted mean of the classes' accuracies in percent; None if the test set has no class with a weight."""
    alike = total.max() / total.clamp(min=1)  # 1 for all classes of a balanced test set, which changes no bit
    weight = weight.to(torch.float64) * alike
    whole = (weight * total).sum()
    return float(100 * (weight * correct).sum() / whole) if whole > 0 else None


def per_class(correct: Tensor, total: Tensor) -> list[float | None]:
    """The accuracy of every class in percent; None where the test set has no sample."""
    rows = zip((100 * correct / total.clamp(min=1)).tolist(), total.tolist(), strict=True)
    return [right if there else None for right, there in rows]


def held_accuracy(correct: Tensor, total: Tensor) -> tuple[float, float] | tuple[None, None]:
    """Macro accuracy over the classes present, and plain accuracy; None for both without samples."""
    there = total > 0
    if not there.any():
        return None, None
    return float(100 * (correct[there] / total[there]).mean()), float(100 * correct.sum() / total.sum())


def held_metrics(outcomes: Outcomes, num_classes: int) -> dict[str, Any]:
    """HELD, from the predictions for a client's held-out samples."""
    label, metrics = torch.from_numpy(outcomes.label), dict[str, Any]()
    total = torch.bincount(label, minlength=num_classes).to(torch.float64)
    for prefix, guessed in (("held", outcomes.personal), ("held_gm", outcomes.shared)):
        if guessed is not None:
            right = torch.bincount(label[torch.from_numpy(guessed) == label], minlength=num_classes)
            macro, share = held_accuracy(right.to(torch.float64), total)
            metrics |= {f"{prefix}_macro": macro, f"{prefix}_share": share}
    return metrics


def personal(client: int, correct: Tensor, total: Tensor, counts: Tensor) -> Personal:
    """PM(V) and PM(L) of one client, from its training counts per class."""
    if not total.any():
        return Personal(client, None, None, None)
    counts = counts.cpu()
    owned = (counts > 0).to(torch.float64)
    by_share = accuracy(correct, total, counts.to(torch.float64) / counts.sum())
    return Personal(client, accuracy(correct, total, owned), by_share, per_class(correct, total))


def metrics(
    correct: Tensor | None, total: Tensor | None, clients: Sequence[Personal], left_out: Sequence[int] = ()
) -> dict[str, Any]:
    """A round's metrics: GM of the global model's `correct`, and the means over these personal models.

    Clients in `left_out`, natural sites that can tell nothing, do not count in held-out means.
    """
    gm = None if correct is None or total is None else accuracy(correct, total, torch.ones_like(total))
    keys = ("pm_v", "pm_l", *(HELD if any(person.measures_held_out for person in clients) else ()))
    means = {key: mean_and_spread(_values(clients, key, left_out))[0] for key in keys}
    values: dict[str, Any] = {
        "gm": gm,
        **means,
        **pooled([person for person in clients if person.client not in left_out]),
    }
    return values


def pooled(clients: Sequence[Personal]) -> dict[str, float]:
    """POOLED, where there are held-out samples and the predictions of all who have some are here."""
    outcomes_of_all = [person.outcomes for person in clients if person.measures_held_out]
    here = [outcomes for outcomes in outcomes_of_all if outcomes is not None]
    if not here or len(here) < len(outcomes_of_all):
        return {}
    whole = sum(map(len, here))
    values = {"held_pooled": 100 * sum(int((each.personal == each.label).sum()) for each in here) / whole}
    shared = [int((each.shared == each.label).sum()) for each in here if each.shared is not None]
    return values | ({"held_gm_pooled": 100 * sum(shared) / whole} if len(shared) == len(here) else {})


def best(records: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The highest pooled accuracies of these rounds, each of its own round."""
    rows = list(records)
    return {f"{key}_best": max(row[key] for row in rows if key in row) for key in POOLED if any(key in r for r in rows)}


def _values(clients: Sequence[Personal], key: str, left_out: Sequence[int]) -> list[float | None]:
    return [getattr(person, key) for person in clients if key not in HELD or person.client not in left_out]


def final_metrics(
    correct: Tensor | None,
    total: Tensor | None,
    clients: Sequence[Personal],
    one_class: Sequence[int] = (),
    few_held: Sequence[int] = (),
) -> dict[str, Any]:
    """The same with spreads, by class and by client, for a run's summary.

    Left out are natural sites with a single class, and those with very few held-out samples.
    """
    left_out = [*one_class, *few_held]
    values = metrics(correct, total, clients, left_out)
    values["pm_l_std"] = mean_and_spread(p.pm_l for p in clients)[1]
    if "held_share" in values:
        values["held_share_std"] = mean_and_spread(_values(clients, "held_share", left_out))[1]
        values |= {"one_class": list(one_class)} if one_class else {}
        values |= {"few_held": list(few_held)} if few_held else {}
    values["per_class"] = None if correct is None or total is None else per_class(correct, total)
    return {**values, "clients": [person.record() for person in clients]}


def mean_and_spread(values: Iterable[float | None]) -> tuple[float, float] | tuple[None, None]:
    """Mean and population standard deviation over the clients that have a value."""
    rows: Sequence[float] = [value for value in values if value is not None]
    if not rows:
        return None, None
    column = torch.tensor(rows, dtype=torch.float64)
    return float(column.mean()), float(column.std(correction=0))
