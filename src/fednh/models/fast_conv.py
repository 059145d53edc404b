"""Convolutions with fewer multiplications, on a CPU: tiles as products of polynomials (Toom-Cook).

A correlation of n = m + r - 1 inputs with r weights has m outputs. It is a product of polynomials, transposed: evaluate
at points, multiply there, go back. With R products instead of m * r a line, and R^2 instead of m^2 r^2 a tile:

    y = A^T [(G w G^T) * (B x B^T)] A      A (R, m), B (R, n), G (R, r); * sums over channels, by matrix products

(Winograd, "Arithmetic Complexity of Computations", 1980; Lavin, Gray, "Fast Algorithms for Convolutional Neural
Networks", 2016.) Real points cost one product, a pair of conjugate complex points three (Karatsuba). Many real points
lose digits, so from eight points on the rest lie on the unit circle: for 5x5 weights and 10x10 outputs R is 17, where a
Fourier transform takes 20, and the error is below 1e-6. Both gradients are the same sums transposed: what was
transformed is used again. Where channels fill a kernel's vectors (native.py), a kernel transforms; else torch does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import fednh.models.native as native

LARGEST = {3: 4, 5: 12}  # outputs a side of a tile, by the side of the weights
SMALLEST = 4  # outputs a side: below this nothing is gained
CHANNELS = {3: 64, 5: 32}  # with fewer the ordinary convolution is as fast, or faster
ROWS = {3: 64, 5: 16}  # images times tiles: as for channels
BYTES = 10 << 20  # of a chunk's transformed inputs at most: they should stay in the processor's cache
SMALL_BYTES = 2 << 20  # where the weights are small enough to be read for every chunk: a core's own cache
FILLED = 0.6  # the least share of the tiles' outputs that the result needs
NEAR = 0.6  # points are 0, infinity, +-1, +-NEAR, +-1/NEAR and the unit circle: chosen by the error they leave


class FastConv2d(nn.Conv2d):
    """nn.Conv2d that computes by `fast_conv2d` where that pays off.

    The choice depends on shapes and batch size alone, so a run takes the same path every time, with any number of
    workers. vmap, export and bfloat16 take the ordinary convolution.
    """

    def forward(self, x: Tensor) -> Tensor:
        return self.convolved(x, self.bias)

    def convolved(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The convolution, with another bias than its own, or none."""
        if is_plain(x, self.weight) and _computable(self) and _pays_off(x, self.weight, int(self.padding[0])):
            return fast_conv2d(x, self.weight, bias, int(self.padding[0]))
        out: Tensor = self._conv_forward(x, self.weight, bias)
        return out


def use_fast_conv(module: nn.Module) -> None:
    """Have the convolutions in `module` compute by `fast_conv2d`, those that it can compute."""
    for layer in module.modules():
        if type(layer) is nn.Conv2d and _computable(layer):
            layer.__class__ = FastConv2d


def fast_conv2d(x: Tensor, weight: Tensor, bias: Tensor | None = None, padding: int = 0) -> Tensor:
    """F.conv2d for square images and square weights: (N, C, H, H), (K, C, r, r) -> (N, K, H', H'), channels last."""
    out: Tensor = _Convolution.apply(x, weight, bias, padding)  # type: ignore[no-untyped-call]
    return out


def is_simple(layer: nn.Conv2d) -> bool:
    """Whether weights and padding are square, without stride, dilation or groups: what kernels and tiles compute."""
    side, padding = layer.kernel_size[0], layer.padding
    return (
        layer.kernel_size == (side, side)
        and not isinstance(padding, str)
        and padding[0] == padding[1]
        and layer.padding_mode == "zeros"
        and layer.stride == layer.dilation == (1, 1)
        and layer.groups == 1
    )


def _computable(layer: nn.Conv2d) -> bool:
    side = layer.kernel_size[0]
    return is_simple(layer) and side in LARGEST and min(layer.in_channels, layer.out_channels) >= CHANNELS[side]


def is_plain(x: Tensor, weight: Tensor) -> bool:
    """Whether nothing but autograd looks at what is computed, and it is float32 on a CPU."""
    return (
        x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and torch._C._functorch.peek_interpreter_stack() is None  # vmap and its like have no rule for it
    )


