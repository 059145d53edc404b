"""FedNH, equation by equation, and FedUH beside it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fednh.data.batches import Samples
from fednh.methods import METHODS
from fednh.methods.losses import scaled_cosine
from fednh.models import Net
from fednh.tree import Tree, select
from tests.helpers.compare import identical, same
from tests.helpers.reference import Play, TwoPart, average, train

CLOSE = {"rtol": 1e-4, "atol": 1e-6}


def client_by_hand(
    start: Tree, x: torch.Tensor, y: torch.Tensor, train_scale: bool = True
) -> tuple[TwoPart, torch.Tensor]:
    """Eq. (2): body and scale trained on s * W f(x) / ||f(x)||, W fixed."""
    model = TwoPart.of(start)
    w, s = start["head.weight"], torch.nn.Parameter(start["scale"].clone())

    def loss() -> torch.Tensor:
        h = model.features(x)
        return F.cross_entropy(s * (h / h.norm(dim=1, keepdim=True)) @ w.T, y)

    train([*model.linear.parameters(), *([s] if train_scale else [])], loss)
    return model, s.detach()


def means_by_hand(model: TwoPart, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Eq. (3): class means of unit representations, zero where the client lacks the class."""
    h = model.features(x).detach()
    h = h / h.norm(dim=1, keepdim=True)
    rows = [h[y == c].mean(0) if (y == c).any() else torch.zeros(5) for c in range(4)]
    return torch.stack(rows)


@pytest.mark.parametrize("aggregation", ["uniform", "count"])
def test_a_round(aggregation: str, net: Net, tiny: Samples) -> None:
    play = Play(METHODS["fednh"](rho=0.7, aggregation=aggregation, scale=3.0), net, tiny)
    start = play.initial
    hands = [client_by_hand(start, x, y) for x, y in play.xy]
    means = [means_by_hand(model, x, y) for (model, _), (x, y) in zip(hands, play.xy, strict=True)]
    updates = play.round()
    for update, (model, s), mu, (_, y) in zip(updates, hands, means, play.xy, strict=True):
        assert set(update.upload) == {*model.body_tree(), "scale", "prototypes"}
        same(select(update.upload, "body"), model.body_tree(), **CLOSE)
        torch.testing.assert_close(update.upload["scale"], s, **CLOSE)
        identical(select(update.keep, "head"), select(start, "head"))  # the head cannot move on a client
        counts = torch.bincount(y, minlength=4)[:, None]
        expected = mu if aggregation == "uniform" else F.normalize(mu, dim=1) * counts
        torch.testing.assert_close(update.upload["prototypes"], expected, **CLOSE)
    w = start["head.weight"]
    if aggregation == "uniform":  # Eq. (4) with alpha = 1/|S|
        fresh = (means[0] + means[1]) / 2
    else:  # the authors' code: unit means weighted by class counts
        a, b = (F.normalize(m, dim=1) for m in means)
        fresh = F.normalize(torch.stack([4 * a[0], 2 * a[1] + 2 * b[1], 3 * b[2], 0 * b[3]]), dim=1)
    expected = F.normalize(0.7 * w + 0.3 * fresh, dim=1)
    torch.testing.assert_close(play.server["head.weight"], expected, **CLOSE)
    assert torch.equal(play.server["head.weight"][3], w[3]), "nobody owns class 3: its prototype stays, to the bit"
    same(select(play.server, "body"), average([m.body_tree() for m, _ in hands]), **CLOSE)
    torch.testing.assert_close(play.server["scale"], (hands[0][1] + hands[1][1]) / 2, **CLOSE)


def test_client_counts_of_the_count_case() -> None:
    """The numbers 4, 2 and 2, 3 above are the tiny clients' class counts."""
    from tests.helpers.tiny import CLIENTS, tiny_dataset

    y = tiny_dataset().y_train
    assert [int((y[CLIENTS[0]] == c).sum()) for c in range(4)] == [4, 2, 0, 0]
    assert [int((y[CLIENTS[1]] == c).sum()) for c in range(4)] == [0, 2, 3, 0]


