"""CNN: the four-layer network of PFLlib (Zhang et al., JMLR 2025), there FedAvgCNN, after McMahan et al. (2017)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from fednh.models.conv import convolutions


class CNN(nn.Module):
    """Two 5x5 convolutions of 32 and 64 channels with 2x2 pooling, then linear 512 and a head with a bias.

    Pooling and the padding of small images are as in Conv2.
    """

    def __init__(self, shape: Sequence[int], num_classes: int):
        super().__init__()
        layers, flat = convolutions("cnn", shape, 32, 64)
        self.body = nn.Sequential(OrderedDict(**layers, linear1=nn.Linear(flat, 512), relu3=nn.ReLU()))
        self.head = nn.Linear(512, num_classes)
