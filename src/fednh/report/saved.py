"""Saved models: the tensors, and the card that says how to use them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from fednh.config import build_method
from fednh.errors import UserError
from fednh.files import read_tree
from fednh.methods import Method
from fednh.models import Net, build_net
from fednh.report.load import Run
from fednh.tree import Tree


def global_model(run: Run) -> Path | None:
    """The file of a run's global model, if its method has one."""
    path = run.path / "models" / "global.safetensors"
    return path if path.exists() else None


def personal_models(run: Run) -> dict[int, Path]:
    """The files of a run's personal models, by client."""
    found = sorted((run.path / "models" / "personal").glob("client-*.safetensors"))
    return {int(path.stem.partition("-")[2]): path for path in found}


def read_model(path: Path) -> tuple[Tree, dict[str, Any]]:
    """A model's tensors and its card."""
    try:
        with safe_open(path, "pt") as file:
            card: dict[str, Any] = json.loads((file.metadata() or {})["fednh"])
        return read_tree(path), card
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise UserError(f"{path} is not a model saved by fednh: {error}") from error


def architecture(card: dict[str, Any]) -> tuple[Net, Method]:
    """The network and the method that a card describes."""
    model = card["model"]
    own = {key: model[key] for key in ("head", "norm") if key in model}
    net = build_net(model["name"], tuple(card["shape"]), len(card["classes"]), model["args"], **own)
    return net, build_method(card["method"])
