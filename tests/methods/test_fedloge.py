"""FedLoGe: two rounds by other means; the sparse frame; both realignments."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fednh.data.batches import ClientData, Samples
from fednh.federated.client import personal_model
from fednh.methods import METHODS
from fednh.models import Net, build_net
from fednh.models.prototypes import sparse_head
from fednh.tree import select
from tests.helpers.compare import identical, same
from tests.helpers.reference import SGD, Play, TwoPart, average, train

CLOSE = {"rtol": 1e-4, "atol": 1e-6}


@pytest.fixture
def play(net: Net, tiny: Samples) -> Play:
    return Play(METHODS["fedloge"](norm=0.5), net, tiny)


def test_two_rounds(play: Play) -> None:
    """The body by the frame's loss alone, each head by its own on features that it cannot change."""
    frame, locals_ = play.initial["frame"], [play.initial["head.weight"]] * 2
    for _ in range(2):
        start, models = play.server, []
        for k, (x, y) in enumerate(play.xy):
            model, local = TwoPart.of(start), nn.Parameter(locals_[k].clone())

            def loss(m: TwoPart = model, phi: nn.Parameter = local, x=x, y=y) -> torch.Tensor:  # type: ignore[no-untyped-def]
                h = m.features(x)
                still = h.detach()
                return (
                    F.cross_entropy(h @ frame.T, y)
                    + F.cross_entropy(m.head(still), y)
                    + F.cross_entropy(still @ phi.T, y)
                )

            train([*model.parameters(), local], loss)
            models.append(model)
            locals_[k] = local.detach()
        for update, model, local in zip(play.round(), models, locals_, strict=True):
            same(update.upload, model.tree(), **CLOSE)
            same(update.keep, {"local.weight": local}, **CLOSE)
        same(select(play.server, "body", "head"), average([m.tree() for m in models]), **CLOSE)
        identical({"frame": play.server["frame"]}, {"frame": frame})
    assert not torch.allclose(locals_[0], locals_[1], atol=1e-2)
    whole, psi = TwoPart.of(play.server), play.server["head.weight"]
    x = play.xy[0][0]
    h = whole.features(x)

    shared = play.method.global_model(play.server)
    assert shared is not None
    expected = h @ torch.stack([row / row.norm() for row in psi]).T
    torch.testing.assert_close(play.method.logits(play.net, shared, x), expected, **CLOSE)

    scores = play.method.logits(play.net, play.personal(1), x)  # client 1 has the classes 1 and 2
    assert torch.isneginf(scores[:, [0, 3]]).all()
    for c in (1, 2):
        aligned = psi[c] * locals_[1][c].norm()
        torch.testing.assert_close(scores[:, c], h @ aligned + h @ locals_[1][c], **CLOSE)


def test_a_class_with_one_sample_is_the_clients_own(play: Play, tiny: Samples) -> None:
    """Three samples of class 0 and one of class 1: both can be predicted, the others cannot."""
    data = ClientData(tiny, np.array([0, 1, 2, 3]))
    model = personal_model(play.method, play.net, play.kept[0], play.received(0), data, SGD)
    scores = play.method.logits(play.net, model, tiny.x)
    assert torch.isneginf(scores).all(0).tolist() == [False, False, True, True]
    assert torch.isfinite(scores[:, :2]).all()


class Biased(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body = nn.Linear(4, 6)
        self.head = nn.Linear(6, num_classes)


def test_a_head_with_a_bias(tiny: Samples) -> None:
    """Lengths are those of the weights; biases of both heads are added, and the global one's stays as it is."""
    net = build_net(f"{__name__}:Biased", (4,), 4)
    play = Play(METHODS["fedloge"](), net, tiny)
    play.round()
    kept, server, personal = play.kept[0], play.server, play.personal(0)
    assert set(kept) == {"local.weight", "local.bias"}
    same({"b": personal["head.bias"]}, {"b": server["head.bias"] + kept["local.bias"]})
    shared = play.method.global_model(server)
    assert shared is not None
    identical({"b": shared["head.bias"]}, {"b": server["head.bias"]})


def test_a_frame_that_has_changed_is_a_problem(play: Play) -> None:
    assert play.method.problem(play.server) is None
    other = {**play.server, "frame": play.server["frame"] * torch.tensor([[1.0], [1.1], [1.0], [1.0]])}
    assert play.method.problem(other) == "prototype 1 has length 1.100000, not 1"


@pytest.mark.parametrize("sparsity", [0.0, 0.6])
def test_the_frame_is_the_simplex_where_its_zeros_allow_that(sparsity: float) -> None:
    frame = sparse_head(10, 64, sparsity, torch.Generator().manual_seed(0))
    assert ((frame == 0).sum(1) == round(64 * sparsity)).all()
    torch.testing.assert_close(frame @ frame.T, torch.eye(10) * (10 / 9) - 1 / 9, rtol=0, atol=1e-4)


def test_zeros_are_in_random_places() -> None:
    one, two = (sparse_head(10, 64, 0.6, torch.Generator().manual_seed(seed)) == 0 for seed in (0, 1))
    assert not torch.equal(one, two)
    assert not torch.equal(one[0], one[1])


@pytest.mark.parametrize(("classes", "dim", "left"), [(1, 5, 2), (6, 2, 2), (20, 4, 2), (4, 3, 2), (2, 1, 1)])
def test_a_frame_of_few_dimensions_has_distinct_unit_rows(classes: int, dim: int, left: int) -> None:
    frame = sparse_head(classes, dim, 0.6, torch.Generator().manual_seed(0))
    assert ((frame != 0).sum(1) <= left).all()
    torch.testing.assert_close(frame.norm(dim=1), torch.ones(classes))
    assert ((frame @ frame.T).fill_diagonal_(-1) < 0.9).all()
