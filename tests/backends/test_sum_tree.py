"""The tree of sums: its shape, and that the same bits come out however jobs divide a round and whoever adds up."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ray import exceptions

from fednh.backends import ray
from fednh.backends.ray import Job, Schedule, Uploaded, whole_groups
from fednh.backends.ray_worker import JobResult, Sums, _job_sums, combine, pack, unpack
from fednh.errors import RunError
from fednh.federated.aggregate import RunningMean, SumRule, accumulator
from fednh.federated.checks import form_of
from fednh.federated.client import ClientResult
from fednh.methods.fedavg import FedAvg
from fednh.tree import FAN, SumTree, Tree, mean


def noise(number: int) -> list[Tree]:
    """Uploads whose sums have other last bits in another order."""
    rng = torch.Generator().manual_seed(number)
    return [{"w": torch.randn(7, generator=rng) * 10 ** (k % 5), "b": torch.randn(2, 2)} for k in range(number)]


def in_order(trees: list[Tree]) -> Tree:
    total = {name: value.clone() for name, value in trees[0].items()}
    for tree in trees[1:]:
        total = {name: value + tree[name] for name, value in total.items()}
    return total


def equal(one: Tree, other: Tree) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def added_up(trees: dict[int, Tree]) -> Tree:
    sums = SumTree()
    for place, tree in trees.items():
        sums.add(tree, place // FAN)
    return sums.total()


def test_up_to_sixteen_are_added_in_their_order() -> None:
    trees = noise(16)
    assert equal(added_up(dict(enumerate(trees))), in_order(trees))
    running = RunningMean()
    for tree in trees[:10]:
        running.add(tree)
    assert equal(running.uploads().mean(), mean(trees[:10])), "the bits of rounds of few clients are the plain mean's"


def test_more_are_added_by_sixteens() -> None:
    trees = noise(300)
    groups = [in_order(trees[k : k + FAN]) for k in range(0, 300, FAN)]
    first, rest = in_order(groups[:FAN]), in_order(groups[FAN:])
    assert equal(added_up(dict(enumerate(trees))), in_order([first, rest]))
    assert not equal(added_up(dict(enumerate(trees))), in_order(trees)), "otherwise this shows nothing"


def test_one_that_is_missing_moves_no_other() -> None:
    trees = noise(40)
    left = {place: tree for place, tree in enumerate(trees) if place not in (3, 17)}
    groups = [in_order([left[k] for k in range(start, min(start + FAN, 40)) if k in left]) for start in (0, 16, 32)]
    assert equal(added_up(left), in_order(groups))
    running = RunningMean()
    for place, tree in left.items():
        running.add(tree, 1, 1, place)
    assert equal(running.uploads().mean(), {name: value / 38 for name, value in in_order(groups).items()})


def test_nothing_that_was_added_is_changed() -> None:
    trees = noise(20)
    before = [{name: value.clone() for name, value in tree.items()} for tree in trees]
    added_up(dict(enumerate(trees)))
    assert all(map(equal, trees, before))


class InOneProcess:
    """A cluster whose machines are function calls; it loses its first `losses` sums."""

    def __init__(self, losses: int = 0) -> None:
        self.losses, self.computed_again, self.notes, self.calls = losses, 0, list[str](), list[int]()

    def combine(self, known: list[int], group: int, level: int, *parts: Sums) -> Sums:
        self.calls.append(len(parts))
        return combine(known, group, level, *parts)

    def fetch_sum(self, ref: Sums) -> Tree:
        if self.losses:
            self.losses -= 1
            raise exceptions.ObjectLostError("00" * 28, None, "")
        self.again = ref.again
        ((total, _, _),) = unpack(ref.trees)
        found: Tree = total
        return found

    def note(self, text: str) -> None:
        self.notes.append(text)

    def lost(self, why: str) -> RunError:
        return RunError("lost")


def exchange(
    cluster: Any, trees: list[Tree], cuts: set[int], bad: set[int], rule: SumRule, samples: list[int], lost: int = 0
) -> Iterator[list[ClientResult]]:
    """What `RayCluster.map` yields: jobs of neighbours that end at `cuts`; the results of `bad` cannot be used."""
    bounds = [0, *sorted(cuts), len(trees)]
    for start, stop in pairwise(bounds):
        mine = range(start, stop)
        results = [
            ClientResult({}, trees[k], 1, 1.0, kept_finite=True, upload_finite=k not in bad, client=k) for k in mine
        ]
        places, sums = _job_sums(samples[start:stop], results, start, rule)
        attempt = int(start < lost < stop)
        done = JobResult("", "", 0, pack(None), 0.0, True, places)
        again: Any = lambda: exchange(cluster, trees, cuts, bad, rule, samples)  # noqa: E731
        job = Job([[k] for k in mine], None, Sums(pack(sums), attempt, len(mine)), start, stop, (), again)
        yield [ClientResult(upload=Uploaded(r.upload or {}, cluster, job, done), client=r.client) for r in results]


def sums_of(cluster: Any, trees: list[Tree], bad: set[int], results: Iterator[list[ClientResult]]) -> RunningMean:
    running = RunningMean()
    for place, result in enumerate(result for some in results for result in some):
        if place not in bad:
            assert result.upload is not None
            running.add(result.upload, 1, 1, place)
    return running


@given(st.integers(1, 600), st.sets(st.integers(1, 599), max_size=60), st.sets(st.integers(0, 599), max_size=20))
@settings(deadline=None, max_examples=40)
def test_however_a_round_is_divided_the_bits_are_the_same(number: int, cuts: set[int], bad: set[int]) -> None:
    trees, bad = noise(number), {k for k in bad if k < number and number > len(bad)}
    if len(bad) == number:
        return
    here = RunningMean()
    for place, tree in enumerate(trees):
        if place not in bad:
            here.add(tree, 1, 1, place)
    cluster, rule = InOneProcess(), SumRule(forms=form_of(trees[0]))
    cut = {each for each in cuts if each < number}
    there = sums_of(cluster, trees, bad, exchange(cluster, trees, cut, bad, rule, [1] * number))
    assert equal(here.uploads().mean(), there.uploads().mean())


def test_single_jobs_are_combined_by_sixteens_and_only_then_at_the_end() -> None:
    trees, cluster = noise(300), InOneProcess()
    rule = SumRule(forms=form_of(trees[0]))
    running = sums_of(cluster, trees, set(), exchange(cluster, trees, set(range(1, 300)), set(), rule, [1] * 300))
    assert equal(running.elsewhere.total(), added_up(dict(enumerate(trees))))  # type: ignore[union-attr]
    assert cluster.calls == [FAN] * 16 + [FAN] + [FAN] * 2 + [1 + 2 + 12], "256 as one, 32 as two, and what is left"


def test_shares_are_those_of_the_weighted_mean() -> None:
    trees, samples = noise(50), [10 + 3 * (k % 7) for k in range(50)]
    server = {"w": torch.zeros(7)}
    here = accumulator("weighted_mean", server, 0.0, FedAvg(), max(samples))
    assert here.rule is not None
    for tree, number in zip(trees, samples, strict=True):
        here.add(tree, number)
    cluster = InOneProcess()
    rule = SumRule(here.rule.weighted, here.rule.reference, form_of(trees[0]))
    there: Any = accumulator("weighted_mean", server, 0.0, FedAvg(), max(samples))
    for some in exchange(cluster, trees, {5, 18, 33}, set(), rule, samples):
        for result in some:
            assert result.upload is not None
            there.add(result.upload, samples[result.client], 1, result.client)
    assert equal(here.uploads().mean(), there.uploads().mean())
    plain = {name: sum(t[name] * n for t, n in zip(trees, samples, strict=True)) / sum(samples) for name in ("w",)}
    torch.testing.assert_close(here.uploads().mean()["w"], plain["w"], rtol=1e-4, atol=1e-4)


def test_what_ray_cannot_compute_again_is_computed_with_all_others() -> None:
    trees, cluster, bad = noise(70), InOneProcess(losses=2), {4}
    rule = SumRule(forms=form_of(trees[0]))
    running = sums_of(cluster, trees, bad, exchange(cluster, trees, {10, 40}, bad, rule, [1] * 70))
    total = running.uploads().mean()
    left = {place: tree for place, tree in enumerate(trees) if place not in bad}
    assert equal(total, {name: value / 69 for name, value in added_up(left).items()})
    assert cluster.computed_again == 2 * 70
    assert len(cluster.notes) == 2
    hopeless = InOneProcess(losses=ray.MAX_ATTEMPTS)
    running = sums_of(hopeless, trees, bad, exchange(hopeless, trees, {10}, bad, rule, [1] * 70))
    with pytest.raises(RunError, match="lost"):
        running.uploads()


def test_clients_that_ray_computed_again_are_counted_once() -> None:
    """Their job ended once, was lost, and was computed again: its sums are of a later attempt than its result."""
    trees, cluster = noise(70), InOneProcess()
    rule = SumRule(forms=form_of(trees[0]))
    running = sums_of(cluster, trees, set(), exchange(cluster, trees, {10, 40}, set(), rule, [1] * 70, lost=20))
    running.uploads()
    assert cluster.again == 30


def test_a_sum_of_others_than_the_loop_accepted_is_refused() -> None:
    trees, cluster = noise(6), InOneProcess()
    results = exchange(cluster, trees, set(), {2}, SumRule(forms=form_of(trees[0])), [1] * 6)
    running = sums_of(cluster, trees, set(), results)  # the loop takes all of them
    with pytest.raises(RunError, match="a sum is of the places"):
        running.uploads()


def test_an_upload_of_another_form_is_in_no_sum() -> None:
    """The driver sees its form and stops the run, as it does where all uploads are."""
    good, odd = {"w": torch.ones(2)}, {"w": torch.ones(3)}
    results = [ClientResult({}, tree, 1, 1.0, client=k) for k, tree in enumerate((good, odd, good))]
    places, sums = _job_sums([1, 1, 1], results, 0, SumRule(forms=form_of(good)))
    assert places == (0, 2)
    assert [tree["w"].tolist() for tree, _, _ in sums] == [[2.0, 2.0]]


def test_a_job_ends_with_a_group_where_it_can() -> None:
    assert len(whole_groups([[k] for k in range(10)], 10)) == 6  # 10 to 15
    assert len(whole_groups([[k] for k in range(40)], 16)) == 32
    assert len(whole_groups([[k] for k in range(5)], 3)) == 5
    assert len(whole_groups([list(range(125))] * 2, 0)) == 2, "a block is not divided"


def test_clients_of_a_group_go_to_one_machine_if_it_has_a_free_slot() -> None:
    schedule, given = Schedule({"a": 16, "b": 16, "full": 0}, 0), []
    for place in range(64):
        assert schedule.room
        given.append(schedule.choose(place // FAN))
        schedule.jobs[place] = given[-1]
    assert given[:32] == ["a"] * 16 + ["b"] * 16
    assert sorted(given[32:]) == ["a"] * 16 + ["b"] * 16
    assert not schedule.room


def test_no_machine_waits_for_another() -> None:
    """Two of one slot each have five of ten clients, though they are of one group."""
    schedule, given = Schedule({"a": 1, "b": 1}, 0), list[Any]()
    for place in range(10):
        while not schedule.room:
            del schedule.jobs[next(iter(schedule.jobs))]
        given.append(schedule.choose(place // FAN))
        schedule.jobs[place] = given[-1]
    assert sorted(given) == ["a"] * 5 + ["b"] * 5


def test_where_others_use_the_cluster_ray_decides() -> None:
    schedule = Schedule({"a": 4}, 2)
    assert schedule.choose(0) is None
    schedule.jobs |= {0: None, 1: None}
    assert not schedule.room
