"""What is in a data set and how it would be divided: counts, measures of imbalance, and warnings of what will hurt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fednh.data.dataset import Dataset, Inputs
from fednh.data.groups import not_divided
from fednh.data.near_copies import Found, near_copies
from fednh.data.partitions.base import Indices, Partition, left_out

FEW = 10  # samples of a class: with fewer, its accuracy is mostly chance
FEW_HELD = 10  # held-out samples of a client: with fewer, its metrics are mostly chance


@dataclass(frozen=True)
class Division:
    """Which client would hold which samples."""

    partition: Partition
    names: tuple[str, ...]
    parts: Sequence[Indices]
    held_out: Sequence[Indices]


def gini(counts: NDArray[Any]) -> float:
    """0: all the same; towards 1: one has everything."""
    ordered, n = np.sort(counts.astype(np.float64)), len(counts)
    total = ordered.sum()
    return float((2 * np.arange(1, n + 1) - n - 1) @ ordered / (n * total)) if total else 0.0


def effective(counts: NDArray[Any]) -> float:
    """The effective number of classes: exp of the entropy of their shares."""
    share = counts[counts > 0] / max(counts.sum(), 1)
    return float(np.exp(-(share * np.log(share)).sum()))


def inspect(data: Dataset, division: Division | None = None) -> dict[str, Any]:
    """All counts, measures and warnings, as plain values."""
    width = data.num_classes
    train, test = (np.bincount(y, minlength=width) for y in (data.y_train, data.y_test))
    sample = data.x_train.shape[1:]
    facts: dict[str, Any] = {
        "data": data.name,
        "samples": {"train": len(data.y_train), "test": len(data.y_test)},
        "kind": "images" if data.is_image else "vectors",
        "shape": list(sample),
        "classes": [
            {"class": name, "train": int(a), "test": int(b)}
            for name, a, b in zip(data.classes, train, test, strict=True)
        ],
        "imbalance": {"gini": round(gini(train), 4), "effective_classes": round(effective(train), 3)},
        "sites": list(data.sites),
        "preprocessing": data.preprocessing,
        "notes": list(data.notes),
    }
    warnings = [*data.warnings, *_class_warnings(data, train, test), *_twins(data)]
    if division is None and not len(data.y_test):
        warnings += _near_itself(data)
    if division is not None:
        facts["clients"], more = _clients(data, division)
        if words := left_out(division.partition, data, division.parts, division.held_out):
            facts["notes"] += words
            used = np.bincount(data.y_train[np.concatenate([*division.parts, *division.held_out])], minlength=width)
            for row, n in zip(facts["classes"], used.tolist(), strict=True):
                row["used"] = n
        warnings += more
    return {**facts, "warnings": warnings}


def _class_warnings(data: Dataset, train: NDArray[Any], test: NDArray[Any]) -> list[str]:
    found = []
    few = [f"{name} ({n})" for name, n in zip(data.classes, train, strict=True) if 0 < n < FEW]
    none = [name for name, n in zip(data.classes, train, strict=True) if n == 0]
    if few:
        found.append(f"classes with fewer than {FEW} training samples, hardly to be learned: {_some(few)}")
    if none:
        found.append(f"classes without any training sample: {_some(none)}")
    if not len(data.y_test):
        found.append("there is no test set: clients hold out some of their samples, and GM, PM(V), PM(L) are not known")
        return found
    found += about_test_set(data)
    if test.min() and test.max() > 1.5 * test.min():
        found.append(
            f"the test set is not balanced ({test.min()} to {test.max()} samples a class): GM and PM weigh "
            "classes, not samples, so one sample of a small class weighs much"
        )
    return found


def about_test_set(data: Dataset) -> list[str]:
    """Classes that the test set lacks, and classes that only it has: also reported when a run starts."""
    train, test = (np.bincount(y, minlength=data.num_classes) for y in (data.y_train, data.y_test))
    if not test.any():
        return []
    found, rows = [], list(zip(data.classes, train, test, strict=True))
    if lacking := [name for name, n, m in rows if n and not m]:
        found.append(f"classes missing in the test set, which are left out of GM, PM(V) and PM(L): {_some(lacking)}")
    if unseen := [f"{name} ({m})" for name, n, m in rows if m and not n]:
        found.append(f"classes of test samples that no training sample has, so no model knows them: {_some(unseen)}")
    return found


def _twins(data: Dataset) -> list[str]:
    """Samples that are the same to the byte."""
    train, test = _digests(data.x_train), _digests(data.x_test)
    found, seen = [], Counter(train)
    if extra := len(train) - len(seen):
        found.append(f"{extra:,} training samples are exact copies of others")
    label: dict[bytes, int] = {}
    torn = {d for d, y in zip(train, data.y_train.tolist(), strict=True) if label.setdefault(d, y) != y}
    if torn:
        found.append(f"{len(torn):,} training samples occur under more than one class")
    if extra := len(test) - len(set(test)):
        found.append(f"{extra:,} test samples are exact copies of others")
    same = np.array([d in seen for d in test], bool)
    if both := int(same.sum()):
        found.append(f"{both:,} test samples are exact copies of training samples: results on them are too good")
    near = near_copies(data.x_test, np.flatnonzero(~same), data.x_train, np.arange(len(train)), data.preprocessing)
    return [*found, *_near(near, "test samples", "training samples")]


def _near(found: Found, what: str, others: str) -> list[str]:
    """A sentence on near copies, with how many samples were compared."""
    if not found.copies:
        return []
    compared = f"{found.copies:,} of {found.samples:,} {what} that were compared with {found.others:,} {others}"
    return [
        f"{compared} are nearly copies of some: results are too good if they show the same person or thing; data.group "
        "keeps such samples together"
    ]


def _near_itself(data: Dataset) -> list[str]:
    """Where nothing is divided yet: near copies that a hold-out could separate."""
    counts = Counter(digests := _digests(data.x_train))
    single = np.array([k for k, digest in enumerate(digests) if counts[digest] == 1], np.int64)
    near = near_copies(data.x_train, single, data.x_train, np.arange(len(digests)), data.preprocessing)
    return _near(near, "training samples", "others")


def _digests(x: Inputs) -> list[bytes]:
    rows = np.ascontiguousarray(x).reshape(len(x), -1) if len(x) else x
    return [blake2b(row.tobytes(), digest_size=16).digest() for row in rows]


def _clients(data: Dataset, how: Division) -> tuple[dict[str, Any], list[str]]:
    width, y = data.num_classes, data.y_train
    table = np.stack([np.bincount(y[part], minlength=width) for part in how.parts])  # (K, C)
    held = np.array([len(part) for part in how.held_out])
    owned = (table > 0).sum(1)
    facts = {
        "partition": how.partition.name,
        "names": list(how.names),
        "counts": table.tolist(),
        "held_out": held.tolist(),
        "samples": _range(table.sum(1)),
        "owned_classes": _range(owned),
        "gini": round(float(np.mean([gini(row) for row in table])), 4),
        "effective_classes": round(float(np.mean([effective(row) for row in table])), 3),
        "size_gini": round(gini(table.sum(1)), 4),
        "missing_share": round(float((table == 0).mean()), 4),
    }
    return facts, _client_warnings(data, how, table, held)


def _client_warnings(data: Dataset, how: Division, table: NDArray[Any], held: NDArray[Any]) -> list[str]:
    found, has = not_divided(data, how.parts, how.held_out, how.names, float(held.any())), (table > 0).astype(np.int64)
    if single := [name for name, row in zip(how.names, has, strict=True) if row.sum() == 1]:
        found.append(f"clients with one class only, whose own model has nothing to decide: {_some(single)}")
    if len(table) > 1:
        shared = has @ has.T
        np.fill_diagonal(shared, 0)
        if alone := [name for name, row in zip(how.names, shared, strict=True) if not row.any()]:
            found.append(f"clients that share no class with any other: {_some(alone)}")
        pairs = len(table) * (len(table) - 1) // 2
        apart = pairs - int((shared > 0).sum()) // 2
        if apart:
            found.append(f"{apart:,} of {pairs:,} pairs of clients have no class in common")
        if rare := [c for c, n in zip(data.classes, has.sum(0), strict=True) if n == 1]:
            found.append(f"classes that one client alone has: {_some(rare)}")
    if held.any():
        if small := [name for name, n in zip(how.names, held, strict=True) if n < FEW_HELD]:
            found.append(f"clients with fewer than {FEW_HELD} held-out samples, whose figures are luck: {_some(small)}")
        digests = _digests(data.x_train)
        trained = {digests[i] for part in how.parts for i in part}
        aside, used = np.concatenate(how.held_out), np.concatenate(how.parts)
        same = np.array([digests[i] in trained for i in aside], bool)
        if both := int(same.sum()):
            found.append(f"{both:,} held-out samples are exact copies of training samples: results are too good")
        near = near_copies(data.x_train, aside[~same], data.x_train, used, data.preprocessing)
        found += _near(near, "held-out samples", "training samples")
    return found


def _range(values: NDArray[Any]) -> dict[str, float]:
    return {"least": int(values.min()), "median": float(np.median(values)), "most": int(values.max())}


def _some(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
