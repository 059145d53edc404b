"""A trained model as ONNX, which needs no fednh. The whole way from raw input is inside.

input          uint8 images (N, H, W, C), or float32 vectors (N, F), with values as in the training data; N is free
probabilities  float32 (N, C); logits float32 (N, C)
similarity     float32 (N,), the cosine to the nearest prototype, for methods that have prototypes

The card goes along: ONNX metadata "fednh". What was written is read back and compared with the model before it gets its
name: an export that computes something else is refused.
"""

from __future__ import annotations

import json
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fednh import extras
from fednh.data import scaling
from fednh.data.dataset import Inputs
from fednh.data.sources.images import rule
from fednh.data.sources.registry import build, find, load
from fednh.errors import UserError
from fednh.federated import similarity
from fednh.inference import inputs
from fednh.inference.model import Model
from fednh.io.cache import data_folder
from fednh.io.files import commit_file, make_folder
from fednh.models.backbone import Backbone, OnnxBody, averaged
from fednh.runs.model_file import Card, remembered
from fednh.text import one_line
from fednh.tree import Tree

TOLERANCE = 1e-4  # relative to values of 1 and more, absolute below
BODY_TOLERANCE = 1e-3  # behind a frozen body: a head solved from few samples amplifies how features are rounded


class ExportedModel(nn.Module):
    """Preprocessing, network, method and softmax as one module; the parameters are its buffers."""

    def __init__(self, model: Model, behind: bool = False):
        """With `behind`, what follows a frozen body alone: its input is the body's output."""
        super().__init__()
        self.model, self.names, self.behind = model, list(model.params), behind
        body = model.backbone
        self.backbone = body.module if isinstance(body, Backbone) else None  # so that its tensors are exported
        for i, name in enumerate(self.names):
            self.register_buffer(f"parameter{i}", model.params[name].contiguous())
        for name, value in model.normalisation._asdict().items():
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        params: Tree = {name: self.get_buffer(f"parameter{i}") for i, name in enumerate(self.names)}
        how = scaling.Constants(*(self.get_buffer(name) for name in scaling.Constants._fields))
        if self.behind:
            logits = self.model.method.scores(self.model.net, params, averaged(x))
        else:
            logits = self.model.logits(x, params, how)
        near = similarity.similarity(self.model.method, params, logits)
        return (logits.softmax(1), logits) if near is None else (logits.softmax(1), logits, near)


class Pixels(nn.Module):
    """What comes before a frozen body: images as they are stored become what the body takes."""

    def __init__(self, backbone: Backbone):
        super().__init__()
        self.backbone = backbone
        for name, value in backbone.scaling._asdict().items():
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.backbone.pixels(x)


def export(model: Model, path: Path) -> dict[str, Any]:
    """Write the model to `path` as ONNX; returns what it was checked on and the largest difference found."""
    extras.need("onnx", "an export to ONNX")
    if path.is_dir():
        raise UserError(f"{path} is a folder; name the file to write, such as {path / 'model.onnx'}")
    if inputs.is_text(model.card):
        raise UserError("a model that takes texts cannot be exported to ONNX: its sentence encoder is not part of it")
    samples, origin = real_samples(model)
    make_folder(path.parent)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".export-") as folder:
        draft = Path(folder) / "model.onnx"
        with _explained(model):
            run = _onnx(model, torch.from_numpy(samples[:2]), draft)
            difference = _difference(model, run, samples)
        if not difference <= (TOLERANCE if model.backbone is None else BODY_TOLERANCE):
            raise UserError(f"the exported model differs from the original by {difference:.1e}; it was not written")
        commit_file(draft, path)
    return {"file": str(path), "checked_on": origin, "samples": len(samples), "difference": difference}


