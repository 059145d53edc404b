"""Splits any module into body, which computes the representation, and head, its last linear layer.

`read_weights` reads pretrained weights for it, by the names of our Trees or of the module's own state_dict.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from fednh.errors import ConfigError, Notice
from fednh.io.files import read_tree
from fednh.models.random_layers import not_repeatable, seeded
from fednh.text import some
from fednh.tree import Tree, finite, select

ADVICE = "give the model a .body and a .head, or name another layer with model.head"


def read_weights(file: str, module: nn.Module, head: str | None) -> Tree:
    """The file's tensors by the names of `module` (which has .body and .head; `head` is the layer's own name).

    A head of another size is left out with a note; anything else that does not fit is refused.
    """
    try:
        tree = read_tree(Path(file))
        with safe_open(file, "pt") as opened:
            ours = "fednh" in (opened.metadata() or {})
    except (OSError, SafetensorError, ValueError) as error:
        raise ConfigError(f"model.weights = {file!r} cannot be read as safetensors: {error}") from error
    wanted: dict[str, Tensor] = module.state_dict()
    tree = max([tree, _translated(tree, head)], key=lambda t: len(t.keys() & wanted.keys()))
    if ours:  # leaves out what a method stores beside the network, such as a scale
        tree = select(tree, "body", "head")
    tree = _without_other_head(file, tree, wanted)
    unknown = sorted(tree.keys() - wanted.keys())
    missing = sorted(n for n in wanted.keys() - tree.keys() if not n.startswith("head.") and not _counter(n))
    other = sorted(n for n in tree.keys() & wanted.keys() if tree[n].shape != wanted[n].shape)
    for problem, names in (("holds what the model lacks", unknown), ("lacks", missing), ("has other shapes", other)):
        if names:
            raise ConfigError(f"model.weights = {file!r} does not fit the model: it {problem}: {some(names, 3)}")
    if not finite(tree):
        raise ConfigError(f"model.weights = {file!r} holds values that are not finite")
    return {name: value.to(wanted[name].dtype) for name, value in tree.items()}


def _translated(tree: Tree, head: str | None) -> Tree:
    """A state_dict of the whole module, under the names that it has after the split."""
    if head is None:
        return tree
    cut = head + "."
    return {f"head.{n.removeprefix(cut)}" if n.startswith(cut) else f"body.{n}": value for n, value in tree.items()}


def _without_other_head(file: str, tree: Tree, wanted: dict[str, Tensor]) -> Tree:
    def head_shapes(part: dict[str, Tensor]) -> dict[str, torch.Size]:
        return {name: value.shape for name, value in select(part, "head").items()}

    if head_shapes(tree) == head_shapes(wanted):
        return tree
    what = "has no head" if not head_shapes(tree) else "has a head of another size, which is left out"
    warnings.warn(f"model.weights = {file!r} {what}; the head starts afresh", Notice, stacklevel=4)
    return select(tree, *{name.partition(".")[0] for name in tree} - {"head"})


def _counter(name: str) -> bool:
    """Batch normalisation counts batches, which older files do not hold; nothing depends on it."""
    return name.endswith("num_batches_tracked")


class Split(nn.Module):
    """A module whose last linear layer is taken out: `.body` is the rest, `.head` that layer."""

    def __init__(self, module: nn.Module, head: str):
        super().__init__()
        layer = module.get_submodule(head)
        parent, _, leaf = head.rpartition(".")
        setattr(module.get_submodule(parent), leaf, nn.Identity())
        self.body, self.head = module, layer


class Resized(nn.Module):
    """A body with a linear layer behind it, where it does not give `dim` features itself, and a head without bias."""

    def __init__(self, body: nn.Module, features: int, num_classes: int, dim: int):
        super().__init__()
        brought = nn.Sequential(OrderedDict(own=body, brought=nn.Linear(features, dim)))
        self.body = body if features == dim else brought
        self.head = nn.Linear(dim, num_classes, bias=False)


def resized(module: nn.Module, num_classes: int, dim: int) -> nn.Module:
    """The module with `dim` features before its head; one that has no linear head is left for Net to refuse."""
    weight = getattr(getattr(module, "head", None), "weight", None)
    if not is_split(module) or weight is None or weight.ndim != 2:
        return module
    return Resized(module.get_submodule("body"), int(weight.shape[1]), num_classes, dim)


def is_split(module: nn.Module) -> bool:
    return all(isinstance(getattr(module, part, None), nn.Module) for part in ("body", "head"))


def find_head(name: str, module: nn.Module, num_classes: int) -> str:
    """The last linear layer with an output for every class; the choice is reported to the user."""
    layers = [(path, layer) for path, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    linear = {str(path): int(layer.out_features) for path, layer in layers}
    fitting = [path for path, width in linear.items() if width == num_classes and path]
    if not fitting:
        listed = ", ".join(f"{path or 'itself'} ({width})" for path, width in linear.items()) or "none"
        raise ConfigError(
            f"model {name} has no .body and .head, and no linear layer inside it has {num_classes} outputs, one for "
            f"each class (linear layers: {listed}); set its number of outputs with model.args"
        )
    warnings.warn(f"model {name}: its layer {fitting[-1]!r} is taken as the head", Notice, stacklevel=3)
    return fitting[-1]


def check_head(name: str, module: nn.Module, head: str, shape: tuple[int, ...]) -> None:
    """Refuse a head that is not the module's last operation: body and head must compute what the whole module does.

    `module` is taken apart by this.
    """
    try:
        layer = module.get_submodule(head)
    except AttributeError:
        linear = ", ".join(path for path, layer in module.named_modules() if isinstance(layer, nn.Linear)) or "none"
        raise ConfigError(
            f"model.head = {head!r} is not a layer of model {name}; its linear layers are: {linear}"
        ) from None
    if not isinstance(layer, nn.Linear) or not head:
        raise ConfigError(
            f"model.head = {head!r} is a {type(layer).__name__} of model {name}, not a linear layer inside it"
        )
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    module.eval()
    with torch.no_grad():
        try:
            whole: Tensor = seeded(lambda: module(x), 0)
            again: Tensor = seeded(lambda: module(x), 0)
        except Exception as error:  # anything that a user's forward may raise
            reason = str(error).strip().partition("\n")[0]
            raise ConfigError(f"model {name} does not accept inputs of shape {shape}: {reason}") from error
        if not torch.equal(whole, again):
            raise not_repeatable(name)
        try:
            parts = Split(module, head)
            ours: Tensor = seeded(lambda: parts.head(parts.body(x)), 0)
            same = ours.shape == whole.shape and torch.allclose(ours, whole, rtol=1e-4, atol=1e-5)
        except Exception:
            same = False
    if not same:
        raise ConfigError(
            f"model {name}: its layer {head!r} is not the last thing that it does (a softmax behind it, or used "
            f"elsewhere?), so it cannot be the head; {ADVICE}"
        )
