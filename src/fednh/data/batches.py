"""From shared arrays to batches: one copy of the samples in memory, and each client's view on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fednh.data import scaling
from fednh.data.dataset import Dataset
from fednh.errors import DataError, Refused
from fednh.seeding import torch_rng
from fednh.tree import double

PADDING = 4  # black pixels around an image before a random crop
EVAL_BATCH = 128  # larger ones leave the processor's cache: a third slower for Conv2


def crop_flip(images: Tensor, rng: torch.Generator) -> Tensor:  # uint8 (B, H, W, C) -> the same
    """Augment a whole batch: a random crop after padding, and a horizontal flip with probability 1/2.

    Every sample's rows and columns are chosen by index, so a flip is only a column index that runs backwards.
    """
    batch, height, width, channels = images.shape
    padded = F.pad(images, (0, 0, PADDING, PADDING, PADDING, PADDING))
    offset = torch.randint(2 * PADDING + 1, (2, batch, 1), generator=rng)
    flip = torch.randint(2, (batch, 1), generator=rng)
    column = torch.arange(width)
    rows = offset[0] + torch.arange(height)  # (B, H)
    columns = offset[1] + torch.where(flip == 1, width - 1 - column, column)  # (B, W)
    row_start = (torch.arange(batch)[:, None] * padded.shape[1] + rows) * padded.shape[2]  # (B, H)
    pixel = (row_start[:, :, None] + columns[:, None, :]).flatten().to(images.device)
    return padded.reshape(-1, channels).index_select(0, pixel).view(batch, height, width, channels)


@dataclass(frozen=True)
class Samples:
    """All samples of one split, as they are stored: uint8 images (N, H, W, C) or float vectors (N, F).

    With V `views`, x has V * N rows: after the samples themselves V - 1 other versions of all of them.
    """

    x: Tensor
    y: Tensor  # (N,)
    num_classes: int
    gain: Tensor  # per channel: a float input is v * gain + shift
    shift: Tensor
    augment: bool
    views: int = 1

    def floats(self, stored: Tensor) -> Tensor:
        """Stored values as the network's float inputs."""
        return scaling.floats(stored, self.gain, self.shift)

    def __len__(self) -> int:
        return len(self.y)


def samples_of(data: Dataset, split: str, augment: str = "auto", device: str = "cpu") -> Samples:
    """The "train" or "test" samples of a data set, ready on a device; only training samples are augmented."""
    x, y = (data.x_train, data.y_train) if split == "train" else (data.x_test, data.y_test)
    chosen = data.augment if augment == "auto" else augment
    if chosen == "crop_flip" and not data.is_image and split == "train":
        raise DataError(f"data.augment = 'crop_flip' needs images, but {data.name} holds vectors")
    gain, shift, centre = scaling.constants(data.scale, data.mean, data.std)
    views = data.views if split == "train" else None
    stored = torch.from_numpy(np.ascontiguousarray(x if views is None else np.concatenate([x, *views])))
    gaps = stored.is_floating_point() and bool(stored.isnan().any())  # what has none is not copied
    return Samples(
        x=(scaling.filled(stored, centre) if gaps else stored).to(device),
        y=torch.from_numpy(np.ascontiguousarray(y)).to(device),
        num_classes=data.num_classes,
        gain=gain.to(device),
        shift=shift.to(device),
        augment=chosen == "crop_flip" and split == "train",
        views=1 if views is None else 1 + len(views),
    )


def blank_samples(shape: tuple[int, ...], num_classes: int, device: torch.device | str = "cpu") -> Samples:
    """One sample a class, all zeros: to find out what a method does without any data."""
    stored = shape if len(shape) == 1 else (*shape[1:], shape[0])
    one, zero = torch.ones(1, device=device), torch.zeros(1, device=device)
    x, y = torch.zeros(num_classes, *stored, device=device), torch.arange(num_classes, device=device)
    return Samples(x, y, num_classes, one, zero, augment=False)


def subset(samples: Samples, index: NDArray[np.int64]) -> Samples:
    """Some of the samples, as they are."""
    rows = torch.from_numpy(np.asarray(index, np.int64)).to(samples.x.device)
    return replace(samples, x=samples.x[rows], y=samples.y[rows], augment=False, views=1)


def drawn_number(share: float, samples: int) -> int:
    """How many samples a share is: rounded down, but at least one."""
    return max(1, int(share * samples + 1e-9))


@torch.no_grad()
def summed_by_class(
    features: Callable[[Tensor], Tensor], batches: Iterable[tuple[Tensor, Tensor, Tensor]], num_classes: int
) -> Tensor:  # (C, D)
    """The sum of each class's features in batches of (x, y, weight), in double precision if the device has it."""
    total: Tensor | None = None
    for x, y, weight in batches:
        h = double(features(x))
        part = (F.one_hot(y, num_classes).to(h) * weight.to(h)[:, None]).T @ h
        total = part if total is None else total + part
    assert total is not None, "a client has at least one sample"
    return total


