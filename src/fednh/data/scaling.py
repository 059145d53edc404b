"""From stored values to what a network sees: (v / scale - mean) / std, and a missing value takes the mean.

Decided here for training, evaluation, prediction, exported models and sites, so that all compute the same, to the bit.

A run has one mean and one deviation of every feature: all its models have them, global and personal, at every site. So
what was measured is what a saved model computes, wherever it is used. With natural sites each site measures its own
samples, and `agreed` makes one of what they say; sites of a deployed federation do the same over the wire. Without
natural sites the training samples are measured together. Test samples are never measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fednh.data.dataset import Dataset, Inputs
from fednh.data.partitions import Indices

EPSILON = float(np.finfo(np.float32).eps)  # a smaller share of the mean is lost in float32


class Scaling(NamedTuple):
    """A feature or channel `v` becomes `(v / scale - mean) / std`."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


class Constants(NamedTuple):
    """A normalisation as tensors, one value a channel or feature."""

    gain: Tensor
    shift: Tensor
    centre: Tensor  # the stored value that stands for a missing one


def constants(scale: float, mean: Sequence[float], std: Sequence[float]) -> Constants:
    """(v / scale - mean) / std as v * gain + shift."""
    centre, width = torch.tensor(mean), torch.tensor(std).clamp(min=1e-8)
    return Constants(1 / (scale * width), -centre / width, centre * scale)


def filled(stored: Tensor, centre: Tensor) -> Tensor:
    """Missing values (NaN) take the mean; images have none."""
    return torch.where(stored.isnan(), centre, stored) if stored.is_floating_point() else stored


def floats(stored: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    """What a network sees of samples without gaps; images as (B, C, H, W) in channels_last order, without a copy."""
    out = stored.to(torch.float32).mul_(gain) if stored.dtype == torch.uint8 else stored * gain
    out = out.add_(shift)
    return out.permute(0, 3, 1, 2) if out.ndim == 4 else out


def statistics(x: Inputs, scale: float, preprocessing: dict[str, Any] | None = None, fewest: int = 1) -> Scaling:
    """What one holder of samples says of each channel (or feature) of `x / scale`; missing values are passed over.

    A feature that does not vary here has deviation 0; one that fewer than `fewest` samples have counts as missing in
    all of them: mean 0 and deviation -1. One in which fewer differ from the value that most have counts as constant: of
    a single one, mean and deviation would tell the value. The slots of a table's categories stay as they are, 0 or 1.
    """
    channels = x.shape[-1]
    # In blocks, so that a large uint8 set is never held as float64 as a whole.
    blocks = [slice(start, start + 4096) for start in range(0, len(x), 4096)]

    def rows(block: slice) -> NDArray[np.float64]:
        return x[block].reshape(-1, channels).astype(np.float64)

    present = sum((np.isfinite(rows(b)).sum(axis=0) for b in blocks), np.zeros(channels, np.int64))
    count = np.maximum(present, 1)
    mean = sum((np.nansum(rows(b), axis=0) for b in blocks), np.zeros(channels)) / count
    variance = sum((np.nansum(np.square(rows(b) - mean), axis=0) for b in blocks), np.zeros(channels)) / count
    for k in range(channels if fewest > 1 and x.ndim == 2 else 0):
        values = x[:, k][np.isfinite(x[:, k])]
        median = np.median(values) if len(values) else np.float64(0)
        others = np.count_nonzero(values != median)
        if others < fewest and 2 * others < len(values):
            mean[k], variance[k] = median, 0.0
    mean, std = mean / scale, np.sqrt(variance) / scale
    mean[present < fewest], std[present < fewest] = 0.0, -1.0
    slots = category_slots(preprocessing or {})
    mean[slots], std[slots] = 0.0, 1.0
    return Scaling(tuple(mean.tolist()), tuple(std.tolist()))


def measure(x: Inputs, scale: float, preprocessing: dict[str, Any] | None = None) -> Scaling:
    """The scaling of samples that one holder has: a feature that is constant or missing gets deviation 1."""
    return agreed([statistics(x, scale, preprocessing)])


def agreed(said: Sequence[Scaling]) -> Scaling:
    """One scaling of all sites, from the statistics of each; a site counts once, whatever its size.

    The mean is the median of the sites' means. The deviation is the median of the sites' deviations from that mean, so
    a feature whose level differs from site to site is scaled by these differences too. A site without any value of a
    feature does not count for it. With three or more sites the median bounds the influence of any single one; of two it
    is the average. If all sites say the same, the result is exactly that.
    """
    means, stds = (zip(*column, strict=True) for column in zip(*said, strict=True))  # (sites, features), transposed
    mean, std = zip(*map(_agreed, means, stds), strict=True)
    return Scaling(mean, std)


def _agreed(means: Sequence[float], stds: Sequence[float]) -> tuple[float, float]:
    """The mean and deviation of one feature."""
    known = [(mean, std) for mean, std in zip(means, stds, strict=True) if std >= 0]
    if not known:
        return 0.0, 1.0
    centre = median(mean for mean, _ in known)
    widths = [math.hypot(std, mean - centre) for mean, std in known]
    width = median(widths) or max(widths)  # at most sites the feature has one and the same value
    return centre, max(width, EPSILON * abs(centre)) if width else 1.0


def feature_slices(preprocessing: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], slice]]:
    """The columns of a table, and the features that each becomes.

    A category has a slot for each value and one for all others; a number is one feature, and perhaps a second one, its
    indicator, which is 1 where the number is missing.
    """
    start = 0
    for column in preprocessing.get("columns", []):
        width = len(column["values"]) + 1 if column["kind"] == "category" else 1 + column.get("indicator", False)
        yield column, slice(start, start + width)
        start += width


def category_slots(preprocessing: Mapping[str, Any]) -> list[int]:
    """Which features of a table are slots that are 0 or 1 and are not scaled: those of categories, and indicators."""
    return [
        slot
        for column, features in feature_slices(preprocessing)
        for slot in range(features.start + (column["kind"] == "number"), features.stop)
    ]


def restore(seen: NDArray[Any], scale: float, scaling: Scaling) -> NDArray[np.float64]:
    """The stored values, channels last, of which a network that scales by these statistics sees `seen`."""
    stored: NDArray[np.float64] = (seen * np.array(scaling.std) + np.array(scaling.mean)) * scale
    return stored


def fit(
    data: Dataset, parts: Sequence[Indices], held_out: Sequence[Indices], by_site: bool
) -> tuple[Dataset, tuple[Scaling, ...]]:
    """The data set with the mean and deviation that the run uses, and with natural sites what each site measured.

    A site measures all its samples but those of the test set: if held-out ones did not count, the statistics for two
    divisions would tell single samples apart. Clients that are not sites measure what they train on, together.
    """
    if not data.fitted:
        return data, ()
    if by_site:
        both = [np.concatenate(rows) for rows in zip(parts, held_out, strict=True)]
        said = tuple(statistics(data.x_train[np.sort(rows)], data.scale, data.preprocessing) for rows in both)
        return replace(data, **agreed(said)._asdict()), said
    if sum(map(len, parts)) < len(data.y_train):  # some are held out, or left out
        measured = measure(data.x_train[np.concatenate(parts)], data.scale, data.preprocessing)
        data = replace(data, **measured._asdict())
    return data, ()
