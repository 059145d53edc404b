"""What every method promises the engine; a new method is tested here by being in METHODS."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from reference import QUICK, Play

from conftest import identical
from fednh.core.tree import Tree, select
from fednh.data.batches import Samples
from fednh.methods import METHODS, Method
from fednh.models import Net

every_method = pytest.mark.parametrize("name", METHODS)


def make(name: str) -> Method:
    return METHODS[name](**QUICK.get(name, {}))


def copied(tree: Tree) -> Tree:
    return {name: value.clone() for name, value in tree.items()}


@every_method
def test_all_methods_start_from_the_same_body(name: str, net: Net, tiny: Samples) -> None:
    ours = Play(make(name), net, tiny)
    identical(select(ours.initial, "body"), select(Play(make("fedavg"), net, tiny).initial, "body"))


@every_method
def test_hooks_change_nothing_in_place(name: str, net: Net, tiny: Samples) -> None:
    play = Play(make(name), net, tiny)
    play.round()
    server, kept = play.server, play.kept
    before = copied(server), [copied(k) for k in kept]
    play.round()
    play.personal(0)
    identical(server, before[0])
    for now, then in zip(kept, before[1], strict=True):
        identical(now, then)


@every_method
def test_a_round_is_deterministic(name: str, net: Net, tiny: Samples) -> None:
    first, second = Play(make(name), net, tiny), Play(make(name), net, tiny)
    for play in (first, second):
        play.round()
        play.round()
    identical(first.server, second.server)
    identical(first.personal(1), second.personal(1))


@every_method
def test_names_and_shapes_stay_the_same(name: str, net: Net, tiny: Samples) -> None:
    """Clients upload the same names every time, and the server's state keeps its form: checkpoints rely on it."""
    play = Play(make(name), net, tiny)
    forms = set()
    for _ in range(2):
        for update in play.round():
            forms.add(tuple((n, tuple(v.shape)) for n, v in sorted(update.upload.items())))
        assert {n: v.shape for n, v in play.server.items()} == {n: v.shape for n, v in play.initial.items()}
    assert len(forms) == 1


@every_method
def test_models_predict(name: str, net: Net, tiny: Samples) -> None:
    play = Play(make(name), net, tiny)
    play.round()
    shared = play.method.global_model(play.server)
    for model in [play.personal(0), play.personal(1), *([] if shared is None else [shared])]:
        scores = play.method.logits(net, model, tiny.x)
        assert scores.shape == (11, 4)
        assert not torch.isnan(scores).any()
        assert not any(v.requires_grad for v in model.values())


@every_method
def test_a_new_client_may_join_late(name: str, net: Net, tiny: Samples) -> None:
    """Enrolment needs only the initial state; its update fits the server of any later round."""
    play = Play(make(name), net, tiny)
    play.round()
    play.kept[1] = play.method.enroll(play.initial)
    play.round()
    assert all(torch.isfinite(v).all() for v in play.server.values())


@every_method
def test_it_introduces_itself(name: str) -> None:
    cls = METHODS[name]
    assert cls.__doc__
    assert len(cls.__doc__) > 30
    assert any(year in cls.cite for year in ("2017", "2019", "2020", "2021", "2022", "2023"))
    assert all(field.default is not dataclasses.MISSING for field in dataclasses.fields(cls)), (
        "every setting has a default"
    )
