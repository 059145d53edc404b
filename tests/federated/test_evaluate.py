from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

import fednh
from fednh.data.batches import ClientData, Samples, subset
from fednh.federated import client, evaluate
from fednh.federated.summary import fall_after_rise
from fednh.methods import METHODS
from fednh.models import Net
from fednh.runs.model_file import Outcomes

# A hand-made confusion: of class 0 2 of 4 right, of class 1 3 of 3, of class 2 0 of 1.
CORRECT = torch.tensor([2.0, 3.0, 0.0], dtype=torch.float64)
TOTAL = torch.tensor([4.0, 3.0, 1.0], dtype=torch.float64)


def test_gm_is_the_mean_of_the_class_accuracies() -> None:
    assert evaluate.accuracy(CORRECT, TOTAL, torch.ones(3)) == pytest.approx((50 + 100 + 0) / 3)


def test_pm_of_a_client_with_classes_0_and_2() -> None:
    person = evaluate.personal(7, CORRECT, TOTAL, torch.tensor([9.0, 0.0, 3.0]))
    assert person.client == 7
    assert person.pm_v == pytest.approx((50 + 0) / 2)
    assert person.pm_l == pytest.approx(0.75 * 50 + 0.25 * 0)


def test_a_test_set_of_ninety_to_ten() -> None:
    """All of class 0 right and none of class 1: each class alike is 50; a client of one in ten of class 0 has 10."""
    correct, total = torch.tensor([90.0, 0.0]).double(), torch.tensor([90.0, 10.0]).double()
    person = evaluate.personal(0, correct, total, torch.tensor([1.0, 9.0]))
    assert (person.pm_v, person.pm_l) == pytest.approx((50.0, 10.0))


def test_on_a_balanced_test_set_no_bit_differs_from_the_share_of_samples() -> None:
    rng = np.random.default_rng(3)
    for size in (7, 100, 1000):
        correct = torch.from_numpy(rng.integers(0, size + 1, 10).astype(np.float64))
        total, counts = torch.full((10,), float(size)).double(), torch.from_numpy(rng.integers(0, 40, 10)).float()
        share = counts.double() / counts.sum()
        person = evaluate.personal(0, correct, total, counts)
        assert evaluate.accuracy(correct, total, torch.ones(10)) == float(100 * correct.sum() / total.sum())
        assert person.pm_l == float(100 * (share * correct).sum() / (share * total).sum())


@given(st.lists(st.tuples(st.integers(0, 50_000), st.integers(0, 1000)), min_size=2, max_size=100))
@example([(1, 1000), (2, 0), (40_000, 333)])
def test_pm_l_has_the_bits_of_a_double(rows: list[tuple[int, int]]) -> None:
    """Beside fractions, which do not round: float32 shares would be wrong from the seventh digit on."""
    counts, right = zip(*rows, strict=True)
    assume(sum(counts))
    exact = Fraction(sum(n * k for n, k in rows), sum(counts) * 1000) * 100
    total = torch.full((len(rows),), 1000.0).double()
    person = evaluate.personal(0, torch.tensor(right).double(), total, torch.tensor(counts, dtype=torch.float32))
    assert person.pm_l == pytest.approx(float(exact), rel=1e-13)


def test_pm_l_of_equal_shares_is_pm_v() -> None:
    person = evaluate.personal(0, CORRECT, TOTAL, torch.tensor([5.0, 5.0, 0.0]))
    assert person.pm_l == pytest.approx(person.pm_v) == pytest.approx((50 + 100) / 2)


def test_a_class_without_test_samples_is_left_out() -> None:
    total = torch.tensor([4.0, 3.0, 0.0], dtype=torch.float64)
    person = evaluate.personal(0, CORRECT, total, torch.tensor([1.0, 1.0, 8.0]))
    assert (person.pm_v, person.pm_l) == pytest.approx((75.0, 75.0)), "shares of what is left"
    assert person.per_class == [50.0, 100.0, None]
    assert evaluate.accuracy(CORRECT, total, torch.ones(3)) == pytest.approx(75.0)
    nothing = evaluate.personal(0, CORRECT, total, torch.tensor([0.0, 0.0, 4.0]))
    assert (nothing.pm_v, nothing.pm_l) == (None, None), "not 0: there is nothing to say"


