"""The clipped sum of per-sample gradients, without computing most of them: what a private step costs.

The loss is mapped over samples (`torch.func.vmap`), so that none can look at another, whatever the loss is. Linear
layers and convolutions are computed outside of that map, for all samples at once, and what goes in (a) and the gradient
of what comes out (g) are kept. A linear layer's gradient for sample i is g_i a_i^T, of length ||g_i|| ||a_i||, and the
sum with weights c is (c g)^T a (Goodfellow, "Efficient Per-Example Gradient Computations", 2015). Those of a
convolution's weights are a product of g_i and the unfolded a_i. A parameter that is used in any other way has as many
copies as there are samples, and autograd gives each its gradient; where it is used in several ways they are added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _functorch as functorch
from torch.func import vmap
from torch.overrides import TorchFunctionMode

from fednh.methods.losses import Loss, unvmap_any
from fednh.methods.maps import is_mapped, outside, outside_all
from fednh.tree import Tree


def clipped_sum(loss: Loss, moving: Tree, fixed: Tree, x: Tensor, y: Tensor, weight: Tensor, clip: float) -> Tree:
    """The sum over samples of `weight` (B,) times their gradient, no longer than `clip` over all names together."""
    slopes = sample_gradients(loss, moving, fixed, x, y)
    norm = torch.stack([g.squares() for g in slopes.values()]).sum(0).sqrt()  # (B,)
    sound = norm.isfinite()  # a gradient that is not would reveal its sample, whatever the noise
    factor = torch.where(sound, weight * clip / norm.clamp(min=clip), 0.0).to(weight.dtype)
    if unvmap_any(~sound.all()):
        slopes = {name: g.only(sound) for name, g in slopes.items()}
    return {name: g.weighted(factor).reshape(moving[name].shape) for name, g in slopes.items()}


@dataclass
class Rows:
    """The gradients of all samples."""

    rows: Tensor  # (B, n)

    def squares(self) -> Tensor:  # (B,)
        squares: Tensor = torch.linalg.vector_norm(self.rows, dim=1).double().square()
        return squares

    def weighted(self, factor: Tensor) -> Tensor:  # (B,) -> (n,)
        return factor @ self.rows

    def only(self, sound: Tensor) -> Rows:  # (B,)
        """Zero for the others."""
        return Rows(torch.where(sound[:, None], self.rows, 0.0))

    def __add__(self, other: Rows | Outer) -> Rows:
        return Rows(self.all().rows + other.all().rows)

    def all(self) -> Rows:
        return self


@dataclass
class Outer:
    """The gradients g_i a_i^T of a matrix."""

    g: Tensor  # (B, out)
    a: Tensor  # (B, in)

    def squares(self) -> Tensor:  # (B,)
        # One factor may be very small and the other very large: the product's digits must not be lost in either.
        norms = [torch.linalg.vector_norm(each, dim=1, dtype=torch.float64) for each in (self.g, self.a)]
        squares: Tensor = (norms[0] * norms[1]).square()
        return squares

    def weighted(self, factor: Tensor) -> Tensor:  # (B,) -> (out, in)
        return (factor[:, None] * self.g).mT @ self.a

    def only(self, sound: Tensor) -> Outer:  # (B,)
        return Outer(*(torch.where(sound[:, None], each, 0.0) for each in (self.g, self.a)))

    def __add__(self, other: Rows | Outer) -> Rows:
        return self.all() + other

    def all(self) -> Rows:
        return Rows((self.g[:, :, None] * self.a[:, None]).flatten(1))


@dataclass
class Kernels(Rows):
    """The gradients of a convolution's weights, their input channels last: (B, K * r * s * C)."""

    shape: tuple[int, ...]  # (K, r, s, C)

    def weighted(self, factor: Tensor) -> Tensor:  # (B,) -> (K, C, r, s)
        return (factor @ self.rows).view(self.shape).permute(0, 3, 1, 2)

    def only(self, sound: Tensor) -> Kernels:  # (B,)
        return Kernels(torch.where(sound[:, None], self.rows, 0.0), self.shape)

    def all(self) -> Rows:
        return Rows(self.rows.view(-1, *self.shape).permute(0, 1, 4, 2, 3).flatten(1))


