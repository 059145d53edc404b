"""pFedFDA: two rounds by other means (density functions, loops over samples); its classifier; hostile covariances."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import MultivariateNormal

from fednh.data.batches import ClientData, Samples
from fednh.methods import METHODS
from fednh.methods.pfedfda import PFedFDA, classifier, halves, raised
from fednh.models import Net
from fednh.tree import Tree, Uploads, select
from tests.helpers.compare import same
from tests.helpers.reference import Play, TwoPart, average, train

CLOSE = {"rtol": 1e-3, "atol": 1e-5}
STEPS = [0.0, 0.25, 0.5, 0.75, 1.0]


def posterior(h: Tensor, means: Tensor, covariance: Tensor, share: Tensor) -> Tensor:
    """log p(c | h) by Bayes' rule, from the Gaussian density function; in float64."""
    share = (share + 1e-4) / (share + 1e-4).sum()
    covariance = 0.9999 * covariance.double() + 1e-4 * covariance.double().trace() / len(covariance) * torch.eye(5)
    joint = [MultivariateNormal(mu.double(), covariance).log_prob(h.double()) + p.log() for mu, p in zip(means, share)]  # noqa: B905
    return torch.stack(joint, 1).log_softmax(1)


def estimates(h: Tensor, y: Tensor, means: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    means = means.clone()
    for c in y.unique().tolist():
        means[c] = h[y == c].mean(0)
    scatter = sum(torch.outer(a - means[c], a - means[c]) for a, c in zip(h, y.tolist(), strict=True))
    return means, scatter / (len(y) - 1) + ridge * torch.eye(5)  # type: ignore[operator]


def adapted(
    h: Tensor, y: Tensor, data: ClientData, server: Tree, single: bool, ridge: float
) -> tuple[Tree, list[float]]:
    means, covariance = server["means"], server["covariance"]
    share, keys = torch.bincount(y, minlength=4) / len(y), data.random(1)[0].tolist()
    groups: tuple[list[int], list[int]] = ([], [])
    for c in y.unique().tolist():
        mine = sorted((i for i in range(len(y)) if y[i] == c), key=lambda i: keys[i])
        groups[0].extend(mine[::2])
        groups[1].extend(mine[1::2])
    best, beta = float("inf"), [0.0, 0.0]
    for s in STEPS:
        for b in [s] if single else STEPS:
            loss = 0.0
            for train_on, test_on in (groups, groups[::-1]):
                m, v = estimates(h[train_on], y[train_on], means, ridge)
                m, v = b * m + (1 - b) * means, s * v + (1 - s) * covariance
                loss += float(F.nll_loss(posterior(h[test_on], m, v, share), y[test_on]))
            if loss < best - 1e-9:
                best, beta = loss, [b, s]
    m, v = estimates(h, y, means, ridge)
    b, s = beta
    return {"means": b * m + (1 - b) * means, "covariance": s * v + (1 - s) * covariance}, beta


@pytest.mark.parametrize(("single", "ridge"), [(False, 0.05), (True, 0.1)])
def test_two_rounds(single: bool, ridge: float, net: Net, tiny: Samples) -> None:
    play = Play(PFedFDA(grid=4, single_beta=single, ridge=ridge), net, tiny)
    assert torch.equal(play.initial["covariance"], torch.eye(5))
    chosen = []
    for _ in range(2):
        server, expected = play.server, []
        for data, (x, y) in zip(play.data, play.xy, strict=True):
            share, model = (
                torch.bincount(y, minlength=4) / len(y),
                TwoPart.of({**server, "head.weight": server["means"]}),
            )

            def loss(m: TwoPart = model, x=x, y=y, share=share, server=server) -> Tensor:  # type: ignore[no-untyped-def]
                scores = posterior(m.features(x), server["means"], server["covariance"], share)
                return F.nll_loss(scores, y).float()

            train(list(model.linear.parameters()), loss)
            gaussians, beta = adapted(model.features(x).detach(), y, data, server, single, ridge)
            expected.append({**model.body_tree(), **gaussians})
            chosen.append(tuple(beta))
        for update, uploaded in zip(play.round(), expected, strict=True):
            assert update.keep == {}
            same(update.upload, uploaded, **CLOSE)
        same(play.server, average(expected), **CLOSE)
    assert len(set(chosen)) > 1, chosen  # so that the choice matters

    x, y = play.xy[1]
    h, share = (
        TwoPart.of({**play.server, "head.weight": play.server["means"]}).features(x).detach(),
        torch.bincount(y, minlength=4) / len(y),
    )
    gaussians, _ = adapted(h, y, play.data[1], play.server, single, ridge)
    personal = play.personal(1)
    same(select(personal, "body"), select(play.server, "body"))  # the averaged one
    found = play.method.logits(net, personal, x).log_softmax(1)
    torch.testing.assert_close(found, posterior(h, **gaussians, share=share).float(), rtol=1e-3, atol=1e-4)

    shared = play.method.global_model(play.server)
    assert shared is not None
    found = play.method.logits(net, shared, x).log_softmax(1)
    wanted = posterior(h, play.server["means"], play.server["covariance"], torch.full((4,), 0.25))
    torch.testing.assert_close(found, wanted.float(), rtol=1e-3, atol=1e-4)


def test_the_classifier_of_two_classes_by_hand() -> None:
    """On one axis with variance 2, means 0 and 4: the border lies in the middle, nearer to the rarer class."""
    gaussians = {"means": torch.tensor([[0.0], [4.0]]), "covariance": torch.tensor([[2.0]])}
    for share, border in (
        (torch.tensor([0.5, 0.5]), 2.0),
        (torch.tensor([0.8, 0.2]), 2 + torch.log(torch.tensor(4.0)) / 2),
    ):
        head = classifier(gaussians, share)
        at = torch.tensor([[float(border)]])
        scores = F.linear(at, head["head.weight"], head["head.bias"])[0]
        torch.testing.assert_close(scores[0], scores[1], rtol=0, atol=2e-3)  # shares are smoothed by 1e-4


def test_halves_have_every_other_sample_of_each_class() -> None:
    y, real = torch.tensor([0, 1, 0, 0, 1, 0]), torch.tensor([1.0, 1, 1, 1, 1, 0])  # the last one is padding
    keys = torch.tensor([0.9, 0.2, 0.1, 0.5, 0.1, 0.0])
    found = halves(keys, y, real, torch.tensor([3.0, 2.0]))
    assert found[:5].tolist() == [0, 1, 0, 1, 0]


def test_a_client_without_two_samples_of_a_class_takes_the_global_gaussians(net: Net, tiny: Samples) -> None:
    import numpy as np

    method = PFedFDA()
    server = method.init(net, torch.Generator().manual_seed(0))
    data = ClientData(tiny, np.array([0, 3, 8]))  # one of each class
    found = method.adapted(net, select(server, "body"), server, data)
    same(found, select(server, "means", "covariance"))


def test_no_average_makes_the_covariance_singular(net: Net) -> None:
    """The median of entries, or a hostile upload, may have eigenvalues that no covariance of the method has."""
    method = METHODS["pfedfda"](ridge=0.5)
    server = method.init(net, torch.Generator().manual_seed(0))
    upload = {name: value for name, value in server.items() if name != "covariance"}
    for bad in (torch.zeros(5, 5), -3 * torch.eye(5), torch.ones(5, 5), torch.eye(5).flip(0)):
        after = method.aggregate(server, Uploads.of([{**upload, "covariance": bad}]))
        assert float(torch.linalg.eigvalsh(after["covariance"])[0]) > 0.49
        assert torch.isfinite(method.global_model(after)["head.weight"]).all()  # type: ignore[index]
        problem = method.upload.problem({**upload, "covariance": bad})
        assert problem is not None
        assert "eigenvalue" in problem
    fine = torch.eye(5) + 0.3 * torch.ones(5, 5)
    assert torch.equal(raised(fine, 0.5), fine)
    assert method.upload.problem({**upload, "covariance": fine}) is None
