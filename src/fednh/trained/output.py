"""Predictions as text: lines for people, CSV and JSON for machines, written as they come."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator
from typing import Any

from fednh.trained.files import Batch
from fednh.trained.model import Scores

Prediction = dict[str, Any]


def records(
    batch: Batch, scores: Scores, classes: tuple[str, ...], top: int, threshold: float | None
) -> list[Prediction]:
    """One record an input: the `top` classes with their probabilities, and whether it looks like any class at all."""
    best = (-scores.probabilities).argsort(axis=1, kind="stable")[:, :top]
    found = []
    for i, name in enumerate(batch.names):
        chosen = [{"class": classes[c], "probability": round(float(scores.probabilities[i, c]), 6)} for c in best[i]]
        record: Prediction = {"input": name, **chosen[0], "top": chosen}
        if scores.similarity is not None:
            record["similarity"] = round(float(scores.similarity[i]), 6)
            if threshold is not None:
                record["known"] = bool(scores.similarity[i] >= threshold)
        found.append(record)
    return found


def to_json(found: Iterable[list[Prediction]]) -> Iterator[str]:
    """One array, a record a line."""
    opening = "[\n"
    for batch in found:
        for record in batch:
            yield opening + json.dumps(record, ensure_ascii=False)
            opening = ",\n"
    yield "[]\n" if opening == "[\n" else "\n]\n"


def to_csv(found: Iterable[list[Prediction]], top: int, cosine: bool, reject: bool) -> Iterator[str]:
    """input, class, probability, class2, probability2, ..., similarity, known."""
    numbers = ["" if i == 1 else str(i) for i in range(1, top + 1)]
    columns = ["input", *(f"{word}{i}" for i in numbers for word in ("class", "probability"))]
    columns += ["similarity"] * cosine + ["known"] * reject
    yield _line(columns)
    for batch in found:
        for record in batch:
            row: list[Any] = [record["input"]]
            for choice in record["top"]:
                row += [choice["class"], choice["probability"]]
            row += [record.get("similarity")] * cosine + [str(record.get("known")).lower()] * reject
            yield _line(row)


def to_lines(found: Iterable[list[Prediction]]) -> Iterator[str]:
    """What people read: the input, its class, and the next ones."""
    for batch in found:
        width = max(len(record["input"]) for record in batch)
        longest = max(len(choice["class"]) for record in batch for choice in record["top"])
        for record in batch:
            words = [f"{c['class']:<{longest}} {100 * c['probability']:5.1f}%" for c in record["top"]]
            if "similarity" in record:
                words.append(f"similarity {record['similarity']:.3f}")
            if record.get("known") is False:
                words.append("unknown: like no class")
            yield f"{record['input']:<{width}}  {'   '.join(words)}\n"


def _line(row: list[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(row)
    return text.getvalue()
