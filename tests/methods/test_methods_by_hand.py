"""Every method: one round on two tiny clients equals an independent computation; nothing else moves or travels."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fednh.data.batches import ClientData, Samples
from fednh.federated import client, similarity
from fednh.methods import METHODS, Method
from fednh.methods.fedala import FedALA
from fednh.methods.fedpac import mixtures
from fednh.methods.fit import Sgd
from fednh.models import Net, build_net
from fednh.tree import Tree, Uploads, prefix, select
from tests.helpers.compare import identical, same
from tests.helpers.reference import QUICK, SGD, Play, TwoPart, average, train, trained

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


@of("fedbabu", finetune_epochs=2, finetuned="local")
def test_fedbabu_fine_tunes_the_latest_local_model(play: Play) -> None:
    newcomer = trained(TwoPart.of(play.initial), *play.xy[1], epochs=2)
    same(play.personal(1), newcomer.tree(), **CLOSE)  # it has no local model: the one received
    play.round()
    global_ = play.server
    local = TwoPart.of(global_)
    train(list(local.linear.parameters()), lambda: F.cross_entropy(local(play.xy[1][0]), play.xy[1][1]))
    updates = play.round()
    same(updates[1].upload, local.body_tree(), **CLOSE)  # from the global body, not from the one kept
    same(play.personal(1), trained(local, *play.xy[1], epochs=2).tree(), **CLOSE)
    identical(select(play.server, "head"), select(play.initial, "head"))


@pytest.mark.parametrize(
    ("play", "authors"),
    [
        (METHODS["ditto"](lam=0.6), False),
        (METHODS["ditto"](lam=0.6, pull="trained", personal_sgd="plain"), True),
    ],
    indirect=["play"],
    ids=["paper", "authors"],
)
def test_ditto(play: Play, authors: bool) -> None:
    play.round()  # after it the personal and the received model differ
    start, personal = play.server, [TwoPart.of(play.personal(k)) for k in range(2)]
    models = local_models(play, start)
    for v, (x, y), model in zip(personal, play.xy, models, strict=True):
        w = model if authors else TwoPart.of(start)

        def loss(v: TwoPart = v, x: torch.Tensor = x, y: torch.Tensor = y, w: TwoPart = w) -> torch.Tensor:
            pull = sum((a - b.detach()).square().sum() for a, b in zip(v.parameters(), w.parameters(), strict=True))
            return F.cross_entropy(v(x), y) + 0.3 * pull

        train(list(v.parameters()), loss, plain=authors)
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
def test_fedproto_remembers_a_class_without_an_owner_in_the_round(play: Play) -> None:
    """Round 2 has client 0 alone: its classes 0 and 1 are as it says, class 2 stays as client 1 left it."""
    play.round()
    before = play.server["prototypes"]
    own, _ = play.round()
    alone = play.method.aggregate({**play.server, "prototypes": before}, Uploads.of([own.upload]))
    torch.testing.assert_close(alone["prototypes"], torch.cat([own.upload["prototypes"][:2], before[2:]]))
    assert before[2].any()
    assert alone["known"].tolist() == [1, 1, 1, 0]


@pytest.mark.parametrize(("method", "mark"), [("fedproto", "known"), ("creff", "owned")])
def test_a_single_sample_makes_an_owner(method: str, mark: str, net: Net, tiny: Samples) -> None:
    """Three samples of class 0 and one of class 1."""
    play = Play(METHODS[method](**QUICK.get(method, {})), net, tiny)
    data, sgd = ClientData(tiny, np.array([0, 1, 2, 3])), Sgd(epochs=1)
    update = client.update(play.method, net, play.kept[0], play.received(0), data, sgd)
    assert update.upload[mark].tolist() == [1, 1, 0, 0]


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


@pytest.mark.parametrize("sgd", ["train", "plain"])
@pytest.mark.parametrize("kind", ["on", "off"])
def test_fedrod(kind: str, sgd: str, net: Net, tiny: Samples) -> None:
    play = Play(METHODS["fedrod"](hypernetwork=kind, personal_sgd=sgd), net, tiny)
    plain = sgd == "plain"
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
            train([personal], lambda h=h, g=generic, p=personal, y=y: F.cross_entropy(g + h @ p.T, y), plain=plain)
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
                plain=plain,
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
    narrow, wide = (build_net("mlp", (4,), 3, {"hidden": [d]}) for d in (256, 257))
    rng = torch.Generator().manual_seed(0)
    assert "hyper.in.weight" in METHODS["fedrod"]().init(narrow, rng)
    assert "personal.weight" in METHODS["fedrod"]().init(wide, rng)


CREFF = {"features_per_class": 3, "match_steps": 4, "match_lr": 0.05, "retrain_epochs": 5, "retrain_batch": 4}


@of("creff", **CREFF)
def test_creff(play: Play) -> None:
    """Two rounds: only in the second do the re-trained head and the averaged one differ."""
    for _ in range(2):
        start = copy.deepcopy(play.server)
        models = local_models(play, start)
        updates = play.round()
        gradients = [real_gradients(start, x, y) for x, y in play.xy]
        for update, model, own in zip(updates, models, gradients, strict=True):
            assert set(update.upload) == {*model.tree(), "gradient", "owned"}
            same(select(update.upload, "body", "head"), model.tree(), **CLOSE)
            for c in range(4):
                expected = own.get(c, torch.zeros(4, 5))
                torch.testing.assert_close(update.upload["gradient"][c], expected, **CLOSE)
        a, b = gradients
        features = matched(start, {0: a[0], 1: (a[1] + b[1]) / 2, 2: b[2]})
        torch.testing.assert_close(play.server["features"], features, rtol=1e-3, atol=1e-5)
        assert torch.equal(play.server["features"][3], start["features"][3]), "a class of nobody keeps its features"
        same(select(play.server, "body", "head"), average([m.tree() for m in models]), **CLOSE)
        assert not torch.allclose(play.server["retrained"], play.server["head.weight"], atol=1e-3)
        by_the_same_seed = play.method.retrain(play.server["features"], int(play.initial["seed"]))
        assert torch.equal(play.server["retrained"], by_the_same_seed), "the same in every round, whatever the features"
    shared = play.method.global_model(play.server)
    assert shared is not None
    same(shared, {**select(play.server, "body"), "head.weight": play.server["retrained"]})
    same(play.personal(0), models[0].tree(), **CLOSE)  # as FedAvg


def real_gradients(server: Tree, x: torch.Tensor, y: torch.Tensor) -> dict[int, torch.Tensor]:
    """By class, the re-trained head's gradient; fewer than 64 images of a class: every draw is the whole class."""
    head, h = torch.nn.Linear(5, 4, bias=False), TwoPart.of(server).features(x).detach()
    head.weight.data.copy_(server["retrained"])
    own = {}
    for c in y.unique().tolist():
        loss = F.cross_entropy(head(h[y == c]), y[y == c])
        own[c] = torch.autograd.grad(loss, head.weight)[0]
    return own


