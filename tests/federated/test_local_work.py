"""Control of local work: optimisers and schedules beside torch's own, steps and fractions of epochs, kept state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LinearLR, LRScheduler, SequentialLR, StepLR

from fednh.backends.vmap import Block, update_block
from fednh.config import Config, load
from fednh.data.batches import ClientData, Samples
from fednh.errors import ConfigError, Refused
from fednh.federated import client
from fednh.flower.site_config import read_policy
from fednh.methods.fedrep import FedRep
from fednh.methods.fit import LocalFit
from fednh.methods.local import Local
from fednh.methods.losses import cross_entropy
from fednh.methods.optimizers import Adam, FitSettings, Sgd
from fednh.models import Net, build_net
from fednh.seeding import torch_rng
from fednh.tree import Tree, has_prefix
from tests.backends.test_vmap import SIZES, largest_difference, parts, samples  # noqa: F401
from tests.helpers.compare import same
from tests.helpers.tiny import CLIENTS

COMMON: dict[str, Any] = {"lr": 0.05, "momentum": 0.8, "weight_decay": 0.02, "clip": 0.5, "batch_size": 4, "epochs": 3}
OPTIMIZERS: dict[str, tuple[FitSettings, Callable[..., torch.optim.Optimizer]]] = {
    "sgd": (Sgd(**COMMON), lambda p: torch.optim.SGD(p, 0.05, 0.8, weight_decay=0.02)),
    "adam": (Adam(**COMMON, beta2=0.9), lambda p: torch.optim.Adam(p, 0.05, (0.8, 0.9), weight_decay=0.02)),
    "adamw": (
        Adam(**COMMON, beta2=0.9, decoupled=True),
        lambda p: torch.optim.AdamW(p, 0.05, (0.8, 0.9), weight_decay=0.02),
    ),
}


def start(net: Net) -> Tree:
    return net.init(torch.Generator().manual_seed(3))


def by_torch(
    net: Net, params: Tree, batches: list[tuple[torch.Tensor, torch.Tensor]], make: Callable[..., torch.optim.Optimizer]
) -> Tree:
    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    optimizer = make(leaves.values())
    for x, y in batches:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net.logits(leaves, x), y).backward()
        torch.nn.utils.clip_grad_norm_(leaves.values(), 0.5)
        optimizer.step()
    return {name: value.detach() for name, value in leaves.items()}


# --- optimisers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_torchs_optimiser(name: str, net: Net, tiny: Samples) -> None:
    settings, make = OPTIMIZERS[name]
    ours = LocalFit(ClientData(tiny, CLIENTS[0]), settings)(
        start(net), cross_entropy(net.logits), only=("body", "head")
    )
    again = ClientData(tiny, CLIENTS[0])
    batches = [batch for _ in range(3) for batch in again.shuffled(4)]
    same(ours, by_torch(net, start(net), batches, make), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("length", [{"epochs": 1.4}, {"epochs": 0.5}, {"steps": 5}, {"epochs": 2, "keep_state": True}])
@pytest.mark.parametrize("method", [Local(), FedRep(head_epochs=1)], ids=["local", "fedrep"])
def test_a_block_gives_what_the_loop_gives(
    method: Any,
    length: dict[str, Any],
    name: str,
    samples: Samples,  # noqa: F811
) -> None:
    """Clients of 1, 3, 7, 10 and 11 samples, two rounds, the second of which begins with what the first one kept."""
    settings, net = replace(OPTIMIZERS[name][0], **{"epochs": 2, **length}), build_net("mlp", (6,), 4, {"hidden": [5]})
    server = method.init(net, torch_rng(0, "init"))
    down, kept = method.broadcast(server), [method.enroll(server)] * len(SIZES)
    for round_ in (1, 2):
        loop = [
            client.update(method, net, kept[k], down, ClientData(samples, part, 5, round_, k), settings)
            for k, part in enumerate(parts())
        ]
        block = Block(samples, parts(), range(len(SIZES)), 5, round_, "train")
        together = update_block(method, net, block, kept, down, settings)
        kept = [each.keep for each in loop]
    assert [a.samples for a in loop] == [b.samples for b in together]
    assert [sorted(a.keep) for a in loop] == [sorted(b.keep) for b in together]
    assert any(has_prefix(each, ("optimizer",)) for each in kept[0]) == settings.keep_state
    assert largest_difference(loop, together) < 5e-4  # Adam divides by small numbers
    assert [a.loss_sum for a in loop] == pytest.approx([b.loss_sum for b in together], rel=1e-3)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_kept_state_goes_on_where_the_last_round_ended(name: str, net: Net, tiny: Samples) -> None:
    """Two rounds of a client that shares nothing are one long run of torch's optimiser; fresh, they are not."""
    made, make = OPTIMIZERS[name]
    batches = [batch for round_ in (1, 2) for batch in ClientData(tiny, CLIENTS[0], 0, round_).shuffled(4)]
    expected = by_torch(net, start(net), batches, make)
    for keep in (True, False):
        kept: Tree = start(net)
        for round_ in (1, 2):
            data = ClientData(tiny, CLIENTS[0], 0, round_)
            kept = client.update(Local(), net, kept, {}, data, replace(made, epochs=1, keep_state=keep)).keep
        far = max(float((kept[each] - expected[each]).abs().max()) for each in expected)
        assert far < 1e-5 if keep else far > 1e-3
    personal = client.personal_model(Local(), net, kept, {}, data, made)
    assert sorted(personal) == sorted(expected), "the optimiser's state is no part of a model"


