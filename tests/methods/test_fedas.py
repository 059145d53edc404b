"""FedAS: rounds by other means, one client missing in some; alignment, Fisher traces and the mean that they weigh."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fednh.data.batches import Samples
from fednh.methods import METHODS
from fednh.models import Net
from fednh.tree import Tree, select
from tests.helpers.compare import same
from tests.helpers.reference import Play, TwoPart, averaged_by, train, trained

CLOSE = {"rtol": 1e-4, "atol": 1e-6}


def aligned(model: TwoPart, own: TwoPart, x: Tensor, y: Tensor, epochs: int) -> None:
    """Features of the received body are brought to the class means of the client's own."""
    means = {c: own.features(x).detach()[y == c].mean(0) for c in y.unique().tolist()}

    def loss() -> Tensor:
        parts = [(model.features(x)[y == c] - mean).square().mean() for c, mean in means.items()]
        return torch.stack(parts).sum()

    train(list(model.linear.parameters()), loss, epochs)


def fisher(model: TwoPart, x: Tensor, y: Tensor) -> float:
    """The sum over single samples of the squared length of the gradient of -log p(y | x)."""
    total = 0.0
    for row, label in zip(x, y, strict=True):
        model.zero_grad()
        (-model(row).log_softmax(0)[label]).backward()
        total += sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)
    return total


def test_fedas(net: Net, tiny: Samples) -> None:
    """Client 1 joins in the second round: nothing is aligned then, and in the third it is."""
    play = Play(METHODS["fedas"](align_epochs=2, fisher_batch=1), net, tiny)
    own: dict[int, TwoPart] = {}
    for clients in ((0,), (0, 1), (0, 1)):
        models, traces = [], []
        for k in clients:
            x, y = play.xy[k]
            head = own[k].head.weight.detach() if k in own else play.initial["head.weight"]
            model = TwoPart.of({**play.server, "head.weight": head})
            if k in own:
                aligned(model, own[k], x, y, 2)
            model = trained(model, x, y)
            models.append(model)
            traces.append(fisher(model, x, y))
        for k, model, trace, update in zip(clients, models, traces, play.round(clients), strict=True):
            same(select(update.keep, "body", "head"), model.tree(), **CLOSE)
            same(update.upload, {**model.body_tree(), "fisher": torch.tensor(trace)}, **CLOSE)
            own[k] = model
        weights = [trace / sum(traces) for trace in traces]
        body = {name: torch.zeros_like(value) for name, value in models[0].body_tree().items()}
        for weight, model in zip(weights, models, strict=True):
            body = {name: value + weight * model.body_tree()[name] for name, value in body.items()}
        same(select(play.server, "body"), body, **CLOSE)
    same(play.personal(1), own[1].tree(), **CLOSE)


def test_a_mini_batch_of_the_trace_is_the_square_of_a_mean(net: Net, tiny: Samples) -> None:
    play = Play(METHODS["fedas"](fisher_batch=100), net, tiny)
    update = play.round()[1]
    model, (x, y) = TwoPart.of(update.keep), play.xy[1]
    F.cross_entropy(model(x), y).backward()
    expected = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)
    assert float((update.upload or {})["fisher"]) == pytest.approx(expected, rel=1e-4)


def upload(value: float, fisher: float) -> Tree:
    return {"body.w": torch.full((2,), value), "fisher": torch.tensor(fisher)}


@pytest.mark.parametrize(
    ("rule", "traces", "expected"),
    [
        ("mean", (1.0, 2.0, 5.0), (1 * 1 + 2 * 2 + 5 * 6) / 8),
        ("weighted_mean", (1.0, 2.0, 5.0), (1 * 1 + 2 * 2 + 5 * 6) / 8),
        ("mean", (0.0, 2.0, 0.0), 2.0),
        ("mean", (0.0, 0.0, 0.0), 3.0),
        ("median", (1.0, 2.0, 5.0e9), 2.0),
        ("trimmed_mean", (1.0, 2.0, 5.0e9), 2.0),
    ],
)
def test_the_trace_weighs_an_upload_in_means_and_in_nothing_else(
    rule: str, traces: tuple[float, ...], expected: float
) -> None:
    method, server = METHODS["fedas"](), {"body.w": torch.zeros(2), "joined": torch.zeros(())}
    sent = [upload(value, trace) for value, trace in zip((1.0, 2.0, 6.0), traces, strict=True)]
    after = method.aggregate(server, averaged_by(rule, sent, server, method, samples=(9, 1, 1)))
    assert after.keys() == server.keys()
    torch.testing.assert_close(after["body.w"], torch.full((2,), expected))


def test_a_negative_trace_is_refused() -> None:
    problem = METHODS["fedas"]().upload.problem
    assert problem(upload(1.0, 0.0)) is None
    assert problem(upload(1.0, -1.0)) == "its Fisher trace is negative"
