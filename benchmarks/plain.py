"""The plain way to train clients, as most research code does it: the measure for every claim of speed.

One client at a time; an ordinary NCHW module; a DataLoader with transforms per sample; torch.optim.SGD; all cores as
intra-op threads. Written for this comparison and otherwise used nowhere. It does the same arithmetic on the same
number of samples as our engine.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from fednh.methods.fit import Sgd

PADDING = 4


class Images(Dataset[tuple[Tensor, int]]):
    """Some images of a stored set, cropped, flipped and normalised one at a time."""

    def __init__(self, x: Tensor, y: Tensor, index: Sequence[int], mean: float = 0.5, std: float = 0.25):
        self.x, self.y, self.index, self.mean, self.std = x, y, index, mean, std  # x: uint8 (N, H, W, C)

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        row = self.index[i]
        image = self.x[row].permute(2, 0, 1).float().div(255)
        size = image.shape[1]
        image = F.pad(image, (PADDING, PADDING, PADDING, PADDING))
        top, left = random.randint(0, 2 * PADDING), random.randint(0, 2 * PADDING)
        image = image[:, top : top + size, left : left + size]
        if random.random() < 0.5:
            image = image.flip(2)
        return (image - self.mean) / self.std, int(self.y[row])


class Vectors(Dataset[tuple[Tensor, int]]):
    """Some vectors of a stored set."""

    def __init__(self, x: Tensor, y: Tensor, index: Sequence[int]):
        self.x, self.y, self.index = x, y, index

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        row = self.index[i]
        return self.x[row], int(self.y[row])


class PlainConv2(nn.Module):
    """The paper's CNN in its usual form: ReLU, then pooling."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 64, 5), nn.Conv2d(64, 64, 5)
        self.linear1, self.linear2 = nn.Linear(64 * 5 * 5, 384), nn.Linear(384, 192)
        self.head = nn.Linear(192, num_classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.linear1(x.flatten(1)))
        return self.head(F.relu(self.linear2(x)))


class PlainBlock(nn.Module):
    """A residual block with GroupNorm."""

    def __init__(self, fan_in: int, fan_out: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(fan_in, fan_out, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(fan_out, fan_out, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(2, fan_out), nn.GroupNorm(2, fan_out)
        self.down: nn.Module = nn.Identity()
        if stride != 1 or fan_in != fan_out:
            self.down = nn.Sequential(nn.Conv2d(fan_in, fan_out, 1, stride, bias=False), nn.GroupNorm(2, fan_out))

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(out + self.down(x))


class PlainResNet18(nn.Module):
    """ResNet-18 with a 3x3 stem."""

    def __init__(self, num_classes: int):
        super().__init__()
        widths = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
        widths += [(128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1)]
        self.stem, self.norm = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.GroupNorm(2, 64)
        self.blocks = nn.Sequential(*(PlainBlock(*width) for width in widths))
        self.head = nn.Linear(512, num_classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.norm(self.stem(x))))
        return self.head(x.mean((2, 3)))


class PlainMLP(nn.Module):
    """Two hidden layers."""

    def __init__(self, inputs: int, num_classes: int):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
        self.head = nn.Linear(64, num_classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


def train(model: nn.Module, data: Dataset[tuple[Tensor, int]], sgd: Sgd) -> nn.Module:
    """One client's local training, on a copy of the model it is sent."""
    model = copy.deepcopy(model)
    optimiser = torch.optim.SGD(model.parameters(), sgd.lr, sgd.momentum, weight_decay=sgd.weight_decay)
    loader = DataLoader(data, sgd.batch_size, shuffle=True)
    for _ in range(sgd.epochs):
        for x, y in loader:
            optimiser.zero_grad()
            F.cross_entropy(model(x), y).backward()
            if sgd.clip:
                nn.utils.clip_grad_norm_(model.parameters(), sgd.clip)
            optimiser.step()
    return model


def round_of(model: nn.Module, clients: Sequence[Dataset[tuple[Tensor, int]]], sgd: Sgd) -> nn.Module:
    """FedAvg's round: every client in turn, then the mean of their weights."""
    states = [train(model, data, sgd).state_dict() for data in clients]
    average = {name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]}
    model.load_state_dict(average)
    return model
