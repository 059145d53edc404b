"""What a method is given in place of a client's data under privacy.level = "sample": only numbers that are noised.

A method's `client_update` gets this and a private `fit` (private_fit.py), and nothing else that depends on a sample. So
all that it makes of them, what it uploads and what it keeps, is covered by the account, whatever the method is. It need
declare nothing; one that asks for more is refused.

`PrivateData` offers class counts and class sums of unit representations. One sample more or less changes one count, or
the sum of one class by a vector of length 1 at most: both have sensitivity 1, whatever the number of classes. Counts,
and the number of samples, are drawn once in a run and kept by the client under PRIVATE.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.func import vmap

from fednh.data.batches import ClientData
from fednh.errors import ConfigError
from fednh.methods.optimizers import FitSettings
from fednh.privacy.accounting import Release
from fednh.privacy.grid import NoisySum
from fednh.privacy.noise import Noise
from fednh.privacy.sample_gradients import MappedNorm
from fednh.tree import Tree

PRIVATE = "privacy"  # the name of noised counts in a client's kept Tree
GRADIENTS, SUMS, COUNTS, SAMPLES = "gradients", "class sums", "class counts", "number of samples"


def left_to_sum(names: Sequence[str], mechanisms: Mechanisms | None) -> tuple[NoisySum, ...]:
    """The noise of class sums, these parts of an upload, as a secure sum adds it: each is a release of its own."""
    return () if mechanisms is None else tuple(NoisySum((name,), mechanisms.sums, 1.0) for name in names)


@dataclass(frozen=True)
class Mechanisms:
    """How much noise a client adds, and to what: the same for all clients of a run."""

    clip: float  # the largest norm of a sample's gradient
    rate: float  # the chance of a sample to be in a step
    gradients: float  # noise multipliers: of a step,
    sums: float  # of class sums,
    counts: float  # and of class counts and of the number of samples

    def steps(self, settings: FitSettings, epochs: float | None) -> int:
        """Steps of one fit: 1 / rate an epoch, however many samples a client has."""
        if epochs is None and settings.steps is not None:
            return settings.steps
        return math.ceil((settings.epochs if epochs is None else epochs) / self.rate - 1e-9)

    def denominator(self, samples: Tensor) -> Tensor:  # (...) -> (...)
        """What a step's sum is divided by: the samples that it is expected to have, from their noised number."""
        return (self.rate * samples).clamp(min=1.0)

    def of_fit(self, settings: FitSettings, epochs: float | None) -> Release:
        return Release(GRADIENTS, self.gradients, self.rate, self.steps(settings, epochs))


class PrivateData:
    """One client's data as a method sees them. `spent` has what it was told, as releases.

    With `left_to_sum` class sums, kept in `exact`, have no noise yet: a secure sum adds it before they leave.
    """

    def __init__(self, data: ClientData, mechanisms: Mechanisms, noise: Noise, kept: Tree, left_to_sum: bool = False):
        self.raw, self.mechanisms, self.noise, self.kept = data, mechanisms, noise, dict(kept)
        self.spent: list[Release] = []
        self.left_to_sum, self.exact = left_to_sum, list[Tensor]()

    @property
    def counts(self) -> Tensor:  # (C,)
        """Noised class counts; none is below 1, so that every class has a share."""
        return self._once(COUNTS, self.raw.counts).clamp(min=1.0)

    @property
    def share(self) -> Tensor:  # (C,)
        return self.counts / self.counts.sum()

    @property
    def samples(self) -> Tensor:  # ()
        """The noised number of samples."""
        return self._once(SAMPLES, self.raw.counts.sum())

    def class_sums(self, features: Callable[[Tensor], Tensor]) -> Tensor:  # (C, D)
        """For each class the noised sum of the features (B, D) of its samples, none of them longer than 1."""
        total = self.raw.class_sums(short(features))
        self.spent.append(Release(SUMS, self.mechanisms.sums))
        if self.left_to_sum:
            self.exact.append(total)
            return total
        return total + self.mechanisms.sums * self.noise.gaussian(tuple(total.shape)).to(total)

    def left(self, upload: Tree, names: Sequence[str]) -> Tree:
        """These parts of an upload, which the method says are class sums as they are, without any rounding of it."""
        parts = {}
        for name in names:
            sums = [total for total in self.exact if torch.equal(total.to(upload[name]), upload[name])]
            if not sums and upload[name].any():
                raise ConfigError(f"the part {name} of its upload is not data.class_sums as they are")
            parts[name] = sums[0] if sums else upload[name]
        return parts

    def _once(self, name: str, value: Tensor) -> Tensor:
        key = name.replace(" ", "_")
        if key not in self.kept:
            self.spent.append(Release(name, self.mechanisms.counts))
            noise = self.noise.once(name, tuple(value.shape)).to(value)
            self.kept[key] = value + self.mechanisms.counts * noise
        return self.kept[key]

    def __getattr__(self, name: str) -> Any:
        refuse_use(f"data.{name}")

    def __len__(self) -> NoReturn:
        refuse_use("len(data)")


def refuse_use(name: str) -> NoReturn:
    """Refuse a part of `ClientData` that no account covers."""
    raise ConfigError(
        f"it reads {name}, which depends on single samples and is not noised; under privacy.level = 'sample' a "
        f"method can use data.counts, data.share, data.class_sums and fit"
    )


def refuse_batchwise() -> NoReturn:
    raise ConfigError(
        "its loss looks at a batch as a whole, so that one sample changes the gradients of others and no noise of a "
        "fixed size hides it"
    )


def short(features: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The same features, computed from each sample alone; one that is longer than 1 is scaled to length 1."""

    def bounded(x: Tensor) -> Tensor:  # (B, ...) -> (B, D)
        with MappedNorm():
            h = vmap(lambda one: features(one[None])[0])(x)
        h = h / h.norm(dim=1, keepdim=True).clamp(min=1.0)
        return torch.where(h.isfinite().all(1, keepdim=True), h, 0.0)

    return bounded