class ClientData:
    """One client's training samples: a view by index, with its class counts and its own randomness for one round."""

    def __init__(
        self,
        samples: Samples,
        index: NDArray[np.int64],
        seed: int = 0,
        round_: int = 0,
        client: int = 0,
        purpose: str = "train",
        fewest: int = 1,
    ):
        """`fewest`: no batch and no draw has fewer samples. A short last batch joins the one before."""
        self.samples, self.fewest = samples, fewest
        self.index = torch.from_numpy(np.asarray(index, np.int64)).to(samples.x.device)
        self.y = samples.y[self.index]
        self.counts = torch.bincount(self.y, minlength=samples.num_classes).to(torch.float32)  # (C,)
        self._address = (seed, round_, client)
        self.rng = self._rng(purpose)
        self._purpose = purpose

    def __len__(self) -> int:
        return len(self.index)

    @cached_property
    def noise(self) -> torch.Generator:
        """What random layers draw from, dropout for example."""
        return self._rng(f"{self._purpose} noise", self.index.device)

    @property
    def share(self) -> Tensor:  # (C,)
        """The client's class distribution."""
        return self.counts / self.counts.sum()

    def shuffled(self, batch_size: int, share: float = 1.0) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch of training batches (x, y) in a new order, augmented; the last one may be small.

        Of a `share` of the samples: the first ones in that order.
        """
        sizes = self.sizes(batch_size, share)
        for chunk in torch.split(torch.randperm(len(self), generator=self.rng)[: sum(sizes)], sizes):
            yield self.training_batch(chunk)

    def training_batch(self, chunk: Tensor) -> tuple[Tensor, Tensor]:  # (B,)
        """These of the client's samples to train on: (x, y), augmented."""
        chunk = chunk.to(self.index.device)
        rows = self.index[chunk]
        if self.samples.views > 1:
            view = torch.randint(self.samples.views, (len(chunk),), generator=self.rng).to(rows.device)
            rows = rows + len(self.samples) * view
        stored = self.samples.x[rows]
        if self.samples.augment:
            stored = crop_flip(stored, self.rng)
        return self.samples.floats(stored), self.y[chunk]

    def sizes(self, batch_size: int, share: float = 1.0) -> list[int]:
        """The sizes of the batches of an epoch, or of a share of the samples."""
        number = min(drawn_number(share, len(self)), len(self))
        self._check(min(batch_size, number))
        whole, short = number // batch_size, number % batch_size
        if whole and 0 < short < self.fewest:
            return [*([batch_size] * (whole - 1)), batch_size + short]
        return [*([batch_size] * whole), *([short] if short else [])]

    def batches(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """All samples once, in order, as they are: (x, y, weight), where a weight of zero marks padding."""
        for rows, y in zip(torch.split(self.index, EVAL_BATCH), torch.split(self.y, EVAL_BATCH), strict=True):
            yield self.samples.floats(self.samples.x[rows]), y, torch.ones_like(y, dtype=torch.float32)

    @torch.no_grad()
    def class_sums(self, features: Callable[[Tensor], Tensor]) -> Tensor:  # (C, D)
        """The sum over each class's samples of their features (B, D), in double precision if the device has it."""
        return summed_by_class(features, self.batches(), self.samples.num_classes)

    def _check(self, number: int) -> None:
        """Refuse a batch or a draw of so few samples; the refusal leaves a site, so it does not say how many."""
        if self.fewest > 1 and number < self.fewest:
            raise Refused(f"a batch or draw of its samples would be smaller than the {self.fewest} that it allows")

    def random(self, times: int, size: int | None = None) -> Tensor:  # (times, n)
        """Uniform numbers in [0, 1), one a sample: the raw material of a method's own draws of up to `size` samples."""
        if size is not None:
            self._check(size)
        return torch.rand(times, len(self), generator=self._rng("method")).to(self.index.device)

    def drawn(self, share: float, batch_size: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """A random share of the samples in random order, as they are: (x, y, weight), as `batches` gives them.

        Within a round every call gives the same samples in the same order.
        """
        order = self.random(1)[0].argsort(stable=True)
        for chunk in torch.split(order[: sum(sizes := self.sizes(batch_size, share))], sizes):
            y = self.y[chunk]
            yield self.samples.floats(self.samples.x[self.index[chunk]]), y, torch.ones_like(y, dtype=torch.float32)

    def _rng(self, purpose: str, device: torch.device | str = "cpu") -> torch.Generator:
        seed, round_, client = self._address
        return torch_rng(seed, purpose, round_, client, device=device)
