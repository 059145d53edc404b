"""ResNet-18 with GroupNorm, the paper's network for TinyImageNet."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

GROUPS = 2  # the paper, appendix "Model Architecture"


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut (He et al. 2016), normalised by groups."""

    def __init__(self, fan_in: int, fan_out: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(fan_in, fan_out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(GROUPS, fan_out)
        self.conv2 = nn.Conv2d(fan_out, fan_out, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(GROUPS, fan_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or fan_in != fan_out:
            self.shortcut = nn.Sequential(
                OrderedDict(conv=nn.Conv2d(fan_in, fan_out, 1, stride, bias=False), norm=nn.GroupNorm(GROUPS, fan_out))
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet18(nn.Module):
    """A 3x3 stride-1 stem without max-pool, four stages of two blocks, global average pooling; D = 512."""

    def __init__(self, shape: Sequence[int], num_classes: int):
        super().__init__()
        stages = OrderedDict[str, nn.Module]()
        fan_in = 64
        for i, (width, stride) in enumerate([(64, 1), (128, 2), (256, 2), (512, 2)], 1):
            stages[f"stage{i}"] = nn.Sequential(BasicBlock(fan_in, width, stride), BasicBlock(width, width, 1))
            fan_in = width
        self.body = nn.Sequential(
            OrderedDict(
                conv=nn.Conv2d(shape[0], 64, 3, padding=1, bias=False),
                norm=nn.GroupNorm(GROUPS, 64),
                relu=nn.ReLU(),
                **stages,
                pool=nn.AdaptiveAvgPool2d(1),
                flat=nn.Flatten(),
            )
        )
        self.head = nn.Linear(512, num_classes, bias=False)