def matched(server: Tree, target: dict[int, torch.Tensor]) -> torch.Tensor:
    """Four steps of gradient matching, class by class: one does not touch another."""
    features, head = server["features"].clone(), torch.nn.Linear(5, 4, bias=False)
    head.weight.data.copy_(server["retrained"])
    for c, wanted in target.items():
        f = features[c].clone().requires_grad_()
        for _ in range(4):
            loss = F.cross_entropy(head(f), torch.full((3,), c))
            (g,) = torch.autograd.grad(loss, head.weight, create_graph=True)
            mismatch = sum(1 - F.cosine_similarity(g[row], wanted[row], dim=0) for row in range(4))
            (slope,) = torch.autograd.grad(mismatch, f)
            f = (f - 0.05 * slope).detach().requires_grad_()
        features[c] = f.detach()
    return features


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


@of("fedprox", mu=0.6)
def test_fedprox(play: Play) -> None:
    received = TwoPart.of(play.initial)
    models = []
    for x, y in play.xy:
        model = TwoPart.of(play.initial)

        def loss(m: TwoPart = model, x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            tie = sum(
                (a - b.detach()).square().sum() for a, b in zip(m.parameters(), received.parameters(), strict=True)
            )
            return F.cross_entropy(m(x), y) + 0.3 * tie

        train(list(model.parameters()), loss)
        models.append(model)
    for update, model in zip(play.round(), models, strict=True):
        same(update.upload, model.tree(), **CLOSE)
        same(update.keep, model.tree(), **CLOSE)
    same(play.server, average([m.tree() for m in models]), **CLOSE)


def by_name(module: TwoPart, change: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """A Tree's values in the order of the module's parameters."""
    names = {"linear.weight": "body.linear1.weight", "linear.bias": "body.linear1.bias", "head.weight": "head.weight"}
    return [change[names[name]] for name, _ in module.named_parameters()]


def corrected_steps(start: Tree, x: torch.Tensor, y: torch.Tensor, shift: Tree) -> TwoPart:
    """Line 10 of SCAFFOLD's Algorithm 1: the correction is added to every gradient, before clipping and momentum."""
    module = TwoPart.of(start)
    parameters = list(module.parameters())
    optimiser = torch.optim.SGD(parameters, SGD.lr, SGD.momentum, weight_decay=SGD.weight_decay)
    for _ in range(SGD.epochs):
        optimiser.zero_grad()
        F.cross_entropy(module(x), y).backward()
        for p, s in zip(parameters, by_name(module, shift), strict=True):
            assert p.grad is not None
            p.grad += s
        torch.nn.utils.clip_grad_norm_(parameters, SGD.clip)
        optimiser.step()
    return module


@of("scaffold", eta_g=0.5)
def test_scaffold(play: Play) -> None:
    """Two rounds of Algorithm 1, option II, with both clients in each; K eta_l with momentum is summed step by step."""
    far, velocity = 0.0, 0.0
    for _ in range(SGD.epochs):  # one step an epoch
        velocity = SGD.momentum * velocity + 1
        far += SGD.lr * velocity
    zero = {name: torch.zeros_like(value) for name, value in select(play.initial, "body", "head").items()}
    x, c, c_i = select(play.initial, "body", "head"), zero, [zero, zero]
    for _ in range(2):
        shifts = [{n: c[n] - mine[n] for n in c} for mine in c_i]
        y_i = [corrected_steps(x, *xy, shift).tree() for xy, shift in zip(play.xy, shifts, strict=True)]
        c_i = [{n: mine[n] - c[n] + (x[n] - y[n]) / far for n in c} for mine, y in zip(c_i, y_i, strict=True)]
        c, middle = average(c_i), average(y_i)
        x = {n: x[n] + 0.5 * (middle[n] - x[n]) for n in x}
        updates = play.round()
        same(select(play.server, "body", "head"), x, **CLOSE)
        same(select(play.server, "c"), prefix("c", c), **CLOSE)
        for update, y, mine in zip(updates, y_i, c_i, strict=True):
            same(select(update.keep, "body", "head"), y, **CLOSE)
            same(select(update.keep, "c_i"), prefix("c_i", mine), **CLOSE)


def test_scaffolds_c_is_the_mean_of_those_who_took_part(net: Net, tiny: Samples) -> None:
    """Client 0 alone, then client 1 alone, then both; whoever is new is not corrected."""
    play = Play(METHODS["scaffold"](), net, tiny)
    method = play.method
    for members in ([0], [1], [0, 1]):
        down = method.broadcast(play.server)
        updates = {k: client.update(method, net, play.kept[k], down, play.data[k], SGD) for k in members}
        if members == [1]:
            same(select(updates[1].keep, "body", "head"), trained(TwoPart.of(down), *play.xy[1]).tree(), **CLOSE)
        for k, update in updates.items():
            play.kept[k] = update.keep
        play.server = method.aggregate(play.server, Uploads.of([u.upload for u in updates.values()]))
        seen = [select(kept, "c_i") for kept in play.kept if kept["joined"] == 1]
        assert int(play.server["clients"]) == len(seen)
        expected = {f"c{name.removeprefix('c_i')}": value for name, value in average(seen).items()}
        same(select(play.server, "c"), expected, rtol=1e-4, atol=1e-5)


@of("fedlc", tau=0.8)
def test_fedlc(play: Play) -> None:
    models = []
    for x, y in play.xy:
        model, owned = TwoPart.of(play.initial), sorted(y.unique().tolist())
        margin = torch.tensor([0.8 / int((y == c).sum()) ** 0.25 for c in owned])
        place = torch.tensor([owned.index(c) for c in y.tolist()])

        def loss(m: TwoPart = model, x=x, o=owned, margin=margin, place=place) -> torch.Tensor:  # type: ignore[no-untyped-def]
            return F.cross_entropy(m(x)[:, o] - margin, place)  # classes that the client lacks are not there at all

        train(list(model.parameters()), loss)
        models.append(model)
    for update, model in zip(play.round(), models, strict=True):
        same(update.upload, model.tree(), **CLOSE)
    same(play.server, average([m.tree() for m in models]), **CLOSE)


def on_the_simplex(model: TwoPart, layer: torch.nn.Linear, head: torch.Tensor, beta: torch.Tensor, x: torch.Tensor):  # type: ignore[no-untyped-def]
    g = layer(model.features(x))
    return beta * (g / g.norm(dim=1, keepdim=True)) @ head.T


@of("fedetf", beta=3.0, gamma=0.5, turns=2, turn_epochs=1)
def test_fedetf(play: Play) -> None:
    head = play.initial["head.weight"]
    cosine = head @ head.T
    torch.testing.assert_close(cosine, torch.eye(4) * (4 / 3) - 1 / 3, rtol=0, atol=1e-5)  # the simplex frame

    def start(tree: Tree) -> tuple[TwoPart, torch.nn.Linear, torch.nn.Parameter]:
        model, layer = TwoPart.of(tree), torch.nn.Linear(5, 5)
        layer.load_state_dict({"weight": tree["projection.weight"], "bias": tree["projection.bias"]})
        return model, layer, torch.nn.Parameter(tree["beta"].clone())

    def balanced(parts, x: torch.Tensor, y: torch.Tensor) -> None:  # type: ignore[no-untyped-def]
        model, layer, beta = parts
        counts = torch.bincount(y, minlength=4)

        def loss() -> torch.Tensor:
            power = torch.exp(on_the_simplex(model, layer, head, beta, x)) * counts**0.5
            return -(power[torch.arange(len(y)), y] / power.sum(1)).log().mean()

        train([*model.linear.parameters(), *layer.parameters(), beta], loss)

    def tree(parts) -> Tree:  # type: ignore[no-untyped-def]
        model, layer, beta = parts
        return {
            **model.body_tree(),
            "projection.weight": layer.weight.detach().clone(),
            "projection.bias": layer.bias.detach().clone(),
            "beta": beta.detach().clone(),
        }

    expected = []
    for x, y in play.xy:
        parts = start(play.initial)
        balanced(parts, x, y)
        expected.append(tree(parts))
    for update, uploaded in zip(play.round(), expected, strict=True):
        same(update.upload, uploaded, **CLOSE)
        assert update.keep == {}
    same(play.server, {**average(expected), "head.weight": head}, **CLOSE)

    (x, y), parts, own_head = play.xy[0], start(play.server), torch.nn.Parameter(head.clone())
    balanced(parts, x, y)
    model, layer, beta = parts
    for _ in range(2):
        for moving in ([own_head], list(layer.parameters())):
            train(
                moving, lambda: F.cross_entropy(on_the_simplex(model, layer, own_head, beta.detach(), x), y), epochs=1
            )
    personal = play.personal(0)
    same(personal, {**tree(parts), "head.weight": own_head.detach()}, **CLOSE)
    scores = play.method.logits(play.net, personal, x)
    torch.testing.assert_close(scores, on_the_simplex(model, layer, own_head, beta, x), **CLOSE)


class WithGroupNorm(torch.nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.GroupNorm(2, 6), torch.nn.ReLU())
        self.head = torch.nn.Linear(6, num_classes, bias=False)


def test_fedbn(tiny: Samples) -> None:
    """Two rounds by torch.optim on the whole module; only what is not normalisation travels and is averaged."""
    net = build_net(f"{__name__}:WithGroupNorm", (4,), 4)
    play = Play(METHODS["fedbn"](), net, tiny)
    norm = ("body.1.weight", "body.1.bias")
    assert net.norms == norm
    first = play.method.global_model(play.initial)
    assert first is not None
    modules = [WithGroupNorm(4), WithGroupNorm(4)]
    for module in modules:
        module.load_state_dict(first)
    for _ in range(2):
        for module, (x, y) in zip(modules, play.xy, strict=True):
            train(list(module.parameters()), lambda m=module, x=x, y=y: F.cross_entropy(m.head(m.body(x)), y))
        local = [{n: v.clone() for n, v in m.state_dict().items()} for m in modules]
        shared = average([{n: v for n, v in one.items() if n not in norm} for one in local])
        updates = play.round()
        for k, update in enumerate(updates):
            assert update.upload.keys() == shared.keys(), "normalisation never travels"
            same(play.personal(k), local[k], **CLOSE)
        same(select(play.server, "body", "head"), shared, **CLOSE)
        for module in modules:
            module.load_state_dict(shared, strict=False)
    model = play.method.global_model(play.server)
    assert model is not None
    identical({n: model[n] for n in norm}, {n: first[n] for n in norm})  # as initialised


@of("fedprior", ema=0.5)
def test_fedprior_uses_the_average_of_rounds(play: Play, tiny: Samples) -> None:
    """After rounds a, b, c the global model is (a/4 + b/2 + c) / (1/4 + 1/2 + 1); clients go on from c."""
    states = []
    for _ in range(3):
        play.round()
        states.append(select(play.server, "body", "scale"))
    a, b, c = states
    expected = {name: (a[name] / 4 + b[name] / 2 + c[name]) / 1.75 for name in c}
    model = play.method.global_model(play.server)
    assert model is not None
    same(select(model, "body", "scale"), expected, **CLOSE)
    identical({"head.weight": model["head.weight"]}, {"head.weight": play.server["head.weight"]})
    personal = play.personal(1)
    prior = personal.pop("prior")
    identical(personal, model)
    share = torch.bincount(play.xy[1][1], minlength=4) + 0.1
    torch.testing.assert_close(prior, (share / share.sum()).log())
    assert play.round()[0].keep == {}, "the personal model is made of what is received"
    plain = Play(METHODS["fedprior"](ema=0.0), play.net, tiny)
    for _ in range(4):
        plain.round()
    identical(select(play.server, "body", "scale", "head"), plain.server)  # training knows nothing of the average


@of("fedprior", ema=0.0, rho=0.6, scale=3.0)
def test_fedprior(play: Play) -> None:
    """The balanced softmax by hand: e^z times how many samples the client has of the class, over their sum."""
    head, bodies, scales = play.initial["head.weight"], [], []
    counts = [torch.bincount(y, minlength=4).float() for _, y in play.xy]
    means = []
    for (x, y), n in zip(play.xy, counts, strict=True):
        model, s = TwoPart.of(play.initial), torch.nn.Parameter(torch.tensor(3.0))

        def scores(x: torch.Tensor, m: TwoPart = model, s: torch.Tensor = s) -> torch.Tensor:
            h = m.features(x)
            return s * (h / h.norm(dim=1, keepdim=True)) @ head.T

        def loss(x=x, y=y, n=n, scores=scores) -> torch.Tensor:  # type: ignore[no-untyped-def]
            weighed = scores(x).exp() * n
            return -(weighed.gather(1, y[:, None]) / weighed.sum(1, keepdim=True)).log().mean()

        train([*model.linear.parameters(), s], loss)
        h = model.features(x).detach()
        h = h / h.norm(dim=1, keepdim=True)
        means.append(torch.stack([h[y == c].mean(0) if (y == c).any() else torch.zeros(h.shape[1]) for c in range(4)]))
        bodies.append(model.body_tree())
        scales.append({"scale": s.detach()})
    for update, body, s, mu in zip(play.round(), bodies, scales, means, strict=True):
        same(update.upload, {**body, **s, "prototypes": mu}, **CLOSE)
    both = average([{**body, **s} for body, s in zip(bodies, scales, strict=True)])
    same(select(play.server, "body", "scale"), both, **CLOSE)
    moved = 0.6 * head + 0.4 * (means[0] + means[1]) / 2
    same({"head.weight": play.server["head.weight"]}, {"head.weight": moved / moved.norm(dim=1, keepdim=True)}, **CLOSE)
    assert "prior" not in (play.method.global_model(play.server) or {}), "shares stay at the client"
    personal, n, x = play.personal(0), counts[0] + 0.1, play.xy[0][0]
    prior = (n / n.sum()).log()
    plain = {name: value for name, value in personal.items() if name != "prior"}
    identical(plain, play.method.global_model(play.server) or {})
    torch.testing.assert_close(
        play.method.scores(play.net, personal, x), play.method.logits(play.net, plain, x) + prior, **CLOSE
    )
    # How new an input is, is the cosine to the nearest prototype, whatever the client's classes are.
    features = F.normalize(play.net.features(personal, x), dim=1)
    nearest = (features @ F.normalize(personal["head.weight"], dim=1).T).max(1).values
    found = similarity.similarity(play.method, personal, play.method.scores(play.net, personal, x))
    assert found is not None
    torch.testing.assert_close(found, nearest, **CLOSE)


def dbe_loss(  # type: ignore[no-untyped-def]
    model: TwoPart, bias: torch.Tensor, means: list[torch.Tensor], consensus: torch.Tensor | None, x, y
) -> torch.Tensor:
    """kappa = 3, mu = 0.4; without a consensus it is plain cross-entropy. Every call adds a running mean."""
    h = model.features(x)
    means.append(0.6 * means[-1].detach() + 0.4 * h.mean(0))
    if consensus is None:
        return F.cross_entropy(model.head(h), y)
    return F.cross_entropy(model.head(h + bias), y) + 3.0 * F.mse_loss(means[-1], consensus) / 2


@of("feddbe", kappa=3.0, mu=0.4)
def test_feddbe(play: Play) -> None:
    """Three rounds: the first finds the consensus as FedAvg does, the second and third pull to it."""
    biases = [torch.zeros(5), torch.zeros(5)]
    consensus = torch.zeros(5)
    for round_ in (1, 2, 3):
        models, means = [], []
        for k, (x, y) in enumerate(play.xy):
            model, bias, mean = TwoPart.of(play.server), torch.nn.Parameter(biases[k].clone()), [torch.zeros(5)]
            goal = consensus if round_ > 1 else None
            train(
                [*model.parameters(), *([] if goal is None else [bias])],
                lambda m=model, b=bias, z=mean, g=goal, x=x, y=y: dbe_loss(m, b, z, g, x, y),
            )
            assert len(mean) == 1 + SGD.epochs
            models.append(model)
            means.append(mean[-1].detach())
            biases[k] = bias.detach()
        for update, model, mean, bias in zip(play.round(), models, means, biases, strict=True):
            told = mean if round_ == 1 else torch.zeros(5)
            same(update.upload, {**model.tree(), "mean": told}, **CLOSE)
            same(update.keep, {**model.tree(), "prbm": bias}, **CLOSE)
        if round_ == 1:
            consensus = (means[0] + means[1]) / 2
        shared = average([m.tree() for m in models])
        same(play.server, {**shared, "consensus": consensus, "known": torch.tensor(1.0)}, **CLOSE)
    assert all(bias.abs().max() > 1e-3 for bias in biases)
    x = play.xy[0][0]
    personal, model = play.personal(0), models[0]
    same(personal, {**model.tree(), "prbm": biases[0]}, **CLOSE)
    torch.testing.assert_close(
        play.method.logits(play.net, personal, x), model.head(model.features(x) + biases[0]), **CLOSE
    )
    everyones = play.method.global_model(play.server) or {}
    same(everyones, shared, **CLOSE)
    torch.testing.assert_close(play.method.logits(play.net, everyones, x), TwoPart.of(shared)(x), **CLOSE)


NAMES = ("body.linear1.weight", "body.linear1.bias", "head.weight")


def mixture(w: Tree, own: Tree, received: Tree) -> Tree:
    return {n: own[n] + (received[n] - own[n]) * w[n] if n in w else received[n] for n in NAMES}


def pass_by_hand(w: Tree, own: Tree, received: Tree, x, y, eta: float) -> tuple[Tree, float]:  # type: ignore[no-untyped-def]
    """W after one pass in batches of two by the chain rule, grad_W = (G - L) * grad_start; and the mean loss."""
    losses = 0.0
    for at in range(0, len(y), 2):
        module = TwoPart.of(mixture(w, own, received))
        loss = F.cross_entropy(module(x[at : at + 2]), y[at : at + 2])
        loss.backward()  # type: ignore[no-untyped-call]
        parameters = (module.linear.weight, module.linear.bias, module.head.weight)
        slope = {n: p.grad for n, p in zip(NAMES, parameters, strict=True)}
        w = {n: torch.clip(w[n] - eta * slope[n] * (received[n] - own[n]), 0, 1) for n in w}
        losses += float(loss.detach()) * len(y[at : at + 2])
    return w, losses / len(y)


@pytest.mark.parametrize(
    ("layers", "threshold", "fewest", "most"), [(1, 0.1, 11, 11), (2, 1.45e-3, 13, 28), (2, 0.0, 30, 30)]
)
def test_fedala(layers: int, threshold: float, fewest: int, most: int, net: Net, tiny: Samples) -> None:
    """Three rounds on half of the samples: no mixing, W learned until ten passes agree, W learned by one pass."""
    eta = 40.0
    play = Play(METHODS["fedala"](layers=layers, threshold=threshold, share=0.5, eta=eta, batch=2), net, tiny)
    learned = NAMES if layers == 2 else NAMES[2:]
    ws = [{n: torch.ones_like(play.initial[n]) for n in learned} for _ in play.xy]
    own: list[Tree] = [{}, {}]
    passes = []
    for round_ in (1, 2, 3):
        received, models = play.server, []
        for k, (x, y) in enumerate(play.xy):
            start, losses = received, list[float]()
            if round_ > 1:
                keys = play.data[k].random(1)[0].tolist()
                half = sorted(range(len(y)), key=lambda i: keys[i])[: len(y) // 2]
                while True:
                    ws[k], loss = pass_by_hand(ws[k], own[k], received, x[half], y[half], eta)
                    losses.append(loss)
                    agree = len(losses) > 10 and np.std(losses[-10:]) < threshold
                    if round_ > 2 or agree or len(losses) == 30:
                        break
                passes += [len(losses)] * (round_ == 2)
                start = mixture(ws[k], own[k], received)
            models.append(trained(TwoPart.of(start), x, y))
        for k, (update, model) in enumerate(zip(play.round(), models, strict=True)):
            same(update.upload, model.tree(), **CLOSE)
            kept = {**model.tree(), **prefix("mix", ws[k]), "rounds": torch.tensor(float(round_))}
            same(update.keep, kept, **CLOSE)
            own[k] = model.tree()
        same(select(play.server, "body", "head"), average([m.tree() for m in models]), **CLOSE)
    assert fewest <= min(passes) <= max(passes) <= most, passes
    values = torch.cat([w.flatten() for w in ws[0].values()])
    assert ((values > 0.01) & (values < 0.99)).any(), "W has moved"
    assert (values == 1).any(), "W stays between 0 and 1"
    same(play.personal(1), own[1], **CLOSE)


def test_fedala_passes_over_the_samples_only_where_a_client_needs_it(
    net: Net, tiny: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    play, passes = Play(METHODS["fedala"](), net, tiny), []
    one_pass = FedALA.one_pass
    monkeypatch.setattr(FedALA, "one_pass", lambda *args: passes.append(1) or one_pass(*args))
    counts = []
    for _ in range(3):
        passes.clear()
        play.round()
        counts.append(len(passes))
    assert counts == [0, 2 * 11, 2]


@of("fedgela", scale=3.0)
def test_fedgela(play: Play) -> None:
    head, expected = play.initial["head.weight"], []
    torch.testing.assert_close(head @ head.T, torch.eye(4) * (4 / 3) - 1 / 3, rtol=0, atol=1e-5)  # the simplex frame
    phis = [torch.tensor([4 / 6 * 4, 2 / 6 * 4, 0, 0]), torch.tensor([0, 2 / 5 * 4, 3 / 5 * 4, 0])]
    for (x, y), phi in zip(play.xy, phis, strict=True):
        model, layer = TwoPart.of({**play.initial, "head.weight": torch.zeros(4, 5)}), torch.nn.Linear(5, 5)
        layer.load_state_dict({n: play.initial[f"projection.{n}"] for n in ("weight", "bias")})
        one = torch.tensor(3.0)

        def loss(m=model, g=layer, phi=phi, x=x, y=y, one=one) -> torch.Tensor:  # type: ignore[no-untyped-def]
            return F.cross_entropy(on_the_simplex(m, g, phi[:, None] * head, one, x), y)  # the scaled classifier

        train([*model.linear.parameters(), *layer.parameters()], loss)
        projection = {f"projection.{n}": p.detach().clone() for n, p in layer.named_parameters()}
        expected.append({**model.body_tree(), **projection})
    for update, tree in zip(play.round(), expected, strict=True):
        same(update.upload, tree, **CLOSE)
        same(update.keep, tree, **CLOSE)
    same(play.server, {**average(expected), "head.weight": head}, **CLOSE)
    personal, shared = play.personal(1), play.method.global_model(play.server) or {}
    same(personal, {**expected[1], "head.weight": head, "phi": phis[1]}, **CLOSE)
    scores = play.method.logits(play.net, personal, x)
    torch.testing.assert_close(scores, on_the_simplex(model, layer, phi[:, None] * head, one, x), **CLOSE)
    assert "phi" not in shared, "shares stay at the client"
    plain = play.method.logits(play.net, {n: v for n, v in personal.items() if n != "phi"}, x)
    torch.testing.assert_close(plain, on_the_simplex(model, layer, head, one, x), **CLOSE)


def spread(h: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, float]:
    """FedPAC's h and V, class by class, with the whole matrix of second moments."""
    mean, v = torch.zeros(4, 5), 0.0
    for c in y.unique().tolist():
        own, p = h[y == c], float((y == c).float().mean())
        mean[c] = p * own.mean(0)
        v += p * float(torch.trace(own.T @ own / len(own))) - p**2 * float(own.mean(0) @ own.mean(0))
    return mean, v / len(y)


def shares_of_two(v: list[float], h: list[torch.Tensor], me: int) -> tuple[float, float]:
    """The quadratic program of two clients by trying a million weights."""
    a = torch.linspace(0, 1, 1_000_001, dtype=torch.float64)
    other = float((h[0].double() - h[1].double()).square().sum())  # only what is not one's own is biased
    value = a**2 * v[0] + (1 - a) ** 2 * v[1] + other * ((1 - a) if me == 0 else a) ** 2
    first = float(a[value.argmin()])
    return first, 1 - first


@of("fedpac", lam=0.7, head_epochs=2)
def test_fedpac(play: Play) -> None:
    """Two rounds: only in the second do clients have heads of their own, and centroids to be pulled to."""
    body, heads = select(play.initial, "body"), [play.initial["head.weight"]] * 2
    centroids: dict[int, torch.Tensor] = {}
    for _ in range(2):
        models, statistics, features = [], [], []
        for (x, y), head in zip(play.xy, heads, strict=True):
            model = TwoPart.of({**body, "head.weight": head})
            statistics.append(spread(model.features(x).detach(), y))
            train([model.head.weight], lambda m=model, x=x, y=y: F.cross_entropy(m(x), y), epochs=2)

            def loss(m: TwoPart = model, x=x, y=y, known=centroids) -> torch.Tensor:  # type: ignore[no-untyped-def]
                h = m.features(x)
                target = torch.stack([known.get(c, own) for c, own in zip(y.tolist(), h.detach(), strict=True)])
                return F.cross_entropy(m.head(h), y) + 0.7 * F.mse_loss(h, target)

            train(list(model.linear.parameters()), loss)
            models.append(model)
            features.append(model.features(x).detach())
        updates = play.round()
        for update, model, (mean, v) in zip(updates, models, statistics, strict=True):
            same(select(update.upload, "body", "head"), model.tree(), **CLOSE)
            same(update.keep, model.tree(), **CLOSE)
            torch.testing.assert_close(update.upload["statistics.mean"], mean, **CLOSE)
            assert float(update.upload["statistics.variance"]) == pytest.approx(v, rel=1e-4)
        for update, own, (_, y) in zip(updates, features, play.xy, strict=True):  # by sums of samples: sizes count
            sums = torch.stack([F.pad(own[y == c].sum(0), (0, 1), value=float((y == c).sum())) for c in range(4)])
            torch.testing.assert_close(update.upload["sums"], sums, **CLOSE)
        means, variances = [mean for mean, _ in statistics], [v for _, v in statistics]
        alpha = [shares_of_two(variances, means, k) for k in range(2)]
        assert all(0.01 < a < 0.99 for a, _ in alpha), "no head is left out"
        local = [model.head.weight.detach() for model in models]
        heads = [a * local[0] + b * local[1] for a, b in alpha]
        for k in range(2):
            same(play.records[k], {"head.weight": heads[k]}, rtol=1e-4, atol=1e-5)
        y, h = torch.cat([y for _, y in play.xy]), torch.cat(features)
        centroids = {c: h[y == c].mean(0) for c in y.unique().tolist()}
        for c in range(4):
            torch.testing.assert_close(play.server["centroids"][c], centroids.get(c, torch.zeros(5)), **CLOSE)
        assert play.server["known"].tolist() == [1, 1, 1, 0]
        body = average([m.body_tree() for m in models])
        both = {**body, "head.weight": (local[0] + local[1]) / 2}
        same(play.method.global_model(play.server) or {}, both, **CLOSE)
    assert not torch.allclose(heads[0], heads[1], atol=1e-3)
    same(play.personal(1), models[1].tree(), **CLOSE)  # the latest local model


def uploaded_sums(*rows: tuple[float, float, float]) -> Tree:
    """What a client of FedPAC uploads; a row is a class: the sum of two features, and the number of samples."""
    return {"sums": torch.tensor(rows), "statistics.mean": torch.zeros(2, 2), "statistics.variance": torch.zeros(())}


def test_fedpacs_centroids_count_samples_and_stay_where_nobody_has_the_class() -> None:
    server = {"centroids": torch.tensor([[9.0, 9.0], [5.0, 7.0]]), "known": torch.tensor([0.0, 1.0])}
    uploads = [uploaded_sums((1, 2, 1), (0, 0, 0)), uploaded_sums((6, 12, 3), (0, 0, 0))]
    after = METHODS["fedpac"]().aggregate(server, Uploads.of(uploads))
    assert after["centroids"].tolist() == [[7 / 4, 14 / 4], [5, 7]]
    assert after["known"].tolist() == [1, 1]


def test_fedpac_finds_what_cannot_be_true() -> None:
    method, upload = METHODS["fedpac"](), uploaded_sums((1, 2, 1), (0, 0, 0))
    assert method.upload.problem(upload) is None
    assert "fewer than 0" in str(method.upload.problem(uploaded_sums((1, 2, 1), (0, 0, -1))))
    assert "negative" in str(method.upload.problem({**upload, "statistics.variance": torch.tensor(-0.5)}))


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
@pytest.mark.parametrize("clients", [1, 2, 7, 30])
def test_fedpacs_mixtures_are_optimal(clients: int, scale: float) -> None:
    """A convex function on the simplex is smallest where no vertex lies downhill: no slope is below their mean."""
    rng = torch.Generator().manual_seed(clients)
    v = torch.rand(clients, generator=rng) * scale**2
    h = torch.randn(clients, 3, 4, generator=rng) * scale * 0.3
    found = mixtures(v, h)
    assert (found >= 0).all()
    torch.testing.assert_close(found.sum(1), torch.ones(clients, dtype=torch.float64))
    several = 0
    for i, alpha in enumerate(found):
        gap = (h[i] - h).flatten(1).double()
        slope = torch.diag(v.double()) @ alpha + gap @ (gap.T @ alpha)
        assert (slope >= alpha @ slope * (1 - 1e-6)).all(), i
        several += int((alpha > 0.01).sum() > 1)
    assert several == (clients if clients > 1 else 0)


def test_fedpac_takes_its_own_head_where_nothing_is_better() -> None:
    v, h = torch.tensor([0.0, 1.0, -4.0]), torch.zeros(3, 2, 2)  # a hostile client may send a negative variance
    h[1] = 50.0
    found = mixtures(v, h)
    assert found[0].tolist() == [1, 0, 0]
    assert found[2].tolist() == [0, 0, 1]
    assert found[1, 1] > 0.999


@of("lgfedavg")
def test_lgfedavg(play: Play) -> None:
    """Heads are averaged; each client goes on from its own body and the average."""
    models = local_models(play, play.initial)
    updates = play.round()
    for update, model in zip(updates, models, strict=True):
        same(update.upload, select(model.tree(), "head"), **CLOSE)
        same(update.keep, model.tree(), **CLOSE)
    mean = average([select(m.tree(), "head") for m in models])
    same(select(play.server, "head"), mean, **CLOSE)
    identical(select(play.server, "body"), select(play.initial, "body"))
    again = [trained(TwoPart.of({**m.body_tree(), **mean}), x, y) for m, (x, y) in zip(models, play.xy, strict=True)]
    for update, model in zip(play.round(), again, strict=True):
        same(update.keep, model.tree(), **CLOSE)
    same(play.personal(0), {**again[0].tree()}, **CLOSE)
    assert play.method.global_model(play.server) is None


class Prototypes(torch.nn.Module):
    """FedTGP's trainable prototypes, by PyTorch's own layers."""

    def __init__(self, server: Tree):
        super().__init__()
        own = {name.removeprefix("server."): value for name, value in server.items() if name.startswith("server.")}
        self.start = torch.nn.Parameter(own["start"].clone())
        dim = self.start.shape[1]
        self.hidden, self.out = torch.nn.Linear(dim, dim), torch.nn.Linear(dim, dim)
        self.load_state_dict(own)

    def forward(self) -> torch.Tensor:
        return self.out(F.relu(self.hidden(self.start)))


@pytest.mark.parametrize("margin", ["largest", "nearest"])
def test_fedtgp(margin: str, net: Net, tiny: Samples) -> None:
    """The server's steps by torch.optim and a loop over means and classes; then the pull, with class 3 of nobody."""
    play = Play(METHODS["fedtgp"](lam=0.5, margin=margin, server_steps=7, server_lr=0.1), net, tiny)
    models = local_models(play, play.initial)  # no prototypes yet, so no pull
    server, updates = Prototypes(play.initial), play.round()
    assert all(set(u.upload) == {"means", "owned"} for u in updates), "no weight ever travels"
    a, b = (protos(m, x, y) for m, (x, y) in zip(models, play.xy, strict=True))  # classes 0 and 1; 1 and 2
    means = {0: a[0], 1: (a[1] + b[1]) / 2, 2: b[2]}
    gaps = {(i, j): float((means[i] - means[j]).norm()) for i in means for j in means if i != j}
    nearest = [min(gaps[i, j] for j in means if j != i) for i in means]
    delta = max(nearest if margin == "nearest" else gaps.values())
    optimiser = torch.optim.SGD(server.parameters(), 0.1)
    for _ in range(7):
        centres, losses = server(), []
        for label, m in [(0, a[0]), (1, a[1]), (1, b[1]), (2, b[2])]:
            far = [(m - centres[c]).norm() + delta * (c == label) for c in range(4)]
            losses.append(torch.log(sum(torch.exp(-d) for d in far)) + far[label])  # type: ignore[arg-type]
        optimiser.zero_grad()
        (sum(losses) / 4).backward()  # type: ignore[union-attr]
        optimiser.step()
    table = server().detach()
    torch.testing.assert_close(play.server["prototypes"], table, rtol=1e-3, atol=1e-5)
    assert play.server["known"].tolist() == [1, 1, 1, 1]
    for model, (x, y) in zip(models, play.xy, strict=True):

        def loss(m: TwoPart = model, x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            h = m.features(x)
            return F.cross_entropy(m.head(h), y) + 0.5 * F.mse_loss(h, table[y])

        train(list(model.parameters()), loss)
    for update, model in zip(play.round(), models, strict=True):
        same(update.keep, model.tree(), rtol=1e-3, atol=1e-5)
    personal, x = play.personal(0), play.xy[1][0]
    h = TwoPart.of(personal).features(x)
    expected = -(h[:, None] - play.server["prototypes"]).norm(dim=2)
    torch.testing.assert_close(play.method.logits(net, personal, x), expected, rtol=1e-3, atol=1e-4)
    assert play.method.global_model(play.server) is None


def test_fedtgp_margin_is_at_most_tau_and_needs_two_classes(net: Net) -> None:
    """Class means 3 and 4 apart along the axes, 5 diagonally; of one class there is no distance."""
    means = torch.tensor([[[0.0, 0.0], [3.0, 0.0], [0.0, 4.0]]])
    owned, one = torch.tensor([[True, True, True]]), torch.tensor([[True, False, False]])
    make = METHODS["fedtgp"]
    assert float(make().gap(means, owned)) == pytest.approx(5.0)  # type: ignore[attr-defined]
    assert float(make(margin="nearest").gap(means, owned)) == pytest.approx(4.0)  # type: ignore[attr-defined,call-arg]
    assert float(make(tau=2.0).gap(means, owned)) == pytest.approx(2.0)  # type: ignore[attr-defined,call-arg]
    assert float(make().gap(means, one)) == 0.0  # type: ignore[attr-defined]
