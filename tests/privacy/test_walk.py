"""Whatever comes out of a client under privacy.level = "sample" depends on its samples through noised numbers alone.

The noise is so large here that it drowns all that it is added to, to the last bit. Then two clients with other samples,
of other classes and another number, must give the same bits, in everything that leaves and that is kept: a bit that
differs has come from the samples by a way without noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import pytest
import torch
from torch import Tensor

from fednh.data.batches import ClientData, Samples
from fednh.federated import client
from fednh.federated.client import ClientResult
from fednh.methods import METHODS
from fednh.methods.base import Method
from fednh.methods.fit import Sgd
from fednh.models import Net
from fednh.privacy.private_data import Mechanisms
from fednh.testing import tiny_clients
from fednh.tree import Tree
from tests.privacy.test_private_round import REFUSED

DROWNING = Mechanisms(clip=1.0, rate=0.5, gradients=1e12, sums=1e25, counts=1e25)
STEPS = Sgd(lr=1e-12, momentum=0.0, weight_decay=0.0, clip=10.0, batch_size=2, epochs=1)  # so that models stay finite


class Loud:
    """Noise that is never near zero; it does not depend on how many samples were drawn before."""

    def __init__(self, seed: int):
        self.rng, self.drawn = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed)

    def gaussian(self, shape: Sequence[int]) -> Tensor:
        noise = torch.randn(tuple(shape), generator=self.rng)
        return torch.where(noise < 0, -1.0, 1.0) * (1 + noise.abs())

    def once(self, name: str, shape: Sequence[int]) -> Tensor:
        return torch.ones(tuple(shape))

    def augmenting(self, seeded: torch.Generator) -> torch.Generator:
        return seeded

    def chosen(self, samples: int, rate: float) -> Tensor:
        return torch.nonzero(torch.rand(samples, generator=self.drawn) < rate).flatten()


def two_clients(net: Net) -> tuple[ClientData, ClientData]:
    """Without a sample, a class or a number in common."""
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(size=(12, *net.shape)).astype(np.float32))
    y = torch.tensor([0] * 5 + [1, 2] * 3 + [2])
    samples = Samples(x, y, net.num_classes, torch.ones(1), torch.zeros(1), False)
    return ClientData(samples, np.arange(5)), ClientData(samples, np.arange(5, 12))


def two_rounds(method: Method, net: Net, data: ClientData) -> list[ClientResult]:
    start = method.init(net, torch.Generator().manual_seed(1))
    kept, down, results = method.enroll(start), method.broadcast(start), list[ClientResult]()
    for round_ in (1, 2):
        results.append(
            client.private_update(method, net, kept, down, data, STEPS, DROWNING, Loud(round_))  # type: ignore[arg-type]
        )
        kept = results[-1].keep
    return results


def differing(one: ClientResult, other: ClientResult) -> list[str]:
    """The parts of a result that are not the same, by name."""
    found = list[str]()
    for field in fields(ClientResult):
        mine, theirs = getattr(one, field.name), getattr(other, field.name)
        if isinstance(mine, dict):
            found += [f"{field.name}.{name}" for name in mine.keys() ^ theirs.keys()]
            found += [f"{field.name}.{n}" for n in mine.keys() & theirs.keys() if not same(mine, theirs, n)]
        elif mine != theirs:
            found.append(field.name)
    return found


def same(one: Tree, other: Tree, name: str) -> bool:
    return torch.equal(one[name].nan_to_num(nan=-1.0), other[name].nan_to_num(nan=-1.0))


@pytest.mark.parametrize("name", sorted(METHODS.keys() - REFUSED - {"local"}))
def test_nothing_of_a_result_depends_on_samples_but_through_noise(name: str) -> None:
    method = METHODS[name](**({"aggregation": "sum"} if name in ("fednh", "fedprior") else {}))
    net, _ = tiny_clients()
    both = [two_rounds(method, net, data) for data in two_clients(net)]
    for one, other in zip(*both, strict=True):
        assert one.upload
        assert differing(one, other) == []


def test_the_walk_finds_what_leaks() -> None:
    """A method that takes its number of samples past the noise."""

    class Smuggler(METHODS["fedavg"]):  # type: ignore[misc]
        def client_update(self, net, kept, received, data, fit):  # type: ignore[no-untyped-def]
            kept, upload = super().client_update(net, kept, received, data, fit)
            return kept, {**upload, "head.weight": torch.full_like(upload["head.weight"], len(data.raw))}

    net, _ = tiny_clients()
    one, other = (two_rounds(Smuggler(), net, data)[0] for data in two_clients(net))
    assert differing(one, other) == ["upload.head.weight"]
