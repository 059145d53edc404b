"""Exported models compute what the model computes, without fednh."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import fednh
from fednh.data.sources.builtin import digits
from fednh.errors import UserError
from fednh.inference import export as exporting
from fednh.inference.export import export
from fednh.methods import METHODS
from fednh.methods.base import Method, Net, Tree
from fednh.methods.fedavg import FedAvg
from tests.helpers.process import fednh as command

DATA = digits()
SHORT = ("fednh", "fedproto", "fedrod")  # each with logits of its own; `make soak` exports the others


@pytest.mark.parametrize("method", [m if m in SHORT else pytest.param(m, marks=pytest.mark.soak) for m in METHODS])
def test_onnx_of_every_method(method: str, finished: dict[str, Path], tmp_path: Path) -> None:
    """A personal model: FedROD's has two heads, FedProto's predicts by distance. `export` compares it itself."""
    import onnxruntime

    model = fednh.load_model(finished[method], client=0)
    facts = export(model, tmp_path / "m.onnx")
    assert facts["difference"] < 1e-4
    assert (facts["samples"], facts["checked_on"]) == (100, "samples of digits")
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    (taken,) = session.get_inputs()
    assert (taken.name, taken.shape, taken.type) == ("input", ["batch", 8, 8, 1], "tensor(uint8)")
    names = [output.name for output in session.get_outputs()]
    assert names == ["probabilities", "logits", *(["similarity"] if model.method.cosine else [])]
    for count in (1, 3, 40):
        x = DATA.x_test[:count]
        found = dict(zip(names, session.run(None, {"input": x}), strict=True))
        np.testing.assert_allclose(found["probabilities"], model.predict_proba(x), atol=1e-4)
        if model.method.cosine:
            np.testing.assert_allclose(found["similarity"], model.similarity(x), atol=1e-4)
    card = json.loads(session.get_modelmeta().custom_metadata_map["fednh"])
    assert card["classes"] == list("0123456789")


def test_an_export_that_differs_is_refused(
    finished: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*_: object) -> object:
        return lambda x: [np.zeros((len(x), 10), np.float32)]

    monkeypatch.setattr(exporting, "_onnx", wrong)
    with pytest.raises(UserError, match="differs from the original"):
        export(fednh.load_model(finished["fednh"]), tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


@dataclass(frozen=True)
class Branching(FedAvg):
    """Its logits depend on values, which torch.export cannot follow."""

    def logits(self, net: Net, params: Tree, x: Tensor) -> Tensor:
        found = net.logits(params, x)
        return found if float(found.sum()) > 0 else 2 * found


@dataclass(frozen=True)
class Unheard(FedAvg):
    """Its logits can be traced, but ONNX has no such operation."""

    def logits(self, net: Net, params: Tree, x: Tensor) -> Tensor:
        return torch.special.bessel_j0(net.logits(params, x))


@pytest.mark.parametrize("method", [Branching(), Unheard()])
def test_what_cannot_be_exported_is_told_in_a_sentence(
    method: Method, finished: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = replace(fednh.load_model(finished["fedavg"]), method=method)
    with pytest.raises(UserError, match="cannot be exported to ONNX: torch cannot write down") as told:
        export(model, tmp_path / "model")
    assert "\n" not in str(told.value)
    assert len(str(told.value)) < 600
    assert "".join(capfd.readouterr()) == ""
    assert list(tmp_path.iterdir()) == []


def test_without_the_training_data(finished: dict[str, Path], tmp_path: Path) -> None:
    model = fednh.load_model(finished["fedavg"])
    away = model.card.model_copy(update={"trained_on": {"data": "npz:/not/here.npz"}})
    samples, origin = exporting.real_samples(type(model)(model.params, away, model.net, model.method))
    assert "random images" in origin
    assert samples.shape == (64, 8, 8, 1)


def test_the_command(finished: dict[str, Path], tmp_path: Path) -> None:
    args = ["export", str(finished["fedrod"]), "-o", str(tmp_path / "deep/m.onnx")]
    ended = command(args, tmp_path / "io")
    assert ended.code == 0, ended.stderr
    assert "agrees within" in ended.stdout
    assert (tmp_path / "deep/m.onnx").exists()
    ended = command([*args[:-1], str(tmp_path / "deep")], tmp_path / "io")
    assert (ended.code, ended.stderr) == (
        2,
        f"fednh: {tmp_path}/deep is a folder; name the file to write, such as {tmp_path}/deep/model.onnx\n",
    )
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["m.onnx"]
