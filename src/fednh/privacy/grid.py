"""Uploads on a grid of whole numbers, modulo 2^64: sums of them are exact, and masks can hide them completely.

A tensor without noise has steps of 2^-30, so that rounding moves a site's number by at most 2^-31 (5e-10): less than
float32 does above 0.004. Numbers leave room for the sum over all sites, up to 2^62 steps: 4e9 over the number of sites.

A tensor with noise lies on a grid of its own, whose step is so fine that a site's noise has a standard deviation of
2^20 steps or more. `noise` is the multiplier that the account names, for a sum of L2 sensitivity `sensitivity` over all
d numbers of these tensors. A record that comes or goes moves the rounded numbers by at most

    sensitivity * (1 + LONGER) / step + sqrt(d)  steps,

because rounding moves the number with it and the one without it by half a step each, in opposite directions at worst
(sqrt(d) / 2 holds where what is taken away is a whole number already, as in Kairouz et al., ICML 2021). So with any
`threshold` sites in the sum, each adds discrete Gaussian noise of variance noise^2 times that, squared, over
`threshold`. More sites add more noise, never less. Sums of discrete noise of sigma steps differ from rounded Gaussian
noise by a total variation below 0.03 / sigma^2 * sqrt(d) (exactly computed in the tests), which is 3e-14 * sqrt(d) for
2^20 steps: the account's epsilon is that of the Gaussian mechanism, at a delta larger by (1 + exp(epsilon)) times that.
LONGER is for features of length 1 whose length was rounded in float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fednh.privacy.discrete_gaussian import LARGEST, Bytes, discrete_gaussian
from fednh.tree import Tree

Words = NDArray[np.uint64]
Specs = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # what a Tree looks like: name -> shape and type

STEP = 2.0**-30  # without noise
ROOM = 2.0**62  # steps that a sum may have, noise aside
FINE = 2.0**20  # steps of a site's noise, at least
LONGER = 2.0**-20  # by which a vector of length 1 may be longer
WORD = 8  # bytes of a number on the grid


@dataclass(frozen=True)
class NoisySum:
    """Tensors of an upload that are one release of the account."""

    names: tuple[str, ...]
    noise: float  # the multiplier: standard deviation over sensitivity
    sensitivity: float  # how far a record moves all of them together, in L2


@dataclass(frozen=True)
class Part:
    """How one tensor lies on the grid."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    step: float  # a power of two
    sigma: int = 0  # of one site's noise, in steps

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Grid:
    """The form of a round's summands: all sites compute the same one."""

    parts: Mapping[str, Part]
    sites: int  # that may be in the sum

    @classmethod
    def of(cls, specs: Specs, sites: int, threshold: int, noisy: Sequence[NoisySum] = ()) -> Grid:
        parts = {name: Part(shape, dtype, STEP) for name, (shape, dtype) in sorted(specs.items())}
        for release in noisy:
            numbers = sum(parts[name].size for name in release.names)
            step, sigma = share_of_noise(release, numbers, threshold)
            parts |= {name: Part(parts[name].shape, parts[name].dtype, step, sigma) for name in release.names}
        return cls(parts, sites)

    @property
    def size(self) -> int:
        """How many numbers a summand has."""
        return sum(part.size for part in self.parts.values())

    def words(self, tree: Tree, random: Bytes) -> Words:
        """A site's summand: rounded, with its share of noise; ValueError if a number lies beyond the grid."""
        pieces = [np.zeros(0, np.uint64)]
        for name, part in self.parts.items():
            values = tree[name].detach().double().reshape(-1).cpu().numpy()
            most = ROOM / self.sites * part.step
            if not np.all(np.abs(values) < most):  # also if it is not finite
                raise ValueError(f"a number of {name} is beyond {most:.3g}, the end of the grid, or not finite")
            whole = np.rint(values / part.step).astype(np.int64)
            if part.sigma:
                whole += discrete_gaussian(part.sigma, part.size, random)
            pieces.append(whole.view(np.uint64))
        return np.concatenate(pieces)

    def tree(self, total: Words) -> Tree:
        """The sums that a sum of summands stands for."""
        if total.shape != (self.size,):
            raise ValueError(f"{len(total)} numbers where {self.size} belong")
        whole, at, tree = total.view(np.int64), 0, {}
        for name, part in self.parts.items():
            values: Any = whole[at : at + part.size].astype(np.float64) * part.step
            tree[name] = torch.from_numpy(values).reshape(part.shape).to(part.dtype)
            at += part.size
        return tree


def share_of_noise(release: NoisySum, numbers: int, threshold: int) -> tuple[float, int]:
    """The step of a noisy sum, and the standard deviation, in steps, of the noise of each of `threshold` sites."""
    share = release.noise * release.sensitivity / math.sqrt(threshold)
    step = 2.0 ** (math.frexp(share / FINE)[1] - 1)  # share / step lies between FINE and twice that
    moved = release.sensitivity * (1 + LONGER) / step + math.sqrt(numbers)
    sigma = math.ceil(release.noise * moved / math.sqrt(threshold))
    if sigma > LARGEST:
        raise ValueError(f"{numbers} numbers are too many for a noise multiplier of {release.noise:g} on the grid")
    return step, sigma
