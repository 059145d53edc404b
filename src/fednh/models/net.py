"""Net: an architecture without state. Parameters live in Trees; a Net says what to compute with them."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fednh.errors import ConfigError
from fednh.models.fast_conv import fuse, use_fast_conv
from fednh.models.random_layers import SeededRandomOps, not_repeatable, seeded
from fednh.models.split import read_weights
from fednh.text import some
from fednh.tree import Tree, canonical, has_prefix, is_statistic, strip_prefix

BATCH_NORM = nn.modules.batchnorm._NormBase  # what may keep running statistics: batch and instance normalisation
PARTS = ("body", "head")
NORMS = (BATCH_NORM, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


class Net:
    """A module with `.body` (x -> features (B, D)) and `.head` (features -> logits (B, C)), applied to any Tree.

    `functional_call` swaps parameters into the module that it is given, so two threads must never share one:
    each thread that calls a Net gets its own copy of the skeleton.

    With `norm="local"` the normalisation layers' parameters and statistics are in no Tree that a method sees: they
    start as `norm`, and a client at work binds its own to its thread (`federated/client.py`). `head` is the head's
    name in a module that was split, `dim` the features that one was brought to (`split.resized`); `weights` is a
    safetensors file to start from. With `convolution="fast"`
    convolutions compute by `fast_conv.py` where they can.

    With `norm="average"` parameters and running statistics of batch normalisation are part of every Tree; the
    `statistics` among its names are moved by no gradient, but by passes with batch statistics (`batch_statistics`).
    With `norm="group:G"` group normalisation with G groups takes the place of batch normalisation.

    A net with random layers, such as dropout, is `random`: they are off, except in a thread that is `training`.

    Parameters that the module has frozen (`requires_grad_(False)`) are `frozen`: no fit and no server moves them.

    Batch statistics and random layers act only in passes that train: gradients are recorded, and a tensor of the tree
    moves. A second pass in the same loss, such as a teacher's, uses running statistics and leaves them alone.

    With precision "bf16" the body's convolutions and matrix products run in bfloat16, forward and backward. Features
    come out as float32, and so does everything that is made of them.
    """

    precision: str = "float32"  # or "bf16"; set once, by the code that creates the Net

    def __init__(
        self,
        build: Callable[[], nn.Module],
        shape: tuple[int, ...],
        num_classes: int,
        name: str = "model",
        *,
        head: str | None = None,
        norm: str = "refuse",
        weights: str | None = None,
        convolution: str = "fast",
        dim: int | None = None,
    ):
        self.brought_to = dim
        self.name, self.shape, self.num_classes, self.head = name, shape, num_classes, head
        self.convolution = convolution
        self.norm_rule, groups = norm, norm.partition(":")[2]
        self._build = (lambda: with_group_norm(build(), int(groups), name)) if groups else build
        self._skeleton = self._checked(seeded(self._build, 0), norm)
        self._weights: Tree = {} if weights is None else read_weights(weights, self._skeleton, head)
        self._skeleton.load_state_dict(self._weights, strict=False)
        for layer in self._skeleton.modules():
            layer.training = layer.training and not isinstance(layer, BATCH_NORM)
        inside = _norm_names(self._skeleton)
        parameters = {name for name, _ in self._skeleton.named_parameters()}
        self.statistics = frozenset(name for name in inside if is_statistic(name)) if norm == "average" else frozenset()
        here = parameters | self.statistics
        self.norms = () if norm == "local" else tuple(name for name in inside if name in here)
        self.norm: Tree = {}
        if norm == "local":
            state = self._skeleton.state_dict()
            self.norm = canonical({name: state[name].detach().clone() for name in inside})
        self.frozen = frozenset(name for name, value in self._skeleton.named_parameters() if not value.requires_grad)
        self.trained_norms = frozenset(self.norm.keys() & parameters - self.frozen)
        self.parameter_shapes = [tuple(value.shape) for value in self._skeleton.parameters()]
        self._needed = {
            part: frozenset(
                name.removeprefix(f"{part}.") for name in here - self.norm.keys() if has_prefix(name, (part,))
            )
            for part in PARTS
        }
        self._thread = threading.local()
        self.random = False
        self.dim = self._probe()

    def __getstate__(self) -> dict[str, Any]:
        """A Net can be sent to another process; the state of threads stays here."""
        return {name: value for name, value in self.__dict__.items() if name != "_thread"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _thread=threading.local())

    @property
    def card(self) -> dict[str, str | int | None]:
        """The arguments that `build_net` needs, beside the constructor's own, to build it again."""
        dim = {} if self.brought_to is None else {"dim": self.brought_to}
        return {"name": self.name, "head": self.head, "norm": self.norm_rule, "convolution": self.convolution, **dim}

    @property
    def layers(self) -> tuple[tuple[str, ...], ...]:
        """Each layer's own parameters, by name, in the order in which the module defines its layers; head last."""
        names = [name for name, _ in self._skeleton.named_parameters() if name not in self.norm]
        names.sort(key=lambda name: name.startswith("head."))
        held = {layer: tuple(name for name in names if _layer(name) == layer) for layer in map(_layer, names)}
        return tuple(held.values())

    @property
    def unmoved(self) -> frozenset[str]:
        """The names that no gradient moves: frozen parameters, and statistics."""
        return self.frozen | self.statistics

    @property
    def stateful(self) -> bool:
        """Whether clients have their own normalisation: results then depend on which client's is bound."""
        return bool(self.norm)

    def init(self, rng: torch.Generator) -> Tree:
        """Fresh parameters, named "body...." and "head....". The same `rng` state gives the same parameters."""
        module = seeded(self._build, int(torch.randint(2**62, (), generator=rng)))
        made = {**dict(module.named_parameters()), **{n: v for n, v in module.named_buffers() if n in self.statistics}}
        fresh = {name: value.detach().clone() for name, value in made.items() if name not in self.norm}
        return canonical(
            {name: self._weights[name].clone() if name in self._weights else fresh[name] for name in fresh}
        )

    def features(self, params: Tree, x: Tensor) -> Tensor:  # (B, ...) -> (B, D)
        if self.precision == "float32":
            return self._apply("body", params, x)
        # Entered at every call: autocast holds for one thread. No weight is used twice, so none is worth caching.
        with torch.autocast(x.device.type, torch.bfloat16, cache_enabled=False):
            return self._apply("body", params, x).float()

    def classify(self, params: Tree, features: Tensor) -> Tensor:  # (B, D) -> (B, C)
        return self._apply("head", params, features)

    def logits(self, params: Tree, x: Tensor) -> Tensor:  # (B, ...) -> (B, C)
        return self.classify(params, self.features(params, x))

    def inputs_of(self, layer: str, params: Tree, x: Tensor) -> Tensor:
        """What a layer of the body is given for `x`, by the layer's name, "body.linear1" for example."""
        given: list[Tensor] = []
        module = self._part("body").get_submodule(layer.removeprefix("body."))
        hook = module.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
        try:
            self.features(params, x)
        finally:
            hook.remove()
        return given[0]

    def bind_norm(self, norm: Tree | None, training: bool = False) -> None:
        """Set this thread's normalisation: a client's own, or (None) the initial one.

        While `training`, layers with running statistics use those of the batch, in passes that train, and update the
        bound ones in place.
        """
        self._thread.norm = self.norm if norm is None else norm
        self._thread.batch_statistics = training

    @contextmanager
    def batch_statistics(self, active: bool) -> Iterator[None]:
        """Let passes that train use the batch's statistics in this thread, and update those of the tree in place."""
        self._thread.batch_statistics = active
        try:
            yield
        finally:
            self._thread.batch_statistics = False

    @contextmanager
    def training(self, rng: torch.Generator) -> Iterator[None]:
        """Turn random layers on in this thread; all that they draw comes from `rng`."""
        if not self.random:
            yield
            return
        self._thread.drawing = True
        try:
            with SeededRandomOps(rng):
                yield
        finally:
            self._thread.drawing = False

    def _set_modes(self, part: nn.Module, trains: bool) -> None:
        """Turn batch statistics and random layers of a part on where this thread asked for them and the pass trains."""
        for layer in part.modules():
            if isinstance(layer, BATCH_NORM):
                layer.training = trains and getattr(self._thread, "batch_statistics", False)
            elif self.random:
                layer.training = trains and getattr(self._thread, "drawing", False)

    def _apply(self, name: str, params: Tree, x: Tensor) -> Tensor:
        part = self._part(name)
        if self.norm or self.statistics or self.random:
            self._set_modes(part, torch.is_grad_enabled() and any(value.requires_grad for value in params.values()))
        out: Tensor = functional_call(part, self._state(params, name), (x,))
        return out

    def _state(self, params: Tree, part: str) -> Tree:
        """What `params` holds for `.body` or `.head`, by the part's own names: all of its parameters and nothing else.

        `functional_call` would take a parameter that is missing from the skeleton, and leave out what it does not know.
        """
        state, needed = strip_prefix(params, part), self._needed[part]
        norm = strip_prefix(getattr(self._thread, "norm", self.norm), part) if self.norm else {}
        if state.keys() != needed and (problem := _difference(part, state, needed, norm)):
            raise ValueError(f"model {self.name} is given a tree that {problem}")
        return {**norm, **state} if norm else state

    def _part(self, name: str) -> nn.Module:
        """This thread's own `.body` or `.head`."""
        if not hasattr(self._thread, "module"):
            self._thread.module = copy.deepcopy(self._skeleton)
            if self.convolution == "fast":
                use_fast_conv(self._thread.module)
                fuse(self._thread.module)
        part: nn.Module = getattr(self._thread.module, name)
        return part

    def _checked(self, module: nn.Module, norm: str) -> nn.Module:
        for part in PARTS:
            if not isinstance(getattr(module, part, None), nn.Module):
                raise ConfigError(
                    f"model {self.name} has no .{part}; a model needs .body (features) and .head (linear)"
                )
        if {name.partition(".")[0] for name, _ in module.named_parameters()} - set(PARTS):
            raise ConfigError(f"model {self.name} has parameters outside .body and .head; move them into .body")
        if not any(value.requires_grad for value in module.parameters()):
            raise ConfigError(f"model {self.name} has frozen all of its parameters, so nothing can be trained")
        for name, layer in module.named_modules():
            if isinstance(layer, BATCH_NORM):
                self._check_batch_norm(name, layer, norm)
        return module

    def _check_batch_norm(self, name: str, layer: nn.Module, norm: str) -> None:
        tracks, batch = bool(layer.track_running_stats), isinstance(layer, nn.modules.batchnorm._BatchNorm)
        if norm not in ("local", "average") and (tracks or batch):
            raise ConfigError(
                f"model {self.name}: {name} is batch normalisation, whose running statistics differ on every client; "
                f'use GroupNorm instead, or set model.norm = "local" to leave normalisation with the clients, "group" '
                f'to put GroupNorm in its place, or "average" to average it with its statistics'
            )
        if batch and not tracks:
            raise ConfigError(
                f"model {self.name}: {name} keeps no running statistics, so a prediction would depend on what else is "
                f"in its batch; build it with track_running_stats=True"
            )
        if norm == "average" and tracks and layer.momentum is None:
            raise ConfigError(
                f"model {self.name}: {name} counts its batches (momentum=None), and counts are not averaged; give it a "
                f'momentum, or set model.norm = "local"'
            )

    def _probe(self) -> int:
        """Some forward passes: find D and random layers, report a model that does not fit, before any training."""
        x = torch.randn(2, *self.shape, generator=torch.Generator().manual_seed(0))
        body, head = self._part("body"), self._part("head")
        try:
            features, logits, draws = self._drawn(x)
            again = self._drawn(x)[1]
            if draws:
                self.random = True
                for part in (self._skeleton, body, head):
                    part.eval()
                with self.training(torch.Generator()):  # refuses what cannot be seeded
                    self._set_modes(body, True)
                    self._set_modes(head, True)
                    head(body(x))
                self._set_modes(body, False)
                self._set_modes(head, False)
                *_, draws = self._drawn(x)
        except (RuntimeError, ValueError, TypeError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise ConfigError(f"model {self.name} does not accept inputs of shape {self.shape}: {reason}") from error
        if features.ndim != 2:
            raise ConfigError(f"model {self.name}: .body must return (batch, features), not {tuple(features.shape)}")
        weight = getattr(head, "weight", None)
        if weight is None or weight.ndim != 2:
            raise ConfigError(f"model {self.name}: .head must be a linear layer with a .weight of (classes, features)")
        if logits.shape[1] != self.num_classes:
            raise ConfigError(
                f"model {self.name} has a head of {logits.shape[1]} classes, but the data has {self.num_classes}"
            )
        if not torch.equal(logits, again):
            raise not_repeatable(self.name)
        if draws:
            raise ConfigError(
                f"model {self.name} draws random numbers also when it is not training, so a prediction could not be "
                f"repeated; give F.dropout and its like training=self.training"
            )
        return int(features.shape[1])

    @torch.no_grad()
    def _drawn(self, x: Tensor) -> tuple[Tensor, Tensor, bool]:
        """Features, logits, and whether PyTorch drew random numbers, which are the same at every call."""

        def forward() -> tuple[Tensor, Tensor, bool]:
            before = torch.get_rng_state()
            features: Tensor = self._part("body")(x)
            logits: Tensor = self._part("head")(features)
            return features, logits, not torch.equal(before, torch.get_rng_state())

        return seeded(forward, 0)


def _difference(part: str, state: Tree, needed: frozenset[str], norm: Tree) -> str | None:
    """How the names of a part differ from those of its parameters; a client's normalisation may be among them."""
    for words, names in (
        ("lacks", needed - state.keys()),
        ("holds what it does not have:", state.keys() - needed - norm.keys()),
    ):
        if names:
            return f"{words} {some([f'{part}.{name}' for name in sorted(names)], 3)}"
    return None


def _layer(name: str) -> str:
    """The layer that holds a parameter."""
    return name.rpartition(".")[0]


def with_group_norm(module: nn.Module, groups: int, model: str) -> nn.Module:
    """The module with group normalisation in place of every batch normalisation, at its initial values."""
    for path, layer in list(module.named_modules()):
        if not isinstance(layer, nn.modules.batchnorm._BatchNorm):
            continue
        if layer.num_features % groups:
            raise ConfigError(
                f"model {model}: {path} has {layer.num_features} channels, which {groups} groups do not divide; set "
                f"model.groups"
            )
        parent, _, name = path.rpartition(".")
        norm = nn.GroupNorm(groups, layer.num_features, eps=layer.eps, affine=layer.affine)
        setattr(module.get_submodule(parent), name, norm)
    return module


def _norm_names(module: nn.Module) -> list[str]:
    """The names of all parameters and statistics of normalisation layers."""
    return [
        f"{path}.{name}"
        for path, layer in module.named_modules()
        if isinstance(layer, NORMS)
        for name in layer.state_dict()
    ]


def uniform_weights(shape: tuple[int, ...], fan_in: int, rng: torch.Generator) -> Tensor:
    """The usual initial values of a linear layer, for one that a method adds: uniform within 1/sqrt(fan_in)."""
    values: Tensor = (torch.rand(shape, generator=rng) * 2 - 1) / fan_in**0.5
    return values
