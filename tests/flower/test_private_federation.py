"""Federations under privacy.level = "sample": what leaves a site is in its account, which stays within the budget."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Message

from fednh.flower import client_app
from fednh.flower.admission import Member
from fednh.flower.protocol import Order, to_tree
from fednh.flower.server_app import Sites
from fednh.io import chain
from fednh.methods import METHODS
from fednh.privacy.ledger import Balance, accounts
from tests.helpers.config import small
from tests.helpers.federation import divided, serve, server_identity
from tests.helpers.hostile import Scene, config_of, problem
from tests.privacy.test_private_round import REFUSED
from tests.privacy.test_walk import DROWNING, STEPS, Loud

# --- a walk through every record of every message ---------------------------------------------------------------------


def walked(folder: Path, part: int, method: str) -> list[dict[str, Any]]:
    """What a site with this part of the samples says to a query and in three rounds, but for hashes with salt."""
    folder.mkdir()
    place = Scene(folder, **{"partition-id": part, "allow.counts": True})
    config = config_of(**{"method.name": method, "privacy.level": "sample", "privacy.noise": 4.0, "rounds": 3})
    orders = [Order(client=0, round=1), *(Order(client=0, round=r, evaluate=r - 1, last=r - 1) for r in (2, 3))]
    replies = [place.ordered(config, each) for each in (*orders, Order(client=0, evaluate=3, last=3, final=True))]
    return [told(reply) for reply in replies]


def told(reply: Message) -> dict[str, Any]:
    assert problem(reply) == ""
    found = dict[str, Any]()
    for name, record in reply.content.items():
        if name == "seal":  # of the site's key, over all that is here
            continue
        if isinstance(record, ArrayRecord):
            found |= {f"{name}.{key}": value for key, value in to_tree(record).items()}
            continue
        salted = {key: str(value).partition(":")[0] for key, value in record.items() if key in ("audit", "ledger")}
        found |= {f"{name}.{key}": value for key, value in {**record, **salted}.items()}
    return found


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    def same(name: str) -> bool:
        mine, theirs = one[name], other[name]
        if isinstance(mine, torch.Tensor):
            return torch.equal(mine.nan_to_num(nan=-1.0), theirs.nan_to_num(nan=-1.0))
        return bool(mine == theirs)

    return [*(one.keys() ^ other.keys()), *(name for name in one.keys() & other.keys() if not same(name))]


@pytest.fixture
def drowned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sites whose noise drowns all that it is added to, to the last bit; and the same noise for all of them."""
    work = client_app.clients.private_update

    def loud(method: Any, net: Any, kept: Any, down: Any, data: Any, *_: Any, **more: Any) -> Any:
        return work(method, net, kept, down, data, STEPS, DROWNING, Loud(1), **more)

    monkeypatch.setattr(client_app.clients, "private_update", loud)
    monkeypatch.setattr(client_app, "covers", lambda paid, released: True)  # with other multipliers


SOME = ("fednh", "scaffold", "fedncm", "fedrod", "ditto")
EVERY = [
    pytest.param(name, marks=[] if name in SOME else [pytest.mark.soak])
    for name in sorted(METHODS.keys() - REFUSED - {"local"})
]


@pytest.mark.parametrize("method", EVERY)
def test_no_record_of_any_message_depends_on_samples_but_through_noise(
    method: str, drowned: None, tmp_path: Path
) -> None:
    """Two sites with other samples, of other classes and another number, say the same, to the last bit."""
    one, other = (walked(tmp_path / str(part), part, method) for part in (0, 1))
    assert any(name.startswith("upload.") for name in one[0])
    for mine, theirs in zip(one, other, strict=True):
        assert differing(mine, theirs) == []
        names = {name for name in mine if not name.startswith("upload.")}
        assert names <= {f"said.{key}" for key in ("format", "epsilon", "delta", "ledger", "audit")} | {
            "facts.client", "facts.round",
        }  # fmt: skip


def test_the_walk_finds_what_leaks(drowned: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_app.Answer, "upload_alone", lambda self: self)
    one, other = (walked(tmp_path / str(part), part, "fedavg") for part in (0, 1))
    assert {name for mine, theirs in zip(one, other, strict=True) for name in differing(mine, theirs)} >= {
        "figures.samples"
    }


# --- whole federations ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("secure", [False, True])
def test_a_federation_ends_within_the_budget_that_it_was_planned_for(secure: bool, tmp_path: Path) -> None:
    """Ten rounds of which the first has no gradients: what is released once is paid once, whenever it is asked for."""
    config = small(
        "fednh",
        **{
            "partition.clients": 2,
            "participation.rate": 1.0,
            "rounds": 10,
            "eval.every": 5,
            "method.head_init": "means",
        },
        **{"privacy.level": "sample", "privacy.epsilon": 8.0, "privacy.rate": 1.0, "federation.secure": secure},
    )
    wire = divided(config, tmp_path)
    for node in wire.nodes.values():
        node |= {"allow.privacy": "sample", "allow.epsilon": 8.0}
    serve(config, wire, tmp_path, identity=server_identity(tmp_path / "fed"))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["clients"] for row in rows] == [[0, 1]] * 10
    (ledger,) = tmp_path.rglob("ledger.jsonl")
    found = accounts(chain.read(ledger))
    assert [account.epsilon for account in found] == [pytest.approx(rows[-1]["epsilon"])] * 2
    assert 7 < rows[-1]["epsilon"] <= 8


def test_the_server_remembers_the_newest_line_of_a_ledger_that_it_has_heard_of() -> None:
    """A stored answer that is sent again says an older one."""
    member = Member(0, "a")
    server = SimpleNamespace(membership=SimpleNamespace(members={0: member}))
    for line in (3, 7, 5):
        balance = Balance(1.0, 1e-5, chain.Head(line, f"{line}" * 64))
        Sites._heard(server, 0, balance)  # type: ignore[arg-type]
    assert member.ledger == f"7:{'7' * 64}"
