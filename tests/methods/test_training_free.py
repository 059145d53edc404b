"""Methods that train nothing: heads by hand, the same for every division and schedule, and how they are run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fednh
from fednh.config import load
from fednh.data.batches import ClientData, samples_of
from fednh.federated import client
from fednh.methods import METHODS, Method
from fednh.methods.afl import AFL
from fednh.methods.fedcgs import FedCGS
from fednh.methods.fedcof import FedCOF
from fednh.methods.fedncm import FedNCM
from fednh.methods.sums import not_gram
from fednh.models import build_net
from fednh.tree import Tree, Uploads
from tests.helpers.compare import identical, same
from tests.helpers.reference import SGD
from tests.helpers.tiny import CLIENTS, tiny_dataset

FREE = [name for name, kind in METHODS.items() if kind.training_free]
NET = build_net("linear", (4,), 4)
TINY = samples_of(tiny_dataset(), "train")
X, Y = TINY.x.double().numpy(), TINY.y.numpy()

every_method = pytest.mark.parametrize("name", FREE)


def play(method: Method, rounds: Sequence[Sequence[int]], parts: Sequence[np.ndarray] = tuple(CLIENTS)) -> Tree:
    """The server after rounds in which these clients take part."""
    server = method.init(NET, torch.Generator().manual_seed(5))
    kept = [method.enroll(server) for _ in parts]
    for picked in rounds:
        uploads = []
        for k in picked:
            data = ClientData(TINY, np.asarray(parts[k]), client=k)
            result = client.update(method, NET, kept[k], method.broadcast(server), data, SGD)
            assert (result.samples, result.loss_sum) == (0, 0.0)
            kept[k] = result.keep
            uploads.append(result.upload or {})
        server = method.aggregate(server, Uploads.of(uploads))
    return server


def head(server: Tree) -> np.ndarray:
    return server["head.weight"].double().numpy()


def test_fedncm_by_hand() -> None:
    """The directions of class sums of unit features; nobody has the last class, whose row stays random and of unit
    length."""
    server = play(FedNCM(), [[0, 1]])
    h = X / np.linalg.norm(X, axis=1, keepdims=True)
    sums = np.stack([h[c == Y].sum(0) for c in range(3)])
    np.testing.assert_allclose(head(server)[:3], sums / np.linalg.norm(sums, axis=1, keepdims=True), atol=1e-6)
    assert np.linalg.norm(head(server)[3]) == pytest.approx(1, abs=1e-6)
    logits = METHODS["fedncm"]().logits(NET, server, TINY.x)
    np.testing.assert_allclose(logits.numpy(), 20 * h @ head(server).T, atol=1e-4)
    assert FedNCM().problem(server) is None


def test_only_clients_that_took_part_count() -> None:
    """After client 0 alone, which has classes 0 and 1, these two have means, of its samples."""
    server, initial = play(FedNCM(), [[0]]), play(FedNCM(), [])
    h = X[CLIENTS[0]] / np.linalg.norm(X[CLIENTS[0]], axis=1, keepdims=True)
    for c in (0, 1):
        total = h[Y[CLIENTS[0]] == c].sum(0)
        np.testing.assert_allclose(head(server)[c], total / np.linalg.norm(total), atol=1e-6)
    identical({"rows": server["head.weight"][2:]}, {"rows": initial["head.weight"][2:]})


@pytest.mark.parametrize("gamma", [0.1, 10.0])
def test_afl_is_the_central_ridge_solution(gamma: float) -> None:
    """argmin ||X W' - Y||^2 + gamma ||W||^2, by NumPy's least squares on the extended system."""
    one_hot = np.eye(4)[Y]
    extended = np.concatenate([X, gamma**0.5 * np.eye(4)]), np.concatenate([one_hot, np.zeros((4, 4))])
    expected = np.linalg.lstsq(*extended, rcond=None)[0].T
    server = play(AFL(gamma=gamma), [[0, 1]])
    np.testing.assert_allclose(head(server), expected, atol=1e-6)
    np.testing.assert_allclose(AFL().logits(NET, server, TINY.x).numpy(), 20 * X @ expected.T, atol=1e-4)
    rows = head(play(AFL(gamma=gamma, unit_rows=True), [[0, 1]]))[:3]
    np.testing.assert_allclose(rows, expected[:3] / np.linalg.norm(expected[:3], axis=1, keepdims=True), atol=1e-6)


def test_fedcof_by_hand() -> None:
    """Class 1 is at both clients, so its means spread by one direction; classes 0 and 2 have gamma I alone."""
    gamma, counts = 0.5, np.array([4, 4, 3, 0])
    means = np.stack([X[c == Y].mean(0) for c in range(3)])
    by_client = [X[part][Y[part] == 1] for part in CLIENTS]
    apart = [len(rows) ** 0.5 * (rows.mean(0) - means[1]) for rows in by_client]
    spread = sum(np.outer(row, row) for row in apart)  # by K_1 - 1 = 1
    gram = 3 * spread + (3 + 3 + 2) * gamma * np.eye(4) + 11 * np.outer(X.mean(0), X.mean(0))
    weight = np.stack([np.linalg.solve(gram, counts[c] * means[c]) for c in range(3)])
    expected = weight / np.linalg.norm(weight, axis=1, keepdims=True)
    server = play(FedCOF(gamma=gamma), [[0, 1]])
    np.testing.assert_allclose(head(server)[:3], expected, atol=1e-6)
    assert not server["head.weight"][3].any()
    unit = X / np.linalg.norm(X, axis=1, keepdims=True)
    np.testing.assert_allclose(FedCOF().logits(NET, server, TINY.x).numpy()[:, :3], 20 * unit @ expected.T, atol=1e-4)


def test_fedcof_with_one_covariance_by_hand() -> None:
    """The scatter of the one class with two owners, by one degree of freedom, stands for all eight."""
    means = X[Y == 1].mean(0)
    apart = [(Y[part] == 1).sum() ** 0.5 * (X[part][Y[part] == 1].mean(0) - means) for part in CLIENTS]
    gram = 8 * (sum(np.outer(row, row) for row in apart) + np.eye(4)) + 11 * np.outer(X.mean(0), X.mean(0))
    weight = np.linalg.solve(gram, X[Y == 2].sum(0))
    server = play(FedCOF(covariance="shared"), [[0], [1]])
    np.testing.assert_allclose(head(server)[2], weight / np.linalg.norm(weight), atol=1e-6)


def test_fedcof_recovers_the_covariance_from_means_alone() -> None:
    """Of 400 clients with five samples each, the estimate is that of the samples, to a few percent."""
    rng = np.random.default_rng(0)
    true = np.array([[2.0, 0.5], [0.5, 1.0]])
    x = rng.multivariate_normal([3, -1], true, 2000)
    sums = torch.from_numpy(x.reshape(400, 5, 2).sum(1))
    total = {
        "sums": sums.sum(0, keepdim=True),
        "counts": torch.tensor([2000.0], dtype=torch.float64),
        "owners": torch.tensor([400.0], dtype=torch.float64),
        "scatter": (sums.T @ sums / 5)[None],
    }
    mean = x.mean(0)
    estimate = (FedCOF(gamma=1e-9).gram(total).numpy() - 2000 * np.outer(mean, mean)) / 1999
    np.testing.assert_allclose(estimate, true, atol=0.25)


@pytest.mark.parametrize("covariance", ["total", "within"])
def test_fedcgs_by_hand(covariance: str) -> None:
    server = play(FedCGS(covariance=covariance, gamma=0.1), [[0, 1]])
    means = np.stack([X[c == Y].mean(0) for c in range(3)])
    around, free = (X - X.mean(0), 10) if covariance == "total" else (X - means[Y], 8)
    sigma = around.T @ around / free
    weight = np.linalg.solve(sigma + 0.1 * np.trace(sigma) / 4 * np.eye(4), means.T).T
    share = np.log((np.array([4, 4, 3]) + 0.1) / 11.4)
    np.testing.assert_allclose(head(server)[:3], weight, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(server["head.bias"][:3], share - (weight * means).sum(1) / 2, rtol=1e-5)
    assert server["head.bias"][3] == pytest.approx(np.log(0.1 / 11.4))


def test_a_personal_model_of_fedcgs_has_the_clients_own_shares() -> None:
    method = FedCGS(gamma=0.1)
    server, data = play(method, [[0, 1]]), ClientData(TINY, CLIENTS[1])
    model = method.personal_model(NET, {}, method.broadcast(server), data, lambda *_, **__: {})
    own = np.log((np.array([0, 2, 3, 0]) + 0.1) / 5.4)
    shared = np.log((np.array([4, 4, 3, 0]) + 0.1) / 11.4)
    differ = method.scores(NET, model, TINY.x) - method.scores(NET, method.global_model(server) or {}, TINY.x)
    np.testing.assert_allclose(differ.numpy(), np.tile(own - shared, (11, 1)), atol=1e-4)


def test_the_personalised_variant_of_fedcgs_pulls_features_to_the_global_means() -> None:
    """With a body, training brings a client's features nearer to the means the more, the larger lambda is."""
    net = build_net("mlp", (4,), 4, {"hidden": [5]})
    far = {}
    for lam in (0.0, 50.0):
        method = FedCGS(personal_epochs=20, lam=lam)
        server = method.init(net, torch.Generator().manual_seed(5))
        data = [ClientData(TINY, part, client=k) for k, part in enumerate(CLIENTS)]
        uploads = [client.update(method, net, method.enroll(server), server, each, SGD).upload or {} for each in data]
        server = method.aggregate(server, Uploads.of(uploads))
        model = client.personal_model(method, net, {}, method.broadcast(server), data[0], SGD)
        x, y, _ = next(data[0].batches())
        far[lam] = float((net.features(model, x) - server["means"][y]).square().mean())
    assert far[50.0] < far[0.0]


