"""The primitive limit of a Conv2 step: its convolutions, matrix products and poolings, forward and backward, alone.

The same shapes and the same layout (channels_last) as the engine's, with the same weights from step to step, but no
ReLU, no loss, no optimiser, no data. No implementation on these primitives can be faster.
"""

from __future__ import annotations

import torch
from torch import Tensor

BATCH, CLASSES = 64, 10
CONV = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)  # stride, padding, dilation, transposed, output padding, groups


class Conv2Primitives:
    """Inputs, weights and gradients of the right shapes; each worker thread needs its own."""

    def __init__(self) -> None:
        def image(*shape: int) -> Tensor:
            return torch.randn(*shape).contiguous(memory_format=torch.channels_last)

        self.x, self.middle = image(BATCH, 3, 32, 32), image(BATCH, 64, 14, 14)
        self.w1, self.w2 = image(64, 3, 5, 5), image(64, 64, 5, 5)
        self.b1, self.b2 = torch.zeros(64), torch.zeros(64)
        self.linears = [
            (torch.randn(BATCH, i), torch.randn(o, i), torch.zeros(o)) for i, o in ((1600, 384), (384, 192))
        ]
        self.head = (torch.randn(BATCH, 192), torch.randn(CLASSES, 192))

    @torch.no_grad()
    def step(self) -> None:
        self._convolution(self.x, self.w1, self.b1, [False, True, True])
        self._convolution(self.middle, self.w2, self.b2, [True, True, True])
        for h, weight, bias in self.linears:
            out = torch.addmm(bias, h, weight.T)
            torch.mm(out, weight)
            torch.mm(out.T, h)
        h, weight = self.head
        out = torch.mm(h, weight.T)
        torch.mm(out, weight)
        torch.mm(out.T, h)

    def _convolution(self, x: Tensor, weight: Tensor, bias: Tensor, wanted: list[bool]) -> None:
        """A convolution and its 2x2 pooling, forward and backward; the first needs no gradient for its input."""
        out = torch.conv2d(x, weight, bias)
        pooled, where = torch.ops.aten.max_pool2d_with_indices(out, [2, 2], [2, 2])
        back = torch.ops.aten.max_pool2d_with_indices_backward(
            pooled, out, [2, 2], [2, 2], [0, 0], [1, 1], False, where
        )
        torch.ops.aten.convolution_backward(back, x, weight, [64], *CONV, wanted)
