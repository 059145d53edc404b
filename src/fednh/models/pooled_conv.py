"""A convolution, 2x2 max pooling and ReLU as one layer, on a CPU.

Torch takes three operations for it and keeps the convolution's whole result between them, which is four times as large
as what comes out and leaves the processor's cache. The kernels keep what pooling chose in a byte (0 to 3, or 4 where
ReLU is off) and nothing else. With few input channels, as in a first layer, the convolution itself is in the kernel:

    out[p] = relu(max over o of sum_t w[t] x[2 p + o + t] + b),      dw[t] = sum_p d[p] x[2 p + chosen(p) + t]
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import fednh.models.native as native
from fednh.models.fast_conv import FastConv2d, is_plain, is_simple

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
