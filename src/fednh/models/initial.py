"""Initial values of layers that a method adds to the network."""

from __future__ import annotations

import torch
from torch import Tensor


def uniform_weights(shape: tuple[int, ...], fan_in: int, rng: torch.Generator) -> Tensor:
    """The usual initial values of a linear layer: uniform within 1/sqrt(fan_in)."""
    values: Tensor = (torch.rand(shape, generator=rng) * 2 - 1) / fan_in**0.5
    return values
