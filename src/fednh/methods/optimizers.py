"""What clients train with: the settings of one fit, and the optimiser that moves parameters by gradients.

The steps are those of torch.optim.SGD, Adam and AdamW. An optimiser's state is a tensor a parameter and name; it starts
at zero. Parameters and state may have a leading dimension of clients, whose numbers of steps may differ.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

import torch
from torch import Tensor

from fednh.tree import Tree, double

Steps = TypeVar("Steps", float, Tensor)  # a number, or one for each of many clients
State = dict[str, list[Tensor]]  # name -> one tensor a parameter


@dataclass(frozen=True)
class FitSettings(ABC):
    """How a client trains in one round: its optimiser, batches and length. The defaults are the paper's."""

    lr: float = 0.01
    momentum: float = 0.9  # of Adam: beta_1
    weight_decay: float = 1e-5
    clip: float = 10.0  # largest gradient norm; 0 turns clipping off
    batch_size: int = 64
    epochs: float = 5  # passes over the samples; the last one may go over a share of them
    steps: int | None = None  # batches, in place of epochs
    keep_state: bool = False  # the optimiser's state stays with the client from round to round

    @property
    def plain(self) -> Sgd:
        """SGD with the same learning rate, batches and epochs, without momentum, weight decay, clipping and memory."""
        shared = {field.name: getattr(self, field.name) for field in fields(FitSettings)}
        return Sgd(**{**shared, "momentum": 0.0, "weight_decay": 0.0, "clip": 0.0, "keep_state": False})

    @abstractmethod
    def fresh(self, params: Sequence[Tensor], clients: int | None = None) -> State:
        """The state before the first step; with `clients` the first dimension of parameters counts them."""

    @abstractmethod
    def move(self, params: Sequence[Tensor], gradients: Sequence[Tensor], state: State) -> None:
        """One step in place, weight decay included; a gradient lies in memory as its parameter does (`like`)."""

    @abstractmethod
    def reach(self, steps: Steps) -> Steps:
        """How far this many steps move a parameter, in units of a gradient that stays the same."""


@dataclass(frozen=True)
class Sgd(FitSettings):
    """Gradient descent with heavy-ball momentum."""

    def fresh(self, params: Sequence[Tensor], clients: int | None = None) -> State:
        return {"velocity": [torch.zeros_like(p) for p in params]} if self.momentum else {}

    def move(self, params: Sequence[Tensor], gradients: Sequence[Tensor], state: State) -> None:
        torch._fused_sgd_(
            [dense(value) for value in params],
            [dense(value) for value in gradients],
            [dense(value) for value in state.get("velocity", ())],
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            lr=self.lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )

    def reach(self, steps: Steps) -> Steps:
        """lr * steps, and more with momentum."""
        m = self.momentum  # a gradient acts again in every later step: 1 + m + m^2 + ...
        far: Steps = self.lr * (steps - m * (1 - m**steps) / (1 - m)) / (1 - m)
        return far


@dataclass(frozen=True)
class Adam(FitSettings):
    """Adam (Kingma and Ba, ICLR 2015); `decoupled`: AdamW (Loshchilov and Hutter, ICLR 2019)."""

    beta2: float = 0.999
    epsilon: float = 1e-8
    decoupled: bool = False  # weight decay shrinks the weights themselves and does not pass through the moments

    def fresh(self, params: Sequence[Tensor], clients: int | None = None) -> State:
        counted = [p.new_zeros(() if clients is None else (clients,)) for p in params]
        return {"m": [torch.zeros_like(p) for p in params], "v": [torch.zeros_like(p) for p in params], "t": counted}

    def move(self, params: Sequence[Tensor], gradients: Sequence[Tensor], state: State) -> None:
        for p, g, m, v, t in zip(params, gradients, state["m"], state["v"], state["t"], strict=True):
            t += 1
            if self.decoupled:
                p.mul_(1 - self.lr * self.weight_decay)
            elif self.weight_decay:
                g = g.add(p, alpha=self.weight_decay)
            m.lerp_(g, 1 - self.momentum)
            v.mul_(self.beta2).addcmul_(g, g, value=1 - self.beta2)
            each = double(t).view((*t.shape, *[1] * (p.ndim - t.ndim)))  # (K, 1, ...) or (1, ...)
            root = (1 - self.beta2**each).sqrt()  # of the second moment's correction for its start at zero
            speed = self.lr * root / (1 - self.momentum**each)
            p.sub_(m / (v.sqrt() + self.epsilon * root.to(v.dtype)) * speed.to(p.dtype))

    def reach(self, steps: Steps) -> Steps:
        raise ValueError("Adam's steps are not in units of a gradient: this method needs train.optimizer = 'sgd'")


class Descent:
    """Clipping and the optimiser's step for one client, in place on all tensors at once."""

    def __init__(self, params: list[Tensor], settings: FitSettings, state: State | None = None):
        self.params, self.settings = params, settings
        self.state = settings.fresh(params) if state is None else state

    @torch.no_grad()
    def __call__(self, gradients: Sequence[Tensor | None]) -> None:
        """One step; a parameter without a gradient stays."""
        here = [i for i, g in enumerate(gradients) if g is not None]
        if not here:
            return
        params = [self.params[i] for i in here]
        grads = [like(g, p) for g, p in zip((g for g in gradients if g is not None), params, strict=True)]
        if self.settings.clip > 0:
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
            factor = (self.settings.clip / (norm + 1e-6)).clamp(max=1.0)
            # Not in place: two names may share one gradient tensor, as with a loss on their sum.
            if factor.device.type != "cpu" or factor != 1:
                grads = list(torch._foreach_mul(grads, factor))
        self.settings.move(params, grads, {name: [rows[i] for i in here] for name, rows in self.state.items()})


def kept_state(settings: FitSettings, names: Sequence[str], params: Sequence[Tensor], kept: Tree) -> State:
    """The state of one client that `as_tree` made, in the form of these parameters; what it lacks starts anew."""
    state = settings.fresh(params)
    for slot, values in state.items():
        for name, value in zip(names, values, strict=True):
            if (before := kept.get(f"{slot}.{name}")) is not None and before.shape == value.shape:
                value.copy_(before)
    return state


def as_tree(names: Sequence[str], state: State) -> Tree:
    """A state as a Tree, by the names of its parameters."""
    return {f"{slot}.{name}": value for slot, rows in state.items() for name, value in zip(names, rows, strict=True)}


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