def test_fairness_is_the_population_standard_deviation() -> None:
    assert evaluate.mean_and_spread([60.0, 80.0, 100.0]) == pytest.approx((80.0, np.std([60, 80, 100])))


def test_correct_per_class_counts_over_batches() -> None:
    """1,000 samples, more than one batch; the model says 'class 1' whenever the feature is positive."""
    x = torch.linspace(-1, 1, 1000)[:, None]
    y = torch.arange(1000) % 2
    test = Samples(x, y, 3, torch.ones(1), torch.zeros(1), augment=False)
    logits = evaluate.logits_of(lambda v: torch.cat([-v, v, torch.full_like(v, -9)], 1), test)
    hits = evaluate.count_correct(logits.argmax(1), test)
    right_1 = int(((x[:, 0] > 0) & (y == 1)).sum())
    right_0 = int(((x[:, 0] <= 0) & (y == 0)).sum())
    assert hits.tolist() == [right_0, right_1, 0]
    assert evaluate.total_per_class(test).tolist() == [500, 500, 0]


def test_a_client_is_measured_on_its_own_classes_with_the_same_result(net: Net, tiny: Samples) -> None:
    """Before the last round no other class is looked at: PM(V) and PM(L) weigh them with 0."""
    method = METHODS["fedavg"]()
    model = net.init(torch.Generator().manual_seed(3))
    mine = np.flatnonzero(np.isin(tiny.y.numpy(), [0, 2]))
    data, nothing = ClientData(tiny, mine, 0, 1, 0, "personal"), subset(tiny, np.zeros(0, np.int64))
    seen: list[int] = []
    whole = client.measured(method, net, 0, data, model, None, tiny, nothing)
    own = client.measured(method, net, 0, data, model, None, tiny, nothing, seen.append, every_class=False)
    assert (own.pm_v, own.pm_l) == (whole.pm_v, whole.pm_l)
    assert sum(seen) == len(mine) < len(tiny)
    assert own.per_class is None
    assert whole.per_class is not None


def test_held_out_means_leave_out_sites_with_one_class() -> None:
    """Shares 50 and 70 count, 100 of the site with one class does not; PM(V) and PM(L) count everybody."""
    shares = (50.0, 100.0, 70.0)
    people = [
        evaluate.Personal(k, share, share, None, share, share, 10.0 * k, 10.0 * k) for k, share in enumerate(shares)
    ]
    found = evaluate.final_metrics(None, None, people, one_class=[1])
    assert (found["held_share"], found["held_macro"], found["held_gm_share"]) == (60.0, 60.0, 10.0)
    assert (found["held_share_std"], found["one_class"]) == (10.0, [1])
    assert found["pm_l"] == found["pm_v"] == pytest.approx(220 / 3)
    assert [row["held_share"] for row in found["clients"]] == list(shares)
    scarce = evaluate.final_metrics(None, None, people, one_class=[1], few_held=[2])
    assert (scarce["held_share"], scarce["one_class"], scarce["few_held"]) == (50.0, [1], [2])
    usual = evaluate.final_metrics(None, None, people)
    assert (usual["held_share"], "one_class" in usual) == (pytest.approx(220 / 3), False)


def test_a_prior_that_is_not_set_is_the_methods(tmp_path: Path) -> None:
    """1 with FedPrior, none with FedNH; one that is set holds for both, 0 as well."""
    small = {"rounds": 1, "partition.clients": 4, "train.epochs": 1, "eval.every": 0}

    def prior(method: str, **more: float) -> torch.Tensor | None:
        run = fednh.run("digits", method=method, out=tmp_path / f"{method}{len(more)}{more}", **small, **more)
        return run.model(run.summary["clients"][0]["client"]).params.get("prior")

    own = prior("fedprior")
    assert own is not None
    assert float(own.exp().sum()) == pytest.approx(1), "the log of shares"
    assert prior("fednh") is None
    assert prior("fedprior", **{"personal.prior": 0}) is None
    for method in ("fedprior", "fednh"):
        half = prior(method, **{"personal.prior": 0.5})
        assert half is not None
        torch.testing.assert_close(half, own / 2)