def test_kept_state_belongs_to_what_a_call_trains(net: Net, tiny: Samples) -> None:
    """FedAS trains all in a client's first round, and from the second on the body alone before."""
    settings, loss = Sgd(**{**COMMON, "batch_size": 99}, keep_state=True), cross_entropy(net.logits)
    first = LocalFit(ClientData(tiny, CLIENTS[0]), settings)
    model = first(start(net), loss, only=("body", "head"))
    alone, after_body, fresh = (
        LocalFit(ClientData(tiny, CLIENTS[0], 0, 2), settings, memory=memory)
        for memory in (first.memory, first.memory, None)
    )
    expected = alone(model, loss, only=("body", "head"))
    same(after_body(model, loss, only=("body",)), fresh(model, loss, only=("body",)))
    same(after_body(model, loss, only=("body", "head")), expected)


def test_a_method_that_divides_by_the_reach_of_sgd_refuses_others() -> None:
    for setting in ({"train.optimizer": "adam"}, {"train.optimizer_state": "kept"}):
        with pytest.raises(ConfigError, match=r"train\.optimizer.* is not supported by method scaffold"):
            load("digits", {"method.name": "scaffold", **setting})
    with pytest.raises(ValueError, match=r"needs train\.optimizer = .sgd."):
        Adam().reach(3.0)


# --- length ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "sizes"),
    [
        ({"steps": 5}, [4, 2, 4, 2, 4]),
        ({"steps": 1}, [4]),
        ({"epochs": 0.5}, [3]),
        ({"epochs": 1.9}, [4, 2, 4, 1]),
        ({"epochs": 0.01}, [1]),
    ],
)
def test_steps_and_fractions_take_these_batches(length: dict[str, Any], sizes: list[int], tiny: Samples) -> None:
    """Of a client with six samples in batches of four; the first samples of an epoch's order."""
    seen: list[torch.Tensor] = []

    def loss(params: Tree, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        return (params["body.w"] * x.flatten(1).sum(1)).square()

    settings = Sgd(batch_size=4, **length)
    fit = LocalFit(ClientData(tiny, CLIENTS[0]), settings)
    fit({"body.w": torch.ones(())}, loss, only=("body",))
    assert [len(x) for x in seen] == sizes
    assert fit.samples == sum(sizes)
    again = ClientData(tiny, CLIENTS[0])
    order = torch.cat([x for _ in range(3) for x, _ in again.shuffled(4)])
    places = [0, 4, 6, 10, 12]
    for x, at in zip(seen, places, strict=False):
        assert torch.equal(x, order[at : at + len(x)])
    assert fit.reach() == pytest.approx(settings.reach(float(len(sizes))))


def test_a_site_counts_steps_as_passes() -> None:
    """Whatever its number of samples is, which a refusal must not tell: a step is a pass at most."""
    policy = read_policy({"allow.epochs": 5, "allow.methods": "fedavg"})
    allowed = [{"epochs": 5}, {"epochs": 0.5}, {"steps": 5}]
    refused = [{"epochs": 5.5}, {"steps": 6}, {"steps": 10**6, "epochs": 1}]
    for train in allowed + refused:
        config = load("digits", {"method.name": "fedavg", **{f"train.{key}": value for key, value in train.items()}})
        if train in allowed:
            policy._check_method(config)
            continue
        with pytest.raises(Refused, match=r"train\.(epochs|steps) = .* allows \(allow\.epochs\)"):
            policy._check_method(config)


# --- schedules -------------------------------------------------------------------------------------------------------

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer, int], LRScheduler]] = {
    "exponential": lambda optimizer, _: ExponentialLR(optimizer, 0.9),
    "constant": lambda optimizer, _: StepLR(optimizer, 10**6),
    "cosine": lambda optimizer, rounds: CosineAnnealingLR(optimizer, rounds, eta_min=0.02),
    "step": lambda optimizer, _: StepLR(optimizer, 4, gamma=0.9),
}


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rates_are_those_of_torchs_schedulers(schedule: str, warmup: int) -> None:
    rounds, settings = 12, {"lr": 0.3, "lr_decay": 0.9, "lr_step": 4, "lr_end": 0.02, "warmup": warmup}
    train = {f"train.{key}": value for key, value in {**settings, "schedule": schedule}.items()}
    config: Config = load("digits", {"rounds": rounds, **train})
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.3)
    scheduler = SCHEDULES[schedule](optimizer, rounds - warmup)
    if warmup:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.3)
        first = LinearLR(optimizer, 1 / (warmup + 1), total_iters=warmup)
        scheduler = SequentialLR(optimizer, [first, SCHEDULES[schedule](optimizer, rounds - warmup)], [warmup])
    expected = []
    for _ in range(rounds):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert [config.fit_settings(t).lr for t in range(1, rounds + 1)] == pytest.approx(expected, rel=1e-6)
