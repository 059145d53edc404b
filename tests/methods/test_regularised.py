"""MOON, FedDyn, MR-MTL and FedUV: rounds by other means, clients missing in some, and their penalties by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fednh.data.batches import Samples
from fednh.methods import METHODS
from fednh.methods.feduv import crowded, too_steady
from fednh.models import Net
from fednh.tree import Tree, prefix, select
from tests.helpers.compare import identical, same
from tests.helpers.reference import Play, TwoPart, average, train, trained

CLOSE = {"rtol": 1e-4, "atol": 1e-6}


def minus(a: Tree, b: Tree, scale: float) -> Tree:
    return {name: a[name] - scale * b[name] for name in a}


# --- MOON -----------------------------------------------------------------------------------------------------------


def contrastive(model: TwoPart, received: TwoPart, own: TwoPart, x: Tensor, tau: float) -> Tensor:
    """Eq. (2), sample by sample."""
    total = torch.zeros(())
    for row in x:
        z, near, far = model.features(row), received.features(row).detach(), own.features(row).detach()
        up, down = (torch.exp(F.cosine_similarity(z, other, dim=0) / tau) for other in (near, far))
        total = total - torch.log(up / (up + down))
    return total / len(x)


def test_moon(net: Net, tiny: Samples) -> None:
    """Client 1 misses the second round; in the third its own model is that of the first."""
    play = Play(METHODS["moon"](mu=2.0, tau=0.4), net, tiny)
    own = [TwoPart.of(play.initial) for _ in play.xy]
    for clients in ((0, 1), (0,), (0, 1)):
        received, models = TwoPart.of(play.server), []
        for k in clients:
            model, (x, y) = TwoPart.of(play.server), play.xy[k]

            def loss(m: TwoPart = model, k: int = k, x: Tensor = x, y: Tensor = y, r: TwoPart = received) -> Tensor:
                return F.cross_entropy(m(x), y) + 2 * contrastive(m, r, own[k], x, 0.4)

            train(list(model.parameters()), loss)
            models.append(model)
        for k, model, update in zip(clients, models, play.round(clients), strict=True):
            same(update.upload, model.tree(), **CLOSE)
            own[k] = model
        same(play.server, average([m.tree() for m in models]), **CLOSE)
    same(play.personal(1), own[1].tree(), **CLOSE)


def test_moon_is_fedavg_in_its_first_round_and_without_its_weight(net: Net, tiny: Samples) -> None:
    """A client's own model is then the one it received: the contrastive loss is log 2."""
    moon, fedavg = (Play(METHODS[name](), net, tiny) for name in ("moon", "fedavg"))
    for ours, theirs in zip(moon.round(), fedavg.round(), strict=True):
        same(ours.upload, theirs.upload, **CLOSE)
    plain = Play(METHODS["moon"](mu=0.0), net, tiny)
    for _ in range(2):
        plain.round()
    fedavg.round()
    same(plain.server, fedavg.server, **CLOSE)


# --- FedDyn ---------------------------------------------------------------------------------------------------------


def test_feddyn(net: Net, tiny: Samples) -> None:
    """h is the mean of the g_k of all clients that took part so far: that is how it is computed here."""
    alpha = 0.3
    play = Play(METHODS["feddyn"](alpha=alpha), net, tiny)
    zero = {name: torch.zeros_like(value) for name, value in TwoPart.of(play.initial).tree().items()}
    g: dict[int, Tree] = {}
    for clients in ((0,), (0, 1), (1,)):
        theta, models = select(play.server, "body", "head"), []
        for k in clients:
            model, (x, y), mine = TwoPart.of(theta), play.xy[k], g.get(k, zero)

            def loss(
                m: TwoPart = model, x: Tensor = x, y: Tensor = y, mine: Tree = mine, theta: Tree = theta
            ) -> Tensor:
                w = {
                    "body.linear1.weight": m.linear.weight,
                    "body.linear1.bias": m.linear.bias,
                    "head.weight": m.head.weight,
                }
                linear = sum((mine[name] * value).sum() for name, value in w.items())
                tie = sum((value - theta[name]).square().sum() for name, value in w.items())
                return F.cross_entropy(m(x), y) - linear + alpha / 2 * tie

            train(list(model.parameters()), loss)
            models.append(model.tree())
            g[k] = minus(mine, minus(model.tree(), theta, 1.0), alpha)
        for k, model_tree, update in zip(clients, models, play.round(clients), strict=True):
            same(select(update.upload, "body", "head"), model_tree, **CLOSE)
            same(select(update.keep, "g"), prefix("g", g[k]), **CLOSE)
        same(select(play.server, "body", "head"), minus(average(models), average(list(g.values())), 1 / alpha), **CLOSE)
        assert play.server["clients"] == len(g)
    same(play.method.global_model(play.server) or {}, select(play.server, "body", "head"))


def test_feddyn_sends_neither_h_nor_g(net: Net, tiny: Samples) -> None:
    play = Play(METHODS["feddyn"](), net, tiny)
    (update, _) = play.round()
    assert update.upload is not None
    assert set(update.upload) == {*select(play.initial, "body", "head"), "newcomers"}
    assert set(play.received(0)) == set(select(play.initial, "body", "head"))
    assert [float(u.upload["newcomers"]) for u in play.round() if u.upload] == [0.0, 0.0]


def test_where_all_clients_stop_feddyn_stops(net: Net, tiny: Samples) -> None:
    """One client alone: after the first round theta = theta_1 - h/alpha = theta_0 + 2 (theta_1 - theta_0)."""
    play = Play(METHODS["feddyn"](alpha=0.5), net, tiny)
    before = play.server
    (update,) = play.round((1,))
    for name, value in select(before, "body", "head").items():
        torch.testing.assert_close(play.server[name], 2 * (update.upload or {})[name] - value, **CLOSE)


