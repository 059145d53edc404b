"""FedVLS: two rounds by other means, its losses by hand, and what a batch loss makes of padding."""

from __future__ import annotations

import math

import pytest
import torch

from fednh.data.batches import Samples
from fednh.methods import METHODS
from fednh.methods.fedvls import distillation, suppression
from fednh.models import Net
from tests.helpers.compare import same
from tests.helpers.reference import Play, TwoPart, average, train

CLOSE = {"rtol": 1e-4, "atol": 1e-6}


def objective(model: TwoPart, teacher: TwoPart, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Lines 14 to 18 of Algorithm 1, sample by sample and class by class; lambda = 2, suppression = 0.7."""
    z, known, count = model(x), teacher(x).detach(), len(y)
    p = {c: int((y == c).sum()) / count for c in range(4)}
    vacant = [c for c in range(4) if p[c] == 0]
    assert len(vacant) == 2
    total = torch.zeros(())
    for i, label in enumerate(y.tolist()):
        e = z[i].exp()
        total = total - (p[label] * e[label] / sum(p[c] * e[c] for c in p)).log() / count
        ours, theirs = e / e[vacant].sum(), known[i].exp() / known[i].exp()[vacant].sum()
        total = total + 2 * sum(theirs[o] * (theirs[o] / ours[o]).log() for o in vacant) / count
    for c, share in p.items():
        if share:
            others = sum(z[i, c].exp() for i, label in enumerate(y.tolist()) if label != c)
            total = total + 0.7 * share * (others / count).log()
    return total


def test_two_rounds(net: Net, tiny: Samples) -> None:
    play = Play(METHODS["fedvls"](lam=2.0, suppression=0.7), net, tiny)
    for _ in range(2):
        teacher, models = TwoPart.of(play.server), [TwoPart.of(play.server) for _ in play.xy]
        for model, (x, y) in zip(models, play.xy, strict=True):
            train(list(model.parameters()), lambda m=model, t=teacher, x=x, y=y: objective(m, t, x, y))
        for update, model in zip(play.round(), models, strict=True):
            same(update.upload, model.tree(), **CLOSE)
            same(update.keep, model.tree(), **CLOSE)
        same(play.server, average([m.tree() for m in models]), **CLOSE)
    same(play.personal(1), models[1].tree(), **CLOSE)
    same(play.method.global_model(play.server) or {}, play.server)


def test_without_its_two_terms_it_trains_with_the_balanced_softmax(net: Net, tiny: Samples) -> None:
    """FedETF's and FedROD's loss; what FedROD uploads of its body is trained with nothing else."""
    plain = Play(METHODS["fedvls"](lam=0, suppression=0), net, tiny).round()
    fedrod = Play(METHODS["fedrod"](hypernetwork="off"), net, tiny).round()
    for ours, theirs in zip(plain, fedrod, strict=True):
        same(ours.upload, theirs.upload, **CLOSE)


def test_distillation_by_hand() -> None:
    z, teacher = torch.tensor([[0.0, 5.0, 0.0]]), torch.tensor([[math.log(3), -7.0, 0.0]])
    found = distillation(z, teacher, torch.tensor([True, False, True]))  # (3/4, 1/4) against (1/2, 1/2)
    torch.testing.assert_close(found, torch.tensor([0.75 * math.log(1.5) + 0.25 * math.log(0.5)]))


@pytest.mark.parametrize("vacant", [[False, False, False], [False, True, False]], ids=["none", "one"])
def test_with_less_than_two_vacant_classes_there_is_nothing_to_distil(vacant: list[bool]) -> None:
    z = torch.randn(5, 3, requires_grad=True)
    found = distillation(z, torch.randn(5, 3), torch.tensor(vacant))
    assert found.tolist() == [0.0] * 5
    (slope,) = torch.autograd.grad(found.sum(), z)
    assert not slope.any()


def test_suppression_by_hand() -> None:
    """Samples of classes 0, 0, 1 with equal weights: of class 2, which none has, all three count."""
    z = torch.tensor([[9.0, math.log(1), 0.0], [9.0, math.log(5), 0.0], [math.log(6), 9.0, 0.0]])
    found = suppression(z, torch.tensor([0, 0, 1]), torch.full((3,), 1 / 3))
    torch.testing.assert_close(found, torch.tensor([math.log(2), math.log(2), 0.0]))


def test_padding_and_batches_of_one_class_suppress_nothing() -> None:
    z, y = torch.randn(4, 2, requires_grad=True), torch.tensor([0, 0, 1, 1])
    padded = suppression(z, y, torch.tensor([0.5, 0.5, 0.0, 0.0]))
    alone = suppression(z[:2], y[:2], torch.tensor([0.5, 0.5]))
    assert padded.tolist() == alone.tolist()
    assert padded[0] == 0
    (slope,) = torch.autograd.grad(padded.sum(), z)
    assert not slope[:, 0].any()
    assert (slope[2:].abs() < 1e-20).all()
    assert torch.isfinite(suppression(z, y, torch.zeros(4))).all()  # where all samples are padding
