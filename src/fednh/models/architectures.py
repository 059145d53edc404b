"""The networks: MLP, Conv2 and ResNet18 of the paper, CNN of PFLlib, Linear, and those of timm by name.

`timm:mobilenetv3_small_050` names one of timm (PyTorch Image Models); weights are a local file.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from itertools import pairwise
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fednh import extras
from fednh.errors import ConfigError

GROUPS = 2  # of ResNet18's GroupNorm: the paper, appendix "Model Architecture"
TIMM_PREFIX = "timm:"
_LOADS = ("pretrained", "checkpoint_path", "cache_dir")  # arguments by which timm would download or unpickle


class Linear(nn.Module):
    """A head without bias on the inputs themselves: the body has no parameters, for data that are features already."""

    def __init__(self, shape: Sequence[int], num_classes: int):
        super().__init__()
        self.body = nn.Flatten()
        self.head = nn.Linear(prod(shape), num_classes, bias=False)


class MLP(nn.Module):
    """For vectors and very small images: linear layers with ReLU between them; the last hidden one gives the features.

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
    """The paper's network for CIFAR-10 and CIFAR-100 (Listing 1), for images of any size.

    Two 5x5 convolutions of 64 channels with 2x2 pooling, then linear 384, linear 192 and a head without bias.
    """

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


class CNN(nn.Module):
    """The four-layer network of PFLlib (Zhang et al., JMLR 2025), there FedAvgCNN, after McMahan et al. (2017).

    Two 5x5 convolutions of 32 and 64 channels with 2x2 pooling, then linear 512 and a head with a bias.
    Pooling and the padding of small images are as in Conv2.
    """

    def __init__(self, shape: Sequence[int], num_classes: int):
        super().__init__()
        layers, flat = convolutions("cnn", shape, 32, 64)
        self.body = nn.Sequential(OrderedDict(**layers, linear1=nn.Linear(flat, 512), relu3=nn.ReLU()))
        self.head = nn.Linear(512, num_classes)


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
    """ResNet-18 with GroupNorm, the paper's network for TinyImageNet.

    A 3x3 stride-1 stem without max-pool, four stages of two blocks, global average pooling; D = 512.
    """

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


def timm_factory(name: str) -> Callable[..., nn.Module]:
    """A function that builds the architecture `name`, with its prefix, for the classes and channels of the data."""
    extras.need("timm", f"model.name = {name!r}")
    try:
        import timm
    except (ImportError, RuntimeError) as error:  # torchvision, which it needs, is missing or of another build
        raise ConfigError(
            f"model.name = {name!r} needs timm, which cannot be imported here ({error}); install a torchvision that "
            f"was built for torch {torch.__version__}"
        ) from error
    own = name.removeprefix(TIMM_PREFIX)
    if ":" in own or not timm.is_model(own):
        close = get_close_matches(own, timm.list_models(), n=1)
        advice = f"did you mean {TIMM_PREFIX + close[0]!r}?" if close else "timm.list_models() in Python lists them"
        raise ConfigError(f"model.name = {name!r} is no architecture of timm; {advice}")

    def make(shape: tuple[int, ...], num_classes: int, **args: Any) -> nn.Module:
        for key in args:
            if key.startswith(_LOADS):
                raise ConfigError(f"model.args.{key} cannot be used: weights come from a local file, see model.weights")
        module: nn.Module = timm.create_model(own, in_chans=shape[0], num_classes=num_classes, **args)
        return module

    return make


def timm_classifier(name: str, module: nn.Module) -> str:
    """The name of the layer that timm calls the classifier."""
    layer = module.get_classifier()  # type: ignore[operator]
    paths = [str(path) for path, each in module.named_modules() if each is layer]
    if not paths or not isinstance(layer, nn.Linear):
        what = "several classifiers" if isinstance(layer, tuple | list) else f"a {type(layer).__name__} as classifier"
        raise ConfigError(f"model {name} has {what}, not one linear layer, so it has no head to train; choose another")
    return paths[0]
