"""A step out of `torch.func.vmap`: work on what is mapped as a whole, in the middle of a function of one row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor
from torch._C import _functorch as functorch

Made = TypeVar("Made")


def outside(work: Callable[..., Sequence[Tensor]], *mapped: Tensor) -> list[Tensor]:
    """Step out of the innermost map: call `work` with every tensor as a whole, (K, ...), and map what it returns.

    At least one of the tensors must be mapped. The rule by which a `torch.autograd.Function` is mapped could do the
    same, but every step needs a call, and its calls would take a twentieth of a round.
    """
    level = functorch.current_level()
    size = next(functorch.get_unwrapped(value).shape[_axis(value)] for value in mapped if is_mapped(value))
    whole = [_whole(value, size) for value in mapped]
    map_ = functorch.pop_dynamic_layer_stack()
    try:
        made = work(*whole)
    finally:
        functorch.push_dynamic_layer_stack(map_)
    return [functorch._add_batch_dim(value, 0, level) for value in made]


def outside_all(work: Callable[[], Made]) -> Made:
    """Call `work` outside of all maps."""
    maps = []
    while functorch.peek_interpreter_stack() is not None:
        maps.append(functorch.pop_dynamic_layer_stack())
    try:
        return work()
    finally:
        for map_ in reversed(maps):
            functorch.push_dynamic_layer_stack(map_)


def is_mapped(value: Tensor) -> bool:
    """Whether the innermost map has a row of its own of this tensor."""
    return functorch.is_batchedtensor(value) and functorch.maybe_get_level(value) == functorch.current_level()


def _axis(value: Tensor) -> int:
    axis: int = functorch.maybe_get_bdim(value)
    return axis


def _whole(value: Tensor, size: int) -> Tensor:  # (size, ...)
    if not is_mapped(value):
        return value.expand(size, *value.shape)
    return functorch.get_unwrapped(value).movedim(_axis(value), 0)