def test_equation_2_logits(net: Net) -> None:
    params = METHODS["fednh"](scale=7.0).init(net, torch.Generator().manual_seed(1))
    x = torch.randn(6, 4)
    h = TwoPart.of(params).features(x)
    cosine = F.cosine_similarity(h[:, None], params["head.weight"][None], dim=-1)
    torch.testing.assert_close(scaled_cosine(net)(params, x), 7 * cosine, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("aggregation", ["uniform", "count"])
def test_prototypes_stay_unit_length(aggregation: str, net: Net, tiny: Samples) -> None:
    play = Play(METHODS["fednh"](rho=0.1, aggregation=aggregation), net, tiny)
    for _ in range(4):
        play.round()
        torch.testing.assert_close(play.server["head.weight"].norm(dim=1), torch.ones(4))
    assert not torch.allclose(play.server["head.weight"][0], play.initial["head.weight"][0])


@pytest.mark.parametrize("name", ["fednh", "feduh"])
def test_initial_heads(name: str, net: Net) -> None:
    """C = 4 <= D + 1: "separated" is the regular simplex, all cosines -1/3; "orthogonal" has right angles."""
    off = ~torch.eye(4, dtype=torch.bool)
    for how, cosine in (("separated", -1 / 3), ("orthogonal", 0.0)):
        w = METHODS[name](head_init=how).init(net, torch.Generator().manual_seed(2))["head.weight"]
        torch.testing.assert_close((w @ w.T)[off], torch.full((12,), cosine), rtol=0, atol=1e-6)


def test_a_fixed_scale_stays(net: Net, tiny: Samples) -> None:
    play = Play(METHODS["fednh"](scale=30.0, train_scale=False), net, tiny)
    play.round()
    assert play.server["scale"].item() == 30.0


def test_feduh_is_fednh_without_semantics(net: Net, tiny: Samples) -> None:
    uniform, moving = (Play(METHODS[name](scale=3.0), net, tiny) for name in ("feduh", "fednh"))
    identical(uniform.initial, moving.initial)
    updates = uniform.round()
    moving.round()
    same(select(uniform.server, "body", "scale"), select(moving.server, "body", "scale"))
    assert torch.equal(uniform.server["head.weight"], uniform.initial["head.weight"]), "the head never changes"
    assert all(set(u.upload) == set(select(uniform.server, "body", "scale")) for u in updates), "nor does it travel up"


@pytest.mark.parametrize("rho", [0.0, 1.0, 1.2])
def test_rho_lies_between_0_and_1(rho: float) -> None:
    from fednh.config import build_method
    from fednh.errors import UserError

    with pytest.raises(UserError, match=r"method\.rho"):
        build_method({"name": "fednh", "rho": rho})


@pytest.mark.parametrize("aggregation", ["uniform", "count"])
@pytest.mark.parametrize("name", ["fednh", "fedprior"])
def test_the_head_may_start_from_class_means(name: str, aggregation: str, net: Net, tiny: Samples) -> None:
    """Round 1 trains nothing: prototypes are the mean directions of the initial body's features; the last class, which
    nobody has, keeps its own. Round 2 is an ordinary one that starts from them."""
    play = Play(METHODS[name](head_init="means", aggregation=aggregation), net, tiny)
    updates = play.round()
    assert [(update.samples, update.keep) for update in updates] == [(0, {}), (0, {})]
    body = TwoPart.of(play.initial)
    weight = [1.0, 1.0] if aggregation == "uniform" else [y.bincount(minlength=4)[:, None] for _, y in play.xy]
    means = [means_by_hand(body, x, y) for x, y in play.xy]
    means = means if aggregation == "uniform" else [F.normalize(mu) for mu in means]
    expected = F.normalize(sum(w * mu for w, mu in zip(weight, means, strict=True)))
    torch.testing.assert_close(play.server["head.weight"][:3], expected[:3], **CLOSE)
    identical({"row": play.server["head.weight"][3]}, {"row": play.initial["head.weight"][3]})
    identical(select(play.server, "body", "scale"), select(play.initial, "body", "scale"))
    identical(select(play.personal(0), "body", "head"), select(play.server, "body", "head"))  # it has no model yet

    ordinary = Play(METHODS[name](aggregation=aggregation), net, tiny)
    ordinary.server = select(play.server, "body", "head", "scale")
    ordinary.round()
    assert all(update.samples > 0 for update in play.round())
    same(select(play.server, "body", "head", "scale"), ordinary.server, **CLOSE)


def test_classes_reported_after_the_first_round_move_as_usual(net: Net, tiny: Samples) -> None:
    """Of client 0 alone in round 1, classes 0 and 1 get means; class 2, which client 1 has, starts uniform."""
    play = Play(METHODS["fednh"](head_init="means"), net, tiny)
    play.round((0,))
    identical({"rows": play.server["head.weight"][2:]}, {"rows": play.initial["head.weight"][2:]})
    before, updates = play.server["head.weight"], play.round()
    mu = (updates[0].upload["prototypes"] + updates[1].upload["prototypes"]) / 2
    torch.testing.assert_close(
        play.server["head.weight"][2], F.normalize(0.9 * before[2] + 0.1 * mu[2], dim=0), **CLOSE
    )
