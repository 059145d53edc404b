"""Local training of the selected names of a Tree. All other names are constants in the loss and cannot move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, islice
from typing import Protocol

import torch
from torch import Tensor

from fednh.data.batches import ClientData
from fednh.interrupt import no_progress
from fednh.methods.losses import BatchLoss, Loss, of_batch, of_samples
from fednh.methods.optimizers import Descent, FitSettings, Sgd, as_tree, kept_state
from fednh.tree import Tree, canonical, double, has_prefix, prefix, strip_prefix

__all__ = ["Fit", "FitSettings", "LocalFit", "Sgd", "is_frozen", "moving_names"]


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
        self, params: Tree, loss: Loss, *, only: tuple[str, ...], epochs: float | None = None, plain: bool = False
    ) -> Tree:
        """Train the names in `only`, for as long as the run says, or for so many `epochs`.

        `plain`: by SGD without momentum, weight decay and clipping.
        """
        ...

    def batchwise(
        self, params: Tree, loss: BatchLoss, *, only: tuple[str, ...], epochs: float | None = None, plain: bool = False
    ) -> Tree:
        """As a call, for a loss that looks at a batch as a whole and may set values for the next step.

        It can set names that `only` leaves out: running means, for example. They start as in `params`, and come back as
        the last step left them.
        """
        ...

    def reach(self, epochs: float | None = None) -> float | Tensor:
        """How far one call moves a parameter whose gradient is always 1; a method divides parameter changes by it.

        Only SGD has such a number: a method that asks for it declares `sgd_only`.
        """
        ...


class Calls:
    """Names for the calls of one round: by what each trains, and its number among those that train the same.

    A method may leave out a call in some rounds (FedAS aligns nothing in a client's first one): what the optimiser kept
    of the others must not go to the wrong call.
    """

    def __init__(self) -> None:
        self.count = Counter[str]()

    def name(self, only: tuple[str, ...]) -> str:
        what = "+".join(only)
        self.count[what] += 1
        return f"{what}-{self.count[what]}"


class LocalFit:
    """`fit` for one client in one round; it also counts the samples processed and sums their loss.

    `watch` is called with (params, loss, only) before the first step of every call; `tick` is called before every step,
    and may raise Interrupted. The loss of every step is computed inside of `training()`. Names in `frozen` do not move.
    `memory` is what the optimiser kept from the client's last round, by `Calls`; after the calls it holds what to
    keep from this one.
    """

    def __init__(
        self,
        data: ClientData,
        settings: FitSettings,
        watch: Callable[[Tree, Loss, tuple[str, ...]], None] | None = None,
        tick: Callable[[int], None] = no_progress,
        training: Callable[[], AbstractContextManager[object]] = nullcontext,
        frozen: Collection[str] = (),
        memory: Tree | None = None,
    ):
        self.data, self.settings, self.watch, self.tick, self.training = data, settings, watch, tick, training
        self.frozen = frozen
        self.memory: Tree = memory or {}
        self.calls = Calls()
        self.samples = 0
        self.loss_sum = 0.0

    def __call__(
        self, params: Tree, loss: Loss, *, only: tuple[str, ...], epochs: float | None = None, plain: bool = False
    ) -> Tree:
        """Minimise the mean of `loss` over the names in `only`; returns all of `params`, those names trained.

        The optimiser starts anew at every call, unless its state is kept. Weight decay acts on the moving names only:
        what is frozen comes back as it went in.
        """
        return self.batchwise(params, of_batch(loss), only=only, epochs=epochs, plain=plain)

    def batchwise(
        self, params: Tree, loss: BatchLoss, *, only: tuple[str, ...], epochs: float | None = None, plain: bool = False
    ) -> Tree:
        settings = self.settings.plain if plain else self.settings
        params = canonical(params)
        moving = {name: params[name].detach().clone() for name in moving_names(params, only, self.frozen)}
        if not moving:
            return params
        if self.watch is not None:
            self.watch(params, of_samples(loss), only)
        working = {name: moving[name].requires_grad_() if name in moving else params[name] for name in params}
        call, names, tensors = self.calls.name(only), list(moving), list(moving.values())
        step = Descent(tensors, settings, kept_state(settings, names, tensors, strip_prefix(self.memory, call)))
        total = double(torch.zeros((), device=tensors[0].device))
        for x, y in batches(self.data, settings, epochs):
            self.tick(0)
            with self.training():
                values, carried = loss(working, x, y, torch.full((len(y),), 1 / len(y), device=y.device))
                value = values.mean()
            step(torch.autograd.grad(value, tensors, allow_unused=True))
            working.update((name, new.detach()) for name, new in carried.items())
            total += value.detach() * len(y)
            self.samples += len(y)
        if settings.keep_state:
            self.memory = {**self.memory, **prefix(call, as_tree(names, step.state))}
        self.loss_sum += float(total)
        return {name: value.detach() if name in moving else value for name, value in working.items()}

    def reach(self, epochs: float | None = None) -> float:
        return self.settings.reach(float(number_of_batches(self.data, self.settings, epochs)))


def batches(data: ClientData, settings: FitSettings, epochs: float | None) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of one fit: so many epochs, or, where a method does not say how many, what the run's settings say."""
    if epochs is None and settings.steps is not None:
        endless = chain.from_iterable(data.shuffled(settings.batch_size) for _ in iter(int, 1))
        yield from islice(endless, settings.steps)
        return
    passes = settings.epochs if epochs is None else epochs
    whole, share = passes // 1, passes % 1
    for _ in range(int(whole)):
        yield from data.shuffled(settings.batch_size)
    if share:
        yield from data.shuffled(settings.batch_size, share)


def number_of_batches(data: ClientData, settings: FitSettings, epochs: float | None) -> int:
    """How many `batches` there are."""
    if epochs is None and settings.steps is not None:
        return settings.steps
    passes = settings.epochs if epochs is None else epochs
    whole, share = passes // 1, passes % 1
    last = len(data.sizes(settings.batch_size, share)) if share else 0
    return int(whole) * len(data.sizes(settings.batch_size)) + last
