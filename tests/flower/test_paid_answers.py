"""A site under privacy: what it pays, when it refuses, and that a kill at any moment never lets out two answers."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message

from fednh.config import Config, dump
from fednh.federated.architectures import initial_state
from fednh.federated.setup import network
from fednh.flower import client_app, paid_answers
from fednh.flower.audit import SiteEvents
from fednh.flower.client_app import Site
from fednh.flower.protocol import Order, to_tree
from fednh.flower.signing import without_signature
from fednh.io import chain
from fednh.privacy.accounting import epsilon
from fednh.privacy.ledger import Ledger, accounts
from fednh.privacy.plan import PrivacyPlan, make_plan
from tests.helpers.compare import identical
from tests.helpers.counts import count
from tests.helpers.hostile import Scene, config_of, everything, problem, question

DELTA = 1e-5
BUDGET = {"allow.privacy": "sample", "allow.delta": DELTA}


@cache
def plan() -> PrivacyPlan:
    """What a site's answers cost: one step an epoch with all samples, so that it is known in closed form."""
    config = private()
    net, method = network(config, (1, 8, 8), 10), config.build_method()
    made = make_plan(config, method, net, initial_state(method, net, config.seed), config.rounds)
    assert made is not None
    return made


def cost(times: int, firsts: int = 1) -> float:
    """Of so many answers in the rounds 1, 2, ...; the one in round 1 was made so often."""
    return epsilon([*plan().spent([1]) * (firsts - 1), *plan().spent(range(1, times + 1))], DELTA)


def private(**more: Any) -> Config:
    return config_of(**{"privacy.level": "sample", "privacy.noise": 4.0, "privacy.rate": 1.0, **more})


def scene(folder: Path, times: int = 100, **node: Any) -> Scene:
    return Scene(folder, **BUDGET, **{"allow.epsilon": cost(times), **node})


def ledger(place: Scene) -> chain.Log:
    found = chain.read(place.folder / "state/ledger.jsonl")
    assert found.problem is None or found.torn
    return found


def events(place: Scene) -> list[str]:
    return [row["event"] for row in ledger(place).lines]


def upload(reply: Message) -> dict[str, torch.Tensor]:
    assert problem(reply) == ""
    record = reply.content["upload"]
    assert isinstance(record, ArrayRecord)
    return to_tree(record)


FIRST = Order(client=0, round=1)


def test_an_answer_is_paid_and_the_same_order_gets_it_again(tmp_path: Path) -> None:
    place = scene(tmp_path)
    one, two = place.ordered(private(), FIRST), place.ordered(private(), FIRST)
    identical(upload(one), upload(two))
    assert events(place) == ["data", "paid", "stored"]
    assert problem(place.ordered(private(), Order(client=0, round=2, evaluate=1, last=1))) == ""
    (account,) = accounts(ledger(place))
    assert account.epsilon == pytest.approx(cost(2))
    said = two.content["said"]
    assert isinstance(said, ConfigRecord)
    assert (said["epsilon"], said["delta"]) == (pytest.approx(cost(1)), DELTA)


