"""A client's round under privacy.level = "sample": what is computed, and that nothing else comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fednh.backends.private_vmap import private_update_block
from fednh.backends.vmap import Block
from fednh.config import load
from fednh.data.batches import ClientData, Samples
from fednh.errors import ConfigError
from fednh.federated import client
from fednh.federated.architectures import initial_state
from fednh.methods import METHODS
from fednh.methods.base import Method, unit
from fednh.methods.fednh import FedNH
from fednh.methods.fit import Fit, Sgd
from fednh.methods.losses import cross_entropy
from fednh.models import Net
from fednh.privacy import plan
from fednh.privacy.accounting import Release
from fednh.privacy.noise import SeededNoise, SystemNoise
from fednh.privacy.plan import make_plan
from fednh.privacy.private_data import Mechanisms, PrivateData
from fednh.privacy.private_fit import PrivateFit
from fednh.privacy.sample_gradients import clipped_sum
from fednh.testing import tiny_clients
from fednh.tree import Tree

SGD = Sgd(lr=0.1, momentum=0.5, weight_decay=1e-3, clip=10.0, batch_size=2, epochs=2)
SOME = Mechanisms(clip=0.7, rate=0.5, gradients=1.3, sums=2.0, counts=3.0)

# Whatever a method does, it is computed on noise, or refused: which of them is which is what this table is about.
REFUSED = {
    "fedproto", "creff", "fedvls", "feddbe", "fedpac", "pfedfda", "fedala", "afl", "fedcof", "fedcgs",
    "fedas", "fedcp", "fedtgp", "feduv", "floco",
}  # fmt: skip


class NoNoise:
    """Every sample in every step, and noise of ones, so that results can be computed by hand."""

    def __init__(self, size: float = 0.0):
        self.size = size

    def gaussian(self, shape: Sequence[int]) -> Tensor:
        return torch.full(tuple(shape), self.size)

    def once(self, name: str, shape: Sequence[int]) -> Tensor:
        return torch.zeros(tuple(shape))

    def chosen(self, samples: int, rate: float) -> Tensor:
        return torch.arange(samples)

    def augmenting(self, seeded: torch.Generator) -> torch.Generator:
        return seeded


def private(method: Method, data: ClientData, net: Net, noise: object = None, mechanisms: Mechanisms = SOME):
    start = method.init(net, torch.Generator().manual_seed(1))
    kept, down = method.enroll(start), method.broadcast(start)
    seeded = SeededNoise(0, 1, 0) if noise is None else noise
    return client.private_update(method, net, kept, down, data, SGD, mechanisms, seeded)  # type: ignore[arg-type]


def test_gradients_are_clipped_over_all_names_together() -> None:
    net, (data, _) = tiny_clients()
    params = net.init(torch.Generator().manual_seed(1))
    (x, y, weight), *_ = data.batches()
    loss, total = cross_entropy(net.logits), dict.fromkeys(params, torch.zeros(()))
    for k in range(len(y)):
        leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
        slopes = torch.autograd.grad(loss(leaves, x[k : k + 1], y[k : k + 1]).sum(), list(leaves.values()))
        norm = torch.cat([slope.flatten() for slope in slopes]).norm()
        assert norm > 0.3  # so that something is clipped
        total = {n: total[n] + s * 0.3 / norm for n, s in zip(leaves, slopes, strict=True)}
    ours = clipped_sum(loss, params, {}, x, y, weight, 0.3)
    for name, value in total.items():
        torch.testing.assert_close(ours[name], value)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.01, 5))
def test_one_sample_moves_a_step_by_no_more_than_the_clip(seed: int, clip: float) -> None:
    """Neighbours differ in one sample, however extreme it is."""
    net, _ = tiny_clients()
    params = {n: 5 * v for n, v in net.init(torch.Generator().manual_seed(seed % 7)).items()}
    rng = torch.Generator().manual_seed(seed)
    x, y = 10 ** float(seed % 5) * torch.randn(4, 4, generator=rng), torch.randint(3, (4,), generator=rng)
    loss = cross_entropy(net.logits)
    both = [clipped_sum(loss, params, {}, x[:n], y[:n], torch.ones(n), clip) for n in (3, 4)]
    moved = torch.cat([(both[1][name] - both[0][name]).flatten() for name in params]).norm()
    assert float(moved) <= clip * (1 + 1e-4)


def test_a_gradient_that_is_not_finite_counts_nothing() -> None:
    net, _ = tiny_clients()
    params = net.init(torch.Generator().manual_seed(1))
    x = torch.tensor([[torch.inf, 0, 0, 0], [1.0, 2, 3, 4]])
    loss, y = cross_entropy(net.logits), torch.tensor([0, 1])
    both = clipped_sum(loss, params, {}, x, y, torch.ones(2), 1.0)
    alone = clipped_sum(loss, params, {}, x[1:], y[1:], torch.ones(1), 1.0)
    for name in params:
        torch.testing.assert_close(both[name], alone[name])


@pytest.mark.parametrize("drawn", [[], [0], [0, 1, 2]])
def test_a_step_by_hand(drawn: list[int]) -> None:
    """The denominator is the expected number, whoever is drawn, and the noise is clip times multiplier."""
    net, (data, _) = tiny_clients()
    sgd = replace(SGD, epochs=1, momentum=0.0, weight_decay=0.0)
    mechanisms = replace(SOME, rate=1.0, clip=0.2)

    class Chosen(NoNoise):
        def chosen(self, samples: int, rate: float) -> Tensor:
            return torch.tensor(drawn, dtype=torch.long)

    params, loss = net.init(torch.Generator().manual_seed(1)), cross_entropy(net.logits)
    fit = PrivateFit(PrivateData(data, mechanisms, Chosen(1.0), {}), sgd)
    trained = fit(params, loss, only=("body", "head"))
    (x, y, _), *_ = data.batches()
    total = clipped_sum(loss, params, {}, x[drawn], y[drawn], torch.ones(len(drawn)), 0.2) if drawn else {}
    for name, value in params.items():
        step = (total.get(name, torch.zeros_like(value)) + 0.2 * 1.3) / 3
        torch.testing.assert_close(trained[name], value - 0.1 * step)


def test_the_number_of_steps_and_releases_depend_on_the_config_alone() -> None:
    net, (data, _) = tiny_clients()
    few = ClientData(data.samples, np.arange(1))
    for each in (data, few):
        result = private(METHODS["fedrep"](), each, net)
        assert result.released == (
            Release("gradients", 1.3, 0.5, 20), Release("number of samples", 3.0), Release("gradients", 1.3, 0.5, 4),
        )  # fmt: skip
        assert (result.samples, result.loss_sum, result.gradient_norm) == (None, None, None)


def test_counts_are_drawn_once_and_kept() -> None:
    net, (data, _) = tiny_clients()
    method = METHODS["fedprior"](aggregation="sum")
    start = method.init(net, torch.Generator().manual_seed(1))
    first = private(method, data, net)
    noise = SeededNoise(0, 2, 0)
    second = client.private_update(method, net, first.keep, method.broadcast(start), data, SGD, SOME, noise)
    names = [[r.name for r in result.released] for result in (first, second)]
    assert names == [["class counts", "gradients", "number of samples", "class sums"], ["gradients", "class sums"]]
    for name in ("privacy.class_counts", "privacy.number_of_samples"):
        torch.testing.assert_close(first.keep[name], second.keep[name])
        assert name not in first.upload


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(2, 6), st.integers(0, 10**6))
def test_neighbouring_data_move_fednhs_sums_by_one_at_most(samples: int, classes: int, seed: int) -> None:
    """The sensitivity of `aggregation = "sum"`: one sample more moves the whole matrix by 1, whatever C is."""
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.normal(size=(samples + 1, 5)).astype(np.float32) * np.float32(10.0 ** rng.integers(-3, 4)))
    y = torch.from_numpy(rng.integers(classes, size=samples + 1))
    one, zero = torch.ones(1), torch.zeros(1)
    sums = [
        FedNH(aggregation="sum").prototypes(unit, ClientData(Samples(x, y, classes, one, zero, False), np.arange(n)))
        for n in (samples, samples + 1)
    ]
    assert float((sums[1] - sums[0]).norm()) == pytest.approx(1.0, abs=1e-5)


def test_features_that_are_too_long_are_shortened_before_they_are_summed() -> None:
    _, (data, _) = tiny_clients()
    told = PrivateData(data, SOME, NoNoise(), {})
    sums = told.class_sums(lambda x: 1000 * x)
    assert float(sums.norm(dim=1).sum()) <= len(data) + 1e-4
    assert told.spent == [Release("class sums", 2.0)]


def test_the_noise_on_sums_has_the_scale_of_the_account() -> None:
    _, (data, _) = tiny_clients()
    zero = PrivateData(data, SOME, NoNoise(), {}).class_sums(unit)
    one = PrivateData(data, SOME, NoNoise(1.0), {}).class_sums(unit)
    torch.testing.assert_close(one - zero, torch.full_like(zero, 2.0))


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_noised_or_refused(name: str) -> None:
    """What an answer releases is what the plan says, for every method that is not refused."""
    overrides = {"method.name": name, "privacy.level": "sample", "privacy.noise": 2.0, "rounds": 2, "train.epochs": 2}
    config = load("digits", overrides)
    net, _ = tiny_clients()
    method = config.build_method()
    initial = initial_state(method, net, 0)
    if name in REFUSED:
        with pytest.raises(ConfigError, match=f"method {name} cannot be used with privacy.level = 'sample'"):
            make_plan(config, method, net, initial, 2)
        return
    made = make_plan(config, method, net, initial, 2)
    assert made is not None
    if name == "local":
        assert made.spent([1, 2]) == []  # nothing leaves, and nothing needs noise
        return
    assert made.mechanisms is not None
    released = private(method, tiny_clients()[1][0], net, mechanisms=made.mechanisms).released
    assert set(released) == set(made.answer(1, True))
    assert made.epsilon([1]) < made.epsilon([1, 2])


def test_plain_prototypes_are_refused_with_what_to_do() -> None:
    config = load("digits", {"privacy.level": "sample", "privacy.noise": 2.0, "method.aggregation": "count"})
    net, _ = tiny_clients()
    method = config.build_method()
    with pytest.raises(ConfigError, match=r"data\.batches.*set method\.aggregation = 'sum'"):
        make_plan(config, method, net, initial_state(method, net, 0), 2)


@pytest.mark.parametrize("name", sorted(METHODS.keys() - REFUSED - {"local"}))
def test_a_block_computes_what_the_loop_does(name: str) -> None:
    net, clients = tiny_clients()
    samples = clients[0].samples
    method = METHODS[name](**({"aggregation": "sum"} if name in ("fednh", "fedprior") else {}))
    start = method.init(net, torch.Generator().manual_seed(1))
    parts, kept, down = [np.arange(5), np.arange(3, 6)], [method.enroll(start)] * 2, method.broadcast(start)
    for round_ in (1, 2):
        noises = [SeededNoise(0, round_, k) for k in range(2)]
        alone = [
            client.private_update(
                method, net, kept[k], down, ClientData(samples, part, 0, round_, k), SGD, SOME, noises[k]
            )
            for k, part in enumerate(parts)
        ]
        noises = [SeededNoise(0, round_, k) for k in range(2)]
        block = Block(samples, parts, [0, 1], 0, round_, "train")
        together = private_update_block(method, net, block, kept, down, SGD, (), SOME, noises)
        for one, other in zip(alone, together, strict=True):
            assert one.released == other.released
            for mine, theirs in ((one.keep, other.keep), (one.upload or {}, other.upload or {})):
                assert mine.keys() == theirs.keys()
                for each in mine:
                    torch.testing.assert_close(mine[each], theirs[each], atol=2e-4, rtol=2e-3)
        kept = [result.keep for result in alone]


def test_the_systems_noise_is_normal_and_never_repeats() -> None:
    one, other = (SystemNoise().gaussian((200_000,)) for _ in range(2))
    assert not torch.equal(one, other)
    assert abs(float(one.mean())) < 0.015, "six standard errors of 200,000 draws, as the bounds below"
    assert abs(float(one.std()) - 1) < 0.01
    assert abs(float((one > 1).float().mean()) - 0.1587) < 0.005
    drawn = len(SystemNoise().chosen(100_000, 0.1))
    assert 9_400 < drawn < 10_600


def test_a_first_answer_with_more_of_the_same_is_planned_for() -> None:
    """The answer that is planned for is the larger one, also where all its releases are of one kind."""
    fit = Release("gradients", 1.0, 0.1, 10)
    assert plan._most([fit, fit], [fit]) == [fit, fit] == plan._most([fit], [fit, fit])
    sums = Release("class sums", 1.0)
    assert plan._most([fit, fit], [fit, sums]) == [fit, fit, fit, sums]  # neither contains the other


def test_a_method_that_counts_its_samples_is_refused_in_words() -> None:
    @dataclass(frozen=True)
    class Counting(Method):
        def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
            return {}, {"number": torch.tensor(float(len(data)))}

    net, _ = tiny_clients()
    config = load("digits", {"privacy.level": "sample", "privacy.noise": 2.0})
    with pytest.raises(ConfigError, match=r"it reads len\(data\), which depends on single samples"):
        make_plan(config, Counting(), net, initial_state(Counting(), net, 0), 2)


def test_augmentation_of_a_real_site_is_not_the_seeds() -> None:
    """Who knows the seed must not know the crops: one sample more moves the draws of all that follow in a step."""
    net, (data, _) = tiny_clients()
    seeded = data.rng
    private(METHODS["fedavg"](), data, net)
    assert data.rng is seeded
    states = []
    for _ in range(2):
        private(METHODS["fedavg"](), data, net, SystemNoise())
        states.append(torch.rand(4, generator=data.rng))
    assert data.rng is not seeded
    assert not torch.equal(*states)
