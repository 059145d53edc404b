"""The way from `run` to a gradient step, and of one upload to the server: short, and as federated/README.md says."""

from __future__ import annotations

import importlib
import re
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import ClassVar

import fednh
from fednh.config import load
from fednh.data.batches import ClientData
from fednh.federated.setup import build_federation
from fednh.methods.base import MODEL
from fednh.methods.fedavg import FedAvg
from fednh.methods.fit import Fit
from fednh.methods.losses import cross_entropy
from fednh.models import Net
from fednh.tree import Tree
from tests.helpers.simulator import SMALL, run_config

SOURCE = Path(fednh.__file__).parent


def frames(frame: FrameType | None) -> list[str]:
    """The functions of the package, and the method's hook, on a stack, the innermost first."""
    names = []
    while frame is not None:
        name, file = frame.f_code.co_name, Path(frame.f_code.co_filename)
        if file.is_relative_to(SOURCE) or name == "client_update":
            names.append(name)
        frame = frame.f_back
    return names


@dataclass(frozen=True)
class Looking(FedAvg):
    """FedAvg whose loss notes the stacks of its thread and of the thread of the loop."""

    stacks: ClassVar[list[tuple[list[str], list[str]]]] = []

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        inner = cross_entropy(net.logits)

        def loss(params: Tree, x, y):  # type: ignore[no-untyped-def]
            loop = sys._current_frames()[threading.main_thread().ident or 0]
            self.stacks.append((frames(loop), frames(sys._getframe())))
            return inner(params, x, y)

        return {}, fit(received, loss, only=MODEL)


def test_a_gradient_step_is_at_most_eleven_calls_below_run(tmp_path: Path) -> None:
    Looking.stacks.clear()
    config = load("digits", {**SMALL, "engine": "loop", "rounds": 1})
    run_config(tmp_path, config, build_federation(config).with_method(Looking()))
    waits = [pair for pair in Looking.stacks if pair[0][0] == "in_order"]  # else the loop adds up an upload meanwhile
    loop, step = max(waits, key=lambda pair: len(pair[0]))
    assert step[-6:] == ["batchwise", "__call__", "client_update", "update", "__call__", "work"]
    assert loop == ["in_order", "results", "_train", "_exchange", "run"]
    assert len(loop) + len(step[-6:]) == 11  # inside of `batchwise` the step is taken


def test_the_table_of_an_uploads_way_names_what_exists() -> None:
    rows = re.findall(r"^\| \d \| `([\w.]+)` \|", (SOURCE / "federated/README.md").read_text(), re.MULTILINE)
    assert 0 < len(rows) <= 8
    for row in rows:
        module, owner, name = re.fullmatch(r"([a-z_.]+?)\.((?:[A-Z]\w*\.)?)(\w+)", row).groups()  # type: ignore[union-attr]
        there = importlib.import_module(f"fednh.{module}")
        assert callable(getattr(getattr(there, owner.rstrip("."), None) if owner else there, name)), row
