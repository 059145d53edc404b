"""The inputs of a linear layer from its update, where everything is known."""

from __future__ import annotations

import numpy as np
import torch

from fednh.attacks import layers
from fednh.attacks.images import remains
from fednh.methods.fit import Sgd


def made(samples: int, units: int, inputs: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """An update of a ReLU layer: each unit is silent for about half of the samples."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(samples, inputs))
    taken = rng.normal(size=(units, samples)) * (rng.random((units, samples)) < 0.5)
    return torch.from_numpy(taken @ np.column_stack([x, np.ones(samples)])), torch.from_numpy(x)


def nearest(found: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.cdist(x, found).min(1).values


def test_a_single_sample_is_the_ratio_of_weight_and_bias():
    update, x = made(1, 20, 6)
    found = layers.inputs(update, 1, np.random.default_rng(0), 1)
    assert found is not None
    assert torch.allclose(found[0], x)


def test_every_sample_comes_back_exactly():
    update, x = made(8, 128, 64)
    assert layers.rank(update) == 8
    found = layers.inputs(update, 8, np.random.default_rng(0), 512)
    assert found is not None
    assert float(nearest(found[0], x).max()) < 1e-6


def test_noise_or_too_many_samples_leave_nothing():
    update, _ = made(8, 128, 64)
    noise = torch.from_numpy(np.random.default_rng(1).normal(size=update.shape))
    assert layers.inputs(update + noise, 8, np.random.default_rng(0), 128) is None
    assert layers.rank(update + noise) == 0
    many, _ = made(80, 128, 64)
    assert layers.inputs(many, 80, np.random.default_rng(0), 128) is None


def test_the_same_draws_give_the_same_numbers():
    """To rounding: the last bits of LAPACK depend on where in memory a matrix lies."""
    update, _ = made(8, 128, 64)
    one, other = (layers.inputs(update, 8, np.random.default_rng(3), 512) for _ in range(2))
    assert one is not None
    assert other is not None
    torch.testing.assert_close(one[0], other[0], rtol=0, atol=1e-12)


def test_weight_decay_alone_shrinks_by_what_remains():
    sgd = Sgd(lr=0.1, momentum=0.5, weight_decay=0.2, clip=0.0, batch_size=4, epochs=2)
    # v1 = 0.2, w1 = 0.98; v2 = 0.1 + 0.196 = 0.296, w2 = 0.9504: two steps of a client with 4 samples
    assert abs(remains(sgd, 4) - 0.9504) < 1e-12
