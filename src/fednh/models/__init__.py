"""Models by name, by the data's shape, or by import path."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from fednh.errors import ConfigError, Refused, UserError, did_you_mean
from fednh.extras import imported_class
from fednh.models import architectures
from fednh.models.architectures import CNN, MLP, TIMM_PREFIX, Conv2, Linear, ResNet18
from fednh.models.net import Net
from fednh.models.random_layers import seeded
from fednh.models.split import Split, check_head, find_head, is_split, resized

MODELS: dict[str, Callable[..., nn.Module]] = {
    "linear": Linear,
    "mlp": MLP,
    "conv2": Conv2,
    "cnn": CNN,
    "resnet18": ResNet18,
}

LAYERS = 20_000  # that a site makes of a model to count its parameters

__all__ = ["MODELS", "Net", "build_net", "check_size", "default_model"]


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
    dim: int | None = None,
) -> Net:
    """The Net called `name`: "auto", one of MODELS, "timm:ARCHITECTURE", or "package.module:Class".

    A user's class is called with `shape` or `input_shape` (one sample: (C, H, W) or (F,)) and `num_classes` or
    `n_classes`, whichever its constructor has as parameters, and with `args`. It has .body and .head, or `head` names
    its last linear layer, or that layer is found. With `dim` it has so many features before a linear head without bias
    (`split.Resized`). For `norm`, `weights` and `convolution` see Net.
    """
    name, make = _maker(name, shape, num_classes, args)
    if name in MODELS and head is not None:
        raise ConfigError(f"model.head = {head!r} is for models of your own; {name} has a head")
    if name not in MODELS:
        module = seeded(make, 0)
        if head is None and name.startswith(TIMM_PREFIX):
            head = architectures.timm_classifier(name, module)
        elif head is None and not is_split(module):
            head = find_head(name, module, num_classes)
        if head is not None:
            check_head(name, module, head, shape)
    whole = make if head is None else lambda: Split(make(), str(head))
    build = whole if dim is None else lambda: resized(whole(), num_classes, dim)
    return Net(build, shape, num_classes, name, head=head, norm=norm, weights=weights, convolution=convolution, dim=dim)


def check_size(
    name: str,
    shape: tuple[int, ...],
    num_classes: int,
    args: Mapping[str, Any] | None,
    check: Callable[[int], None],
    dim: int | None = None,
) -> None:
    """Call `check` with a model's number of parameters, and while it is made with those so far: it may raise.

    They are counted on PyTorch's meta device, which needs no memory for them. A class of one's own that cannot be made
    there is made as it is.
    """
    name, make = _maker(name, shape, num_classes, args)
    with _counting(check):
        try:
            with torch.device("meta"):
                module = make()
        except UserError as error:
            if isinstance(error, Refused) or name in MODELS or name.startswith(TIMM_PREFIX):
                raise
            module = make()
    widest = max((each.shape[-1] for each in module.parameters() if each.ndim == 2), default=0)
    brought = 0 if dim is None else dim * (widest + 1 + num_classes)  # the layer behind its body, and the head
    check(sum(each.numel() for each in (*module.parameters(), *module.buffers())) + brought)


@contextmanager
def _counting(check: Callable[[int], None]) -> Iterator[None]:
    """Count parameters and layers as they are made: arguments such as a depth must not make any number of them."""
    made = {"parameters": 0, "layers": 0}

    def parameter(_: nn.Module, name: str, value: nn.Parameter | None) -> None:
        made["parameters"] += 0 if value is None else value.numel()
        check(made["parameters"] // 2)  # a class may make one twice, or replace it

    def layer(*_: object) -> None:
        made["layers"] += 1
        if made["layers"] > LAYERS:
            raise Refused(f"the model has more than {LAYERS:,} layers")

    hooks = (register_module_parameter_registration_hook(parameter), register_module_module_registration_hook(layer))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _maker(
    name: str, shape: tuple[int, ...], num_classes: int, args: Mapping[str, Any] | None
) -> tuple[str, Callable[[], nn.Module]]:
    """The name of the model, which "auto" leaves open, and what makes its module."""
    name = default_model(shape) if name == "auto" else name
    if (name in ("conv2", "cnn", "resnet18") or name.startswith(TIMM_PREFIX)) and len(shape) != 3:
        raise ConfigError(
            f"model.name = {name!r} needs images, but the data are vectors of {shape[0]} values; use 'mlp'"
        )
    factory = MODELS.get(name) or _factory(name)
    offered = {"shape": shape, "input_shape": shape, "num_classes": num_classes, "n_classes": num_classes}
    arguments = _arguments(name, factory, offered, dict(args or {}))

    def make() -> nn.Module:
        try:
            module = factory(**arguments)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"model {name} cannot be built: {error}") from error
        if not isinstance(module, nn.Module):
            raise ConfigError(f"model {name} gave a {type(module).__name__}, not a torch.nn.Module")
        return module

    return name, make


def _factory(path: str) -> Callable[..., nn.Module]:
    if path.startswith(TIMM_PREFIX):
        return architectures.timm_factory(path)
    if ":" not in path:
        raise ConfigError(
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
        raise ConfigError(
            f"model.args.{unknown[0]} is not an argument of model {name}; it takes {', '.join(parameters)}"
        )
    arguments = {**{key: value for key, value in offered.items() if key in parameters}, **given}
    try:
        inspect.signature(factory).bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"model {name} cannot be built: {error}; set it in model.args") from error
    return arguments
