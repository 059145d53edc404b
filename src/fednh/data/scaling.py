"""From stored values to what a network sees: (v / scale - mean) / std, and a missing value takes the mean.

Decided here for training, evaluation, prediction, exported models and sites, so that all compute the same, to the bit.

Mean and deviation of features are measured on training samples and on nothing else. With natural sites each site
measures its own, so no number of one site depends on another's; the global model's metadata has their mean. Otherwise
all training samples are measured together. Held-out and test samples never are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fednh.data.dataset import Dataset, Inputs
from fednh.data.partitions.base import Indices


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


def measure(x: Inputs, scale: float, preprocessing: dict[str, Any] | None = None) -> Scaling:
    """Of each channel (or feature) of `x / scale`; missing values are passed over, a constant one gets deviation 1.

    The slots of a table's categories stay as they are, 0 or 1.
    """
    channels = x.shape[-1]
    # In blocks, so that a large uint8 set is never held as float64 as a whole.
    blocks = [slice(start, start + 4096) for start in range(0, len(x), 4096)]

    def rows(block: slice) -> NDArray[np.float64]:
        return x[block].reshape(-1, channels).astype(np.float64)

    there = sum((np.isfinite(rows(b)).sum(axis=0) for b in blocks), np.zeros(channels, np.int64))
    count = np.maximum(there, 1)
    mean = sum((np.nansum(rows(b), axis=0) for b in blocks), np.zeros(channels)) / count
    variance = sum((np.nansum(np.square(rows(b) - mean), axis=0) for b in blocks), np.zeros(channels)) / count
    mean, std = mean / scale, np.sqrt(variance) / scale
    std[std == 0] = 1.0
    slots = category_slots(preprocessing or {})
    mean[slots], std[slots] = 0.0, 1.0
    return Scaling(tuple(mean.tolist()), tuple(std.tolist()))


def category_slots(preprocessing: dict[str, Any]) -> list[int]:
    """Which features of a table are one-hot slots; a category has one for each value and one for all others."""
    found: list[int] = []
    at = 0
    for column in preprocessing.get("columns", []):
        width = len(column["values"]) + 1 if column["kind"] == "category" else 1
        found += range(at, at + width) if column["kind"] == "category" else []
        at += width
    return found


def average(scalings: Sequence[Scaling]) -> Scaling:
    """Each site counts once, whatever its size."""
    mean, std = (np.mean(column, axis=0).tolist() for column in zip(*scalings, strict=True))
    return Scaling(tuple(mean), tuple(std))


def apply(x: Inputs, scale: float, scaling: Scaling) -> NDArray[np.float32]:  # (N, F)
    """Vectors scaled by these statistics, as the network sees them."""
    gain, shift, centre = constants(scale, *scaling)
    stored = torch.from_numpy(np.ascontiguousarray(x))
    found: NDArray[np.float32] = floats(filled(stored, centre), gain, shift).numpy()
    return found


def restore(seen: NDArray[Any], scale: float, scaling: Scaling) -> NDArray[np.float64]:
    """The stored values, channels last, of which a network that scales by these statistics sees `seen`."""
    stored: NDArray[np.float64] = (seen * np.array(scaling.std) + np.array(scaling.mean)) * scale
    return stored


def measured_by_sites(data: Dataset, natural: bool) -> bool:
    """Whether each site scales inputs by its own statistics: features yes; channels are scaled equally everywhere."""
    return natural and data.fitted and not data.is_image


def fit(
    data: Dataset, parts: Sequence[Indices], held_out: Sequence[Indices], by_site: bool
) -> tuple[Dataset, tuple[Scaling, ...]]:
    """The data set with statistics of training samples alone, and with natural sites the scaling of each site.

    A test sample is scaled by the statistics of its site, or by the sites' mean if its site is not known.
    """
    if not measured_by_sites(data, by_site):
        if data.fitted and sum(map(len, parts)) < len(data.y_train):  # some are held out, or left out
            mean, std = measure(data.x_train[np.concatenate(parts)], data.scale, data.preprocessing)
            data = replace(data, mean=mean, std=std)
        return data, ()
    own = tuple(measure(data.x_train[part], data.scale, data.preprocessing) for part in parts)
    x_train = np.empty(data.x_train.shape, np.float32)
    for part, held, scaling in zip(parts, held_out, own, strict=True):
        rows = np.concatenate([part, held])
        x_train[rows] = apply(data.x_train[rows], data.scale, scaling)
    x_test = apply(data.x_test, data.scale, average(own))
    if data.site_test is not None:
        for site, scaling in enumerate(own):
            there = data.site_test == site
            x_test[there] = apply(data.x_test[there], data.scale, scaling)
    width = len(own[0].mean)
    return replace(data, x_train=x_train, x_test=x_test, mean=(0.0,) * width, std=(1.0,) * width, scale=1.0), own
