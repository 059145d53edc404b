"""How good a model is on labelled data: per class, as a whole, and whether its probabilities can be believed.

And predictions as text: lines for people, CSV and JSON for machines, written as they come.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fednh.data.dataset import Inputs, Labels
from fednh.errors import UserError
from fednh.inference.inputs import Batch
from fednh.inference.model import Model, Scores
from fednh.text import csv_text

BINS = 15  # of confidence, as Guo et al. (2017) have them


@dataclass(frozen=True)
class ClassMetrics:
    """One class, in shares of 1; a class that was never predicted has precision 0."""

    name: str
    precision: float
    recall: float
    f1: float
    support: int


@dataclass(frozen=True)
class Bin:
    """The samples whose confidence lies in (low, high]."""

    low: float
    high: float
    samples: int
    confidence: float
    accuracy: float


@dataclass(frozen=True)
class Assessment:
    """Shares of 1. `ece` is the expected calibration error: how far confidence lies from accuracy, on average."""

    samples: int
    accuracy: float
    balanced_accuracy: float  # the mean recall of the classes that are there
    macro_f1: float  # the mean F1 of the classes that are there
    log_loss: float | None  # None where a class was given probability 0
    ece: float
    classes: list[ClassMetrics]
    confusion: list[list[int]]  # rows are true classes, columns predicted ones
    reliability: list[Bin]

    def record(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def assess(model: Model, x: Inputs, y: Labels, tell: Callable[[int, int], None] | None = None) -> Assessment:
    """Scikit-learn's metrics of the model's predictions for `x`, whose classes are `y`; `tell` hears the progress."""
    from sklearn import metrics

    if len(y) == 0:
        raise UserError("there are no samples to evaluate on; choose another split")
    probability = model.scores(x, tell).probabilities
    guess = probability.argmax(1)
    labels = list(range(len(model.classes)))
    precision, recall, f1, support = metrics.precision_recall_fscore_support(y, guess, labels=labels, zero_division=0)
    present = support > 0
    truth = probability[np.arange(len(y)), y].astype(np.float64)
    bins = reliability(probability.max(1), guess == y)
    columns = zip(model.classes, precision, recall, f1, support, strict=True)
    return Assessment(
        samples=len(y),
        accuracy=float(metrics.accuracy_score(y, guess)),
        balanced_accuracy=float(recall[present].mean()),
        macro_f1=float(f1[present].mean()),
        log_loss=float(-np.log(truth).mean()) if (truth > 0).all() else None,
        ece=calibration_error(bins),
        classes=[ClassMetrics(name, float(p), float(r), float(f), int(n)) for name, p, r, f, n in columns],
        confusion=metrics.confusion_matrix(y, guess, labels=labels).tolist(),
        reliability=bins,
    )


def calibration_error(bins: Sequence[Bin]) -> float:
    """The expected calibration error (Guo et al. 2017): |confidence - accuracy| of the bins, weighted by samples."""
    return sum(b.samples * abs(b.confidence - b.accuracy) for b in bins) / sum(b.samples for b in bins)


def reliability(confidence: NDArray[np.float32], right: NDArray[np.bool_], bins: int = BINS) -> list[Bin]:
    """Confidence and accuracy in bins of equal width; bins without samples are left out."""
    edges = np.linspace(0, 1, bins + 1)
    place = np.clip(np.ceil(confidence.astype(np.float64) * bins).astype(int) - 1, 0, bins - 1)
    return [
        Bin(
            low=float(edges[i]),
            high=float(edges[i + 1]),
            samples=int((place == i).sum()),
            confidence=float(confidence[place == i].astype(np.float64).mean()),
            accuracy=float(right[place == i].mean()),
        )
        for i in range(bins)
        if (place == i).any()
    ]


# --- predictions as text -------------------------------------------------------------------------------------------

Prediction = dict[str, Any]


def records(
    batch: Batch, scores: Scores, classes: tuple[str, ...], top: int, threshold: float | None
) -> list[Prediction]:
    """One record an input: the `top` classes with their probabilities, and whether it looks like any class at all."""
    best = (-scores.probabilities).argsort(axis=1, kind="stable")[:, :top]
    predictions = []
    for i, name in enumerate(batch.names):
        chosen = [{"class": classes[c], "probability": round(float(scores.probabilities[i, c]), 6)} for c in best[i]]
        record: Prediction = {"input": name, **chosen[0], "top": chosen}
        if scores.similarity is not None:
            record["similarity"] = round(float(scores.similarity[i]), 6)
            if threshold is not None:
                record["known"] = bool(scores.similarity[i] >= threshold)
        predictions.append(record)
    return predictions


def to_json(predictions: Iterable[list[Prediction]]) -> Iterator[str]:
    """One array, a record a line."""
    opening = "[\n"
    for batch in predictions:
        for record in batch:
            yield opening + json.dumps(record, ensure_ascii=False)
            opening = ",\n"
    yield "[]\n" if opening == "[\n" else "\n]\n"


def to_csv(predictions: Iterable[list[Prediction]], top: int, cosine: bool, reject: bool) -> Iterator[str]:
    """input, class, probability, class2, probability2, ..., similarity, known."""
    numbers = ["" if i == 1 else str(i) for i in range(1, top + 1)]
    columns = ["input", *(f"{word}{i}" for i in numbers for word in ("class", "probability"))]
    columns += ["similarity"] * cosine + ["known"] * reject
    yield csv_text([columns])
    for batch in predictions:
        for record in batch:
            row: list[Any] = [record["input"]]
            for choice in record["top"]:
                row += [choice["class"], choice["probability"]]
            row += [record.get("similarity")] * cosine + [str(record.get("known")).lower()] * reject
            yield csv_text([row])


def to_lines(predictions: Iterable[list[Prediction]]) -> Iterator[str]:
    """What people read: the input, its class, and the next ones."""
    for batch in predictions:
        width = max(len(record["input"]) for record in batch)
        longest = max(len(choice["class"]) for record in batch for choice in record["top"])
        for record in batch:
            words = [f"{c['class']:<{longest}} {100 * c['probability']:5.1f}%" for c in record["top"]]
            if "similarity" in record:
                words.append(f"similarity {record['similarity']:.3f}")
            if record.get("known") is False:
                words.append("unknown: like no class")
            yield f"{record['input']:<{width}}  {'   '.join(words)}\n"
