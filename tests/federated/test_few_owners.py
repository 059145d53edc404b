"""Classes that few clients own, with a hostile one among them: what every robust rule promises, and what none can.

Ten clients report, of whom `owners` speak about class 0; the last of these is hostile. All others own class 1. Honest
rows are 3 along the first axis. The hostile row is huge and points along the second axis, where nobody else has
anything, and its mark is a huge number too.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from fednh.federated import checks
from fednh.methods import METHODS, Method
from fednh.methods.creff import CReFF
from fednh.models import Net
from fednh.tree import Tree
from tests.helpers.reference import averaged_by

CLIENTS, HONEST, HUGE = 10, 3.0, 1e30
ROBUST = ("median", "trimmed_mean", "norm_clip")
# Sums that the server adds up take no robust rule.
BY_CLASS = {name: kind() for name, kind in METHODS.items() if kind().upload.by_class and not kind().upload.summed}
BY_CLASS["fednh by count"] = METHODS["fednh"](aggregation="count")

every_rule = pytest.mark.parametrize("name", ROBUST)
every_method = pytest.mark.parametrize("method", BY_CLASS.values(), ids=BY_CLASS)
few = pytest.mark.parametrize("owners", [1, 2, 3, 4])


def test_these_are_the_methods_that_upload_by_class() -> None:
    assert set(BY_CLASS) == {"fednh", "fednh by count", "fedpac", "fedprior", "fedproto", "fedtgp", "creff"}


def uploads(method: Method, server: Tree, net: Net, owners: int) -> list[Tree]:
    form = checks.declared_upload(method, net, server)
    made = []
    for k in range(CLIENTS):
        tree = {name: server.get(name, torch.zeros(shape)).clone() for name, (shape, _) in form.items()}
        mine, hostile = [c for c in (0, 1) if c == 1 or k < owners], k == owners - 1
        for name in method.upload.by_class:
            rows = torch.zeros(form[name][0]).flatten(1)
            rows[mine, 0] = HONEST
            if hostile:
                rows[0], rows[0, 1] = 0.0, HUGE
            tree[name] = rows.reshape(form[name][0])
        for name in method.upload.marks:
            tree[name] = torch.zeros(form[name][0])
            tree[name][mine] = 1.0
            if hostile:
                tree[name][0] = HUGE
        made.append(tree)
    return made


def expected(name: str, owners: int) -> tuple[float, float]:
    """What an owner of class 0 is taken to say, along the first and the second axis, by hand."""
    if name != "norm_clip" and owners >= 3:
        return HONEST, 0.0  # the hostile coordinate is cut off, as is its silence along the first axis
    return HONEST * (owners - 1) / owners, HONEST / owners  # one voice of many, no longer than an honest one


def start(method: Method, net: Net) -> Tree:
    """The prototypes, where there are some, are the third axis."""
    server = method.init(net, torch.Generator().manual_seed(0))
    return {**server, "head.weight": torch.eye(5)[2].expand(4, 5).clone()} if method.cosine else server


@few
@every_method
@every_rule
def test_what_a_hostile_owner_can_do_is_bounded(name: str, method: Method, owners: int, net: Net) -> None:
    server = start(method, net)
    average = averaged_by(name, uploads(method, server, net, owners), server, method).mean()
    first, second = expected(name, owners)
    for part in method.upload.by_class:
        row = average[part].flatten(1)[0] * CLIENTS / owners
        torch.testing.assert_close(row[:2], torch.tensor([first, second]), rtol=1e-5, atol=1e-6)
        assert not row[2:].any()
        assert average[part].flatten(1)[1, 0].item() == pytest.approx(HONEST), "a class of all is not disturbed"
        assert not average[part][2:].any(), "a class of nobody stays silent"
    for mark in method.upload.marks:
        assert average[mark].tolist() == pytest.approx([owners / CLIENTS, 1, 0, 0])


@few
@every_rule
@pytest.mark.parametrize("aggregation", ["uniform", "count"])
def test_fednhs_prototype_is_not_turned(aggregation: str, name: str, owners: int, net: Net) -> None:
    method = METHODS["fednh"](aggregation=aggregation)
    server = start(method, net)
    rows = averaged_by(name, uploads(method, server, net, owners), server, method)
    prototype = method.aggregate(server, rows)["head.weight"][0]
    mu = torch.tensor([*expected(name, owners), 0.0, 0.0, 0.0]) * owners / CLIENTS
    if aggregation == "count":
        mu = mu / mu.norm()
    moved = 0.9 * torch.eye(5)[2] + 0.1 * mu
    torch.testing.assert_close(prototype, moved / moved.norm())
    assert prototype[1] < 0.12, "the attacker's direction: the plain mean goes to 1.00"


@few
@every_rule
def test_fedprotos_prototype(name: str, owners: int, net: Net) -> None:
    method = METHODS["fedproto"]()
    server = start(method, net)
    out = method.aggregate(server, averaged_by(name, uploads(method, server, net, owners), server, method))
    assert out["prototypes"][0, :2].tolist() == pytest.approx(expected(name, owners), rel=1e-5)
    assert out["known"].tolist() == [1, 1, 0, 0]


@dataclass(frozen=True)
class Targets(CReFF):
    """CReFF that shows the gradient which it would match."""

    def match(self, features: Tensor, head: Tensor, target: Tensor, owned: Tensor) -> Tensor:
        seen.append((target, owned))
        return features


seen: list[tuple[Tensor, Tensor]] = []


@few
@every_rule
def test_creffs_target(name: str, owners: int, net: Net) -> None:
    method = Targets(features_per_class=2, retrain_epochs=1)
    server = start(method, net)
    method.aggregate(server, averaged_by(name, uploads(method, server, net, owners), server, method))
    target, owned = seen.pop()
    assert target.flatten(1)[0, :2].tolist() == pytest.approx(expected(name, owners), rel=1e-5)
    assert owned.tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("lie", [("known", 0.0), ("known", HUGE), ("prototypes", 0.0)])
@every_rule
def test_a_mark_and_its_row_cannot_be_played_against_each_other(name: str, lie: tuple[str, float], net: Net) -> None:
    """Ten owners agree, but one says that it does not own what it sends, or sends nothing for what it says it owns."""
    method = METHODS["fedproto"]()
    server = start(method, net)
    rows = uploads(method, server, net, 4)[:3] * 3
    rows.append({key: value.clone() for key, value in rows[0].items()})
    rows[-1][lie[0]][0] = lie[1]
    out = method.aggregate(server, averaged_by(name, rows, server, method))
    clipped_silence = name == "norm_clip" and lie[0] == "prototypes"
    assert out["prototypes"][0, 0].item() == pytest.approx(HONEST * (0.9 if clipped_silence else 1.0), rel=1e-5)


def test_norm_clip_does_not_weigh_an_only_owner_by_how_much_it_owns() -> None:
    """Client 0 owns all four classes, the last one alone; everybody's rows have length 1."""
    method = METHODS["fednh"]()
    rows = torch.eye(4)
    made = [{"prototypes": rows}, *({"prototypes": rows * torch.eye(4)[k][:, None]} for k in (0, 1, 2))]
    out = averaged_by("norm_clip", made, {}, method).mean()["prototypes"]
    torch.testing.assert_close(out.diagonal(), torch.tensor([2.0, 2.0, 2.0, 1.0]) / 4)


