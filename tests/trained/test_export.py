"""Exported models compute what the model computes, without fednh."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import fednh
from fednh.data.sources.builtin import digits
from fednh.errors import UserError
from fednh.methods import METHODS
from fednh.methods.base import Method, Net, Tree
from fednh.methods.fedavg import FedAvg
from fednh.trained import export as exporting
from fednh.trained.export import export
from forked import fednh as command

DATA = digits()
ALONE = """
import sys, json, numpy as np
sys.modules["fednh"] = None  # it must not be needed
import torch
extra = {"fednh.json": ""}
model = torch.export.load(sys.argv[1], extra_files=extra).module()
found = [model(torch.from_numpy(np.load(sys.argv[2])[:n]))[0].tolist() for n in (1, 5)]
print(json.dumps({"found": found, "classes": json.loads(extra["fednh.json"])["classes"]}))
"""


SHORT = ("fednh", "fedproto", "fedrod", "fedetf")  # each with logits of its own; `make soak` exports the others


@pytest.mark.parametrize("method", [m if m == "fednh" else pytest.param(m, marks=pytest.mark.soak) for m in METHODS])
def test_torch_export_of_every_method(method: str, finished: dict[str, Path], tmp_path: Path) -> None:
    """A personal model: FedROD's has two heads, FedProto's predicts by distance. `export` compares it itself."""
    model = fednh.load_model(finished[method], client=0)
    facts = export(model, "torch", tmp_path / "m.pt2")
    assert facts["difference"] < 1e-4
    assert facts["samples"] == 100
    assert facts["checked_on"] == "samples of digits"
    if method == "fednh":
        np.save(tmp_path / "x.npy", DATA.x_test[:5])
        args = [sys.executable, "-W", "ignore", "-c", ALONE, str(tmp_path / "m.pt2"), str(tmp_path / "x.npy")]
        said = json.loads(subprocess.run(args, capture_output=True, text=True, check=True).stdout)
        np.testing.assert_allclose(said["found"][1], model.predict_proba(DATA.x_test[:5]), atol=1e-5)
        assert said["classes"] == list("0123456789")


@pytest.mark.parametrize("method", ["fednh", "fedproto", "fedrod"])
def test_onnx(method: str, finished: dict[str, Path], tmp_path: Path) -> None:
    import onnxruntime

    model = fednh.load_model(finished[method], client=0)
    assert export(model, "onnx", tmp_path / "m.onnx")["difference"] < 1e-4
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    (taken,) = session.get_inputs()
    assert (taken.name, taken.shape, taken.type) == ("input", ["batch", 8, 8, 1], "tensor(uint8)")
    names = [output.name for output in session.get_outputs()]
    assert names == ["probabilities", "logits", *(["similarity"] if method == "fednh" else [])]
    for count in (1, 3, 40):
        x = DATA.x_test[:count]
        found = dict(zip(names, session.run(None, {"input": x}), strict=True))
        np.testing.assert_allclose(found["probabilities"], model.predict_proba(x), atol=1e-4)
        if method == "fednh":
            np.testing.assert_allclose(found["similarity"], model.similarity(x), atol=1e-4)
    card = json.loads(session.get_modelmeta().custom_metadata_map["fednh"])
    assert card["classes"] == list("0123456789")


def test_an_export_that_differs_is_refused(
    finished: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*_: object) -> object:
        return lambda x: [np.zeros((len(x), 10), np.float32)]

    monkeypatch.setattr(exporting, "_torch", wrong)
    with pytest.raises(UserError, match="differs from the original"):
        export(fednh.load_model(finished["fednh"]), "torch", tmp_path / "m.pt2")
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


@pytest.mark.parametrize(("method", "form"), [(Branching(), "torch"), (Branching(), "onnx"), (Unheard(), "onnx")])
def test_what_cannot_be_exported_is_told_in_a_sentence(
    method: Method, form: str, finished: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = replace(fednh.load_model(finished["fedavg"]), method=method)
    with pytest.raises(UserError, match=f"cannot be exported with --format {form}: torch cannot write down") as told:
        export(model, form, tmp_path / "model")
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
    args = ["export", str(finished["fedrod"]), "--format", "torch", "-o", str(tmp_path / "deep/m.pt2")]
    ended = command(args, tmp_path / "io")
    assert ended.code == 0, ended.stderr
    assert "agrees within" in ended.stdout
    assert (tmp_path / "deep/m.pt2").exists()
