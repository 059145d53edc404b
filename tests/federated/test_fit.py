from __future__ import annotations

import pytest
import torch

from fednh.data.batches import ClientData, Samples
from fednh.methods.fit import LocalFit, Sgd
from fednh.methods.losses import cross_entropy
from fednh.methods.optimizers import Descent
from fednh.models import Net
from fednh.tree import Tree, prefix, select, strip_prefix
from tests.helpers.compare import identical, same
from tests.helpers.tiny import CLIENTS


def start(net: Net) -> Tree:
    return net.init(torch.Generator().manual_seed(3))


def plain(net: Net, params: Tree, data: ClientData, sgd: Sgd, steps_of: list[torch.Tensor]) -> Tree:
    """The same training with torch's own optimiser, on the batches given by index."""
    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    optimiser = torch.optim.SGD(leaves.values(), sgd.lr, sgd.momentum, weight_decay=sgd.weight_decay)
    for batch in steps_of:
        x, y = data.samples.x[data.index][batch], data.y[batch]
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(net.logits(leaves, x), y).backward()
        torch.nn.utils.clip_grad_norm_(leaves.values(), sgd.clip)
        optimiser.step()
    return {name: value.detach() for name, value in leaves.items()}


@pytest.mark.parametrize("clip", [10.0, 0.05])
def test_equals_torchs_optimiser(net: Net, tiny: Samples, clip: float) -> None:
    sgd = Sgd(lr=0.3, momentum=0.9, weight_decay=0.02, clip=clip, batch_size=4, epochs=3)
    data = ClientData(tiny, CLIENTS[0])
    ours = LocalFit(data, sgd)(start(net), cross_entropy(net.logits), only=("body", "head"))
    again = ClientData(tiny, CLIENTS[0])
    batches = [b for _ in range(3) for b in torch.randperm(6, generator=again.rng).split(4)]
    assert [len(b) for b in batches] == [4, 2] * 3, "the last, small batch of an epoch is kept"
    same(ours, plain(net, start(net), data, sgd, batches), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("moving", "still"), [("body", "head"), ("head", "body")])
def test_what_is_not_selected_is_bit_identical(net: Net, tiny: Samples, moving: str, still: str) -> None:
    sgd = Sgd(lr=0.5, momentum=0.9, weight_decay=0.5, batch_size=2, epochs=4)
    before = start(net)
    reference = {name: value.clone() for name, value in before.items()}
    after = LocalFit(ClientData(tiny, CLIENTS[0]), sgd)(before, cross_entropy(net.logits), only=(moving,))
    identical(select(after, still), select(reference, still))
    for name, value in select(after, moving).items():
        assert not torch.equal(value, reference[name]), name
    identical(before, reference)  # and the input itself is never written to


def test_a_gradient_that_two_names_share_is_clipped_once(tiny: Samples) -> None:
    """Both have the gradient (1, 1), of joint norm 2; clipped to 1, that is a half, and a step of 0.1 goes 0.05."""
    before = {"body.one": torch.zeros(2), "body.two": torch.zeros(2)}
    fit = LocalFit(ClientData(tiny, CLIENTS[0]), Sgd(0.1, 0.0, 0.0, clip=1.0, batch_size=6, epochs=1))
    weight = torch.ones(2)  # so that the gradient lies in memory as the parameters do and is not copied
    after = fit(before, lambda p, x, y: ((p["body.one"] + p["body.two"]) * weight).sum() + 0 * x[:, 0], only=("body",))
    same(after, {name: torch.full((2,), -0.05) for name in before}, rtol=1e-5, atol=0.0)


def test_selecting_nothing_is_an_error(net: Net, tiny: Samples) -> None:
    with pytest.raises(ValueError, match="nothing to train"):
        LocalFit(ClientData(tiny, CLIENTS[0]), Sgd())(start(net), cross_entropy(net.logits), only=("tail",))


@pytest.mark.parametrize("part", ["body", "personal.body"])
def test_a_body_without_parameters_trains_nothing(part: str, tiny: Samples) -> None:
    fit = LocalFit(ClientData(tiny, CLIENTS[0]), Sgd())
    before = {"head.weight": torch.ones(4, 2)}
    identical(fit(before, lambda params, x, y: x[:, 0], only=(part,)), before)
    assert fit.samples == 0


def test_zero_epochs_change_nothing(net: Net, tiny: Samples) -> None:
    fit = LocalFit(ClientData(tiny, CLIENTS[0]), Sgd())
    identical(fit(start(net), cross_entropy(net.logits), only=("body",), epochs=0), start(net))
    assert fit.samples == 0


