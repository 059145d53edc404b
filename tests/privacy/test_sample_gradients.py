"""The clipped sum is the one that per-sample gradients give, for layers and losses of any kind."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, vmap

from fednh.data.batches import ClientData, samples_of
from fednh.data.dataset import Dataset
from fednh.federated import client
from fednh.methods import METHODS
from fednh.methods.fit import Sgd
from fednh.methods.losses import Loss
from fednh.models import build_net
from fednh.privacy import private_fit
from fednh.privacy.noise import SeededNoise
from fednh.privacy.private_data import Mechanisms
from fednh.privacy.sample_gradients import Outer, clipped_sum, sample_gradients
from fednh.tree import Tree

SOME = Mechanisms(clip=0.5, rate=0.5, gradients=0.1, sums=1.0, counts=1.0)


def reference(loss: Loss, moving: Tree, fixed: Tree, x: Tensor, y: Tensor, weight: Tensor, clip: float) -> Tree:
    """Every sample's gradient by itself, as `torch.func` gives it."""

    def one(moving: Tree, x: Tensor, y: Tensor) -> Tensor:
        return loss({**fixed, **moving}, x[None], y[None])[0]

    alone = [grad(one)(moving, *sample) for sample in zip(x, y, strict=True)]
    slopes = {name: torch.stack([each[name] for each in alone]).reshape(len(y), -1) for name in moving}
    norm = torch.stack([g.square().sum(1) for g in slopes.values()]).sum(0).sqrt()
    factor = weight * clip / norm.clamp(min=clip)
    return {name: (factor @ g).reshape(moving[name].shape) for name, g in slopes.items()}


def close(ours: Tree, theirs: Tree) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert float((ours[name] - value).norm()) <= 1e-5 * float(value.norm()) + 1e-12, name


def images(count: int = 6) -> ClientData:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (count, 8, 8, 3), np.uint8), np.arange(count) % 3
    data = Dataset("random", x, y, x, y, ("a", "b", "c"), (0.5,) * 3, (0.25,) * 3)
    return ClientData(samples_of(data, "train"), np.arange(count))