@given(
    owners=st.lists(st.integers(0, 2), min_size=11, max_size=11),
    order=st.permutations([0, 1, 2]),
    cut=st.integers(0, 3),
)
@settings(max_examples=25, deadline=None)
@pytest.mark.parametrize("name", ["fedncm", "afl", "fedcgs"])
def test_the_same_head_for_every_division_and_schedule(
    name: str, owners: list[int], order: list[int], cut: int
) -> None:
    """Of three clients in one or more rounds, some of which take part again. Sums are of float64, so they agree to
    1e-12; heads are rounded to float32, to one part in 10^6."""
    parts = [np.flatnonzero(np.array(owners) == k) for k in range(3)]
    there = [k for k in order if len(parts[k])]
    rounds = [picked for picked in (there[:cut], there[cut:], there) if picked]
    central, divided = play(METHODS[name](), [[0]], [np.arange(11)]), play(METHODS[name](), rounds, parts)
    sums = METHODS[name]().upload.summed
    exact = 1e-12 if name != "fedncm" else 1e-6  # fedncm sends float32
    same({n: divided[n] for n in sums}, {n: central[n] for n in sums}, rtol=exact, atol=exact)
    same(divided, central, rtol=1e-6, atol=1e-6)


@every_method
def test_a_client_sends_its_sums_once(name: str) -> None:
    """All in one round, one after the other, or again and again: the server has the same sums."""
    method = METHODS[name]()
    together = play(method, [[0, 1]])
    for rounds in ([[0], [1]], [[1], [0, 1], [0], [0, 1]]):
        same(play(method, rounds), together, rtol=1e-6, atol=1e-6)
    kept = {"sent": torch.ones(())}
    again = client.update(method, NET, kept, method.broadcast(together), ClientData(TINY, CLIENTS[0]), SGD)
    assert all(not value.any() for value in (again.upload or {}).values())


