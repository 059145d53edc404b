"""fednh.run with objects: methods, models and callbacks as a program has them, also as a notebook cell defines them."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from torch import nn

import fednh
from fednh.methods.base import MODEL, ClientData, Fit, Net, Tree, cross_entropy
from fednh.methods.fednh import FedNH

SMALL: dict[str, Any] = {"rounds": 3, "seed": 1, "clients": 6, "epochs": 1}


@dataclass(frozen=True)
class Mine(fednh.Method):
    cite: ClassVar[str] = "none"
    pull: float = 0.1

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        trained = fit(received, cross_entropy(net.logits), only=MODEL)
        return trained, trained


class Small(nn.Module):
    def __init__(self, input_shape: tuple[int, ...], num_classes: int, width: int = 8):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), width), nn.ReLU())
        self.head = nn.Linear(width, num_classes, bias=False)


class Watching(fednh.Callback):
    def __init__(self, stop_after: int = 0):
        self.stop_after, self.seen = stop_after, list[Any]()

    def on_start(self, config: Mapping[str, Any], rounds_done: int) -> None:
        self.seen.append(("start", config["rounds"], rounds_done))

    def on_round(self, record: dict[str, Any]) -> bool:
        self.seen.append(record["round"])
        return bool(record["round"] == self.stop_after)

    def on_end(self, summary: dict[str, Any]) -> None:
        self.seen.append(("end", summary["rounds"]))


def test_a_method_by_class_instance_and_name(tmp_path: Path) -> None:
    results = {
        name: fednh.run("digits", method=method, out=tmp_path / name, **SMALL)
        for name, method in {"class": Mine, "instance": Mine(pull=0.5), "path": f"{__name__}:Mine"}.items()
    }
    assert [r.config.method["pull"] for r in results.values()] == [0.1, 0.5, 0.1]
    assert results["class"].summary["gm"] == results["path"].summary["gm"]
    own = fednh.run("digits", method=FedNH(rho=0.8), out=tmp_path / "own", **SMALL)
    assert (own.config.method["name"], own.config.method["rho"]) == ("fednh", 0.8), "a built-in method has its name"


def test_a_model_by_class(tmp_path: Path) -> None:
    result = fednh.run("digits", method="fedavg", model=Small, model__args={"width": 5}, out=tmp_path / "r", **SMALL)
    assert result.config.model.name == f"{__name__}:Small"
    assert result.model().params["head.weight"].shape == (10, 5)


def test_a_callback_sees_the_run_and_may_stop_it(tmp_path: Path) -> None:
    """A stopped run is saved; the resumed one has the bits of one that was never stopped."""
    whole = fednh.run("digits", out=tmp_path / "whole", **SMALL)
    stopping, later = Watching(stop_after=2), Watching()
    with pytest.raises(fednh.Interrupted, match=r"stopped after round 2; fednh.resume\(.*\) continues"):
        fednh.run("digits", out=tmp_path / "r", callbacks=[stopping], **SMALL)
    result = fednh.resume(tmp_path / "r", callbacks=[later])
    assert stopping.seen == [("start", 3, 0), 1, 2]
    assert later.seen == [("start", 3, 2), 3, ("end", 3)]
    assert result.summary["gm"] == whole.summary["gm"]


def test_a_callback_cannot_change_the_run(tmp_path: Path) -> None:
    class Writing(fednh.Callback):
        def on_round(self, record: dict[str, Any]) -> None:
            record.clear()

    result = fednh.run("digits", out=tmp_path / "r", callbacks=[Writing()], **SMALL)
    assert [line["round"] for line in result.metrics] == [1, 2, 3]


def test_a_result_is_one_line_and_a_frame(tmp_path: Path) -> None:
    result = fednh.run("digits", out=tmp_path / "r", eval__every=1, **SMALL)
    assert repr(result).startswith("<Result: fednh on digits, 3 rounds, GM ")
    assert "\n" not in repr(result)
    assert len(repr(result)) < 300
    model = result.model()
    assert repr(model).startswith("<Model: global model of fednh, mlp of ")
    assert repr(model).endswith("images of 1x8x8, 10 classes (0, 1, 2, 3, 4 and 5 more), digits>")
    assert "personal model of fednh for client 2" in repr(result.model(2))
    assert "<th>GM</th>" in result._repr_html_()
    assert "<th>classes</th><td>10 classes (0, 1, 2, 3, 4 and 5 more)</td>" in model._repr_html_()
    pytest.importorskip("pandas")
    frame = result.to_frame()
    assert list(frame.index) == [1, 2, 3]
    assert frame["gm"].iloc[-1] == result.summary["gm"]


def local() -> type[nn.Module]:
    class Hidden(Small):
        pass

    return Hidden


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"model": Small((1, 8, 8), 10)}, "a Small that exists already"),
        ({"model": local()}, "Hidden is defined inside a function"),
        ({"model": int}, "int does not derive from torch.nn.Module"),
        ({"method": int}, "int does not derive from fednh.Method"),
        ({"callbacks": [3]}, "callbacks has a int"),
        ({"backend": "rai"}, "the backend 'rai' is not known; did you mean 'ray'"),
        ({"address": "127.0.0.1:1"}, "is a Ray cluster's; choose the backend ray"),
    ],
)
def test_what_cannot_be_run_is_refused_in_a_sentence(given: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(fednh.UserError, match=told):
        fednh.run("digits", out=tmp_path / "r", **given)
    assert not (tmp_path / "r").exists()


CELL = """
import sys
from dataclasses import dataclass
from typing import ClassVar
import fednh
from fednh.methods.base import MODEL, cross_entropy

@dataclass(frozen=True)
class Cell(fednh.Method):
    cite: ClassVar[str] = "none"
    def client_update(self, net, kept, received, data, fit):
        trained = fit(received, cross_entropy(net.logits), only=MODEL)
        return trained, trained

print(fednh.run("digits", method=Cell, rounds=2, clients=6, epochs=1, backend=sys.argv[2], out=sys.argv[1]))
"""


@pytest.mark.parametrize("backend", ["simulator", pytest.param("ray", marks=pytest.mark.soak)])
def test_a_class_of_a_notebook_cell(backend: str, tmp_path: Path) -> None:
    """The program has no file, as a cell has none. Another process cannot go on with the run, and says so."""
    done = subprocess.run([sys.executable, "-c", CELL, str(tmp_path / "r"), backend], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "<Result: __main__:Cell on digits, 2 rounds" in done.stdout
    with pytest.raises(fednh.UserError, match="defined in the program or notebook that started the run"):
        fednh.resume(tmp_path / "r", rounds=3)
