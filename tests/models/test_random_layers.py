"""Random layers: on in training, off in use, and drawn by address, so that a run can be repeated to the bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fednh
from fednh.data.batches import ClientData, Samples
from fednh.errors import UserError
from fednh.federated import client
from fednh.federated.architectures import initial_state
from fednh.federated.client import ClientResult
from fednh.methods import METHODS
from fednh.methods.fit import Sgd
from fednh.models import Net, build_net
from fednh.tree import Tree
from tests.helpers.compare import identical, outcome
from tests.helpers.method_seconds import TIMED_TRAINED
from tests.helpers.synthetic import site_table
from tests.helpers.tiny import CLIENTS

ME = __name__
SGD = Sgd(lr=0.1, batch_size=3, epochs=2)


def attention(x: Tensor, training: bool) -> Tensor:
    return F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5 if training else 0.0)[0]


LAYERS: dict[str, Callable[[Tensor, bool], Tensor]] = {
    "dropout": lambda x, training: F.dropout(x, 0.5, training),
    "alpha_dropout": lambda x, training: F.alpha_dropout(x, 0.5, training),
    "attention": attention,
    "rrelu": lambda x, training: F.rrelu(x, 0.1, 0.9, training),
    "stochastic_depth": lambda x, training: x * x.new_empty(len(x), 1).bernoulli_(0.5) if training else x,
    "noise": lambda x, training: x + torch.randn_like(x) if training else x,
    "mixing": lambda x, training: x + x[torch.randperm(len(x))] if training else x,
    "numbers": lambda x, training: x + torch.rand(x.shape) if training else x,
}
masks: list[Tensor] = []  # what Dropping has drawn


class Dropping(nn.Module):
    """A body that notes its masks."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.lin, self.fc = nn.Linear(4, 40), nn.Linear(40, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        mask = F.dropout(torch.ones(len(x), 40), 0.5, self.training)
        if self.training:
            masks.append(mask)
        out: Tensor = self.fc(self.lin(x) * mask)
        return out


class Usual(nn.Module):
    """Layers as most people write them."""

    def __init__(self, shape: tuple[int, ...], num_classes: int):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(shape[0], 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3))
        self.head = nn.Linear(8, num_classes)


class Odd(nn.Module):
    def __init__(self, num_classes: int, kind: str):
        super().__init__()
        self.lin, self.fc, self.kind = nn.Linear(4, 6), nn.Linear(6, num_classes), kind

    def forward(self, x: Tensor) -> Tensor:
        h = self.lin(x)
        if self.kind in LAYERS:
            h = LAYERS[self.kind](h, self.training)
        elif self.kind == "always":
            h = F.dropout(h, 0.5)
        else:
            h = h * random.random()
        out: Tensor = self.fc(h)
        return out


def moving(params: Tree) -> Tree:
    """As a fit passes them to its loss."""
    return {name: value.clone().requires_grad_() for name, value in params.items()}


@pytest.mark.parametrize("kind", LAYERS)
def test_every_layer_draws_from_the_generator_that_is_given(kind: str) -> None:
    net = build_net(f"{ME}:Odd", (4,), 3, {"kind": kind}, head="fc")
    assert net.random
    params, x = net.init(torch.Generator().manual_seed(1)), torch.randn(6, 4, generator=torch.Generator())

    def drawn(seed: int) -> Tensor:
        torch.manual_seed(int(torch.randint(1000, ())))  # whatever the process's own generator would give
        with net.training(torch.Generator().manual_seed(seed)):
            return net.logits(moving(params), x)

    before = torch.get_rng_state()
    usual = net.logits(params, x)
    with net.training(torch.Generator().manual_seed(0)):
        net.logits(moving(params), x)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(drawn(5), drawn(5))
    assert not torch.equal(drawn(5), drawn(6))
    assert torch.equal(net.logits(params, x), usual)


