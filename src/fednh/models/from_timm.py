"""Architectures of timm (PyTorch Image Models) by name: `timm:mobilenetv3_small_050`. Weights are a local file."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from fednh import extras
from fednh.errors import UserError

PREFIX = "timm:"
_LOADS = ("pretrained", "checkpoint_path", "cache_dir")  # arguments by which timm would download or unpickle


def factory(name: str) -> Callable[..., nn.Module]:
    """What builds the architecture called `name`, with its prefix; the number of classes and channels is the data's."""
    extras.need("timm", f"model.name = {name!r}")
    try:
        import timm
    except (ImportError, RuntimeError) as error:  # torchvision, which it needs, is missing or of another build
        raise UserError(
            f"model.name = {name!r} needs timm, which cannot be imported here ({error}); install a torchvision that "
            f"was built for torch {torch.__version__}"
        ) from error
    own = name.removeprefix(PREFIX)
    if ":" in own or not timm.is_model(own):
        close = get_close_matches(own, timm.list_models(), n=1)
        advice = f"did you mean {PREFIX + close[0]!r}?" if close else "timm.list_models() in Python lists them"
        raise UserError(f"model.name = {name!r} is no architecture of timm; {advice}")

    def make(shape: tuple[int, ...], num_classes: int, **args: Any) -> nn.Module:
        for key in args:
            if key.startswith(_LOADS):
                raise UserError(f"model.args.{key} cannot be used: weights come from a local file, see model.weights")
        module: nn.Module = timm.create_model(own, in_chans=shape[0], num_classes=num_classes, **args)
        return module

    return make


def classifier(name: str, module: nn.Module) -> str:
    """The name of the layer that timm calls the classifier."""
    layer = module.get_classifier()  # type: ignore[operator]
    found = [str(path) for path, each in module.named_modules() if each is layer]
    if not found or not isinstance(layer, nn.Linear):
        what = "several classifiers" if isinstance(layer, tuple | list) else f"a {type(layer).__name__} as classifier"
        raise UserError(f"model {name} has {what}, not one linear layer, so it has no head to train; choose another")
    return found[0]
