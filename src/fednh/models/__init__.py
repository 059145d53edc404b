"""Models by name, by the data's shape, or by import path."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from fednh.errors import UserError, did_you_mean
from fednh.extras import imported_class
from fednh.models import architectures
from fednh.models.architectures import CNN, MLP, TIMM_PREFIX, Conv2, ResNet18
from fednh.models.net import Net
from fednh.models.random_layers import seeded
from fednh.models.split import Split, check_head, find_head, is_split

MODELS: dict[str, Callable[..., nn.Module]] = {"mlp": MLP, "conv2": Conv2, "cnn": CNN, "resnet18": ResNet18}

__all__ = ["MODELS", "Net", "build_net", "count_parameters", "default_model"]


def default_model(shape: tuple[int, ...]) -> str:
    """The model for a sample's shape: vectors and images below 16 pixels a side take the mlp, below 64 conv2."""
    if len(shape) == 1 or min(shape[1:]) < 16:
        return "mlp"
    return "conv2" if min(shape[1:]) < 64 else "resnet18"


def build_net(
    name: str,
    shape: tuple[int, ...],
    num_classes: int,
    args: Mapping[str, Any] | None = None,
    *,
    head: str | None = None,
    norm: str = "refuse",
    weights: str | None = None,
    convolution: str = "fast",
) -> Net:
    """The Net called `name`: "auto", one of MODELS, "timm:ARCHITECTURE", or "package.module:Class".

    A user's class is called with `shape` or `input_shape` (one sample: (C, H, W) or (F,)) and `num_classes` or
    `n_classes`, whichever its constructor has as parameters, and with `args`. It has .body and .head, or `head` names
    its last linear layer, or that layer is found. For `norm`, `weights` and `convolution` see Net.
    """
    name, make = _maker(name, shape, num_classes, args)
    if name in MODELS and head is not None:
        raise UserError(f"model.head = {head!r} is for models of your own; {name} has a head")
    if name not in MODELS:
        whole = seeded(make, 0)
        if head is None and name.startswith(TIMM_PREFIX):
            head = architectures.timm_classifier(name, whole)
        elif head is None and not is_split(whole):
            head = find_head(name, whole, num_classes)
        if head is not None:
            check_head(name, whole, head, shape)
    build = make if head is None else lambda: Split(make(), str(head))
    return Net(build, shape, num_classes, name, head=head, norm=norm, weights=weights, convolution=convolution)


def count_parameters(name: str, shape: tuple[int, ...], num_classes: int, args: Mapping[str, Any] | None = None) -> int:
    """How many parameters a model has, counted on PyTorch's meta device, which needs no memory for them.

    A class of one's own that cannot be made there is made as it is.
    """
    name, make = _maker(name, shape, num_classes, args)
    try:
        with torch.device("meta"):
            module = make()
    except UserError:
        if name in MODELS or name.startswith(TIMM_PREFIX):
            raise
        module = make()
    return sum(each.numel() for each in (*module.parameters(), *module.buffers()))


def _maker(
    name: str, shape: tuple[int, ...], num_classes: int, args: Mapping[str, Any] | None
) -> tuple[str, Callable[[], nn.Module]]:
    """The name of the model, which "auto" leaves open, and what makes its module."""
    name = default_model(shape) if name == "auto" else name
    if (name in ("conv2", "cnn", "resnet18") or name.startswith(TIMM_PREFIX)) and len(shape) != 3:
        raise UserError(f"model.name = {name!r} needs images, but the data are vectors of {shape[0]} values; use 'mlp'")
    factory = MODELS.get(name) or _factory(name)
    offered = {"shape": shape, "input_shape": shape, "num_classes": num_classes, "n_classes": num_classes}
    arguments = _arguments(name, factory, offered, dict(args or {}))

    def make() -> nn.Module:
        try:
            module = factory(**arguments)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"model {name} cannot be built: {error}") from error
        if not isinstance(module, nn.Module):
            raise UserError(f"model {name} gave a {type(module).__name__}, not a torch.nn.Module")
        return module

    return name, make


def _factory(path: str) -> Callable[..., nn.Module]:
    if path.startswith(TIMM_PREFIX):
        return architectures.timm_factory(path)
    if ":" not in path:
        raise UserError(
            f"model.name = {path!r} is not known{did_you_mean(path, ['auto', *MODELS])} "
            f"(or give 'timm:ARCHITECTURE' or 'package.module:Class')"
        )
    return imported_class(path, "model.name", nn.Module)


def _arguments(
    name: str, factory: Callable[..., nn.Module], offered: dict[str, Any], given: dict[str, Any]
) -> dict[str, Any]:
    parameters = inspect.signature(factory).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = [key for key in given if key not in parameters and not takes_any]
    if unknown:
        raise UserError(f"model.args.{unknown[0]} is not an argument of model {name}; it takes {', '.join(parameters)}")
    arguments = {**{key: value for key, value in offered.items() if key in parameters}, **given}
    try:
        inspect.signature(factory).bind(**arguments)
    except TypeError as error:
        raise UserError(f"model {name} cannot be built: {error}; set it in model.args") from error
    return arguments
