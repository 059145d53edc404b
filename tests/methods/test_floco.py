"""Floco: rounds by other means on draws taken from the client's stream; places, projections and draws by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fednh.data.batches import Samples
from fednh.methods import METHODS
from fednh.methods.floco import Floco, energy, onto_simplex, principal, widest
from fednh.models import Net
from fednh.tree import select
from tests.helpers.compare import same
from tests.helpers.reference import SGD, Play, TwoPart, average

CLOSE = {"rtol": 1e-4, "atol": 1e-6}


def alpha_of(column: list[float], place: list[float], placed: bool, rho: float) -> list[float]:
    """Uniform on the simplex from exponential numbers; near a place a share of the way there."""
    exponential = [-math.log(1 - u) for u in column[:-1]]
    anywhere = [e / sum(exponential) for e in exponential]
    if not placed:
        return anywhere
    length = sum(abs(a - b) for a, b in zip(anywhere, place, strict=True))
    return [b + column[-1] * min(1, rho / length) * (a - b) for a, b in zip(anywhere, place, strict=True)]


def test_floco(net: Net, tiny: Samples) -> None:
    """Two clients have places after round 2; the third round is trained near them."""
    play = Play(METHODS["floco"](endpoints=3, tau=2, rho=0.3), net, tiny)
    places, placed = [[1 / 3] * 3] * 2, False
    for number in (1, 2, 3):
        sent = []
        for k, (x, y) in enumerate(play.xy):
            model = TwoPart.of({**play.server, "head.weight": torch.zeros(4, 5)})
            ends = nn.Parameter(play.server["endpoints.head.weight"].clone())
            columns = play.data[k].random(4).T.tolist()
            moving = [*model.linear.parameters(), ends]
            optimiser = torch.optim.SGD(moving, SGD.lr, momentum=SGD.momentum, weight_decay=SGD.weight_decay)
            for step in range(SGD.epochs):  # each is one step
                alpha = alpha_of(columns[step], places[k], placed, 0.3)
                optimiser.zero_grad()
                head = sum(a * ends[m] for m, a in enumerate(alpha))
                F.cross_entropy(model.features(x) @ head.T, y).backward()
                nn.utils.clip_grad_norm_(moving, SGD.clip)
                optimiser.step()
            sent.append({**model.body_tree(), "endpoints.head.weight": ends.detach().clone()})
        for expected, update in zip(sent, play.round(), strict=True):
            same(select(update.upload or {}, "body", "endpoints"), expected, **CLOSE)
            same(update.keep, expected, **CLOSE)
        same(select(play.server, "body", "endpoints"), average(sent), **CLOSE)
        if number == 2:  # of two clients one component is left, on which they lie opposite each other
            found = sorted(record["place"].tolist() for record in play.records)
            assert found[0] == pytest.approx([0, 0.5, 0.5], abs=1e-6)
            assert found[1] == pytest.approx([1, 0, 0], abs=1e-6)
            places, placed = [record["place"].tolist() for record in play.records], True
        for k in range(2):
            head = sum(a * sent[k]["endpoints.head.weight"][m] for m, a in enumerate(places[k]))
            same(play.personal(k), {**select(sent[k], "body"), "head.weight": head}, **CLOSE)
    assert [record["place"].tolist() for record in play.records] == places, "a place stays"
    centre = play.server["endpoints.head.weight"].mean(0)
    same(play.method.global_model(play.server), {**select(play.server, "body"), "head.weight": centre}, **CLOSE)


def test_who_comes_later_is_placed_by_the_components_of_round_tau() -> None:
    method = Floco(endpoints=2, tau=1)
    server = {
        "endpoints.head.weight": torch.zeros(2, 1, 2),
        "before.head.weight": torch.tensor([[[1.0, 0.0]], [[0.0, 0.0]]]),
        "rounds": torch.tensor(4.0),
        "mean": torch.tensor([0.0, 1.0, 0.0, 0.0]),
        "components": torch.tensor([[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]]),
        "size": torch.tensor(2.0),
    }
    ends = torch.tensor([[[7.0, 1.5]], [[7.0, 1.0]]])  # moved by (6, 1.5, 7, 1): kappa (0.5, 1), halved (0.25, 0.5)
    late = {"endpoints.head.weight": ends, "place": torch.tensor([0.5, 0.5]), "placed": torch.zeros(())}
    early = {"endpoints.head.weight": ends, "place": torch.tensor([0.9, 0.1]), "placed": torch.ones(())}
    records = method.records(server, [late, early])
    torch.testing.assert_close(records[0]["place"], torch.tensor([0.375, 0.625]))
    assert records[1]["place"].tolist() == early["place"].tolist()
    assert [float(record["placed"]) for record in records] == [1, 1]
    assert method.records({**server, "rounds": torch.tensor(0.0)}, [late]) == [{}]


def test_a_round_of_one_client_places_it_in_the_centre(net: Net, tiny: Samples) -> None:
    play = Play(METHODS["floco"](endpoints=3, tau=1), net, tiny)
    play.round((0,))
    torch.testing.assert_close(play.records[0]["place"], torch.full((3,), 1 / 3))
    play.round((1,))
    torch.testing.assert_close(play.records[1]["place"], torch.full((3,), 1 / 3))


def test_projections_by_hand() -> None:
    points = torch.tensor([[0.2, 0.3, 0.5], [2.0, 0.0, 0.0], [0.0, 0.0, 0.0], [1.0, 1.0, -5.0], [0.8, 0.6, 0.0]])
    expected = [[0.2, 0.3, 0.5], [1, 0, 0], [1 / 3, 1 / 3, 1 / 3], [0.5, 0.5, 0], [0.6, 0.4, 0]]
    torch.testing.assert_close(onto_simplex(points), torch.tensor(expected))


@given(st.lists(st.floats(-3, 3), min_size=4, max_size=4), st.integers(0, 1000))
def test_no_point_of_the_simplex_is_nearer_than_the_projection(point: list[float], seed: int) -> None:
    here = torch.tensor([point], dtype=torch.float64)
    found = onto_simplex(here)
    assert float(found.min()) >= 0
    assert float(found.sum()) == pytest.approx(1)
    rows = torch.rand(20, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 1e-9
    other = rows / rows.sum(1, keepdim=True)
    assert float((found - here).norm()) <= float((other - here).norm(dim=1).min()) + 1e-9


def test_components_are_those_of_largest_variance_with_a_sign() -> None:
    moves = torch.tensor([[3.0, 0, 0], [-3, 0, 0], [0, 1, 0], [0, -1, 0]], dtype=torch.float64) + 5
    mean, components = principal(moves, 3)
    assert mean.tolist() == pytest.approx([5, 5, 5])
    expected = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(components, expected)


def test_the_size_spreads_places_most() -> None:
    assert float(energy(torch.tensor([[1.0, 0], [0, 1], [0.5, 0.5]]))) == pytest.approx((0.5 + 2 + 2) / 3)
    kappa = torch.tensor([[0.3, 0.0, -0.1], [0.1, 0.2, 0.0], [-0.2, 0.1, 0.1], [0.0, -0.3, 0.0]], dtype=torch.float64)
    size = widest(kappa)
    least = energy(onto_simplex(kappa / size))
    assert all(energy(onto_simplex(kappa / z)) >= least for z in torch.linspace(0.01, 1, 60, dtype=torch.float64))


@pytest.mark.parametrize("rho", [0.1, 2.0])
def test_draws_lie_in_the_simplex_and_near_the_place(rho: float) -> None:
    method, place = Floco(endpoints=4, rho=rho), torch.tensor([1.0, 0, 0, 0])
    numbers = torch.rand(800, 5, generator=torch.Generator().manual_seed(3))
    near = torch.stack([method.drawn(row, place, torch.ones(())) for row in numbers])
    anywhere = torch.stack([method.drawn(row, place, torch.zeros(())) for row in numbers])
    for drawn in (near, anywhere):
        assert (drawn >= -1e-7).all()
        torch.testing.assert_close(drawn.sum(1), torch.ones(800))
    assert float((near - place).abs().sum(1).max()) <= rho + 1e-6
    torch.testing.assert_close(anywhere.mean(0), torch.full((4,), 0.25), atol=0.03, rtol=0)
    torch.testing.assert_close(anywhere.square().mean(0), torch.full((4,), 0.1), atol=0.03, rtol=0)  # 2 / (4 * 5)


def test_a_step_with_more_epochs_than_samples_draws_again_from_the_first(net: Net, tiny: Samples) -> None:
    """Columns are as many as samples: step n uses the first again. Here on a client of one sample and three steps."""
    import numpy as np

    from fednh.data.batches import ClientData

    data = ClientData(tiny, np.array([4]))
    assert data.random(4).shape == (4, 1)
    play = Play(METHODS["floco"](endpoints=3), net, tiny)
    play.data[0], play.xy[0] = data, (tiny.x[data.index], data.y)
    (update,) = play.round((0,))
    assert all(torch.isfinite(value).all() for value in (update.upload or {}).values())


def test_places_are_not_weights(net: Net, tiny: Samples) -> None:
    """Neither place nor mark is in the server's state, so that no rule of the server moves them."""
    play = Play(METHODS["floco"](), net, tiny)
    assert not select(play.server, "place", "placed")
    assert Tensor is type(play.received(0)["place"])