def _pays_off(x: Tensor, weight: Tensor, padding: int) -> bool:
    side = weight.shape[2]
    if x.ndim != 4 or x.shape[2] != x.shape[3] or x.shape[2] + 2 * padding < side:
        return False
    plan = Plan.of(x.shape[2], side, padding)
    filled = (plan.outputs / (plan.tiles * plan.tile)) ** 2
    return plan.outputs >= SMALLEST and filled >= FILLED and len(x) * plan.tiles**2 >= ROWS[side]


class Plan(NamedTuple):
    """How an image is cut into tiles."""

    inputs: int  # pixels a side of the image
    side: int  # r, of the weights
    padding: int
    outputs: int  # pixels a side of the result
    tile: int  # m, outputs a side of a tile
    tiles: int  # a side

    @classmethod
    def of(cls, inputs: int, side: int, padding: int) -> Plan:
        outputs = inputs + 2 * padding - side + 1
        most = LARGEST[side]
        tiles = -(-outputs // most)
        tile = most if side == 3 else max(SMALLEST, -(-outputs // tiles))  # a small tile of 3x3 weights gains nothing
        return cls(inputs, side, padding, outputs, tile, tiles)

    @property
    def window(self) -> int:
        """n, inputs a side of a tile."""
        return self.tile + self.side - 1

    def windows(self, x: Tensor) -> Tensor:  # (N, C, H, H) -> (N, tiles, tiles, n, n, C)
        """What each tile sees: a view of the image, or of the image with a border of zeros."""
        rows, before = x.permute(0, 2, 3, 1), self.padding
        after = self.bordered - self.inputs - before
        return self.as_windows(F.pad(rows, (0, 0, before, after, before, after)) if before or after else rows)

    @property
    def bordered(self) -> int:
        """Pixels a side that the tiles see together."""
        return self.tiles * self.tile + self.side - 1

    def as_windows(self, rows: Tensor) -> Tensor:  # (N, bordered, bordered, C) -> (N, tiles, tiles, n, n, C), a view
        return rows.unfold(1, self.window, self.tile).unfold(2, self.window, self.tile).permute(0, 1, 2, 4, 5, 3)

    def inside(self, rows: Tensor) -> Tensor:  # (N, bordered, bordered, C) -> (N, H, H, C)
        """The image without its border."""
        kept = slice(self.padding, self.padding + self.inputs)
        return rows[:, kept, kept]

    def as_tiles(self, rows: Tensor) -> Tensor:  # (N, tiles * m, tiles * m, K) -> (N, tiles, tiles, m, m, K), a view
        m, t = self.tile, self.tiles
        return rows.view(len(rows), t, m, t, m, -1).permute(0, 1, 3, 2, 4, 5)

    def tiles_of(self, y: Tensor) -> Tensor:  # (N, K, H', H') -> (N, tiles, tiles, m, m, K)
        rows, more = y.permute(0, 2, 3, 1), self.tiles * self.tile - self.outputs
        return self.as_tiles(F.pad(rows, (0, 0, 0, more, 0, more)) if more else rows)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
        plan = Plan.of(x.shape[2], weight.shape[2], padding)
        a, b, g = matrices(plan.tile, plan.side, x.dtype)
        w = spread(g, weight.permute(1, 2, 3, 0)[:, None, None].contiguous())  # (R^2, C, K)
        channels = max(weight.shape[:2])
        size = min(BYTES, max(SMALL_BYTES, 4 * w.element_size() * w.numel()))
        step = max(1, size // (x.element_size() * w.shape[0] * plan.tiles**2 * channels))
        seen, side = [], plan.tiles * plan.tile
        y = x.new_empty(len(x), side, side, len(weight))
        for part, rows in zip(torch.split(x, step), torch.split(y, step), strict=True):
            spectrum = spread(b, plan.windows(part))  # (R^2, rows, C)
            collect(a, torch.bmm(spectrum, w), plan.as_tiles(rows))
            if any(ctx.needs_input_grad):
                seen.append(spectrum)
        ctx.plan, ctx.step = plan, step
        ctx.save_for_backward(w, *seen)
        y = y[:, : plan.outputs, : plan.outputs].contiguous()
        if bias is not None:
            y += bias
        return y.permute(0, 3, 1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        plan: Plan = ctx.plan
        w, *seen = ctx.saved_tensors
        a, b, g = matrices(plan.tile, plan.side, dy.dtype)
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        dx: list[Tensor] = []
        dw: Tensor | None = None
        for part, x in zip(torch.split(dy, ctx.step), seen, strict=True):
            y = spread(a, plan.tiles_of(part))  # (R^2, rows, K)
            if wants_x:
                rows = dy.new_zeros(len(part), plan.bordered, plan.bordered, w.shape[1])
                collect(b, torch.bmm(y, w.mT), plan.as_windows(rows), add=True)
                dx.append(plan.inside(rows))
            if wants_weight:
                dw = torch.bmm(x.mT, y) if dw is None else dw.baddbmm_(x.mT, y)
        return (
            (dx[0] if len(dx) == 1 else torch.cat(dx)).permute(0, 3, 1, 2) if wants_x else None,
            None if dw is None else _weights(g, dw),
            dy.sum((0, 2, 3)) if wants_bias else None,
            None,
        )


def _weights(g: Tensor, dw: Tensor) -> Tensor:  # (R, r), (R^2, C, K) -> (K, C, r, r)
    side = g.shape[1]
    out = dw.new_empty(dw.shape[1], 1, 1, side, side, dw.shape[2])
    collect(g, dw, out)
    return out[:, 0, 0].permute(3, 0, 1, 2)


def spread(matrix: Tensor, tiles: Tensor) -> Tensor:  # (R, s), (N, t, t, s, s, C) -> (R^2, N * t^2, C)
    """matrix @ tile @ matrix.T for all tiles and channels."""
    *outer, side, _, channels = tiles.shape
    rows = math.prod(outer)
    if not _has_kernel(tiles):
        lines = torch.mm(matrix, tiles.permute(3, 4, 0, 1, 2, 5).reshape(side, -1)).view(len(matrix), side, -1)
        return torch.matmul(matrix, lines).view(-1, rows, channels)
    out = _far_apart(len(matrix) ** 2, rows, channels, tiles)
    _transform(matrix, tiles, _grid(out, len(matrix), outer))
    return out


def collect(matrix: Tensor, products: Tensor, tiles: Tensor, add: bool = False) -> None:
    """The transpose of `spread`: (R, s), (R^2, N * t^2, C), written into `tiles` (N, t, t, s, s, C), or added to them.

    Tiles that are added to may overlap.
    """
    rank, side = matrix.shape
    outer = tiles.shape[:3]
    if _has_kernel(tiles):
        _transform(matrix.T.contiguous(), _grid(products, rank, outer), tiles, add)
        return
    lines = torch.matmul(matrix.T, products.reshape(rank, rank, -1))
    values = torch.mm(matrix.T, lines.view(rank, -1)).view(side, side, *outer, -1).permute(2, 3, 4, 0, 1, 5)
    if not add:
        tiles.copy_(values)
        return
    for j in (0, 1):  # tiles overlap with their neighbours alone, so every other one does not
        for k in (0, 1):
            tiles[:, j::2, k::2] += values[:, j::2, k::2]


def _has_kernel(tiles: Tensor) -> bool:
    wide = native.width()
    return bool(wide) and tiles.dtype == torch.float32 and tiles.shape[-1] % wide == 0 and tiles.stride(-1) == 1


def _far_apart(count: int, rows: int, channels: int, like: Tensor) -> Tensor:  # (count, rows, channels)
    """Not a power of two apart: the kernel writes all `count` in turn, and they would share few lines of the cache."""
    apart = rows * channels + 16
    return like.new_empty(count * apart).as_strided((count, rows, channels), (apart, channels, 1))


def _grid(products: Tensor, rank: int, outer: Sequence[int]) -> Tensor:  # (R^2, N * t^2, C) -> (N, t, t, R, R, C)
    return products.view(rank, rank, *outer, products.shape[-1]).permute(2, 3, 4, 0, 1, 5)


def _transform(matrix: Tensor, source: Tensor, target: Tensor, add: bool = False) -> None:
    sizes = native.Tiles(*matrix.shape, source.shape[-1], add)
    sizes.count[:] = source.shape[:3]
    sizes.from_tile[:], sizes.from_[:] = source.stride()[:3], source.stride()[3:5]
    sizes.to_tile[:], sizes.to[:] = target.stride()[:3], target.stride()[3:5]
    native.call("transform", matrix, source, target, sizes)


@cache
def matrices(tile: int, side: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """A (R, m), B (R, n), G (R, r) for m = `tile` and r = `side`; their rows are of equal length."""
    count = tile + side - 1
    reals, pairs = _points(count)
    (a, _), (g, _), (_, values) = (_evaluation(reals, pairs, length) for length in (tile, side, count))
    # Products at the points -> values at the points -> coefficients; B is that, transposed.
    combine = torch.zeros(count, len(a), dtype=torch.float64)
    first = len(reals)
    combine[:first, :first] = torch.eye(first)
    for j in range(len(pairs)):
        rows, columns = slice(first + 2 * j, first + 2 * j + 2), slice(first + 3 * j, first + 3 * j + 3)
        combine[rows, columns] = torch.tensor([[1.0, -1.0, 0.0], [-1.0, -1.0, 1.0]], dtype=torch.float64)
    b = torch.linalg.solve(values, combine).T
    lengths = [each.norm(dim=1, keepdim=True) for each in (a, b, g)]
    equal = (lengths[0] * lengths[1] * lengths[2]) ** (1 / 3)
    a, b, g = (each * equal / length for each, length in zip((a, b, g), lengths, strict=True))
    return a.to(dtype).contiguous(), b.to(dtype).contiguous(), g.to(dtype).contiguous()


def _points(count: int) -> tuple[list[float], list[complex]]:
    """So many points: real ones, infinity among them, and one of each conjugate pair."""
    near = NEAR
    if count == 6:
        return [0.0, math.inf, near, -near, 1 / near, -1 / near], []
    fixed = [0.0, 1.0, -1.0, near, -near, 1 / near, -1 / near, *([] if count % 2 else [math.inf])]
    pairs = (count - len(fixed)) // 2
    angles = [math.pi * (j + 1) / (pairs + 1) for j in range(pairs)]
    return fixed, [complex(math.cos(angle), math.sin(angle)) for angle in angles]


def _evaluation(reals: list[float], pairs: list[complex], length: int) -> tuple[Tensor, Tensor]:
    """What takes a polynomial with so many coefficients to its values: the factors of products, and plain values."""
    factors: list[list[float]] = []
    values: list[list[float]] = []
    for point in reals:
        last = [0.0] * (length - 1) + [1.0]
        row = last if math.isinf(point) else [point**k for k in range(length)]
        factors.append(row)
        values.append(row)
    for pair in pairs:
        powers = [pair**k for k in range(length)]
        re, im = [p.real for p in powers], [p.imag for p in powers]
        factors += [re, im, [p + q for p, q in zip(re, im, strict=True)]]
        values += [re, im]
    return torch.tensor(factors, dtype=torch.float64), torch.tensor(values, dtype=torch.float64)


# --- convolution, pooling and ReLU as one layer -----------------------------------------------------------------------
# A convolution, 2x2 max pooling and ReLU as one layer, on a CPU.
#
# Torch takes three operations for it and keeps the convolution's whole result between them, which is four times as
# large as what comes out and leaves the processor's cache. The kernels keep what pooling chose in a byte (0 to
# 3, or 4 where ReLU is off) and nothing else. With few input channels, as in a first layer, the convolution itself is
# in the kernel:
#
#     out[p] = relu(max over o of sum_t w[t] x[2 p + o + t] + b),      dw[t] = sum_p d[p] x[2 p + chosen(p) + t]


FEW = 4  # input channels: with more, the convolutions of torch and of fast_conv are faster


class PooledConv2d(FastConv2d):
    """relu(max_pool2d(conv2d(x), 2)); vmap, export, bfloat16 and machines without kernels take torch's operations."""

    def forward(self, x: Tensor) -> Tensor:
        wide = native.width() if x.ndim == 4 and is_plain(x, self.weight) else 0
        if not wide or self.out_channels % wide or not _something_to_pool(self, x):
            return F.relu(F.max_pool2d(super().forward(x), 2))
        bias = self.weight.new_zeros(self.out_channels) if self.bias is None else self.bias
        if self.in_channels > FEW or x.requires_grad or not is_simple(self):
            return _applied(_Pool, self.convolved(x, None), bias)
        return _applied(_ConvPool, F.pad(x, [int(self.padding[0])] * 4) if self.padding[0] else x, self.weight, bias)


def fuse(module: nn.Module) -> None:
    """Have every convolution, 2x2 max pooling and ReLU that follow each other in `module` compute as one layer.

    The convolution takes over the work of the other two, which do nothing from now on; names stay as they are.
    """
    for sequence in module.modules():
        if type(sequence) is not nn.Sequential:
            continue
        layers, names = sequence._modules, list(sequence._modules)
        for conv, pool, relu in zip(names, names[1:], names[2:], strict=False):
            first = layers[conv]
            if type(first) in (nn.Conv2d, FastConv2d) and _halves(layers[pool]) and type(layers[relu]) is nn.ReLU:
                first.__class__ = PooledConv2d
                layers[pool] = layers[relu] = nn.Identity()


def _halves(layer: nn.Module | None) -> bool:
    """Whether the layer is 2x2 max pooling as the kernels have it."""
    return type(layer) is nn.MaxPool2d and (
        layer.kernel_size in (2, (2, 2))
        and layer.stride in (2, (2, 2))
        and layer.padding in (0, (0, 0))
        and layer.dilation in (1, (1, 1))
        and not layer.ceil_mode
        and not layer.return_indices
    )


def _something_to_pool(layer: nn.Conv2d, x: Tensor) -> bool:
    """Whether 2x2 values are left, so that a result has pixels; otherwise torch has the words for it."""
    if isinstance(layer.padding, str):
        return min(x.shape[2:]) >= 2
    sizes = zip(x.shape[2:], layer.padding, layer.dilation, layer.kernel_size, layer.stride, strict=True)
    return len(x) > 0 and all((size + 2 * p - d * (k - 1) - 1) // s + 1 >= 2 for size, p, d, k, s in sizes)


def _applied(function: type[torch.autograd.Function], *arguments: Tensor) -> Tensor:
    out: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return out


class _ConvPool(torch.autograd.Function):
    """x (N, C, H, W), which has no gradient, weight (K, C, r, r), bias (K) -> (N, K, P, Q)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        (kernels, channels, side, _), (images, _, height, width) = weight.shape, x.shape
        sizes = native.Conv(images, height, width, channels, side, kernels)
        rows = x.permute(0, 2, 3, 1).contiguous()  # channels last, as it mostly is
        out = x.new_empty(images, (height - side + 1) // 2, (width - side + 1) // 2, kernels)
        which = torch.empty_like(out, dtype=torch.uint8) if any(ctx.needs_input_grad) else None
        native.call("conv_pool", rows, weight.permute(2, 3, 1, 0).contiguous(), bias.contiguous(), out, which, sizes)
        ctx.sizes = sizes
        if which is not None:
            ctx.save_for_backward(rows, which)
        return out.permute(0, 3, 1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[None, Tensor, Tensor]:
        rows, which = ctx.saved_tensors
        sizes: native.Conv = ctx.sizes
        dw = d.new_zeros(sizes.side, sizes.side, sizes.channels, sizes.kernels)
        db = d.new_zeros(sizes.kernels)
        native.call("conv_pool_gradient", rows, d.permute(0, 2, 3, 1).contiguous(), which, dw, db, sizes)
        return None, dw.permute(3, 2, 0, 1), db


class _Pool(torch.autograd.Function):
    """x (N, K, H, W), bias (K) -> relu(max_pool2d(x + bias, 2)): (N, K, H / 2, W / 2)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        images, channels, height, width = x.shape
        sizes = native.Image(images, height, width, channels)
        out = x.new_empty(images, height // 2, width // 2, channels)
        which = torch.empty_like(out, dtype=torch.uint8) if any(ctx.needs_input_grad) else None
        native.call("pool_relu", x.permute(0, 2, 3, 1).contiguous(), bias.contiguous(), out, which, sizes)
        ctx.sizes = sizes
        if which is not None:
            ctx.save_for_backward(which)
        return out.permute(0, 3, 1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, Tensor]:
        sizes: native.Image = ctx.sizes
        odd = sizes.height % 2 or sizes.width % 2
        dx = (d.new_zeros if odd else d.new_empty)(sizes.images, sizes.height, sizes.width, sizes.channels)
        db = d.new_zeros(sizes.channels)
        native.call("pool_relu_gradient", d.permute(0, 2, 3, 1).contiguous(), *ctx.saved_tensors, dx, db, sizes)
        return dx.permute(0, 3, 1, 2), db
