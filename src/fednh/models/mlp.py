"""A multi-layer perceptron for vectors and very small images."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from math import prod

from torch import nn


class MLP(nn.Module):
    """Linear layers with ReLU between them; the last hidden layer is the representation.

    `linear_output=True` leaves that layer without ReLU, so representations fill the whole space: the paper's spiral
    example uses hidden=(16, 8, 4, 2) this way to draw them in the plane.
    """

    def __init__(
        self, shape: Sequence[int], num_classes: int, hidden: Sequence[int] = (128, 64), linear_output: bool = False
    ):
        super().__init__()
        if not hidden or min(hidden) < 1:
            raise ValueError(f"model.args.hidden = {list(hidden)} must hold at least one width, each 1 or more")
        layers: OrderedDict[str, nn.Module] = OrderedDict(flat=nn.Flatten())
        widths = [prod(shape), *hidden]
        for i, (fan_in, fan_out) in enumerate(pairwise(widths), 1):
            layers[f"linear{i}"] = nn.Linear(fan_in, fan_out)
            if i < len(hidden) or not linear_output:
                layers[f"relu{i}"] = nn.ReLU()
        self.body = nn.Sequential(layers)
        self.head = nn.Linear(hidden[-1], num_classes, bias=False)