@every_method
def test_sums_stay_at_the_server_and_are_told_to_tell_counts(name: str) -> None:
    method = METHODS[name]()
    server = play(method, [])
    assert not set(method.broadcast(server)) & {"sums", "counts", "gram", "scatter", "owners"}
    assert method.upload.tells_counts
    assert all(server[each].dtype == torch.float64 for each in method.upload.summed)


@pytest.mark.parametrize(
    ("gram", "words"),
    [
        (torch.eye(2), None),
        (torch.zeros(2, 2), None),
        (torch.tensor([[1.0, 2.0], [2.0, 1.0]]), "has the eigenvalue -1"),
        (torch.tensor([[1.0, 0.5], [0.0, 1.0]]), "is not symmetric"),
    ],
)
def test_what_is_no_gram_matrix_is_refused(gram: Tensor, words: str | None) -> None:
    problem = not_gram({"gram": gram})
    assert problem is None if words is None else words in str(problem)


# --- how they are run -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (1, 1.0)),
        ({"rounds": 3}, (3, 1.0)),
        ({"participation.rate": 0.5}, (1, 0.5)),
        ({"rounds": 3, "participation.rate": 0.5}, (3, 0.5)),
    ],
)
def test_one_round_with_every_client_unless_set(given: dict[str, float], expected: tuple[int, float]) -> None:
    config = load("digits", {"method.name": "afl", **given})
    assert (config.rounds, config.participation.rate) == expected
    other = load("digits", {"method.name": "fednh", **given})
    assert (other.rounds, other.participation.rate) == (given.get("rounds", 40), given.get("participation.rate", 0.5))


def test_a_file_that_sets_rounds_is_followed(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('rounds = 4\n[method]\nname = "fedncm"\n')
    config = load(str(tmp_path / "c.toml"), {})
    assert (config.rounds, config.participation.rate) == (4, 1.0)


@every_method
def test_a_run_reports_no_loss_and_no_speed_of_training(name: str, tmp_path: Path) -> None:
    """Also on several rounds with a part of the clients, where the server ends as after one round with all."""
    few = {"partition.clients": 4, "model.name": "linear", "model.args": {}}
    once = fednh.run("digits", method=name, out=tmp_path / "once", **few)
    assert once.metrics[0]["train_loss"] is None
    assert (once.summary["samples"], once.summary["samples_per_second"]) == (0, None)
    often = fednh.run("digits", method=name, out=tmp_path / "often", rounds=12, participation=0.5, **few)
    assert often.summary["gm"] == once.summary["gm"]
    assert once.summary["gm"] > 85