def real_samples(model: Model) -> tuple[Inputs, str]:
    """Inputs to compare on: of the data that the model was trained on, where they are at hand."""
    name, why = str(model.card.trained_on.get("data", "")), "the training data are not here"
    try:
        x = _raw(model.card, name)
        samples = inputs.samples(x[:: max(1, len(x) // 100)][:100], model.card)
        if inputs.is_image(model.card) and samples.ndim == 2:
            raise UserError("they are features, not images")
        return samples, f"samples of {name}"
    except UserError as error:
        if Path(name.partition(":")[2] or "-").exists():
            why = f"the training data cannot be read: {error}"
    how, shape = model.card.preprocessing, model.card.shape
    rng = np.random.default_rng(0)
    sizes = (64, *shape[1:], shape[0]) if inputs.is_image(model.card) else (64, *shape)
    drawn = scaling.restore(rng.normal(size=sizes), how.scale, scaling.Scaling(tuple(how.mean), tuple(how.std)))
    if inputs.is_image(model.card):
        return np.clip(drawn, 0, 255).astype(np.uint8), f"random images ({why})"
    return drawn.astype(np.float32), f"random vectors ({why})"


def _raw(card: Card, name: str) -> Any:
    """Samples of the training data; of a table its columns are enough, whichever one the label was."""
    how, named = card.sample_form, find(name)
    if named is None:
        data = load(name, data_folder())
        return data.x_test if len(data.x_test) else data.x_train
    kind, address = named
    if kind.runs_code:
        raise UserError("a model file may come from anybody, and names no code to run")
    settings = {"size": how.get("size"), "fit": rule(how), "on_bad": "skip"}
    settings |= {"classes": card.classes if kind.named else None, **remembered(card)}
    source = build(kind, settings)
    return source.inputs(name, address, how)


Runner = Callable[[Inputs], list[Any]]


def _onnx(model: Model, example: Tensor, path: Path) -> Runner:
    import onnx
    import onnxruntime

    outputs = ["probabilities", "logits", *(["similarity"] if model.method.cosine else [])]
    if not isinstance(model.backbone, Backbone) or model.backbone.onnx is None:
        proto = _traced(ExportedModel(model).eval(), example, outputs, path)
    else:
        proto = _joined(model, model.backbone, model.backbone.onnx, example, outputs, path)
    _name_batch(proto.graph)
    onnx.helper.set_model_props(proto, {"fednh": json.dumps(model.info)})
    onnx.checker.check_model(proto)
    onnx.save(proto, path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda x: list(session.run(None, {"input": x}))


def _traced(module: nn.Module, example: Tensor, outputs: list[str], path: Path) -> Any:
    """A PyTorch module as an ONNX network; `path` is used on the way."""
    import onnx

    with torch.no_grad(), _quiet():
        batch = torch.export.Dim("batch")
        program = torch.export.export(module, (example,), dynamic_shapes=({0: batch},))
        made = torch.onnx.export(program, (), dynamo=True, input_names=["input"], output_names=outputs, verbose=False)
    assert made is not None
    made.save(path, external_data=False)
    return onnx.load(path)


def _joined(model: Model, backbone: Backbone, body: OnnxBody, example: Tensor, outputs: list[str], path: Path) -> Any:
    """One network of three: scaling, the frozen body as its file has it, and what was trained behind it."""
    import onnx
    from onnx.compose import add_prefix, merge_models

    before = _traced(Pixels(backbone).eval(), example, ["pixels"], path)
    behind = _traced(ExportedModel(model, behind=True).eval(), body.run(backbone.pixels(example)), outputs, path)
    middle, opset = onnx.load(body.file), _opset(before)
    if _opset(middle) != opset:
        middle = onnx.version_converter.convert_version(middle, opset)
    before.ir_version = middle.ir_version = behind.ir_version = max(before.ir_version, middle.ir_version)
    before = add_prefix(before, "before/", rename_inputs=False)
    middle, behind = add_prefix(middle, "body/"), add_prefix(behind, "behind/", rename_outputs=False)
    front = merge_models(before, middle, [("before/pixels", f"body/{body.input}")], outputs=[f"body/{body.output}"])
    return merge_models(front, behind, [(f"body/{body.output}", "behind/input")])


def _opset(proto: Any) -> int:
    """The version of ONNX's operators that a network is written in."""
    return next(int(each.version) for each in proto.opset_import if each.domain in ("", "ai.onnx"))


def _name_batch(graph: Any) -> None:
    """Name the free dimension `batch`."""
    for value in (*graph.input, *graph.output):
        dimension = value.type.tensor_type.shape.dim[0]
        dimension.Clear()
        dimension.dim_param = "batch"


def _difference(model: Model, run: Runner, samples: Inputs) -> float:
    """The largest difference over all outputs, for one sample, some, and all at once."""
    largest = 0.0
    for count in sorted({1, min(7, len(samples)), len(samples)}):
        part = samples[:count]
        wanted = model.scores(part)
        for ours, theirs in zip((wanted.probabilities, wanted.logits, wanted.similarity), run(part), strict=False):
            assert ours is not None
            same = ours == theirs  # also where both are infinite: a class that FedProto never met
            apart = np.abs(np.where(same, 0, ours) - np.where(same, 0, theirs)) / np.maximum(1, np.abs(ours))
            largest = max(largest, float(np.where(same, 0, apart).max()))
    return largest


@contextmanager
def _explained(model: Model) -> Iterator[None]:
    """Raise a UserError of one sentence where an exporter fails: its own message has pages about its internals."""
    try:
        yield
    except (UserError, OSError, MemoryError):
        raise
    except Exception as error:
        name = model.card.method.get("name")
        reason = one_line(next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__), 200)
        raise UserError(
            f"this model of {name} cannot be exported to ONNX: torch cannot write down what its network "
            f"or its method's logits compute ({reason}); they may use tensor operations alone, with no `if` or loop "
            f"that depends on values"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporters: they warn of optional libraries and deprecations on every call, and print what failed."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    nowhere = StringIO()
    try:
        with warnings.catch_warnings(), redirect_stdout(nowhere), redirect_stderr(nowhere):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
