"""Net: an architecture without state. Parameters live in Trees; a Net says what to compute with them."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fednh.errors import UserError
from fednh.tree import Tree, arranged, below


class Net:
    """A module with `.body` (x -> features (B, D)) and `.head` (features -> logits (B, C)), applied to any Tree.

    `functional_call` swaps parameters into the module that it is given, so two threads must never share one:
    each thread that calls a Net gets its own copy of the skeleton.

    With precision "bf16" the body's convolutions and matrix products run in bfloat16, forward and backward. Features
    come out as float32, and so does everything that is made of them.
    """

    precision: str = "float32"  # or "bf16"; chosen once, by who makes the Net

    def __init__(self, build: Callable[[], nn.Module], shape: tuple[int, ...], num_classes: int, name: str = "model"):
        self.name, self.shape, self.num_classes = name, shape, num_classes
        self._build = build
        self._skeleton = self._checked(_seeded(build, 0))
        self.parameter_shapes = [tuple(value.shape) for value in self._skeleton.parameters()]
        self._mine = threading.local()
        self.dim = self._probe()

    def init(self, rng: torch.Generator) -> Tree:
        """Fresh parameters, named "body...." and "head....". The same `rng` state gives the same parameters."""
        module = _seeded(self._build, int(torch.randint(2**62, (), generator=rng)))
        return arranged({name: value.detach().clone() for name, value in module.named_parameters()})

    def features(self, params: Tree, x: Tensor) -> Tensor:  # (B, ...) -> (B, D)
        if self.precision == "float32":
            return self._features(params, x)
        # Entered at every call: autocast holds for one thread. No weight is used twice, so none is worth caching.
        with torch.autocast(x.device.type, torch.bfloat16, cache_enabled=False):
            return self._features(params, x).float()

    def classify(self, params: Tree, features: Tensor) -> Tensor:  # (B, D) -> (B, C)
        out: Tensor = functional_call(self._part("head"), below(params, "head"), (features,))
        return out

    def logits(self, params: Tree, x: Tensor) -> Tensor:  # (B, ...) -> (B, C)
        return self.classify(params, self.features(params, x))

    def _features(self, params: Tree, x: Tensor) -> Tensor:
        out: Tensor = functional_call(self._part("body"), below(params, "body"), (x,))
        return out

    def _part(self, name: str) -> nn.Module:
        """This thread's own `.body` or `.head`."""
        if not hasattr(self._mine, "module"):
            self._mine.module = copy.deepcopy(self._skeleton)
        part: nn.Module = getattr(self._mine.module, name)
        return part

    def _checked(self, module: nn.Module) -> nn.Module:
        for part in ("body", "head"):
            if not isinstance(getattr(module, part, None), nn.Module):
                raise UserError(f"model {self.name} has no .{part}; a model needs .body (features) and .head (linear)")
        if {name.partition(".")[0] for name, _ in module.named_parameters()} - {"body", "head"}:
            raise UserError(f"model {self.name} has parameters outside .body and .head; move them into .body")
        for name, layer in module.named_modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                raise UserError(
                    f"model {self.name}: {name} is batch normalisation, whose running statistics differ on every "
                    f"client; use GroupNorm instead"
                )
            if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0:
                raise UserError(
                    f"model {self.name}: {name} is dropout, which draws from a generator that all workers share, so a "
                    f"run could not be repeated; set its p to 0 and use train.weight_decay to regularise"
                )
        return module

    def _probe(self) -> int:
        """One forward pass on zeros: finds D and reports a model that does not fit the data, before any training."""
        body, head = self._part("body"), self._part("head")
        try:
            with torch.no_grad():
                features: Tensor = body(torch.zeros(2, *self.shape))
                logits: Tensor = head(features)
        except (RuntimeError, ValueError, TypeError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise UserError(f"model {self.name} does not accept inputs of shape {self.shape}: {reason}") from error
        if features.ndim != 2:
            raise UserError(f"model {self.name}: .body must return (batch, features), not {tuple(features.shape)}")
        weight = getattr(head, "weight", None)
        if weight is None or weight.ndim != 2:
            raise UserError(f"model {self.name}: .head must be a linear layer with a .weight of (classes, features)")
        if logits.shape[1] != self.num_classes:
            raise UserError(
                f"model {self.name} has a head of {logits.shape[1]} classes, but the data has {self.num_classes}"
            )
        return int(features.shape[1])


def _seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Build a module from a given seed and leave the global generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()