# --- MR-MTL ---------------------------------------------------------------------------------------------------------


def test_mrmtl(net: Net, tiny: Samples) -> None:
    """Client 1 joins in the second round, from the mean that it receives; it trains its own model from then on."""
    play = Play(METHODS["mrmtl"](lam=0.6), net, tiny)
    own: dict[int, TwoPart] = {}
    for clients in ((0,), (0, 1), (1,)):
        mean, models = TwoPart.of(play.server), []
        for k in clients:
            model, (x, y) = TwoPart.of(own[k].tree() if k in own else mean.tree()), play.xy[k]

            def loss(m: TwoPart = model, x: Tensor = x, y: Tensor = y, mean: TwoPart = mean) -> Tensor:
                tie = sum(
                    (a - b.detach()).square().sum() for a, b in zip(m.parameters(), mean.parameters(), strict=True)
                )
                return F.cross_entropy(m(x), y) + 0.3 * tie

            train(list(model.parameters()), loss)
            own[k] = model
            models.append(model.tree())
        for model_tree, update in zip(models, play.round(clients), strict=True):
            same(update.upload, model_tree, **CLOSE)
        same(select(play.server, "body", "head"), average(models), **CLOSE)
    for k, model in own.items():
        same(play.personal(k), model.tree(), **CLOSE)


def test_mrmtl_without_the_tie_is_training_alone(net: Net, tiny: Samples) -> None:
    tied, alone = Play(METHODS["mrmtl"](lam=0.0), net, tiny), Play(METHODS["local"](), net, tiny)
    for _ in range(2):
        tied.round()
        alone.round()
    same(tied.personal(0), alone.personal(0), **CLOSE)


def test_a_newcomer_of_mrmtl_has_the_mean(net: Net, tiny: Samples) -> None:
    play = Play(METHODS["mrmtl"](), net, tiny)
    play.round((0,))
    identical(play.personal(1), select(play.server, "body", "head"))


# --- FedUV ----------------------------------------------------------------------------------------------------------


def penalties(p: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """As the authors' code has it: torch.std, torch.pdist and torch.median."""
    gamma = torch.eye(p.shape[1]).std(0).mean()
    distance = torch.pdist(h).square()
    sigma = distance[distance != 0].median()
    return F.relu(gamma - p.std(0)).mean(), (-distance / sigma).exp().mean()


def test_feduv(net: Net, tiny: Samples) -> None:
    play = Play(METHODS["feduv"](lam=3.0, mu=0.7), net, tiny)
    for clients in ((0, 1), (1,)):
        models = [TwoPart.of(play.server) for _ in clients]
        for k, model in zip(clients, models, strict=True):
            x, y = play.xy[k]

            def loss(m: TwoPart = model, x: Tensor = x, y: Tensor = y) -> Tensor:
                steady, near = penalties(m(x).softmax(1), m.features(x))
                return F.cross_entropy(m(x), y) + 3 * steady + 0.7 * near

            train(list(model.parameters()), loss)
        for model, update in zip(models, play.round(clients), strict=True):
            same(update.upload, model.tree(), **CLOSE)
        same(play.server, average([m.tree() for m in models]), **CLOSE)
    plain = Play(METHODS["feduv"](lam=0.0, mu=0.0), net, tiny).round()
    for k, update in enumerate(plain):
        same(update.upload, trained(TwoPart.of(play.initial), *play.xy[k]).tree(), **CLOSE)


def test_fedus_penalties_by_hand() -> None:
    """Outputs that never vary are short of 1/sqrt(2) each; three points on a line have squared distances 1, 4, 9."""
    weight = torch.full((3,), 1 / 3)
    steady = too_steady(torch.tensor([[0.9, 0.1]] * 3), weight)
    assert float(steady) == pytest.approx(1 / math.sqrt(2), abs=1e-5)
    near = crowded(torch.tensor([[0.0], [1.0], [3.0]]), weight)
    assert float(near) == pytest.approx(sum(math.exp(-d / 4) for d in (1, 4, 9)) / 3)
    assert float(crowded(torch.tensor([[0.0], [0.0], [3.0]]), weight)) == pytest.approx((1 + 2 / math.e) / 3)


@pytest.mark.parametrize("real", [0, 1, 2, 5])
def test_padding_does_not_change_feduv(real: int) -> None:
    torch.manual_seed(real)
    p, h = torch.randn(7, 4).softmax(1).requires_grad_(), torch.randn(7, 3, requires_grad=True)
    weight = torch.cat([torch.full((real,), 1 / max(real, 1)), torch.zeros(7 - real)])
    found = too_steady(p, weight), crowded(h, weight)
    if real > 1:
        torch.testing.assert_close(found, penalties(p[:real], h[:real]) if real > 2 else found)
        alone = too_steady(p[:real], weight[:real]), crowded(h[:real], weight[:real])
        torch.testing.assert_close(found, alone)
    else:
        assert float(found[1].detach()) == 0
    slopes = torch.autograd.grad(sum(found), [p, h], allow_unused=True, materialize_grads=True)
    for slope in slopes:
        assert torch.isfinite(slope).all()
        assert not slope[real:].any()


def test_feduv_of_one_sample_and_of_equal_ones() -> None:
    assert float(crowded(torch.ones(1, 3), torch.ones(1))) == 0
    h = torch.ones(4, 3, requires_grad=True)
    near = crowded(h, torch.full((4,), 0.25))
    assert near.tolist() == 1
    (slope,) = torch.autograd.grad(near, h)
    assert not slope.any()