Gradients = dict[str, Rows | Outer]
Pair = tuple[int, int]

UNFOLDED = 1 << 20  # bytes of a convolution's unfolded inputs at a time: they should stay in a core's own cache


def sample_gradients(loss: Loss, moving: Tree, fixed: Tree, x: Tensor, y: Tensor, known: bool = True) -> Gradients:
    """The gradient of every sample's loss with respect to every moving name; without `known`, by copies alone."""
    with torch.enable_grad():
        copies = [_leaf(value.detach().expand(len(y), *value.shape)) for value in moving.values()]
        seen: list[Use] = []

        def one(copies: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
            mine = dict(zip(moving, copies, strict=True))
            with _Watch(moving if known else {}, mine, seen):
                return loss({**fixed, **mine}, x[None], y[None])[0]

        values = vmap(one)(copies, x, y)
    slopes = _gradients(values, [*copies, *(use.out for use in seen)])
    found: dict[str, list[Rows | Outer]] = {name: [] for name in moving}
    for name, slope in zip(moving, slopes, strict=False):
        if slope is not None:
            found[name].append(Rows(slope.reshape(len(y), -1)))
    for use, slope in zip(seen, slopes[len(copies) :], strict=True):
        if slope is not None:
            for name, gradient in use.gradients(slope).items():
                found[name].append(gradient)
    return {name: _added(parts, moving[name], len(y)) for name, parts in found.items()}


def _added(parts: list[Rows | Outer], value: Tensor, samples: int) -> Rows | Outer:
    if not parts:
        return Rows(value.new_zeros(samples, value.numel()))
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


@dataclass
class Use:
    """One use of a layer: its output for all samples, and the gradients of its parameters from that of the output."""

    out: Tensor
    gradients: Callable[[Tensor], Gradients]


class MappedNorm(TorchFunctionMode):
    """Inside a map: group normalisation of images, for which torch has no rule where channels lie last in memory."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.group_norm and functorch.is_batchedtensor(args[0]) and args[0].ndim > 3:
            images: Tensor = args[0]
            out: Tensor = func(images.flatten(2), *args[1:], **(kwargs or {}))
            return out.reshape(images.shape)
        return func(*args, **(kwargs or {}))


class _Watch(MappedNorm):
    """Inside the map over samples: computes layers on moving parameters for all samples at once, and notes their use.

    Only what is certain is done that way: the parameter itself in a linear layer or convolution, of one sample, where
    gradients are recorded, and not inside of a further transformation.
    """

    def __init__(self, moving: Tree, copies: Tree, seen: list[Use]):
        super().__init__()
        self.moving, self.seen = moving, seen
        self.names = {id(copy): name for name, copy in copies.items()} if moving else {}
        self.level = functorch.current_level()

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _LAYERS and torch.is_grad_enabled() and functorch.current_level() == self.level:
            made = _LAYERS[func](self, *args, **kwargs)
            if made is not None:
                return made
        return super().__torch_function__(func, types, args, kwargs)

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        names = self._names(weight, bias)
        if names is None or not is_mapped(input):
            return None

        def work(x: Tensor) -> list[Tensor]:  # (B, ..., in)
            # One matrix for all samples, and for each client of a block.
            rows = x.flatten(0, -2)
            out = _recorded(F.linear(rows, *self._values(weight, bias)))
            self.seen.append(Use(out, lambda slope: _of_linear(names, rows.detach(), slope, len(x))))
            return [out.reshape(*x.shape[:-1], -1)]

        return outside(work, input)[0]

    def conv2d(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor | None:
        names = self._names(weight, bias)
        simple = groups == 1 and not isinstance(padding, str) and _pair(dilation) == (1, 1)
        if names is None or not simple or not is_mapped(input) or input.ndim != 4 or len(input) != 1:
            return None

        def work(x: Tensor) -> list[Tensor]:  # (B, 1, C, H, W)
            images = x.flatten(0, 1)
            out = _recorded(F.conv2d(images, *self._values(weight, bias), stride, padding))
            how = weight.shape, _pair(stride), _pair(padding)
            self.seen.append(Use(out, lambda slope: _of_convolution(names, images.detach(), slope, *how)))
            return [out[:, None]]

        return outside(work, input)[0]

    def _names(self, weight: Tensor, bias: Tensor | None) -> tuple[str, str | None] | None:
        """The moving names of a layer, if its parameters are such."""
        if id(weight) not in self.names or (bias is not None and id(bias) not in self.names):
            return None
        return self.names[id(weight)], None if bias is None else self.names[id(bias)]

    def _values(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        values = [None if each is None else self.moving[self.names[id(each)]].detach() for each in (weight, bias)]
        assert values[0] is not None
        return values[0], values[1]


_LAYERS: dict[Callable[..., Any], Callable[..., Tensor | None]] = {F.linear: _Watch.linear, F.conv2d: _Watch.conv2d}


def _of_linear(names: tuple[str, str | None], a: Tensor, g: Tensor, samples: int) -> Gradients:  # (B * T, ...) each
    weight, bias = names
    a, g = a.float(), g.float()
    if len(a) == samples:
        return {weight: Outer(g, a), **({bias: Rows(g)} if bias else {})}
    a, g = a.reshape(samples, -1, a.shape[-1]), g.reshape(samples, -1, g.shape[-1])
    return {weight: Rows((g.mT @ a).flatten(1)), **({bias: Rows(g.sum(1))} if bias else {})}


def _of_convolution(
    names: tuple[str, str | None], images: Tensor, g: Tensor, shape: Sequence[int], stride: Pair, padding: Pair
) -> Gradients:
    """From (B, C, H, W) and (B, K, P, Q); `shape` is that of the weights, (K, C, r, s)."""
    weight, bias = names
    count, channels, *side = shape
    g = g.float().permute(0, 2, 3, 1).flatten(1, 2)  # (B, P * Q, K)
    rows = F.pad(images.float().permute(0, 2, 3, 1), (0, 0, padding[1], padding[1], padding[0], padding[0]))
    if not rows.is_contiguous():
        rows = rows.contiguous()
    seen = rows.unfold(1, side[0], stride[0]).unfold(2, side[1], stride[1]).permute(0, 1, 2, 4, 5, 3)
    step = max(1, UNFOLDED // (4 * g.shape[1] * channels * side[0] * side[1]))
    parts = [
        torch.bmm(slope.mT, part.reshape(len(part), g.shape[1], -1))
        for slope, part in zip(torch.split(g, step), torch.split(seen, step), strict=True)
    ]
    kernels = Kernels(torch.cat(parts).flatten(1), (count, *side, channels))
    return {weight: kernels, **({bias: Rows(g.sum(1))} if bias else {})}


def _pair(value: Any) -> Pair:
    """A size that may be given once for both sides."""
    both = (value, value) if isinstance(value, int) else tuple(value)
    return both if len(both) == 2 else (both[0], both[0])


def _leaf(value: Tensor) -> Tensor:
    """The value, such that autograd gives its gradient, whether clients are mapped or not."""
    raw = _raw(value)
    outside_all(raw.requires_grad_)
    return value


def _recorded(value: Tensor) -> Tensor:
    """A layer's output: of the first one nothing before it needs a gradient."""
    return value if _raw(value).requires_grad else _leaf(value)


def _raw(value: Tensor) -> Tensor:
    """What autograd sees: clients, if they are mapped, are a dimension of it."""
    while functorch.is_batchedtensor(value):
        value = functorch.get_unwrapped(value)
    return value


def _gradients(values: Tensor, of: list[Tensor]) -> list[Tensor | None]:
    """The gradients of the sum of all values, those of each client in its row."""
    raw = _raw(values)
    if not raw.requires_grad:
        return [None] * len(of)
    found = outside_all(lambda: torch.autograd.grad(raw.sum(), [_raw(each) for each in of], allow_unused=True))
    return [None if slope is None else _mapped_like(slope, each) for slope, each in zip(found, of, strict=True)]


def _mapped_like(slope: Tensor, value: Tensor) -> Tensor:
    if not functorch.is_batchedtensor(value):
        return slope
    level, axis = functorch.maybe_get_level(value), functorch.maybe_get_bdim(value)
    return functorch._add_batch_dim(_mapped_like(slope, functorch.get_unwrapped(value)), axis, level)