@pytest.mark.parametrize("method", ["fedavg", "fednh", "fedper", "fedrep", "fedprox"])
@pytest.mark.parametrize("model", ["conv2", "cnn", "mlp", "linear"])
def test_a_clients_round_is_that_of_per_sample_gradients(
    model: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, net = images(), build_net(model, (3, 8, 8), 3, {})
    how = METHODS[method](**({"aggregation": "sum"} if method == "fednh" else {}))
    start = how.init(net, torch.Generator().manual_seed(0))
    kept, down = how.enroll(start), how.broadcast(start)
    results = []
    for way in (clipped_sum, reference):
        monkeypatch.setattr(private_fit, "clipped_sum", way)
        noise, sgd = SeededNoise(0, 1, 0), Sgd(lr=0.1, batch_size=4, epochs=1)
        results.append(client.private_update(how, net, kept, down, data, sgd, SOME, noise))
    for mine, theirs in ((results[0].keep, results[1].keep), (results[0].upload, results[1].upload)):
        close(mine or {}, theirs or {})


@pytest.mark.parametrize("method", ["fedavg", "fednh"])
def test_a_network_with_group_normalisation(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images lie with channels last in memory, for which torch's group normalisation has no mapped form."""
    test_a_clients_round_is_that_of_per_sample_gradients("resnet18", method, monkeypatch)


def net_of(c: int, k: int, side: int, stride: int, padding: int) -> tuple[Loss, Tree]:
    """A convolution, group normalisation, and a linear layer on every pixel whose matrix is used again, transposed."""
    rng = torch.Generator().manual_seed(0)
    shapes = {"conv": (k, c, side, side), "bias": (k,), "gain": (k,), "shift": (k,), "mix": (k, k), "scale": ()}
    params = {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}

    def loss(p: Tree, x: Tensor, y: Tensor) -> Tensor:
        h = F.group_norm(F.conv2d(x, p["conv"], p["bias"], stride, padding), 1, p["gain"], p["shift"])
        h = F.linear(h.permute(0, 2, 3, 1), p["mix"]).relu().mean((1, 2))
        return p["scale"] * (h @ p["mix"]).logsumexp(-1) + p["conv"].square().sum()

    return loss, params


@settings(max_examples=15, deadline=None)
@given(
    *[st.integers(1, 3)] * 4, st.integers(0, 2), st.integers(1, 4), st.booleans(), st.floats(1e-2, 1e2)
)  # fmt: skip
def test_shapes_and_several_uses(
    c: int, k: int, side: int, stride: int, padding: int, samples: int, frozen: bool, clip: float
) -> None:
    loss, params = net_of(c, k, side, stride, padding)
    rng = torch.Generator().manual_seed(samples)
    x, y = torch.randn(samples, c, 5, 6, generator=rng), torch.zeros(samples, dtype=torch.long)
    fixed = {name: params.pop(name) for name in ("bias", "shift")} if frozen else {}
    arguments = (loss, params, fixed, x, y, torch.ones(samples), clip)
    ours, theirs = clipped_sum(*arguments), reference(*arguments)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5 * clip)


def losses() -> dict[str, Callable[[Tree, Tensor, Tensor], Tensor]]:
    def without_gradient(p: Tree, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            teacher = F.linear(x, p["w"])
        return (F.linear(x, p["w"]) * teacher).sum(1)

    def inner(p: Tree, x: Tensor, y: Tensor) -> Tensor:
        return grad(lambda z: F.linear(z, p["w"]).square().sum())(x).square().sum(1)

    return {
        "of the batch": lambda p, x, y: F.linear(x - x.mean(0) / 2, p["w"]).square().sum(1),
        "without a gradient": without_gradient,
        "with a gradient of its own": inner,
        "of a shared matrix": lambda p, x, y: F.linear(F.linear(x, p["w"]), p["w"]).sum(1),
        "of none": lambda p, x, y: x.sum(1),
    }


@pytest.mark.parametrize("kind", losses())
def test_a_loss_of_another_kind(kind: str) -> None:
    """Samples never meet: a loss of the batch sees batches of one."""
    rng = torch.Generator().manual_seed(0)
    x, y, w = torch.randn(4, 3, generator=rng), torch.zeros(4, dtype=torch.long), torch.randn(3, 3, generator=rng)
    arguments = (losses()[kind], {"w": w}, {}, x, y, torch.tensor([1.0, 1, 1, 0]), 0.3)
    close(clipped_sum(*arguments), reference(*arguments))


def test_layers_of_clients_that_are_computed_together() -> None:
    """Inside of a map over clients, each with parameters and samples of its own."""
    loss, params = net_of(2, 3, 3, 1, 1)
    rng = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, 4, 2, 5, 5, generator=rng), torch.zeros(2, 4, dtype=torch.long)
    both = {name: torch.stack([value, 2 * value]) for name, value in params.items()}
    together = vmap(lambda p, x, y: clipped_sum(loss, p, {}, x, y, torch.ones(4), 0.5))(both, x, y)
    for client_ in range(2):
        mine = {name: value[client_] for name, value in both.items()}
        alone = reference(loss, mine, {}, x[client_], y[client_], torch.ones(4), 0.5)
        for name, value in alone.items():
            torch.testing.assert_close(together[name][client_], value, rtol=1e-4, atol=1e-5)


def test_the_gradients_of_a_linear_layer_are_not_computed_one_by_one() -> None:
    net = build_net("mlp", (4,), 3, {})
    x, y = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), torch.arange(5) % 3
    params = net.init(torch.Generator().manual_seed(0))
    slopes = sample_gradients(lambda p, x, y: net.logits(p, x).square().sum(1), params, {}, x, y)
    assert all(isinstance(slope, Outer) for name, slope in slopes.items() if name.endswith("weight"))


def test_a_short_and_a_long_factor_have_the_length_of_their_product() -> None:
    assert float(Outer(torch.full((1, 2), 1e-25), torch.full((1, 2), 1e25)).squares()) == pytest.approx(4.0, rel=1e-5)
