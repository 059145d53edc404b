"""What is in a data set and how it would be divided: counts, measures of imbalance, and warnings of problems.

Identifiers: features that number rows or people, and times, which a model can learn by heart. An increasing number in a
file that is sorted by class gives away the class of every held-out row, and of no new one.

Near copies: samples that are nearly the same on both sides of a split, such as an image saved again or a row measured
twice. Images are compared as grey pictures of at most 16x16 pixels, whatever their brightness and contrast; rows by
their standardised numbers, where their categories are the same. Of large sets a sample is compared, so the time is
bounded.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fednh.data.dataset import Dataset, Inputs
from fednh.data.partitions import Indices, Partition, left_out
from fednh.data.scaling import category_slots, feature_slices, measure
from fednh.data.splits import not_divided
from fednh.seeding import numpy_rng
from fednh.text import some

FEW = 10  # samples of a class: with fewer, its accuracy is mostly chance
FEW_HELD = 10  # held-out samples of a client: with fewer, its metrics are mostly chance

# Identifiers
LEAST = 20  # rows; with fewer, everything looks like one
NUMBER_START = 1000  # rows that rule most features out
PER_STEP = 3  # rows that one value of an ordered column may have, on average
PER_NAME = 20  # rows that one value of a column with a telling name may have, on average
_WHOSE = "row|record|case|patient|person|subject|sample|customer|user|member|serial|invoice|order|entry|line"
_TELLING = re.compile(
    rf"(^|[^a-z])(id|ids|uuid|guid)$|^({_WHOSE})?[^a-z]*(nr|no|num|number|idx|index|key|name)$|^unnamed\b|^$",
    re.IGNORECASE,
)
_CAMEL = re.compile(r"[a-z](Id|ID|Nr|No)$")

# Near copies
MOST, MOST_OTHERS = 2_000, 20_000  # samples that are compared, and samples that each is compared with
MOST_VALUES = 20_000_000  # numbers in all, of rows
SIDE = 16  # pixels
ALIKE = 0.998  # the least correlation of images that are nearly the same
CLOSE = 0.02  # the largest distance of rows that are, in standard deviations, on average over the numbers
FINE = 20  # a number with so many different values tells rows apart
CHANCE = 1e-4  # how often a row may have a near one by chance: in few dimensions rows are close anyway
BLOCK = 500

Near = Callable[[slice], NDArray[np.bool_]]  # which of these rows is near to which of the others


def number_identifiers(
    values: NDArray[np.float64], name: str = "x", site: NDArray[np.int64] | None = None
) -> str | None:
    """Why a feature of numbers looks like an identifier, or None; `site` has the sites of the rows."""
    if not possible_identifier(values[:NUMBER_START]):
        return None
    finite = np.isfinite(values)
    values = values[finite]
    if len(values) < LEAST:
        return None
    if _steady(values):
        return "rises or falls from row to row"
    if not _whole(values):
        return None
    if _counts(values):
        return "is a number of its own in every row"
    if site is not None and _counts_sites(values, site[finite]):
        return "numbers the rows of every site"
    return _telling_name(name, len(np.unique(values)), len(values))


def possible_identifier(start: NDArray[np.floating[Any]]) -> bool:
    """Whether a feature may be one, by its first rows."""
    values = start[np.isfinite(start)]
    return _whole(values) or _steady(values)


def word_identifiers(different: int, rows: int, name: str) -> str | None:
    """Why a text column looks like an identifier, or None."""
    if rows >= LEAST and 2 * different > rows:
        return "has a word of its own in most rows"
    return _telling_name(name, different, rows)


def identifier_warning(where: str, what: str, reasons: Iterable[tuple[str, str | None]], remedy: str) -> list[str]:
    """One warning on all features that have a reason."""
    named = [f"{name!r} ({why})" for name, why in reasons if why]
    words = f"{where}: {what} that look like identifiers, which a model learns by heart"
    return [f"{words}: {some(named)}; {remedy}"] if named else []


def vector_identifiers(x: Inputs, where: str, site: NDArray[np.int64] | None) -> list[str]:
    """A warning of features without names that look like identifiers."""
    possible = [k for k in range(x.shape[1]) if possible_identifier(x[:NUMBER_START, k].astype(np.float64))]
    reasons = ((str(k), number_identifiers(x[:, k].astype(np.float64), "x", site)) for k in possible)
    return identifier_warning(where, "features", reasons, "leave them out")


def _telling_name(name: str, different: int, rows: int) -> str | None:
    """The reason, if a column with many values is named as identifiers are."""
    called = _TELLING.search(name.strip()) or _CAMEL.search(name.strip())
    return "is called so" if called and different >= LEAST and different * PER_NAME >= rows else None


def _whole(values: NDArray[np.float64]) -> bool:
    return bool((values == np.floor(values)).all())


def _steady(values: NDArray[np.float64]) -> bool:
    """Whether they rise or fall throughout; a few rows in a row may have the same one, as those of one patient."""
    step = np.diff(values)
    ordered = bool((step >= 0).all() or (step <= 0).all())
    return ordered and PER_STEP * (int(np.count_nonzero(step)) + 1) >= len(values)


def _counts(values: NDArray[np.float64]) -> bool:
    """Whether all are different, with few gaps."""
    dense = len(values) >= LEAST and bool(np.ptp(values) < 2 * len(values))
    return dense and len(np.unique(values)) == len(values)


def _counts_sites(values: NDArray[np.float64], site: NDArray[np.int64]) -> bool:
    sizes: Sequence[int] = np.bincount(site[site >= 0]).tolist()
    large = [k for k, size in enumerate(sizes) if size >= LEAST]
    return bool(large) and all(_counts(values[site == k]) or _steady(values[site == k]) for k in large)


class NearCopies(NamedTuple):
    """How many samples have a near copy among the others, and how many were compared."""

    copies: int
    samples: int
    others: int


def near_copies(x: Inputs, mine: Indices, others: Inputs, theirs: Indices, preprocessing: dict[str, Any]) -> NearCopies:
    """Samples x[mine] with a near copy in others[theirs]; within one array a sample is no copy of itself."""
    rng, most = numpy_rng(0, "near copies"), MOST_OTHERS
    if x.ndim == 2:
        most = min(most, MOST_VALUES // max(x.shape[1], 1))
    mine, theirs = _sample(mine, min(MOST, most), rng), _sample(theirs, most, rng)
    none = NearCopies(0, len(mine), len(theirs))
    if not len(mine) or not len(theirs):
        return none
    if x.ndim == 4:
        near = _near_images(_thumbnails(x, mine), _thumbnails(others, theirs))
    else:
        near = _near_rows(x[mine], others[theirs], preprocessing)
    count = 0
    for start in range(0, len(mine), BLOCK):
        close = near(slice(start, start + BLOCK))
        if x is others:
            close &= mine[start : start + BLOCK, None] != theirs[None]
        count += int(close.any(axis=1).sum())
    by_chance = x.ndim == 2 and count <= 3 * CHANCE * len(mine)
    return none if by_chance else none._replace(copies=count)


def _sample(index: Indices, most: int, rng: np.random.Generator) -> Indices:
    return index if len(index) <= most else np.sort(rng.choice(index, most, replace=False))


def _near_images(one: NDArray[np.float32], two: NDArray[np.float32]) -> Near:
    return lambda rows: one[rows] @ two.T >= ALIKE


def _thumbnails(x: Inputs, index: Indices) -> NDArray[np.float32]:  # (N, P)
    """Small grey pictures of mean 0 and length 1; one without any contrast is 0."""
    edges = [np.unique(np.linspace(0, side, min(side, SIDE) + 1).astype(int)[:-1]) for side in x.shape[1:3]]
    blocks = []
    for start in range(0, len(index), BLOCK):
        grey = x[index[start : start + BLOCK]].astype(np.float32).mean(axis=3)
        for axis, at in enumerate(edges, 1):
            width = np.diff([*at, grey.shape[axis]])
            grey = np.add.reduceat(grey, at, axis=axis) / width.reshape((-1, 1) if axis == 1 else (1, -1))
        flat = grey.reshape(len(grey), -1)
        flat = flat - flat.mean(axis=1, keepdims=True)
        length = np.linalg.norm(flat, axis=1, keepdims=True)
        blocks.append(np.where(length > 1, flat / np.maximum(length, 1), 0).astype(np.float32))
    return np.concatenate(blocks)


def _near_rows(one: Inputs, two: Inputs, preprocessing: dict[str, Any]) -> Near:
    """Rows by their standardised numbers; none is near where too few numbers tell rows apart."""
    slots = set(category_slots(preprocessing))
    numbers = [k for k in range(two.shape[1]) if k not in slots]
    fine = [k for k in numbers if len(np.unique(two[:, k])) > FINE]
    if len(fine) < 2:
        return lambda rows: np.zeros((len(one[rows]), len(two)), bool)
    mean, std = (np.array(each) for each in measure(two, 1.0, preprocessing))

    def standard(x: Inputs) -> NDArray[np.float64]:
        gaps = np.isnan(x[:, numbers]).astype(np.float64)  # a gap is like a gap alone
        return np.concatenate([np.nan_to_num((x - mean) / std), gaps], axis=1)

    a, b = standard(one), standard(two)
    reach = min(CLOSE * math.sqrt(len(numbers)), _by_chance(len(fine), len(two)))
    squares = (a**2).sum(axis=1)[:, None], (b**2).sum(axis=1)[None]

    def near(rows: slice) -> NDArray[np.bool_]:
        close: NDArray[np.bool_] = squares[0][rows] + squares[1] - 2 * a[rows] @ b.T <= max(reach**2, 1e-9)
        return close

    return near


def _by_chance(dimensions: int, rows: int) -> float:
    """The distance within which a normally distributed row finds one of so many others with probability CHANCE."""
    half = dimensions / 2
    ball = math.log(CHANCE / rows) + half * math.log(2 * math.pi) + math.lgamma(half + 1) - half * math.log(math.pi)
    return math.exp(ball / dimensions)


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
        "missing": _missing(data),
        "notes": list(data.notes),
    }
    warnings = [*data.warnings, *_class_warnings(data, train, test), *_exact_duplicates(data)]
    if division is None and not len(data.y_test):
        warnings += _near_duplicates(data)
    if division is not None:
        facts["clients"], more = _clients(data, division)
        if notes := left_out(division.partition, data, division.parts, division.held_out):
            facts["notes"] += notes
            used = np.bincount(data.y_train[np.concatenate([*division.parts, *division.held_out])], minlength=width)
            for row, n in zip(facts["classes"], used.tolist(), strict=True):
                row["used"] = n
        warnings += more
    return {**facts, "warnings": warnings}


def _missing(data: Dataset) -> list[dict[str, Any]]:
    """The columns of a table that lack values in training rows: how many of how many rows, in all and at every site."""
    counts = []
    for column, features in feature_slices(data.preprocessing):
        values = data.x_train[:, features]
        absent = values[:, -1] == 1 if column["kind"] == "category" else np.isnan(values[:, 0])
        if not absent.any():
            continue
        by_site = {
            name: {"missing": int(np.sum(absent[mask])), "rows": int(np.sum(mask))}
            for name, mask in ((name, data.site_train == k) for k, name in enumerate(data.sites))
        }
        counts.append({"column": column["name"], "missing": int(absent.sum()), "rows": len(absent), "sites": by_site})
    return counts


def _class_warnings(data: Dataset, train: NDArray[Any], test: NDArray[Any]) -> list[str]:
    warnings = []
    few = [f"{name} ({n})" for name, n in zip(data.classes, train, strict=True) if 0 < n < FEW]
    none = [name for name, n in zip(data.classes, train, strict=True) if n == 0]
    if few:
        warnings.append(f"classes with fewer than {FEW} training samples, too few to learn: {some(few, 8)}")
    if none:
        warnings.append(f"classes without any training sample: {some(none, 8)}")
    if not len(data.y_test):
        words = "there is no test set: clients hold out some of their samples, and GM, PM(V), PM(L) are not known"
        return [*warnings, words]
    warnings += about_test_set(data)
    if test.min() and test.max() > 1.5 * test.min():
        warnings.append(
            f"the test set is not balanced ({test.min()} to {test.max()} samples a class): GM and PM weigh "
            "classes, not samples, so one sample of a small class weighs much"
        )
    return warnings


def about_test_set(data: Dataset) -> list[str]:
    """Classes that the test set lacks, and classes that only it has: also reported when a run starts."""
    train, test = (np.bincount(y, minlength=data.num_classes) for y in (data.y_train, data.y_test))
    if not test.any():
        return []
    warnings, rows = [], list(zip(data.classes, train, test, strict=True))
    if lacking := [name for name, n, m in rows if n and not m]:
        warnings.append(
            f"classes missing in the test set, which are left out of GM, PM(V) and PM(L): {some(lacking, 8)}"
        )
    if unseen := [f"{name} ({m})" for name, n, m in rows if m and not n]:
        warnings.append(
            f"classes of test samples that no training sample has, so no model knows them: {some(unseen, 8)}"
        )
    return warnings


def _exact_duplicates(data: Dataset) -> list[str]:
    """Samples that are the same to the byte."""
    train, test = _digests(data.x_train), _digests(data.x_test)
    warnings, label = [], dict[bytes, int]()
    conflicting_labels = {d for d, y in zip(train, data.y_train.tolist(), strict=True) if label.setdefault(d, y) != y}
    if copies := len(train) - len(label):
        warnings.append(f"{copies:,} training samples are exact copies of others")
    if conflicting_labels:
        warnings.append(f"{len(conflicting_labels):,} training samples occur under more than one class")
    if copies := len(test) - len(set(test)):
        warnings.append(f"{copies:,} test samples are exact copies of others")
    same = np.array([d in label for d in test], bool)
    if copies := int(same.sum()):
        warnings.append(f"{copies:,} test samples are exact copies of training samples: results on them are too good")
    near = near_copies(data.x_test, np.flatnonzero(~same), data.x_train, np.arange(len(train)), data.preprocessing)
    return [*warnings, *_near_warning(near, "test samples", "training samples")]


def _near_warning(near: NearCopies, what: str, others: str) -> list[str]:
    """A sentence on near copies, with how many samples were compared."""
    if not near.copies:
        return []
    compared = f"{near.copies:,} of {near.samples:,} {what} that were compared with {near.others:,} {others}"
    return [
        f"{compared} are nearly copies of some: results are too good if they show the same person or thing; data.group "
        "keeps such samples together"
    ]


def _near_duplicates(data: Dataset) -> list[str]:
    """Before a division: near copies that holding samples out could separate."""
    counts = Counter(digests := _digests(data.x_train))
    single = np.array([k for k, digest in enumerate(digests) if counts[digest] == 1], np.int64)
    near = near_copies(data.x_train, single, data.x_train, np.arange(len(digests)), data.preprocessing)
    return _near_warning(near, "training samples", "others")


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
    warnings = not_divided(data, how.parts, how.held_out, how.names, float(held.any()))
    has = (table > 0).astype(np.int64)
    if single := [name for name, row in zip(how.names, has, strict=True) if row.sum() == 1]:
        warnings.append(f"clients with one class only, whose own model has nothing to decide: {some(single, 8)}")
    if len(table) > 1:
        shared = has @ has.T
        np.fill_diagonal(shared, 0)
        if alone := [name for name, row in zip(how.names, shared, strict=True) if not row.any()]:
            warnings.append(f"clients that share no class with any other: {some(alone, 8)}")
        pairs = len(table) * (len(table) - 1) // 2
        if apart := pairs - int((shared > 0).sum()) // 2:
            warnings.append(f"{apart:,} of {pairs:,} pairs of clients have no class in common")
        if rare := [c for c, n in zip(data.classes, has.sum(0), strict=True) if n == 1]:
            warnings.append(f"classes that one client alone has: {some(rare, 8)}")
    if held.any():
        if small := [name for name, n in zip(how.names, held, strict=True) if n < FEW_HELD]:
            warnings.append(
                f"clients with fewer than {FEW_HELD} held-out samples, too few to measure: {some(small, 8)}"
            )
        digests = _digests(data.x_train)
        trained = {digests[i] for part in how.parts for i in part}
        aside, used = np.concatenate(how.held_out), np.concatenate(how.parts)
        same = np.array([digests[i] in trained for i in aside], bool)
        if both := int(same.sum()):
            warnings.append(f"{both:,} held-out samples are exact copies of training samples: results are too good")
        near = near_copies(data.x_train, aside[~same], data.x_train, used, data.preprocessing)
        warnings += _near_warning(near, "held-out samples", "training samples")
    return warnings


def _range(values: NDArray[Any]) -> dict[str, float]:
    return {"least": int(values.min()), "median": float(np.median(values)), "most": int(values.max())}
