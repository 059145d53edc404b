"""What every executor is tried with: a method that needs all that an executor carries, and a config for each case."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from fednh.config import Config, load
from fednh.federated.setup import build_federation
from fednh.methods.base import ClientData, Fit, Net, Tree
from tests.helpers.kept_or_received import KeptOrReceived

VICTIM = 1  # the client with whom something is wrong


@dataclass(frozen=True)
class Contract(KeptOrReceived):
    """Clients start from what they kept; the one with `size` samples uploads what is not finite, or fails."""

    fault: str = ""
    size: int = 0
    head: str = "kept"  # type: ignore[assignment]
    enrolls: bool = True

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        block = getattr(data, "block", None)  # of vmap, which fails as a whole and is then computed one by one
        if self.fault == "error" and self.size in (block.sizes if block is not None else [len(data)]):
            raise RuntimeError("no luck")
        keep, upload = super().client_update(net, kept, received, data, fit)
        if self.fault == "refused":
            bad = torch.where(data.counts.sum() == self.size, torch.nan, 0.0)
            upload = {name: value + bad for name, value in upload.items()}
        return keep, upload


class BatchNormed(nn.Module):
    def __init__(self, num_classes: int):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head = nn.Linear(8, num_classes)


CASES = {
    "bits": {},
    "dropouts": {"participation.dropout": 0.3},
    "refused": {"method.fault": "refused"},
    "error": {"method.fault": "error", "on_error": "skip"},
    "interrupt": {"checkpoint.every": 1},
    "networks": {  # clients have different ones; interrupted, too
        "method.name": "fednh",
        "checkpoint.every": 1,
        "model.name": ["mlp", "linear"],
        "model.args": {"mlp": {"hidden": [8]}},
        "model.dim": 12,
    },
    "int8": {"federation.compress": "int8", "checkpoint.every": 1},
    "top-k": {"federation.compress": "top-k", "federation.compress_share": 0.1, "participation.dropout": 0.3},
    "lossless": {"federation.compress": "lossless"},
    "norm": {"model.name": f"{__name__}:BatchNormed", "model.args": {}, "model.norm": "average"},
    "local work": {
        **{"train.optimizer": "adamw", "train.optimizer_state": "kept", "train.steps": 7, "train.lr": 0.003},
        **{"train.schedule": "cosine", "train.warmup": 1},
    },
    "stop when": {  # goes back five rounds at the end, further than checkpoints do; interrupted, too
        **{"stop_when.metric": "held_share", "stop_when.patience": 5, "stop_when.gain": 25.0, "rounds": 10},
        **{"data.holdout": 0.3, "eval.clients": "all", "checkpoint.every": 1},
    },
}
STOPPED = ("interrupt", "networks", "int8", "stop when")


def config_of(case: str) -> Config:
    """Digits on six clients, of which four train in each of four rounds."""
    settings = {
        "method.name": f"{__name__}:Contract",
        "partition.clients": 6,
        "participation.rate": 0.6,
        "rounds": 4,
        "train.epochs": 1,
        "train.batch_size": 64,
        "model.args": {"hidden": [8]},
        "eval.every": 1,
        "workers": 1,
        "engine": "loop",
        **CASES[case],
    }
    sizes = [len(part) for part in build_federation(load("digits", settings)).parts]
    assert sizes.count(sizes[VICTIM]) == 1
    ours = {} if case == "networks" else {"method.size": sizes[VICTIM]}
    return load("digits", {**settings, **ours})
