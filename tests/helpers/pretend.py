"""A device that is not there: tensors that say they live elsewhere, hold their numbers on the CPU, and refuse what a
real device refuses.

It goes by the name of torch's `meta` device: autograd asks a device for its guard, and a build for the CPU has none for
`cuda`. `with Pretend():` makes `device=DEVICE` and `.to(DEVICE)` give such tensors. An operation that mixes them with
CPU tensors of one dimension or more raises, as it would on the device; so do `numpy()` on them, writing one into a CPU
tensor, and drawing one from a generator of the CPU. What torch allows is allowed: CPU tensors of no dimension as
operands, CPU tensors as indices, and copies. Kernels are the CPU's, so the numbers must be those of the CPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("meta")
aten = torch.ops.aten
COPIES = (aten._to_copy.default, aten.copy_.default)
READS = (
    aten.item,
    aten._local_scalar_dense,
    aten.nonzero,
    aten.masked_select,
    aten.equal,
    aten._unique2,
    aten.is_nonzero,
)
INDEXING = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)


class Mixed(RuntimeError):
    """Something that a real device would not do."""


class OnDevice(Tensor):
    """A tensor that reports the pretended device and keeps its numbers in `held`."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> OnDevice:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=DEVICE,
        )
        made.held = held
        return made  # type: ignore[no-any-return]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnDevice({self.held!r})"

    def numpy(self, *, force: bool = False) -> Any:
        raise Mixed("numpy() on a tensor of the device; call .cpu() first")

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise Mixed("numpy reads a tensor of the device; call .cpu() first")

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return perform(func, args, kwargs or {})


class Pretend(TorchDispatchMode):
    """While it is on, the device is there. It counts the operations done on it. It holds for one thread.

    `waits` counts those for which the CPU waits until the device has caught up, because it asks for numbers.

    `doubles=False`: the device has no double precision, as Apple's mps, whose name it then has for `tree.double`.
    """

    def __init__(self, doubles: bool = True) -> None:
        super().__init__()
        self.operations, self.doubles = 0, doubles
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.operations += any(isinstance(v, OnDevice) for v in tree_flatten((args, kwargs))[0])
        if _waits(func, args, kwargs):
            self.waits[str(func)] += 1
        result = perform(func, args, kwargs)
        made = [value for value in tree_flatten(result)[0] if isinstance(value, OnDevice)]
        if not self.doubles and any(value.dtype == torch.float64 for value in made):
            raise Mixed(f"{func}: a tensor of double precision on a device that has none")
        return result


def perform(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One operation: check who meets whom, let the CPU do it, and put the result where it belongs."""
    tensors = list(_tensors(args, kwargs))
    on_device = any(isinstance(t, OnDevice) for t in tensors)
    wanted = kwargs.get("device")
    there = on_device if wanted is None else torch.device(wanted).type == DEVICE.type
    if func not in COPIES:
        _check(func, args, kwargs, there, on_device)
    plain_args, plain_kwargs = tree_map(_held, (args, kwargs))
    if wanted is not None:
        plain_kwargs["device"] = torch.device("cpu")
    if plain_kwargs.get("pin_memory"):
        plain_kwargs["pin_memory"] = False
    result = func(*plain_args, **plain_kwargs)
    if func.overloadpacket in (aten.item, aten._local_scalar_dense, aten.is_pinned):
        return result
    if _in_place(func):  # the tensor that was given is the result
        return None if result is None else kwargs.get("out", args[0])
    return tree_map(lambda value: OnDevice(value) if isinstance(value, Tensor) and there else value, result)


def _check(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], there: bool, on_device: bool) -> None:
    if (generator := kwargs.get("generator")) is not None and there and generator.device.type == "cpu":
        raise Mixed(f"{func}: a generator of the CPU for a tensor of the device")
    if not on_device:
        return
    looked = (args[:1], args[2:]) if func in INDEXING else args
    strangers = [t for t in _tensors(looked, kwargs) if not isinstance(t, OnDevice)]
    if func in INDEXING and not isinstance(args[0], OnDevice):
        raise Mixed(f"{func}: indices of the device into a tensor of the CPU")
    if any(t.ndim > 0 for t in strangers):
        shapes = [tuple(t.shape) for t in strangers]
        raise Mixed(f"{func}: tensors of the device meet tensors of the CPU of shapes {shapes}")
    if _in_place(func) and any(t is stranger for t in _tensors(args[:1], {}) for stranger in strangers):
        raise Mixed(f"{func}: a result of the device written into a tensor of the CPU")


def _waits(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the CPU needs a number of the device before it can go on: a value, a copy to here, a size by a mask."""
    if func == aten._to_copy.default:
        return isinstance(args[0], OnDevice) and torch.device(kwargs.get("device") or DEVICE).type != DEVICE.type
    if func == aten.copy_.default:
        return isinstance(args[1], OnDevice) and not isinstance(args[0], OnDevice)
    if func in INDEXING:
        return any(isinstance(t, OnDevice) and t.dtype in (torch.bool, torch.uint8) for t in _tensors(args[1:2], {}))
    return func.overloadpacket in READS and any(isinstance(t, OnDevice) for t in _tensors(args, kwargs))


def _tensors(args: Any, kwargs: Any) -> Iterator[Tensor]:
    return (value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor))


def _held(value: Any) -> Any:
    return value.held if isinstance(value, OnDevice) else value


def _in_place(func: Any) -> bool:
    """Whether the operation writes into its first argument (or `out`) and gives that back."""
    return any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