def test_a_penalty_added_to_every_sample_counts_once(net: Net, tiny: Samples) -> None:
    """loss + c * ||head||^2 moves the head by exactly one gradient of the penalty more."""
    sgd = Sgd(lr=0.1, momentum=0.0, weight_decay=0.0, clip=0.0, batch_size=64, epochs=1)
    loss = cross_entropy(net.logits)
    free = LocalFit(ClientData(tiny, CLIENTS[0]), sgd)(start(net), loss, only=("head",))
    tied = LocalFit(ClientData(tiny, CLIENTS[0]), sgd)(
        start(net), lambda p, x, y: loss(p, x, y) + 0.5 * p["head.weight"].square().sum(), only=("head",)
    )
    expected = free["head.weight"] - 0.1 * start(net)["head.weight"]
    torch.testing.assert_close(tied["head.weight"], expected)


def test_counts_samples_and_loss(net: Net, tiny: Samples) -> None:
    fit = LocalFit(ClientData(tiny, CLIENTS[1]), Sgd(lr=1e-12, epochs=2, batch_size=3))
    fit(start(net), cross_entropy(net.logits), only=("body", "head"))
    data = ClientData(tiny, CLIENTS[1])
    expected = 2 * cross_entropy(net.logits)(start(net), tiny.x[data.index], data.y).sum()
    assert fit.samples == 10
    assert fit.loss_sum == pytest.approx(float(expected), rel=1e-5)


def test_a_parameter_that_the_loss_does_not_touch_is_left_alone(net: Net, tiny: Samples) -> None:
    params = {**start(net), "body.spare": torch.ones(3)}
    after = LocalFit(ClientData(tiny, CLIENTS[0]), Sgd(weight_decay=0.5))(
        params, lambda p, x, y: cross_entropy(net.logits)({k: v for k, v in p.items() if k != "body.spare"}, x, y),
        only=("body", "head"),
    )  # fmt: skip
    assert after["body.spare"].tolist() == [1.0, 1.0, 1.0]


def test_a_loss_of_batches_is_given_weights_and_sets_values_for_the_next_step(net: Net, tiny: Samples) -> None:
    """Six samples in batches of 4 and 2, two epochs; the value that is carried counts steps."""
    seen: list[tuple[float, int]] = []

    def loss(p: Tree, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, Tree]:
        assert float(weight.sum()) == pytest.approx(1)
        seen.append((float(p["steps"]), len(weight)))
        pull = p["steps"] * p["head.weight"].sum()  # uses what the step before has set
        return cross_entropy(net.logits)(p, x, y) * 0 + pull, {"steps": p["steps"] + 1 + 0 * p["head.weight"].sum()}

    sgd = Sgd(lr=0.1, momentum=0.0, weight_decay=0.0, clip=0.0, batch_size=4, epochs=2)
    before = {**start(net), "steps": torch.tensor(1.0)}
    after = LocalFit(ClientData(tiny, CLIENTS[0]), sgd).batchwise(before, loss, only=("head",))
    assert seen == [(1.0, 4), (2.0, 2), (3.0, 4), (4.0, 2)]
    assert after["steps"] == 5
    assert not after["steps"].requires_grad
    assert before["steps"] == 1
    torch.testing.assert_close(after["head.weight"], before["head.weight"] - 0.1 * (1 + 2 + 3 + 4))


def test_a_gradient_may_lie_otherwise_in_memory_than_its_parameter() -> None:
    """Convolutions hand out weight gradients whose values lie in another order; each belongs to its own weight."""
    param, gradient = torch.zeros(2, 2), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    Descent([param], Sgd(lr=1.0, clip=0, weight_decay=0))((gradient.T.contiguous().T,))
    assert param.tolist() == [[-1, -2], [-3, -4]]


def test_without_momentum_a_step_is_the_gradient_alone() -> None:
    param = torch.tensor([1.0])
    step = Descent([param], Sgd(lr=0.5, momentum=0.0, weight_decay=0.1, clip=0))
    for _ in range(2):
        step((torch.tensor([2.0]),))
    assert param.item() == pytest.approx((1 - 0.5 * 2.1) - 0.5 * (2 - 0.1 * 0.05))


def test_frozen_names_do_not_move_wherever_a_method_keeps_them(net: Net, tiny: Samples) -> None:
    before = {**start(net), **prefix("mine", start(net))}
    frozen = {name for name in start(net) if name.startswith("body.")}
    data, loss = ClientData(tiny, CLIENTS[0]), cross_entropy(lambda tree, x: net.logits(strip_prefix(tree, "mine"), x))
    after = LocalFit(data, Sgd(weight_decay=0.5), frozen=frozen)(before, loss, only=("mine",))
    assert {name for name in before if not torch.equal(before[name], after[name])} == {"mine.head.weight"}
    alone = LocalFit(data, Sgd(), frozen=frozen)
    identical(alone(before, loss, only=("mine.body",)), before)
    assert alone.samples == 0
