"""Conv2: the paper's network for CIFAR-10 and CIFAR-100 (Listing 1), for images of any size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import nn


def convolutions(name: str, shape: Sequence[int], first: int, second: int) -> tuple[OrderedDict[str, nn.Module], int]:
    """Two 5x5 convolutions of so many channels with 2x2 pooling, flattened, and the number of values that come out.

    Pooling comes before ReLU: the two commute (ReLU is monotone) and ReLU then runs on a quarter of the values.
    Images of less than 16 pixels a side are padded in the convolutions, which would otherwise leave no pixels.
    """
    channels, height, width = shape
    if min(height, width) < 4:
        raise ValueError(f"{name} needs images of at least 4x4 pixels, not {height}x{width}; use model.name = 'mlp'")
    padding = 2 if min(height, width) < 16 else 0
    layers = OrderedDict[str, nn.Module](
        conv1=nn.Conv2d(channels, first, 5, padding=padding),
        pool1=nn.MaxPool2d(2),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(first, second, 5, padding=padding),
        pool2=nn.MaxPool2d(2),
        relu2=nn.ReLU(),
        flat=nn.Flatten(),
    )
    with torch.no_grad():
        return layers, nn.Sequential(layers)(torch.zeros(1, channels, height, width)).shape[1]


class Conv2(nn.Module):
    """Two 5x5 convolutions of 64 channels with 2x2 pooling, then linear 384, linear 192 and a head without bias."""

    def __init__(self, shape: Sequence[int], num_classes: int):
        super().__init__()
        layers, flat = convolutions("conv2", shape, 64, 64)
        self.body = nn.Sequential(
            OrderedDict(
                **layers,
                linear1=nn.Linear(flat, 384),
                relu3=nn.ReLU(),
                linear2=nn.Linear(384, 192),
                relu4=nn.ReLU(),
            )
        )
        self.head = nn.Linear(192, num_classes, bias=False)
