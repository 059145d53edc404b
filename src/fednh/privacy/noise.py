"""Where noise and drawn samples come from: seeded streams in a simulation, the operating system in a deployment.

Whoever knows the noise can subtract it, and whoever knows which samples were drawn, or how they were augmented, gains
nothing from sampling. So a real site draws all from the operating system, whose numbers no seed in a config gives away;
a simulation draws all from streams with an address, so that its results can be repeated.
"""

from __future__ import annotations

import os
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fednh.seeding import torch_rng


class Noise(Protocol):
    """One client's randomness in one round."""

    def gaussian(self, shape: torch.Size | tuple[int, ...]) -> Tensor:
        """Independent standard normal numbers."""

    def chosen(self, samples: int, rate: float) -> Tensor:  # (n,)
        """The numbers of the samples that are in a step: each of them with chance `rate`, independently."""

    def once(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Standard normal numbers for a value that a client releases once in a run."""

    def augmenting(self, seeded: torch.Generator) -> torch.Generator:
        """What crops, flips and views of samples are drawn from, in place of the run's stream."""


class SeededNoise:
    """A simulated client's: the same for every number of workers, and again after an interruption."""

    def __init__(self, seed: int, round_: int, client: int, purpose: str = "privacy"):
        self._seed, self._client = seed, client
        self._rng = torch_rng(seed, purpose, round_, client)

    def gaussian(self, shape: torch.Size | tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self._rng)

    def chosen(self, samples: int, rate: float) -> Tensor:
        return torch.nonzero(torch.rand(samples, generator=self._rng, dtype=torch.float64) < rate).flatten()

    def once(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=torch_rng(self._seed, f"privacy {name}", self._client))

    def augmenting(self, seeded: torch.Generator) -> torch.Generator:
        return seeded


class SystemNoise:
    """A real site's: from the operating system's cryptographic generator, by the normal distribution's inverse."""

    def gaussian(self, shape: torch.Size | tuple[int, ...]) -> Tensor:
        from scipy.special import ndtri

        return torch.from_numpy(ndtri(_uniform(int(np.prod(shape))))).to(torch.float32).reshape(shape)

    def chosen(self, samples: int, rate: float) -> Tensor:
        return torch.from_numpy(np.flatnonzero(_uniform(samples) < rate))

    def once(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self.gaussian(shape)

    def augmenting(self, seeded: torch.Generator) -> torch.Generator:
        """A sample more in a step moves the draws of those that follow; unknown ones are the same for neighbours."""
        return torch.Generator().manual_seed(int.from_bytes(os.urandom(8), "little") >> 1)


def _uniform(count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Uniform numbers in (0, 1) of 53 random bits each."""
    bits = np.frombuffer(os.urandom(8 * count), np.uint64) >> np.uint64(11)
    return (bits.astype(np.float64) + 0.5) / 2.0**53
