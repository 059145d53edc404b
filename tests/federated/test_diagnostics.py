"""Gradient norms: right by an independent computation, at the received model, and without any influence on the run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fednh.data.batches import ClientData, Samples
from fednh.federated import client
from fednh.methods.ditto import Ditto
from fednh.methods.fedavg import FedAvg
from fednh.methods.fit import Sgd
from fednh.models import Net
from tests.helpers.method_seconds import TIMED_TRAINED
from tests.helpers.synthetic import real_run
from tests.helpers.tiny import CLIENTS


def _full_gradient(net: Net, params: dict[str, torch.Tensor], data: ClientData) -> float:
    """By backward() on one batch of everything, with parameters of its own."""
    own = {name: value.detach().clone().requires_grad_() for name, value in params.items()}
    x = data.samples.floats(data.samples.x[data.index])
    F.cross_entropy(net.logits(own, x), data.y).backward()
    gradients = [value.grad for name, value in own.items() if name.startswith("body")]
    return sum(float((gradient**2).sum()) for gradient in gradients if gradient is not None)


def test_it_is_the_squared_norm_of_the_bodys_full_gradient(net: Net, tiny: Samples) -> None:
    data, start = ClientData(tiny, CLIENTS[0]), net.init(torch.Generator().manual_seed(1))
    update = client.update(FedAvg(), net, {}, start, data, Sgd(batch_size=2), gradient_norm=True)
    assert update.gradient_norm == pytest.approx(_full_gradient(net, start, data), rel=1e-5)


def test_ditto_is_measured_at_the_received_model_not_at_its_personal_one(net: Net, tiny: Samples) -> None:
    data, received = ClientData(tiny, CLIENTS[0]), net.init(torch.Generator().manual_seed(1))
    personal = net.init(torch.Generator().manual_seed(2))
    kept = Ditto().enroll(personal)
    update = client.update(Ditto(), net, kept, received, data, Sgd(), gradient_norm=True)
    assert update.gradient_norm == pytest.approx(_full_gradient(net, received, data), rel=1e-5)
    assert update.gradient_norm != pytest.approx(_full_gradient(net, personal, data), rel=1e-2)


CHEAP = {
    "creff": {"method.match_steps": 2, "method.retrain_epochs": 2},
    "fedrep": {"method.head_epochs": 1},
    "fedbabu": {"method.finetune_epochs": 1},
    "fedetf": {"method.turns": 1, "method.turn_epochs": 1},
}


@pytest.mark.parametrize("method", TIMED_TRAINED)
def test_every_method_is_measured_and_trains_the_same(method: str, tmp_path: Path) -> None:
    settings = {"method.name": method, "rounds": 2, "partition.clients": 4, **CHEAP.get(method, {})}
    off = real_run(tmp_path / "off", settings)
    on = real_run(tmp_path / "on", {**settings, "diagnostics.gradient_norm": True})
    assert [on.summary[key] for key in ("gm", "pm_v", "pm_l")] == [off.summary[key] for key in ("gm", "pm_v", "pm_l")]
    assert [r["train_loss"] for r in on.records] == [r["train_loss"] for r in off.records]
    for record in on.records:
        assert len(record["gradient_norms"]) == len(record["clients"]) == 4
        assert min(record["gradient_norms"]) > 0
        assert record["gradient_norm"] == pytest.approx(np.mean(record["gradient_norms"]))
    assert all("gradient_norm" not in record for record in off.records)
