"""Personal models that share the received body: the test set passes through it once, and no number changes."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from fednh.data.batches import Samples
from fednh.federated import client
from fednh.federated import client as shared_body
from fednh.federated.client import CachedFeaturesNet, SharedBody
from fednh.methods.registry import METHODS
from fednh.models import Net
from fednh.tree import Tree, select
from tests.helpers.compare import timeless
from tests.helpers.simulator import play


def test_the_test_set_passes_through_a_shared_body_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """FedPrior's personal models are the global one with priors: eight clients or one, the body works the same."""
    seen: list[int] = []
    plain = Net.features

    def counted(self: Net, params: Tree, x: torch.Tensor) -> torch.Tensor:
        seen.append(0 if torch.is_grad_enabled() else len(x))
        return plain(self, params, x)

    monkeypatch.setattr(Net, "features", counted)
    found: list[tuple[Any, Any, int]] = []
    for name, most in (("once", shared_body.MOST), ("each", 0)):
        monkeypatch.setattr(shared_body, "MOST", most)
        seen.clear()
        settings = {"method__name": "fedprior", "participation__rate": 1.0, "eval__prior": [1.0], "workers": 1}
        simulation, summary, told = play(tmp_path / name, **settings)
        found.append((timeless(summary), timeless(told.records), sum(seen)))
    (summary, records, few), (again, records_again, many) = found
    assert summary == again
    assert records == records_again
    assert len(summary["clients"]) == 8
    assert many - few >= 7 * len(simulation.setup.side.test or ()), (
        "at the end; after round 2 each looks at its own classes"
    )


@pytest.mark.parametrize("name", ["fedprior", "pfedfda", "fedloge"])
def test_logits_are_the_same_bits(name: str, net: Net, tiny: Samples) -> None:
    method = METHODS[name]()
    server = method.init(net, torch.Generator().manual_seed(1))
    model = method.global_model(server) or {}
    shared = SharedBody()
    features = shared.features(net, server, model, tiny)
    assert features is not None
    assert shared.features(net, server, model, tiny) is features, "remembered"
    usual = client.logits_of(method, net, model, tiny)
    assert torch.equal(client.logits_of(method, net, model, tiny, features=features), usual)
    changed = client.logits_of(method, net, model, tiny, features=features + 1)
    assert not torch.equal(changed, usual), "they are what the method sees"


def test_another_body_is_never_taken_for_the_shared_one(net: Net, tiny: Samples) -> None:
    down = net.init(torch.Generator().manual_seed(1))
    equal = {name: value.clone() for name, value in down.items()}
    assert SharedBody().features(net, down, equal, tiny) is None, "equal, but not the same: it may be trained"
    assert SharedBody().features(net, down, select(down, "head"), tiny) is None
    x, known = tiny.floats(tiny.x), torch.zeros(len(tiny), net.dim)
    knowing = CachedFeaturesNet(net, down, x, known)
    assert knowing.features(down, x) is known
    assert torch.equal(knowing.features(equal, x), net.features(down, x))
    assert torch.equal(knowing.features(down, x.clone()), net.features(down, x))
    assert torch.equal(knowing.logits(down, x), net.classify(down, known))


def test_features_stay_where_they_are(net: Net, tiny: Samples) -> None:
    """A stage that is sent to another machine does not carry them."""
    down, shared = net.init(torch.Generator().manual_seed(1)), SharedBody()
    empty = len(pickle.dumps(shared))
    shared.features(net, down, down, tiny)
    assert len(pickle.dumps(shared)) == empty
