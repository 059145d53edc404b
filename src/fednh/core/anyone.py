"""Whether there is work to do for anybody: the only question on a tensor's value that a method may ask.

An executor may compute many clients at once by `torch.func.vmap`, and then one Python `if` cannot serve them all. Work
that only some of them need is done for all, and its result is used with `torch.where`. If nobody needs it, it can be
left out: that saves time and changes no result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def anyone(flag: Tensor) -> bool:  # ()
    """Whether the flag is set, for the client or for one of those that are computed at once."""
    answers: list[bool] = []
    _Look.apply(flag, answers.append)  # type: ignore[no-untyped-call]
    return answers[0]


class _Look(torch.autograd.Function):
    """Calls `tell` with the answer. Inside a map `vmap` is given the flags of all clients as one tensor."""

    @staticmethod
    def forward(flag: Tensor, tell: Callable[[bool], None]) -> Tensor:
        tell(bool(flag.any()))
        return flag.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Nothing is kept: a flag has no gradient."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], flag: Tensor, tell: Callable[[bool], None]) -> tuple[Tensor, Any]:
        return _Look.forward(flag, tell), in_dims[0]
