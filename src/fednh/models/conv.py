"""Conv2: the paper's network for CIFAR-10 and CIFAR-100 (Listing 1), for images of any size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import nn


class Conv2(nn.Module):
    """Two 5x5 convolutions of 64 channels with 2x2 pooling, then linear 384, linear 192 and a head without bias.

    Pooling comes before ReLU: the two commute (ReLU is monotone) and ReLU then runs on a quarter of the values.
    Images of less than 16 pixels a side are padded in the convolutions, which would otherwise leave no pixels.
    """

    def __init__(self, shape: Sequence[int], num_classes: int):
        super().__init__()
        channels, height, width = shape
        if min(height, width) < 4:
            raise ValueError(f"conv2 needs images of at least 4x4 pixels, not {height}x{width}; use model.name = 'mlp'")
        padding = 2 if min(height, width) < 16 else 0
        convolutions = OrderedDict[str, nn.Module](
            conv1=nn.Conv2d(channels, 64, 5, padding=padding),
            pool1=nn.MaxPool2d(2),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(64, 64, 5, padding=padding),
            pool2=nn.MaxPool2d(2),
            relu2=nn.ReLU(),
            flat=nn.Flatten(),
        )
        with torch.no_grad():
            flat = nn.Sequential(convolutions)(torch.zeros(1, channels, height, width)).shape[1]
        self.body = nn.Sequential(
            OrderedDict(
                **convolutions,
                linear1=nn.Linear(flat, 384),
                relu3=nn.ReLU(),
                linear2=nn.Linear(384, 192),
                relu4=nn.ReLU(),
            )
        )
        self.head = nn.Linear(192, num_classes, bias=False)
