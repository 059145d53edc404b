"""Random layers (dropout, stochastic depth, noise): every number that they draw comes from a generator that is given.

PyTorch's layers draw from one generator of the process, which all threads share: results would depend on which client
was faster. A dispatch mode belongs to one thread and sees every operation, also those inside of a user's forward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from fednh.errors import ConfigError, UserError

Made = TypeVar("Made")
_one_at_a_time = threading.RLock()


def seeded(make: Callable[[], Made], seed: int) -> Made:
    """What `make` gives if the process's own generator starts from `seed`; that generator is left as it was."""
    with _one_at_a_time, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def not_repeatable(name: str) -> UserError:
    return ConfigError(
        f"model {name} gives the same input two different outputs (does its forward draw random numbers by other means "
        f"than PyTorch's?), so a run could not be repeated; take that out of it"
    )


class SeededRandomOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside of it, all that this thread draws comes from `rng`."""

    def __init__(self, rng: torch.Generator):
        super().__init__()  # type: ignore[no-untyped-call]
        self.rng = rng

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **given)
        return _with_generator(func)(*args, **{**given, "generator": self.rng})


@lru_cache
def _with_generator(func: OpOverload) -> OpOverload:
    """The form of a random operation that takes a generator."""
    packet = func.overloadpacket
    forms: list[OpOverload] = [func, *(getattr(packet, name) for name in packet.overloads())]
    for form in forms:
        if any(argument.name == "generator" for argument in form._schema.arguments) and _takes(form) == _takes(func):
            return form
    raise ConfigError(
        f"the model draws random numbers by {func}, which takes no seed here, so a run could not be repeated; use "
        f"another operation"
    )


def _takes(func: OpOverload) -> list[tuple[str, str]]:
    """Its other arguments."""
    return [(each.name, str(each.type)) for each in func._schema.arguments if each.name != "generator"]
