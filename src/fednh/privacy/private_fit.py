"""DP-SGD as another `Fit`: Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, Algorithm 1.

A step draws every sample with chance q (`privacy.rate`), and moves the parameters by

    g = (sum over drawn samples i of g_i min(1, C / ||g_i||)  +  C m N(0, I)) / (q n)

g_i is the gradient of the loss of sample i alone with respect to all names that move, together; C is `privacy.clip`, m
the noise multiplier, n the client's noised number of samples. The denominator is the same in all steps: the number that
was drawn says something about who is there. The number of steps depends on the config alone. What follows, momentum and
weight decay, uses g alone. `train.clip` is not applied, and `train.batch_size` only says how many samples of a step are
computed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import NoReturn

import torch
from torch import Tensor

from fednh.interrupt import no_progress
from fednh.methods.fit import moving_names
from fednh.methods.losses import BatchLoss, Loss
from fednh.methods.optimizers import FitSettings, like
from fednh.privacy.private_data import PrivateData, refuse_batchwise
from fednh.privacy.sample_gradients import clipped_sum
from fednh.tree import Tree, canonical


class Mover:
    """Parameters and their optimiser, which moves them in place."""

    def __init__(self, params: Tree, settings: FitSettings):
        self.params, self.settings = params, settings
        self.state = settings.fresh(list(params.values()))

    @torch.no_grad()
    def __call__(self, gradients: list[Tensor]) -> None:
        params = list(self.params.values())
        self.settings.move(params, [like(g, p) for g, p in zip(gradients, params, strict=True)], self.state)


class PrivateFit:
    """`fit` of one client in one round; `data.spent` gets what it releases."""

    def __init__(
        self,
        data: PrivateData,
        settings: FitSettings,
        tick: Callable[[int], None] = no_progress,
        frozen: Collection[str] = (),
    ):
        self.data, self.settings, self.tick, self.frozen = data, settings, tick, frozen

    def __call__(
        self, params: Tree, loss: Loss, *, only: tuple[str, ...], epochs: float | None = None, plain: bool = False
    ) -> Tree:
        data, mechanisms = self.data, self.data.mechanisms
        settings = self.settings.plain if plain else self.settings
        params = canonical(params)
        names = moving_names(params, only, self.frozen)
        release = mechanisms.of_fit(settings, epochs)
        if not names or not release.count:
            return params
        fixed = {name: value.detach() for name, value in params.items() if name not in names}
        data.spent.append(release)
        denominator = mechanisms.denominator(data.samples)
        move = self.mover({name: params[name].detach().clone() for name in names}, settings)
        moving = move.params
        for _ in range(release.count):
            self.tick(0)
            total = {name: torch.zeros_like(value) for name, value in moving.items()}
            for x, y, weight in self.batches(settings.batch_size):
                part = clipped_sum(loss, moving, fixed, x, y, weight, mechanisms.clip)
                total = {name: total[name] + part[name] for name in total}
            move([self._noised(total[name], denominator) for name in moving])
        return {**params, **moving}

    def mover(self, params: Tree, settings: FitSettings) -> Mover:
        return Mover(params, settings)

    def batches(self, batch_size: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """A step's samples in pieces: (x, y, weight), where a weight of zero marks padding."""
        raw, rows = self.data.raw, self.data.noise.chosen(len(self.data.raw), self.data.mechanisms.rate)
        for chunk in torch.split(rows, batch_size) if len(rows) else ():
            x, y = raw.training_batch(chunk)
            yield x, y, torch.ones_like(y, dtype=torch.float32)

    def _noised(self, total: Tensor, denominator: Tensor) -> Tensor:
        mechanisms, noise = self.data.mechanisms, self.data.noise.gaussian(total.shape).to(total)
        return (total + mechanisms.clip * mechanisms.gradients * noise) / denominator

    def batchwise(
        self, params: Tree, loss: BatchLoss, *, only: tuple[str, ...], epochs: float | None = None, plain: bool = False
    ) -> NoReturn:
        refuse_batchwise()

    def reach(self, epochs: float | None = None) -> float:
        return self.settings.reach(float(self.data.mechanisms.steps(self.settings, epochs)))