@pytest.mark.parametrize("name", ["mean", *ROBUST])
def test_scaffold_counts_every_newcomer(name: str, net: Net) -> None:
    """Seven of ten are new. Marks are 0 or 1: trimmed, all or none would be."""
    method = METHODS["scaffold"]()
    server = method.init(net, torch.Generator().manual_seed(0))
    form = checks.declared_upload(method, net, server)
    made = [{n: server.get(n, torch.zeros(shape)).clone() for n, (shape, _) in form.items()} for _ in range(CLIENTS)]
    for k, tree in enumerate(made):
        tree["newcomers"] = torch.tensor(float(k < 7))
    out = method.aggregate({**server, "clients": torch.tensor(3.0)}, averaged_by(name, made, server, method))
    assert out["clients"].item() == pytest.approx(10)
    if name != "mean":  # a mark that is a lie counts as one
        made[0]["newcomers"], made[9]["newcomers"] = torch.tensor(HUGE), torch.tensor(-HUGE)
        out = method.aggregate(server, averaged_by(name, made, server, method))
        assert out["clients"].item() == pytest.approx(7)


def test_counts_weigh_directions_and_are_not_trimmed_with_them() -> None:
    """Four owners with 9, 3, 6 and 1 samples: of each coordinate of their directions the middle two are averaged."""
    method, owners = METHODS["fednh"](aggregation="count"), [(1.0, 0.0, 9), (0.8, 0.6, 3), (0.6, 0.8, 6), (0.0, 1.0, 1)]
    made = [{"prototypes": torch.tensor([[x * n, y * n], [0.0, 9.0]])} for x, y, n in owners]
    made += [{"prototypes": torch.tensor([[0.0, 0.0], [0.0, 9.0]])}] * 6
    out = averaged_by("trimmed_mean", made, {}, method, trim=0.1).mean()["prototypes"][0]
    middle = [(0.8 * 3 + 0.6 * 6) / 9, (0.6 * 3 + 0.8 * 6) / 9]
    assert out.tolist() == pytest.approx([value * 19 / 10 for value in middle])
