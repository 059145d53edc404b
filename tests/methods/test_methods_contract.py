"""What every method promises the engine; a new method is tested here by being in METHODS."""

from __future__ import annotations

import ast
import dataclasses
import re
from inspect import getsource
from sys import modules

import pytest
import torch

from fednh.data.batches import Samples
from fednh.methods import METHODS, Method
from fednh.models import Net
from fednh.tree import Tree, Uploads, select
from tests.helpers.compare import identical
from tests.helpers.reference import QUICK, Play

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


@pytest.mark.parametrize("method", list(map(make, METHODS)), ids=repr)
def test_it_says_whether_a_round_changes_what_a_client_keeps(method: Method, net: Net, tiny: Samples) -> None:
    play = Play(method, net, tiny)
    before = copied(play.kept[0])
    after = play.round()[0].keep
    if method.training_free:  # of which no personal model is made
        assert after.pop("sent") != before.pop("sent")
    changed = any(name not in before or not torch.equal(before[name], value) for name, value in after.items())
    assert method.kept_is_trained == changed
    assert changed or before.keys() == after.keys()


@every_method
def test_it_introduces_itself(name: str) -> None:
    cls = METHODS[name]
    assert cls.__doc__
    assert len(cls.__doc__) > 30
    assert re.search(r"\b20(17|19|2[0-9])\b", cls.cite)
    assert all(field.default is not dataclasses.MISSING for field in dataclasses.fields(cls)), (
        "every setting has a default"
    )


@every_method
def test_its_file_reads_alone(name: str) -> None:
    """It derives from Method directly, and all that it is written in comes from one place."""
    cls = METHODS[name]
    assert cls.__bases__ == (Method,)
    nodes = ast.walk(ast.parse(getsource(modules[cls.__module__])))
    places = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module is not None}
    stands_on = {"fedprior": {"fednh.methods.fednh"}}.get(name, set())  # the one whose paper it changes
    assert {place for place in places if place.startswith("fednh")} == {"fednh.methods.base", *stands_on}


class Plain(Method):
    """Nothing but the one hook that has no default: every parameter moves by one."""

    def client_update(self, net: Net, kept: Tree, received: Tree, data: object, fit: object) -> tuple[Tree, Tree]:
        model = {name: value + 1 for name, value in received.items()}
        return model, model


def test_the_defaults_send_everything_average_everything_and_evaluate_the_latest_local_model(
    net: Net, tiny: Samples
) -> None:
    play = Play(Plain(), net, tiny)
    identical(play.method.broadcast(play.server), play.initial)
    assert play.kept == [{}, {}]
    identical(play.personal(0), play.initial)  # it has kept nothing yet
    play.round()
    moved = {name: value + 1 for name, value in play.initial.items()}
    identical(play.server, moved)
    play.server = {name: value + 5 for name, value in play.server.items()}
    identical(play.personal(0), moved)  # what it kept, not what it received


def test_the_default_aggregate_leaves_alone_what_nobody_uploads() -> None:
    one, two, nine = torch.tensor(1.0), torch.tensor(2.0), torch.tensor(9.0)
    uploads = Uploads.of(
        [{"body": one}, {"body": two}], rule=lambda trees: max(trees, key=lambda tree: float(tree["body"]))
    )
    identical(Plain().aggregate({"body": nine, "head": nine}, uploads), {"body": two, "head": nine})


OF_RECEIVED = (
    "fedbabu",
    "fedetf",
    "fedprior",
    "fedloge",
    "pfedfda",
    "fedncm",
    "afl",
    "fedcof",
    "fedcgs",
)  # the personal model is made from what is received, not from the last local model


OF_KEPT = ("mrmtl",)  # a client trains a model of its own, of which the mean travels


class Still:
    """`fit` that shows where training starts, and trains nothing."""

    def __init__(self) -> None:
        self.starts: list[Tree] = []

    def __call__(self, params: Tree, loss: object, *, only: object, epochs: object = None, plain: bool = False) -> Tree:
        self.starts.append(params)
        return params

    batchwise = __call__

    def reach(self, epochs: object = None) -> float:
        return 1.0


@every_method
def test_training_starts_from_the_body_received_and_the_personal_model_is_the_one_kept(
    name: str, net: Net, tiny: Samples
) -> None:
    """Of a body that is both kept and received, 1 is kept and 2 received. Where no body travels, it is the kept one."""
    play, method = Play(make(name), net, tiny), make(name)
    kept = play.round()[0].keep
    kept = {n: torch.ones_like(v) if "body" in n else v for n, v in kept.items()}
    received = method.broadcast(play.server)
    received = {n: torch.full_like(v, 2.0) if "body" in n else v for n, v in received.items()}
    travels = bool(select(received, "body")) and name not in OF_KEPT
    fit = Still()
    method.client_update(net, kept, received, play.data[0], fit)
    assert bool(fit.starts) != method.training_free
    start = select(fit.starts[0], "body") if fit.starts else {}
    assert start or method.training_free
    assert all((v == (2.0 if travels else 1.0)).all() for v in start.values())
    model = method.personal_model(net, kept, received, play.data[0], fit)
    expected = 2.0 if name in OF_RECEIVED else 1.0
    assert all((v == expected).all() for v in select(model, "body").values())
