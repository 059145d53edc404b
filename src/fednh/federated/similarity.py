"""Novelty of an input, for methods whose logits are cosines: the cosine to the nearest class prototype.

A training input lies near its class's prototype; an input of an unknown class usually lies farther from all. Quantiles
of the training samples' similarities are stored with the model: an input below the 5% quantile is less similar to
every class than 95% of the samples that the model was trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fednh.data.batches import EVAL_BATCH, Samples
from fednh.interrupt import no_progress
from fednh.methods.base import Method
from fednh.models.net import Net
from fednh.seeding import numpy_rng
from fednh.tree import Tree, canonical

QUANTILES = (0.01, 0.05)
FEWEST = 20  # samples that a client needs to report quantiles: with fewer they would reveal single samples
MOST = 2000  # training samples used: enough for quantiles, without a pass over a large set


def similarity(method: Method, params: Tree, logits: Tensor) -> Tensor | None:  # (B, C) -> (B,)
    """The cosine to the nearest prototype; None for a method whose logits are something else."""
    return _cosine(params, logits) if method.cosine else None


def _cosine(params: Tree, logits: Tensor) -> Tensor:  # (B, C) -> (B,)
    """The largest cosine; a personal model's prior and temperature are not part of the similarity."""
    scaled = (logits - params["prior"] if "prior" in params else logits).max(1).values
    return (scaled * params["temperature"] if "temperature" in params else scaled) / params["scale"]


def sample_count(method: Method, samples: int) -> int:
    """How many of a client's `samples` samples `look` uses."""
    return min(samples, MOST) if method.cosine else 0


@torch.no_grad()
def similarity_quantiles(
    method: Method,
    net: Net,
    params: Tree,
    samples: Samples,
    index: NDArray[np.int64],
    seed: int,
    tick: Callable[[int], None] = no_progress,
) -> dict[str, Any] | None:
    """The entry in a model's metadata: quantiles of the similarities of up to `MOST` of the samples at `index`.

    `tick` is called before every batch.
    """
    if not method.cosine or len(index) == 0:
        return None
    if len(index) > MOST:
        index = np.sort(numpy_rng(seed, "novelty").choice(index, MOST, replace=False))
    params = canonical(params)
    similarities = []
    for rows in torch.split(torch.from_numpy(index).to(samples.x.device), EVAL_BATCH):
        tick(len(rows))
        logits = method.scores(net, params, samples.floats(samples.x[rows]))
        similarities.append(_cosine(params, logits))
    values = torch.cat(similarities).cpu().to(torch.float64)
    levels = torch.quantile(values, torch.tensor(QUANTILES, dtype=torch.float64)).tolist()
    return {
        "score": "cosine to the nearest prototype",
        "samples": len(index),
        "quantiles": {f"{q:g}": round(level, 6) for q, level in zip(QUANTILES, levels, strict=True)},
    }


def merged(rows: Iterable[tuple[Sequence[float], int] | None]) -> dict[str, Any] | None:
    """The same where only clients have samples: the mean of their quantiles, sites by the samples used."""
    sites = [(levels, min(samples, MOST)) for levels, samples in filter(None, rows)]
    total = sum(samples for _, samples in sites)
    if not total:
        return None
    means = [sum(levels[k] * samples for levels, samples in sites) / total for k in range(len(QUANTILES))]
    quantiles = {f"{q:g}": round(level, 6) for q, level in zip(QUANTILES, means, strict=True)}
    return {"score": "cosine to the nearest prototype", "samples": total, "quantiles": quantiles, "sites": len(sites)}
