"""FedCP and GPFL: rounds by torch's own layers, clients missing in some; what their extra networks do, by hand."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fednh.data.batches import Samples
from fednh.methods import METHODS
from fednh.methods.fedcp import discrepancy, routed
from fednh.methods.gpfl import valve
from fednh.models import Net
from fednh.tree import Tree, select, strip_prefix
from tests.helpers.compare import identical, same
from tests.helpers.reference import Play, TwoPart, average, train

CLOSE = {"rtol": 1e-4, "atol": 1e-6}


def linear_norm(tree: Tree) -> tuple[nn.Linear, nn.LayerNorm]:
    linear = nn.Linear(*reversed(tree["weight"].shape))
    norm = nn.LayerNorm(len(tree["gain"]))
    linear.load_state_dict({"weight": tree["weight"], "bias": tree["bias"]})
    norm.load_state_dict({"weight": tree["gain"], "bias": tree["shift"]})
    return linear, norm


def layers_tree(linear: nn.Linear, norm: nn.LayerNorm) -> Tree:
    found = {"weight": linear.weight, "bias": linear.bias, "gain": norm.weight, "shift": norm.bias}
    return {name: value.detach().clone() for name, value in found.items()}


# --- FedCP ----------------------------------------------------------------------------------------------------------


class Separating(nn.Module):
    """A client of FedCP: body and own head, the policy network, the global head as received."""

    def __init__(self, server: Tree, own: Tensor):
        super().__init__()
        self.base = TwoPart.of(server)
        self.base.head.weight.data = own.clone()
        self.linear, self.norm = linear_norm(strip_prefix(server, "policy"))
        self.before = TwoPart.of(server)  # as received: the body for the discrepancy, and the global head
        self.v = own.sum(0) / own.sum(0).norm()

    def forward(self, x: Tensor) -> Tensor:
        h = self.base.features(x)
        pairs = F.relu(self.norm(self.linear(h * self.v))).exp().split(5, dim=1)
        s = pairs[0] / (pairs[0] + pairs[1])
        return h * (1 - s) @ self.before.head.weight.detach().T + h * s @ self.base.head.weight.T

    def loss(self, x: Tensor, y: Tensor, lam: float) -> Tensor:
        h, other = self.base.features(x), self.before.features(x).detach()
        mmd = torch.zeros(())
        for a in (10, 15, 20, 50):
            for sign, one, two in ((1, h, h), (1, other, other), (-2, h, other)):
                for i in range(len(x)):
                    for j in range(len(x)):
                        mmd = mmd + sign * torch.exp(-(one[i] - two[j]).square().sum() / (2 * a)) / len(x) ** 2
        return F.cross_entropy(self(x), y) + lam * mmd

    def moving(self) -> list[nn.Parameter]:
        return [*self.base.parameters(), *self.linear.parameters(), *self.norm.parameters()]


def test_fedcp(net: Net, tiny: Samples) -> None:
    """Client 1 misses the second round; its own head waits for it."""
    play = Play(METHODS["fedcp"](lam=3.0), net, tiny)
    own = [play.initial["head.weight"]] * 2
    last: dict[int, Separating] = {}
    for clients in ((0, 1), (0,), (1,)):
        sent = []
        for k in clients:
            client, (x, y) = Separating(play.server, own[k]), play.xy[k]
            train(client.moving(), lambda c=client, x=x, y=y: c.loss(x, y, 3.0))
            own[k], last[k] = client.base.head.weight.detach().clone(), client
            policy = {f"policy.{n}": v for n, v in layers_tree(client.linear, client.norm).items()}
            head = (own[k] + client.before.head.weight.detach()) / 2
            sent.append({**client.base.body_tree(), **policy, "head.weight": head})
        for k, expected, update in zip(clients, sent, play.round(clients), strict=True):
            same(update.upload, expected, **CLOSE)
            torch.testing.assert_close(update.keep["personal.head.weight"], own[k], **CLOSE)
        same(select(play.server, *sent[0]), average(sent), **CLOSE)
    for k, client in last.items():
        client.v = own[k].sum(0) / own[k].sum(0).norm()  # a personal model's condition is of its head as trained
        torch.testing.assert_close(play.method.logits(net, play.personal(k), tiny.x), client(tiny.x), **CLOSE)


def test_fedcps_global_model_is_a_client_whose_own_head_is_the_global_one(net: Net, tiny: Samples) -> None:
    play = Play(METHODS["fedcp"](), net, tiny)
    play.round()
    model = {**play.server, "personal.head.weight": play.server["head.weight"]}
    h, v = net.features(play.server, tiny.x), torch.randn(5)
    expected = play.method.logits(net, play.method.global_model(play.server) or {}, tiny.x)
    torch.testing.assert_close(routed(net, model, h, v), expected, **CLOSE)


@pytest.mark.parametrize("real", [1, 3])
def test_padding_does_not_change_the_discrepancy(real: int) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(5, 4), torch.randn(5, 4)
    weight = torch.cat([torch.full((real,), 1 / real), torch.zeros(5 - real)])
    found = discrepancy(a, b, weight)
    torch.testing.assert_close(found, discrepancy(a[:real], b[:real], weight[:real]))
    assert float(discrepancy(a, a, weight)) == pytest.approx(0, abs=1e-5)
    assert float(found) > 0


# --- GPFL -----------------------------------------------------------------------------------------------------------


class Guided(nn.Module):
    """A client of GPFL: body and own head, valve and embeddings."""

    def __init__(self, server: Tree, head: Tensor, share: Tensor):
        super().__init__()
        self.base = TwoPart.of({**server, "head.weight": head})
        self.gamma, self.gamma_norm = linear_norm(strip_prefix(server, "valve.gamma"))
        self.beta, self.beta_norm = linear_norm(strip_prefix(server, "valve.beta"))
        self.embedding = nn.Parameter(server["embedding"].clone())
        self.frozen = server["embedding"]
        self.g, self.p = self.frozen.sum(0) / 4, sum(share[c] * self.frozen[c] for c in range(4))

    def turned(self, x: Tensor, condition: Tensor) -> Tensor:
        gamma = self.gamma_norm(F.relu(self.gamma(condition)))
        beta = self.beta_norm(F.relu(self.beta(condition)))
        return F.relu(self.base.features(x) * (gamma + 1) + beta)

    def loss(self, x: Tensor, y: Tensor, lam: float, mu: float) -> Tensor:
        general, personal = self.turned(x, self.g), self.turned(x, self.p)
        angles = F.cosine_similarity(general[:, None], self.embedding[None], dim=2)
        far = torch.stack([(general[i] - self.frozen[label]).norm() for i, label in enumerate(y.tolist())]).mean()
        extra = [m for m in self.parameters() if all(m is not theirs for theirs in self.base.parameters())]
        decay = sum(value.square().sum() for value in extra)
        return F.cross_entropy(self.base.head(personal), y) + F.cross_entropy(angles, y) + lam * far + mu / 2 * decay

    def shared(self) -> Tree:
        gamma = {f"valve.gamma.{n}": v for n, v in layers_tree(self.gamma, self.gamma_norm).items()}
        beta = {f"valve.beta.{n}": v for n, v in layers_tree(self.beta, self.beta_norm).items()}
        return {**self.base.body_tree(), **gamma, **beta, "embedding": self.embedding.detach().clone()}


def test_gpfl(net: Net, tiny: Samples) -> None:
    play = Play(METHODS["gpfl"](lam=0.3, mu=0.2), net, tiny)
    heads, last = [play.initial["head.weight"]] * 2, {}
    shares = [torch.bincount(y, minlength=4) / len(y) for _, y in play.xy]
    for clients in ((0, 1), (0,), (1,)):
        sent = []
        for k in clients:
            client, (x, y) = Guided(play.server, heads[k], shares[k]), play.xy[k]
            train(list(client.parameters()), lambda c=client, x=x, y=y: c.loss(x, y, 0.3, 0.2))
            heads[k], last[k] = client.base.head.weight.detach().clone(), copy.deepcopy(client)
            sent.append(client.shared())
        for k, expected, update in zip(clients, sent, play.round(clients), strict=True):
            same(update.upload, expected, **CLOSE)
            torch.testing.assert_close(update.keep["head.weight"], heads[k], **CLOSE)
        same(select(play.server, "body", "valve", "embedding"), average(sent), **CLOSE)
    for k, client in last.items():
        scores = play.method.logits(net, play.personal(k), tiny.x)
        torch.testing.assert_close(scores, client.base.head(client.turned(tiny.x, client.p)), **CLOSE)


def test_gpfls_global_model_names_the_nearest_embedding(net: Net, tiny: Samples) -> None:
    play = Play(METHODS["gpfl"](), net, tiny)
    play.round()
    model = play.method.global_model(play.server)
    assert model is not None
    assert not select(model, "head")
    f = valve(model, net.features(model, tiny.x), model["embedding"].mean(0))
    for row, scores in zip(f, play.method.logits(net, model, tiny.x), strict=True):
        expected = [float(F.cosine_similarity(row, each, dim=0)) for each in model["embedding"]]
        assert scores.tolist() == pytest.approx(expected, abs=1e-5)


def test_a_newcomer_of_gpfl_is_told_from_others_by_its_class_shares(net: Net, tiny: Samples) -> None:
    play = Play(METHODS["gpfl"](), net, tiny)
    play.round((0,))
    model = play.personal(1)
    identical(select(model, "head"), select(play.initial, "head"))
    expected = (2 * play.server["embedding"][1] + 3 * play.server["embedding"][2]) / 5
    torch.testing.assert_close(model["condition"], expected)
