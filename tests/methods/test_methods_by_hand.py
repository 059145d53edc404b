"""Every method: one round on two tiny clients equals an independent computation; nothing else moves or travels."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from reference import Play, TwoPart, average, train, trained

from conftest import identical, same
from fednh.data.batches import Samples
from fednh.methods import METHODS, Method
from fednh.models import Net
from fednh.tree import Tree, prefix, select

CLOSE = {"rtol": 1e-4, "atol": 1e-6}


@pytest.fixture
def play(request: pytest.FixtureRequest, net: Net, tiny: Samples) -> Play:
    method: Method = request.param
    return Play(method, net, tiny)


def of(name: str, **settings: object) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("play", [METHODS[name](**settings)], indirect=True, ids=[name])


def local_models(play: Play, start: Tree) -> list[TwoPart]:
    return [trained(TwoPart.of(start), x, y) for x, y in play.xy]


@of("fedavg")
def test_fedavg(play: Play) -> None:
    models = local_models(play, play.initial)
    updates = play.round()
    for update, model in zip(updates, models, strict=True):
        same(update.upload, model.tree(), **CLOSE)
    same(play.server, average([m.tree() for m in models]), **CLOSE)
    same(play.personal(1), models[1].tree(), **CLOSE)  # the latest local model, not the average
    same(play.method.global_model(play.server) or {}, play.server)


@of("local")
def test_local(play: Play) -> None:
    once = local_models(play, play.initial)
    twice = [trained(m, x, y) for m, (x, y) in zip(once, play.xy, strict=True)]
    assert play.method.broadcast(play.server) == {}
    assert all(u.upload == {} for u in play.round() + play.round())
    same(play.personal(0), twice[0].tree(), **CLOSE)
    same(play.personal(1), twice[1].tree(), **CLOSE)
    identical(play.server, play.initial)
    assert play.method.global_model(play.server) is None


@of("fedper")
def test_fedper(play: Play) -> None:
    models = local_models(play, play.initial)
    updates = play.round()
    assert all(set(u.upload) == set(models[0].body_tree()) for u in updates), "a head never travels"
    body = average([m.body_tree() for m in models])
    same(select(play.server, "body"), body, **CLOSE)
    identical(select(play.server, "head"), select(play.initial, "head"))  # the global head stays as initialised
    same(play.personal(0), models[0].tree(), **CLOSE)
    second = trained(TwoPart.of({**body, "head.weight": models[0].head.weight}), *play.xy[0])
    play.round()
    same(play.personal(0), second.tree(), **CLOSE)  # averaged body, own head from the round before


@of("fedrep", head_epochs=4)
def test_fedrep(play: Play) -> None:
    models = []
    for x, y in play.xy:
        model = TwoPart.of(play.initial)
        train([model.head.weight], lambda m=model, x=x, y=y: F.cross_entropy(m(x), y), epochs=4)
        train(list(model.linear.parameters()), lambda m=model, x=x, y=y: F.cross_entropy(m(x), y))
        models.append(model)
    updates = play.round()
    for update, model in zip(updates, models, strict=True):
        same(update.upload, model.body_tree(), **CLOSE)
        same(update.keep, model.tree(), **CLOSE)
    same(select(play.server, "body"), average([m.body_tree() for m in models]), **CLOSE)


@of("fedbabu", finetune_epochs=2)
def test_fedbabu(play: Play) -> None:
    models = []
    for x, y in play.xy:
        model = TwoPart.of(play.initial)
        train(list(model.linear.parameters()), lambda m=model, x=x, y=y: F.cross_entropy(m(x), y))
        models.append(model)
    updates = play.round()
    for update, model in zip(updates, models, strict=True):
        same(update.upload, model.body_tree(), **CLOSE)
    body = average([m.body_tree() for m in models])
    expected = {**body, **select(play.initial, "head")}
    same(play.method.global_model(play.server) or {}, expected, **CLOSE)
    identical(select(play.server, "head"), select(play.initial, "head"))
    tuned = trained(TwoPart.of(expected), *play.xy[1], epochs=2)
    same(play.personal(1), tuned.tree(), **CLOSE)


@of("ditto", lam=0.6)
def test_ditto(play: Play) -> None:
    play.round()  # after it the personal and the received model differ
    start, personal = play.server, [TwoPart.of(play.personal(k)) for k in range(2)]
    models = local_models(play, start)
    received = TwoPart.of(start)
    for v, (x, y) in zip(personal, play.xy, strict=True):

        def loss(v: TwoPart = v, x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            pull = sum(
                (a - b.detach()).square().sum() for a, b in zip(v.parameters(), received.parameters(), strict=True)
            )
            return F.cross_entropy(v(x), y) + 0.3 * pull

        train(list(v.parameters()), loss)
    updates = play.round()
    for update, model, v in zip(updates, models, personal, strict=True):
        same(update.upload, model.tree(), **CLOSE)
        same(update.keep, prefix("personal", v.tree()), **CLOSE)
    same(play.server, average([m.tree() for m in models]), **CLOSE)
    same(play.personal(0), personal[0].tree(), **CLOSE)


def protos(model: TwoPart, x: torch.Tensor, y: torch.Tensor) -> dict[int, torch.Tensor]:
    h = model.features(x).detach()
    return {c: h[y == c].mean(0) for c in y.unique().tolist()}


@of("fedproto", lam=0.5)
def test_fedproto(play: Play) -> None:
    models = local_models(play, play.initial)  # no prototypes yet, so no pull
    play.round()
    a, b = (protos(m, x, y) for m, (x, y) in zip(models, play.xy, strict=True))
    expected = {0: a[0], 1: (a[1] + b[1]) / 2, 2: b[2]}
    assert play.server["known"].tolist() == [1, 1, 1, 0]
    for c, value in expected.items():
        torch.testing.assert_close(play.server["prototypes"][c], value, **CLOSE)
    assert play.server["prototypes"][3].tolist() == [0.0] * 5
    table = play.server["prototypes"]
    for model, (x, y) in zip(models, play.xy, strict=True):

        def loss(m: TwoPart = model, x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            h = m.features(x)
            return F.cross_entropy(m.head(h), y) + 0.5 * F.mse_loss(h, table[y])

        train(list(model.parameters()), loss)
    updates = play.round()
    assert all(set(u.upload) == {"prototypes", "known"} for u in updates), "no weight ever travels"
    for update, model in zip(updates, models, strict=True):
        same(update.keep, model.tree(), **CLOSE)
    assert play.method.global_model(play.server) is None


@of("fedproto")
def test_fedproto_predicts_the_nearest_known_prototype(play: Play) -> None:
    play.round()
    personal, x = play.personal(0), play.xy[1][0]
    h = TwoPart.of(personal).features(x)
    distance = torch.stack([(h - p).norm(dim=1) for p in personal["prototypes"][:3]], 1)
    scores = play.method.logits(play.net, personal, x)
    assert scores.argmax(1).tolist() == distance.argmin(1).tolist()
    assert torch.isneginf(scores[:, 3]).all(), "a class that nobody has shown is never predicted"
    by_head = METHODS["fedproto"](inference="logits").logits(play.net, personal, x)
    torch.testing.assert_close(by_head, TwoPart.of(personal)(x))


@pytest.mark.parametrize("kind", ["on", "off"])
def test_fedrod(kind: str, net: Net, tiny: Samples) -> None:
    play = Play(METHODS["fedrod"](hypernetwork=kind), net, tiny)
    start = play.initial
    expected_uploads, personals = [], []
    for x, y in play.xy:
        share = torch.bincount(y, minlength=4) / len(y)
        model = TwoPart.of(start)
        train(
            list(model.parameters()), lambda m=model, x=x, y=y, s=share: F.cross_entropy(m(x) + s.log(), y)
        )  # fmt: skip
        h, generic = model.features(x).detach(), model(x).detach()
        if kind == "off":
            personal = torch.nn.Parameter(start["personal.weight"].clone())
            train([personal], lambda h=h, g=generic, p=personal, y=y: F.cross_entropy(g + h @ p.T, y))
            expected_uploads.append(model.tree())
            personals.append({**model.tree(), "personal.weight": personal.detach()})
        else:
            first, second = torch.nn.Linear(4, 5), torch.nn.Linear(5, 20)
            with torch.no_grad():
                for layer, name in ((first, "in"), (second, "out")):
                    layer.weight.copy_(start[f"hyper.{name}.weight"])
                    layer.bias.copy_(start[f"hyper.{name}.bias"])

            def head(f: torch.nn.Linear = first, s: torch.nn.Linear = second, p: torch.Tensor = share) -> torch.Tensor:
                return s(torch.relu(f(p))).view(4, 5)

            train(
                [*first.parameters(), *second.parameters()],
                lambda h=h, g=generic, y=y, make=head: F.cross_entropy(g + h @ make().T, y),
            )
            hyper = {f"hyper.in.{n}": p.detach() for n, p in first.named_parameters()}
            hyper |= {f"hyper.out.{n}": p.detach() for n, p in second.named_parameters()}
            expected_uploads.append({**model.tree(), **hyper})
            personals.append({**model.tree(), "personal.weight": head().detach()})
    updates = play.round()
    for update, expected in zip(updates, expected_uploads, strict=True):
        same(update.upload, expected, **CLOSE)
    same({n: play.server[n] for n in expected_uploads[0]}, average(expected_uploads), **CLOSE)
    for k in range(2):
        personal = play.personal(k)
        same(personal, personals[k], **CLOSE)
        x = play.xy[k][0]
        model = TwoPart.of(personal)
        both = model(x) + model.features(x) @ personal["personal.weight"].T
        torch.testing.assert_close(play.method.logits(net, personal, x), both)
    shared = play.method.global_model(play.server)
    assert shared is not None
    torch.testing.assert_close(play.method.logits(net, shared, x), TwoPart.of(play.server)(x))


def test_fedrod_chooses_the_hypernetwork_by_width() -> None:
    from fednh.models import build_net

    narrow, wide = (build_net("mlp", (4,), 3, {"hidden": [d]}) for d in (256, 257))
    rng = torch.Generator().manual_seed(0)
    assert "hyper.in.weight" in METHODS["fedrod"]().init(narrow, rng)
    assert "personal.weight" in METHODS["fedrod"]().init(wide, rng)


CREFF = {"features_per_class": 3, "match_steps": 4, "match_lr": 0.05, "retrain_epochs": 5, "retrain_batch": 4}


@of("creff", **CREFF)
def test_creff(play: Play) -> None:
    start = copy.deepcopy(play.initial)
    models = local_models(play, start)
    head = torch.nn.Linear(5, 4, bias=False)
    gradients = []
    for x, y in play.xy:  # fewer than 64 images of a class: every draw is the whole class
        h = TwoPart.of(start).features(x).detach()
        own = {}
        for c in y.unique().tolist():
            head.weight.data.copy_(start["retrained"])
            loss = F.cross_entropy(head(h[y == c]), y[y == c])
            own[c] = torch.autograd.grad(loss, head.weight)[0]
        gradients.append(own)
    updates = play.round()
    for update, model, own in zip(updates, models, gradients, strict=True):
        assert set(update.upload) == {*model.tree(), "gradient", "owned"}
        same(select(update.upload, "body", "head"), model.tree(), **CLOSE)
        for c in range(4):
            expected = own.get(c, torch.zeros(4, 5))
            torch.testing.assert_close(update.upload["gradient"][c], expected, **CLOSE)
    a, b = gradients
    target = {0: a[0], 1: (a[1] + b[1]) / 2, 2: b[2]}
    features = start["features"].clone()
    for c, wanted in target.items():  # class by class: matching one class does not touch another
        f = features[c].clone().requires_grad_()
        for _ in range(4):
            head.weight.data.copy_(start["retrained"])
            loss = F.cross_entropy(head(f), torch.full((3,), c))
            (g,) = torch.autograd.grad(loss, head.weight, create_graph=True)
            mismatch = sum(1 - F.cosine_similarity(g[row], wanted[row], dim=0) for row in range(4))
            (slope,) = torch.autograd.grad(mismatch, f)
            f = (f - 0.05 * slope).detach().requires_grad_()
        features[c] = f.detach()
    torch.testing.assert_close(play.server["features"], features, **CLOSE)
    assert torch.equal(play.server["features"][3], start["features"][3]), "a class that nobody owns keeps its features"
    same(select(play.server, "body", "head"), average([m.tree() for m in models]), **CLOSE)
    shared = play.method.global_model(play.server)
    assert shared is not None
    same(shared, {**select(play.server, "body"), "head.weight": play.server["retrained"]})
    same(play.personal(0), models[0].tree(), **CLOSE)  # as FedAvg


def test_creff_retrains_by_plain_sgd() -> None:
    method = METHODS["creff"](**CREFF)
    features = torch.randn(4, 3, 5)
    rng = torch.Generator().manual_seed(9)
    head = torch.nn.Linear(5, 4, bias=False)
    head.weight.data = (torch.rand(4, 5, generator=rng) * 2 - 1) / 5**0.5
    optimiser = torch.optim.SGD(head.parameters(), 0.01)
    labels = torch.arange(4).repeat_interleave(3)
    for _ in range(5):
        for batch in torch.randperm(12, generator=rng).split(4):
            optimiser.zero_grad()
            F.cross_entropy(head(features.view(12, 5)[batch]), labels[batch]).backward()
            optimiser.step()
    torch.testing.assert_close(method.retrain(features, 9), head.weight.detach())


def test_creff_draws() -> None:
    """Draws of two: of class 0 (three samples) the two smallest keys, of class 1 (one sample) always the one."""
    method = METHODS["creff"](draw_size=2)
    keys = torch.tensor([[0.1, 0.9, 0.2, 0.5, 0.0], [0.8, 0.1, 0.2, 0.5, 0.0]])
    y, real = torch.tensor([0, 0, 0, 1, 0]), torch.tensor([1.0, 1, 1, 1, 0])  # the last one is padding
    weights = method.draw_weights(keys, y, real, torch.tensor([3.0, 1.0]))
    torch.testing.assert_close(weights, torch.tensor([0.25, 0.25, 0.5, 1.0, 0.0]))