def person(client: int, label: list[int], personal: list[int], shared: list[int] | None) -> evaluate.Personal:
    """A client whose models took its held-out samples for these classes."""
    columns = [None if column is None else np.array(column, np.int32) for column in (label, personal, shared)]
    outcomes = Outcomes(*columns)  # type: ignore[arg-type]
    held = evaluate.held_metrics(outcomes, 3)
    return evaluate.Personal(client, None, None, None, **held, outcomes=outcomes)


def test_pooled_counts_samples_not_clients() -> None:
    """4 of 4 and 0 of 1: the mean over clients is 50, of the samples 4 in 5 are right; the global model has 1 in 5."""
    large, small = person(0, [0, 0, 1, 2], [0, 0, 1, 2], [0, 1, 2, 0]), person(1, [2], [1], [0])
    found = evaluate.metrics(None, None, [large, small])
    assert (found["held_share"], found["held_pooled"], found["held_gm_pooled"]) == (50.0, 80.0, 20.0)
    assert evaluate.metrics(None, None, [large, small], left_out=[0])["held_pooled"] == 0.0
    summary = evaluate.final_metrics(None, None, [large, small])
    assert (summary["held_pooled"], summary["held_gm_pooled"]) == (80.0, 20.0)


def test_pooled_needs_the_predictions_of_all() -> None:
    here, away = person(0, [0, 1], [0, 0], None), evaluate.Personal(1, None, None, None, 50.0, 50.0)
    assert evaluate.pooled([here]) == {"held_pooled": 50.0}, "a method without a global model"
    assert evaluate.pooled([here, away]) == {}
    assert evaluate.pooled([here, evaluate.Personal(2, 50.0, 50.0, None)]) == {"held_pooled": 50.0}, "nothing held out"
    assert evaluate.pooled([]) == {}


def test_the_best_round_is_each_metrics_own() -> None:
    rows = [{"round": 1}, {"held_pooled": 60.0, "held_gm_pooled": 30.0}, {"held_pooled": 50.0, "held_gm_pooled": 40.0}]
    assert evaluate.best(rows) == {"held_pooled_best": 60.0, "held_gm_pooled_best": 40.0}
    assert evaluate.best([{"round": 1, "gm": 3.0}]) == {}


def lines(*accuracies: float, falling: bool = True) -> list[dict[str, float]]:
    return [
        {"round": 2 * k + 2, "train_loss": 1 - 0.1 * k if falling else 1 + 0.1 * k, "held_share": value}
        for k, value in enumerate(accuracies)
    ]


def test_a_fall_after_a_rise_is_told_with_its_round() -> None:
    told = fall_after_rise(lines(30.0, 38.0, 42.4, 42.0, 41.0, 40.1, 39.5))
    assert told == (
        "held-out accuracy was best after round 6 (42.4) and fell to 39.5, while the training loss still fell (0.80 to "
        "0.40): fewer rounds may do better"
    )


@pytest.mark.parametrize(
    "records",
    [
        lines(30.0, 38.0, 42.4, 42.0, 41.0, 40.1, 39.5, falling=False),  # the loss rose as well: it has not learned
        lines(30.0, 38.0, 42.4, 41.5, 41.0),  # less than two points
        lines(40.0, 46.0, 39.0, 45.0, 40.0, 46.1, 40.0, 42.0),  # no more than it jumps
        lines(40.0, 46.0, 40.0),  # too few evaluations
        lines(40.0, 41.0, 42.0, 43.0, 46.0, 40.0),  # one evaluation after the best
        [{"round": 1, "train_loss": 0.5}] * 9,
    ],
)
def test_what_is_no_clear_fall_is_not_told(records: list[dict[str, float]]) -> None:
    assert fall_after_rise(records) is None