def test_two_deployments_with_one_seed_differ(tmp_path: Path) -> None:
    """Noise and batches are the operating system's: who knows the seed knows nothing of them."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    one, two = (upload(scene(tmp_path / name).ordered(private(), FIRST)) for name in ("a", "b"))
    assert all(not torch.equal(one[name], two[name]) for name in one)


def test_an_order_beyond_the_budget_is_refused_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = scene(tmp_path, times=1)
    place.agreed = agreed(place)
    upload(place.ordered(private(), FIRST))
    before, computed = ledger(place).lines, list[Any]()
    monkeypatch.setattr(Site, "_answer", lambda self, *args: computed.append(args))
    again = problem(place.ordered(private(), Order(client=0, round=2)))
    assert place.asked(private()) == again
    assert place.asked(private()) == (
        "refused: its privacy budget is spent: another answer would bring its samples to "
        f"epsilon {cost(1, firsts=2):.3g} at delta 1e-05, and its owner allows {cost(1):g} "
        "(allow.epsilon of its site.toml)"
    )
    assert computed == []
    assert ledger(place).lines == before


def test_nothing_but_the_upload_leaves(tmp_path: Path) -> None:
    place = scene(tmp_path)
    place.ordered(private(), FIRST)
    later = Order(client=0, round=2, evaluate=1, last=1)
    reply = place.ordered(private(), later)
    assert set(reply.content) == {"said", "facts", "upload", "seal"}
    assert set(reply.content["facts"]) == {"client", "round"}
    assert set(reply.content["said"]) == {"format", "epsilon", "delta", "ledger", "audit"}
    last = place.ordered(private(), Order(client=0, evaluate=2, last=2, final=True))
    assert set(last.content) == {"said", "facts", "seal"}, everything(last)
    assert events(place).count("paid") == 2


@pytest.mark.parametrize(
    ("rule", "asked", "words"),
    [
        ({"allow.privacy": "sample"}, {}, "privacy.level = 'none' is not the 'sample' that this site asks for"),
        (
            {"allow.privacy": "sample"},
            {"privacy.level": "client", "privacy.noise": 4.0},
            "'client' is not the 'sample'",
        ),
    ],
)
def test_less_privacy_than_the_owner_asks_for_is_refused(
    rule: dict[str, Any], asked: dict[str, Any], words: str, tmp_path: Path
) -> None:
    assert words in Scene(tmp_path, **rule, **{"allow.epsilon": 8.0}).asked(config_of(**asked))


def test_a_site_that_asks_for_no_level_keeps_the_account_all_the_same(tmp_path: Path) -> None:
    place = Scene(tmp_path)
    upload(place.ordered(private(), FIRST))
    assert events(place) == ["data", "paid", "stored"]


# --- kills -----------------------------------------------------------------------------------------------------------


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before(kind: Any, name: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(kind, name, die)


def after(kind: Any, name: str) -> Callable[[pytest.MonkeyPatch], None]:
    work = getattr(kind, name)

    def done(*args: Any, **more: Any) -> None:
        work(*args, **more)
        die()

    return lambda patch: patch.setattr(kind, name, done)


MOMENTS = {
    "before it is paid": (before(Ledger, "pay"), 0),
    "when it is paid": (after(Ledger, "pay"), 1),
    "while it computes": (before(client_app.clients, "private_update"), 1),
    "when its state is saved": (after(Site, "_save_state"), 1),
    "before it is stored": (before(paid_answers, "_write"), 1),
    "when its file is there": (before(Ledger, "stored"), 1),
    "when it is stored": (after(Ledger, "stored"), 1),
    "before it is logged": (before(SiteEvents, "left"), 1),
    "when it is logged": (after(SiteEvents, "left"), 1),
    "before it is sent": (before(client_app.signing, "sign_reply"), 1),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_at_any_moment_spends_once_and_lets_out_one_answer(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, order = scene(tmp_path), Order(client=0, round=2, evaluate=1, last=1)
    upload(place.ordered(private(), FIRST))
    patch, paid = MOMENTS[moment]

    def killed() -> None:
        patch(monkeypatch)  # in the fork alone
        place.ordered(private(), order)

    place.agreed = agreed(place)
    child = get_context("fork").Process(target=killed)
    child.start()
    child.join(120)
    assert child.exitcode == -signal.SIGKILL
    assert events(place).count("paid") == 1 + paid
    stored = sorted((tmp_path / "state").rglob("answer.round-000002.*"))
    again = upload(place.ordered(private(), order))
    if moment in ("when it is stored", "before it is logged", "when it is logged", "before it is sent"):
        identical(again, client_app.read_tree(stored[0]))  # it might have left: no other one may
    identical(again, upload(place.ordered(private(), order)))
    assert (events(place).count("paid"), events(place).count("stored")) == (2, 2)
    assert accounts(ledger(place))[0].epsilon == pytest.approx(cost(2))
    count("kills survived")


def agreed(place: Scene, config: Config | None = None) -> Any:
    hello = place.deliver(place.signed(question(dump(config or private()))))
    return client_app.Hello.read(without_signature(hello.content)).task


def test_a_stored_answer_that_is_lost_or_changed_is_paid_again(tmp_path: Path) -> None:
    place = scene(tmp_path)
    first = upload(place.ordered(private(), FIRST))
    (file,) = (tmp_path / "state").rglob("answer.round-*")
    file.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\0")
    second = upload(place.ordered(private(), FIRST))
    assert any(not torch.equal(first[name], second[name]) for name in first)
    assert accounts(ledger(place))[0].epsilon == pytest.approx(cost(1, firsts=2))
    identical(second, upload(place.ordered(private(), FIRST)))


# --- the ledger that others know of ----------------------------------------------------------------------------------


def test_a_ledger_that_the_audit_log_knows_cannot_be_deleted_or_set_back(tmp_path: Path) -> None:
    place, file = scene(tmp_path), tmp_path / "state/ledger.jsonl"
    upload(place.ordered(private(), FIRST))
    old = file.read_bytes()
    upload(place.ordered(private(), Order(client=0, round=2, last=1)))
    whole = file.read_bytes()
    place.agreed = agreed(place)
    for content in (b"", old):
        file.write_bytes(content)
        reply = place.ordered(private(), Order(client=0, round=3, last=2))
        assert "its ledger of what was released is damaged, lost or an old copy" in problem(reply)
        assert str(file) not in everything(reply)
    file.unlink()
    assert "nothing more is released" in place.asked(private())
    log = [json.loads(line) for line in (tmp_path / "state/audit/a.jsonl").read_text().splitlines()]
    assert str(file) in log[-1]["why"]
    file.write_bytes(whole)
    upload(place.ordered(private(), Order(client=0, round=3, last=2)))


def test_a_folder_of_state_from_a_backup_is_known_by_what_the_server_has_heard(tmp_path: Path) -> None:
    place = scene(tmp_path)
    first = place.ordered(private(), FIRST)
    place.agreed = agreed(place)
    heard = str(first.content["said"]["ledger"])  # type: ignore[index]
    for path in [tmp_path / "state/ledger.jsonl", *(tmp_path / "state").rglob("*.jsonl")]:
        path.unlink(missing_ok=True)
    reply = place.ordered(private(), Order(client=0, round=2, last=1, ledger=heard))
    assert "damaged, lost or an old copy" in problem(reply)


def test_two_folders_with_one_ledger_share_the_budget(tmp_path: Path) -> None:
    """Folders of two sites with the same rows, in files of other names."""
    rows = np.random.default_rng(3).integers(0, 256, (40, 4, 4, 1), np.uint8)
    shared = tmp_path / "ledger.jsonl"
    places = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        arrays = {"x_train": rows, "y_train": np.arange(40) % 2, "site_train": np.array(["a"] * 40)}
        np.savez(tmp_path / name / f"{name}.npz", **arrays)
        own = {"data": f"npz:{tmp_path}/{name}/{name}.npz", "ledger": str(shared)}
        places.append(scene(tmp_path / name, times=1, **own))
    upload(places[0].ordered(OWN, FIRST))
    assert "privacy budget is spent" in places[1].asked(OWN)


OWN = private(**{"data.name": "own", "model.name": "mlp", "data.classes": ["0", "1"]})


def test_two_folders_of_one_site_do_not_use_one_payment_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same order of two servers while the first answer is computed: each has noise of its own, so each is paid."""
    rows, shared, places = np.random.default_rng(3).integers(0, 256, (40, 4, 4, 1), np.uint8), tmp_path / "l.jsonl", []
    np.savez(tmp_path / "x.npz", x_train=rows, y_train=np.arange(40) % 2, site_train=np.array(["a"] * 40))
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        places.append(scene(tmp_path / name, data=f"npz:{tmp_path}/x.npz", ledger=str(shared)))
        places[-1].agreed = agreed(places[-1], OWN)
    work = client_app.clients.private_update

    def answer_other() -> None:
        client_app.clients.private_update = work  # in the fork alone
        upload(places[1].ordered(OWN, FIRST))

    other = get_context("fork").Process(target=answer_other)

    def slow(*args: Any, **more: Any) -> Any:
        other.start()
        other.join(3)  # it waits for the payment that is in use
        return work(*args, **more)

    monkeypatch.setattr(client_app.clients, "private_update", slow)
    upload(places[0].ordered(OWN, FIRST))
    other.join(120)
    assert other.exitcode == 0
    assert [row["event"] for row in chain.read(shared).lines] == ["data", "paid", "stored", "paid", "stored"]


