"""Local training: SGD on the selected names of a Tree. All other names are constants in the loss and cannot move."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from fednh.data.batches import ClientData
from fednh.interrupt import no_progress
from fednh.methods.losses import BatchLoss, Loss, of_batch, of_samples
from fednh.tree import Tree, canonical, has_prefix

Steps = TypeVar("Steps", float, Tensor)  # a number, or one for each of many clients


@dataclass(frozen=True)
class Sgd:
    """The optimiser's settings in one round; the paper's values."""

    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 1e-5
    clip: float = 10.0  # largest gradient norm; 0 turns clipping off
    batch_size: int = 64
    epochs: int = 5

    @property
    def plain(self) -> Sgd:
        """The same learning rate, batches and epochs, without momentum, weight decay and clipping."""
        return replace(self, momentum=0.0, weight_decay=0.0, clip=0.0)

    def reach(self, steps: Steps) -> Steps:
        """How far this many steps move a parameter whose gradient is always 1: lr * steps, and more with momentum."""
        m = self.momentum  # a gradient acts again in every later step: 1 + m + m^2 + ...
        far: Steps = self.lr * (steps - m * (1 - m**steps) / (1 - m)) / (1 - m)
        return far


def moving_names(params: Tree, only: tuple[str, ...], frozen: Collection[str]) -> list[str]:
    """The names below `only` that a fit moves: all that the model has not frozen, wherever a method keeps them.

    "personal.body.conv.weight" is frozen if "body.conv.weight" is. A body may have no parameters; then none move.
    """
    asked = [name for name in params if has_prefix(name, only)]
    if not asked and not any(part.rpartition(".")[2] == "body" for part in only):
        raise ValueError(f"nothing to train: no name in {sorted(params)} belongs to {only}")
    return [name for name in asked if not is_frozen(name, frozen)] if frozen else asked


def is_frozen(name: str, frozen: Collection[str]) -> bool:
    """Whether a name, or what is left of it below a part, is that of a frozen parameter."""
    return name in frozen or any(name.endswith("." + each) for each in frozen)


class Fit(Protocol):
    """What a method is given to train with."""

    def __call__(
        self, params: Tree, loss: Loss, *, only: tuple[str, ...], epochs: int | None = None, plain: bool = False
    ) -> Tree:
        """Train the names in `only`; `plain`: by SGD without momentum, weight decay and clipping."""
        ...

    def batchwise(
        self, params: Tree, loss: BatchLoss, *, only: tuple[str, ...], epochs: int | None = None, plain: bool = False
    ) -> Tree:
        """As a call, for a loss that looks at a batch as a whole and may set values for the next step.

        It can set names that `only` leaves out: running means, for example. They start as in `params`, and come back as
        the last step left them.
        """
        ...

    def reach(self, epochs: int | None = None) -> float | Tensor:
        """How far one call moves a parameter whose gradient is always 1; a method divides parameter changes by it."""
        ...


class LocalFit:
    """`fit` for one client in one round; it also counts the samples processed and sums their loss.

    `watch` is called with (params, loss, only) before the first step of every call; `tick` is called before every step,
    and may raise Interrupted. The loss of every step is computed inside of `training()`. Names in `frozen` do not move.
    """

    def __init__(
        self,
        data: ClientData,
        sgd: Sgd,
        watch: Callable[[Tree, Loss, tuple[str, ...]], None] | None = None,
        tick: Callable[[int], None] = no_progress,
        training: Callable[[], AbstractContextManager[object]] = nullcontext,
        frozen: Collection[str] = (),
    ):
        self.data, self.sgd, self.watch, self.tick, self.training = data, sgd, watch, tick, training
        self.frozen = frozen
        self.samples = 0
        self.loss_sum = 0.0

    def __call__(
        self, params: Tree, loss: Loss, *, only: tuple[str, ...], epochs: int | None = None, plain: bool = False
    ) -> Tree:
        """Minimise the mean of `loss` over the names in `only`; returns all of `params`, those names trained.

        Fresh momentum at every call. Weight decay acts on the moving names only: what is frozen comes back
        as it went in.
        """
        return self.batchwise(params, of_batch(loss), only=only, epochs=epochs, plain=plain)

    def batchwise(
        self, params: Tree, loss: BatchLoss, *, only: tuple[str, ...], epochs: int | None = None, plain: bool = False
    ) -> Tree:
        sgd = self.sgd.plain if plain else self.sgd
        params = canonical(params)
        moving = {name: params[name].detach().clone() for name in moving_names(params, only, self.frozen)}
        if not moving:
            return params
        if self.watch is not None:
            self.watch(params, of_samples(loss), only)
        working = {name: moving[name].requires_grad_() if name in moving else params[name] for name in params}
        step = Momentum(list(moving.values()), sgd)
        total = torch.zeros((), dtype=torch.float64, device=step.params[0].device)
        for _ in range(sgd.epochs if epochs is None else epochs):
            for x, y in self.data.shuffled(sgd.batch_size):
                self.tick(0)
                with self.training():
                    values, carried = loss(working, x, y, torch.full((len(y),), 1 / len(y), device=y.device))
                    value = values.mean()
                step(torch.autograd.grad(value, step.params, allow_unused=True))
                working.update((name, new.detach()) for name, new in carried.items())
                total += value.detach() * len(y)
                self.samples += len(y)
        self.loss_sum += float(total)
        return {name: value.detach() if name in moving else value for name, value in working.items()}

    def reach(self, epochs: int | None = None) -> float:
        batches = len(self.data.sizes(self.sgd.batch_size))
        return self.sgd.reach(float((self.sgd.epochs if epochs is None else epochs) * batches))


class Momentum:
    """Clipping, weight decay and heavy-ball momentum, in place on all tensors at once."""

    def __init__(self, params: list[Tensor], sgd: Sgd):
        self.params, self.sgd = params, sgd
        self.velocity = [torch.zeros_like(p) for p in params]

    @torch.no_grad()
    def __call__(self, gradients: tuple[Tensor | None, ...]) -> None:
        moved = [(p, v, g) for p, v, g in zip(self.params, self.velocity, gradients, strict=True) if g is not None]
        if not moved:
            return
        params, velocity = ([row[i] for row in moved] for i in range(2))
        grads = [like(g, p) for p, _, g in moved]
        if self.sgd.clip > 0:
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
            factor = (self.sgd.clip / (norm + 1e-6)).clamp(max=1.0)
            # Not in place: two names may share one gradient tensor, as with a loss on their sum.
            if factor.device.type != "cpu" or factor != 1:
                grads = list(torch._foreach_mul(grads, factor))
        descend(params, grads, velocity, self.sgd)


def descend(params: list[Tensor], gradients: list[Tensor], velocity: list[Tensor], sgd: Sgd) -> None:
    """Weight decay and momentum in place, in one pass; a gradient lies in memory as its parameter does."""
    torch._fused_sgd_(
        [dense(value) for value in params],
        [dense(value) for value in gradients],
        [dense(value) for value in velocity] if sgd.momentum else [],
        weight_decay=sgd.weight_decay,
        momentum=sgd.momentum,
        lr=sgd.lr,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )


def dense(value: Tensor) -> Tensor:
    """The same numbers in the order of memory: on other views the fused optimiser takes twice as long."""
    if value.is_contiguous():
        return value
    return value.permute(sorted(range(value.ndim), key=value.stride, reverse=True))


def like(gradient: Tensor, param: Tensor) -> Tensor:
    """The gradient, its values in memory in the order of the parameter's, as the fused optimiser takes them to be."""
    if gradient.stride() == param.stride():
        return gradient
    return torch.empty_like(param).copy_(gradient)