def test_dropout_by_hand() -> None:
    net = build_net(f"{ME}:Odd", (4,), 3, {"kind": "dropout"}, head="fc")
    params, x = net.init(torch.Generator().manual_seed(1)), torch.randn(6, 4, generator=torch.Generator())
    h = x @ params["body.lin.weight"].T + params["body.lin.bias"]
    kept = torch.empty(6, 6).bernoulli_(0.5, generator=torch.Generator().manual_seed(3))
    with net.training(torch.Generator().manual_seed(3)):
        torch.testing.assert_close(net.features(params, x), h)  # a teacher's pass: nothing of it moves
        torch.testing.assert_close(net.features(moving(params), x), 2 * kept * h)
        with torch.no_grad():
            torch.testing.assert_close(net.features(moving(params), x), h)
    torch.testing.assert_close(net.features(moving(params), x), h)


@pytest.mark.parametrize(
    ("kind", "words"), [("always", "also when it is not training"), ("python", "two different outputs")]
)
def test_what_could_not_be_repeated_is_refused(kind: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        build_net(f"{ME}:Odd", (4,), 3, {"kind": kind}, head="fc")


def trained(method: str, net: Net, tiny: Samples, who: int, round_: int = 1, look: bool = False) -> ClientResult:
    light = {"match_steps": 2, "retrain_epochs": 2} if method == "creff" else {}
    made = METHODS[method](**light)
    start = initial_state(made, net, 0)
    data = ClientData(tiny, CLIENTS[who], 7, round_, who)
    return client.update(made, net, made.enroll(start), made.broadcast(start), data, SGD, look)


@pytest.mark.parametrize("method", TIMED_TRAINED)
def test_masks_differ_by_step_client_and_round_and_are_the_same_again(method: str, tiny: Samples) -> None:
    net = build_net(f"{ME}:Dropping", (4,), 4, head="fc")
    seen: list[list[Tensor]] = []
    for who, round_ in ((0, 1), (0, 1), (1, 1), (0, 2)):
        masks.clear()
        trained(method, net, tiny, who, round_)
        seen.append(list(masks))
    first, again, *others = seen
    assert len(first) >= 4, "two epochs of two batches"
    everything = [mask for part in (first, *others) for mask in part]
    assert len({mask.numpy().tobytes() for mask in everything}) == len(everything)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def test_threads_and_measurements_change_nothing(tiny: Samples) -> None:
    net = build_net(f"{ME}:Dropping", (4,), 4, head="fc")
    jobs = [(who, round_) for who in (0, 1) for round_ in range(1, 9)]
    alone = [trained("fedavg", net, tiny, *job) for job in jobs]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda job: trained("fedavg", net, tiny, *job), jobs))
    for one, other in zip(alone, together, strict=True):
        identical(one.upload, other.upload)
    looked = trained("fedavg", net, tiny, *jobs[0], look=True)
    identical(looked.upload, alone[0].upload)
    assert looked.gradient_norm is not None


def test_a_run_is_the_same_for_any_number_of_workers_and_resumed(tmp_path: Path) -> None:
    """With batch normalisation at the clients, too; models are used with dropout off."""
    (tmp_path / "rows.csv").write_text("\n".join(site_table("abcde", 12)) + "\n")
    settings = {"data.name": f"csv:{tmp_path}/rows.csv", "partition.name": "site", "rounds": 3, "train.epochs": 2}
    settings |= {"method.name": "fedrep", "model.name": f"{ME}:Usual", "model.norm": "local", "checkpoint.every": 1}
    result = fednh.run({**settings, "workers": 1}, out=tmp_path / "one")
    fednh.run({**settings, "workers": 3, "rounds": 2}, out=tmp_path / "many")
    fednh.resume(tmp_path / "many", rounds=3)
    one, many = outcome(tmp_path / "one"), outcome(tmp_path / "many")
    del one["files"]["config.toml"], many["files"]["config.toml"]
    assert one == many
    x, model = np.array([[0.5, 1.0], [1.0, 0.5]], np.float32), result.model(client=0)
    assert (model.predict_proba(x) == model.predict_proba(x)).all()
    with pytest.raises(UserError, match="'vmap' cannot be used: the model has random layers, such as dropout, which"):
        fednh.run({**settings, "engine": "vmap"}, out=tmp_path / "blocks")