def test_classes_that_the_config_does_not_list_are_refused(tmp_path: Path) -> None:
    """A single sample may have the highest label: how many classes there are depends on it."""
    rows = np.random.default_rng(3).integers(0, 256, (40, 4, 4, 1), np.uint8)
    np.savez(tmp_path / "x.npz", x_train=rows, y_train=np.arange(40) % 2, site_train=np.array(["a"] * 40))
    place = scene(tmp_path, data=f"npz:{tmp_path}/x.npz")
    assert "list all classes in data.classes" in place.asked(private(**{"data.name": "own", "model.name": "mlp"}))
    assert place.asked(OWN) == ""


def test_a_state_that_was_made_without_noise_is_not_used_under_privacy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SCAFFOLD's upload has the control variate in it that the client has kept."""
    place, seen, work = Scene(tmp_path), list[Any](), client_app.clients.private_update

    def look(method: Any, net: Any, kept: Any, *args: Any, **more: Any) -> Any:
        seen.append(kept)
        return work(method, net, kept, *args, **more)

    monkeypatch.setattr(client_app.clients, "private_update", look)
    upload(place.ordered(config_of(**{"method.name": "scaffold"}), FIRST))
    place.nodes[11] |= {**BUDGET, "allow.epsilon": 1e6}
    wanted = private(**{"method.name": "scaffold"})
    for round_ in (2, 3):
        upload(place.ordered(wanted, Order(client=0, round=round_, last=round_ - 1)))
    control = [sum(float(value.abs().sum()) for name, value in kept.items() if "c_i" in name) for kept in seen]
    assert control[0] == 0, "as of a newcomer"
    assert control[1] > 0, "of the private round before"
