"""Uploads that are finite and of the right form, and would void the round: refused, named, counted, and told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict

from fednh.backends import threads
from fednh.config import Config
from fednh.data.batches import ClientData
from fednh.errors import RunError
from fednh.federated import checks
from fednh.federated.setup import build_federation
from fednh.flower import protocol
from fednh.flower.admission import agree
from fednh.flower.protocol import Task, to_arrays, to_tree
from fednh.io.files import read_tree
from fednh.methods import Method
from fednh.methods.fednh import FedNH
from fednh.methods.fit import Fit
from fednh.models import Net
from fednh.runs.run_folder import RunFolder
from fednh.tree import Tree
from tests.helpers.callbacks import Recorder
from tests.helpers.config import small
from tests.helpers.federation import divided, federate, serve, server_identity, travelled

Change = Callable[[Tree], Tree]


def times(factor: float, *names: str) -> Change:
    """These parts of the upload so many times; without names, all but the prototypes."""
    return lambda tree: {
        n: v * factor if n in names or not (names or n == "prototypes") else v for n, v in tree.items()
    }


def hostile(change: Change, rounds: tuple[int, ...] = (1, 2, 3), nodes: tuple[int, ...] = (1001,)) -> Any:
    """Sites that upload what `change` makes of their honest upload."""

    def tamper(node: int, request: Message, reply: Message) -> Message:
        train = request.metadata.message_type == "train" and int(request.metadata.group_id) in rounds
        if node in nodes and train:
            reply.content["upload"] = to_arrays(change(to_tree(reply.content["upload"])))
        return travelled(reply)

    return tamper


def sites(number: int, **more: object) -> Any:
    settings = {"partition.clients": number, "participation.rate": 1.0, "eval.every": 0, **more}
    return small("fednh", **{"partition.name": "iid", **settings})


ATTACKS: dict[str, tuple[Change, str]] = {
    "1e30": (times(1e30), "times as long as the median of the round"),
    "ten thousand times": (times(10_000), "its step is"),
    "prototypes": (times(1e30, "prototypes"), "a prototype has length"),
    "long prototypes": (times(1.5, "prototypes"), "and a mean of unit vectors is no longer than 1"),
}


@pytest.mark.parametrize(
    "attack",
    [each if each in ("1e30", "prototypes") else pytest.param(each, marks=pytest.mark.soak) for each in ATTACKS],
)
def test_one_long_upload_is_refused_and_the_others_are_used(attack: str, tmp_path: Path) -> None:
    """In every round; the model is, to the bit, the one of a federation in which that site never answered."""
    change, words = ATTACKS[attack]
    config = sites(4, rounds=2)
    _, watcher = federate(config, tmp_path / "attacked", hostile(change))
    assert [(r["clients"], r["refused"]) for r in watcher.records] == [([0, 2, 3], [1])] * 2
    told = [note for note in watcher.notes if "client 1" in note]
    assert len(told) == 2
    assert all("the upload of site client-000001 (client 1) was refused: " in note and words in note for note in told)

    def silent(node: int, request: Message, reply: Message) -> Message | None:
        return None if node == 1001 and request.metadata.message_type == "train" else reply

    federate(config, tmp_path / "silent", silent)
    one, other = (read_tree(tmp_path / run / "models" / "global.safetensors") for run in ("attacked", "silent"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_of_two_sites_the_long_one_is_refused_and_the_run_says_so(tmp_path: Path) -> None:
    """One upload is left and federation.min_clients is 2: such rounds are given up, and the run fails at its end."""
    with pytest.raises(RunError, match=r"2 of 3 rounds changed nothing \(round 2, 3\)"):
        federate(sites(2), tmp_path, hostile(times(1e30), rounds=(2, 3)))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(r["clients"], r["refused"]) for r in lines] == [([0, 1], []), ([], [1]), ([], [1])]
    assert [("lost" in r) for r in lines] == [False, True, True]
    assert json.loads((tmp_path / "summary.json").read_text())["lost"] == [2, 3]
    states = sorted(path.name for path in (tmp_path / "fed/state").rglob("state.round-*"))
    assert states  # the sites go on from round 1 when they are asked again: nothing of a lost round counts
    first = read_tree(tmp_path / "models" / "global.safetensors")
    federate(sites(2, rounds=1), tmp_path / "once")
    once = read_tree(tmp_path / "once" / "models" / "global.safetensors")
    assert all(torch.equal(first[name], once[name]) for name in first)


def test_a_round_below_min_clients_is_given_up(tmp_path: Path) -> None:
    """Two of four fail in round 2, and federation.min_clients is 3; a misfit is no site to count on either."""
    config = sites(4, **{"federation.min_clients": 3})

    def tamper(node: int, request: Message, reply: Message) -> Message | None:
        lost = node in (1001, 1002) and request.metadata.message_type == "train" and request.metadata.group_id == "2"
        return None if lost else reply

    with pytest.raises(RunError, match="1 of 3 rounds changed nothing"):
        federate(config, tmp_path, tamper)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [r["clients"] for r in lines] == [[0, 1, 2, 3], [], [0, 1, 2, 3]]
    assert (
        "round 2 is given up: 2 uploads can be used, and federation.min_clients = 3"
        in (tmp_path / "federation.log").read_text()
    )


def test_too_few_sites_are_waited_for_and_then_not_asked(tmp_path: Path) -> None:
    """Two of three nodes are gone after round 1: the one that is left is not asked to train alone."""
    config = sites(3, rounds=2)
    wire = divided(config, tmp_path)

    def leave(node: int, request: Message, reply: Message) -> Message:
        if request.metadata.group_id == "1" and node == 1002:
            del wire.nodes[1001], wire.nodes[1002]
        return reply

    wire.tamper = leave
    with pytest.raises(RunError, match="1 of 2 rounds changed nothing"):
        serve(config, wire, tmp_path / "run", server_identity(tmp_path / "fed"))
    asked = [(q.metadata.message_type, q.metadata.group_id) for q, _ in wire.seen]
    assert asked.count(("train", "2")) == 0


def test_uploads_that_change_nothing(tmp_path: Path) -> None:
    """Every site sends back what it received: nothing is wrong with any upload, and the round is told as lost."""
    config = small("fedavg", rounds=1, **{"partition.clients": 2, "participation.rate": 1.0, "train.lr": 1e-30})
    with pytest.raises(RunError, match="1 of 1 rounds changed nothing"):
        federate(config, tmp_path)
    assert "the uploads change nothing" in (tmp_path / "federation.log").read_text()


def test_misfits_do_not_begin_a_federation(tmp_path: Path) -> None:
    """Two sites that fit are needed. One that does not is there first; the third that fits comes later."""
    config = small("fedavg", rounds=1, **{"partition.clients": 3, "participation.rate": 1.0})
    wire = divided(config, tmp_path)
    third = wire.nodes.pop(1002)

    def tamper(node: int, request: Message, reply: Message) -> Message:
        if node == 1001:
            reply.content["said"]["task"] = reply.content["said"]["task"].replace('"9"', '"nine"')  # type: ignore
            wire.nodes[1002] = third
        return travelled(reply)

    wire.hostile = tamper
    watcher = serve(config, wire, tmp_path / "run", server_identity(tmp_path / "fed"), enough=2)
    assert watcher.records[0]["clients"] == [0, 2]
    assert any("cannot take part: its classes are" in note for note in watcher.notes)


# --- the rule by hand ----------------------------------------------------------------------------------------------


def test_lengths_by_hand() -> None:
    server = {"body": torch.tensor([1.0, 1.0]), "scale": torch.tensor(2.0)}
    upload = {"body": torch.tensor([4.0, 5.0]), "scale": torch.tensor(2.0), "change.a": torch.tensor([1e30])}
    assert checks.norms(upload, server) == {"step": 5.0, "change": pytest.approx(1e30)}


@pytest.mark.parametrize(
    ("rows", "before", "refused"),
    [
        ([1.0, 2.0, 3.0, 31.0], 0.0, [3]),  # the lower median is 2, and 20 the most
        ([1.0, 2.0, 3.0, 19.0], 0.0, []),
        ([0.001, 0.002, 0.003, 1.0], 0.5, []),  # steps were longer before
        ([0.001, 0.002, 0.003, 6.0], 0.5, [3]),
        ([1.0, 99.0], 0.0, []),  # of two: a hundred times
        ([1.0, 101.0], 0.0, [1]),
        ([0.0, 0.0, 7.0], 0.0, []),  # who does nothing says nothing
        ([1e30], 0.0, []),
    ],
)
def test_who_is_refused_by_hand(rows: list[float], before: float, refused: list[int]) -> None:
    uploads = {k: {"step": row} for k, row in enumerate(rows)}
    usual = checks.typical_norms(uploads, {"step": before})
    assert list(checks.norm_problems(uploads, {}, usual, 10.0)) == refused


def test_a_jump_away_from_its_own_past() -> None:
    """0.1 until now and 2 today, where 1 is usual: refused; 0.9 would not be longer than usual."""
    for now, refused in ((2.0, [0]), (0.9, [])):
        uploads = {0: {"step": now}, 1: {"step": 1.0}, 2: {"step": 1.1}}
        past = {0: [{"step": 0.1}] * 5, 1: [{"step": 1.0}] * 5}
        assert list(checks.norm_problems(uploads, past, {"step": 1.0}, 10.0)) == refused


def test_the_simulator_takes_the_same_rule_and_leaves_honest_numbers_alone(tmp_path: Path) -> None:
    """With `bound` an honest run has the same bits as without; a client that uploads 1e30 is refused."""
    config = sites(4, rounds=2)
    bounded = config.model_copy(update={"bound": 10.0})
    honest = [simulated(each, tmp_path / f"{k}") for k, each in enumerate((config, bounded))]
    assert all(torch.equal(honest[0][1][name], honest[1][1][name]) for name in honest[0][1])
    watcher, _ = simulated(bounded, tmp_path / "attacked", Hostile())
    assert [(r["clients"], r["refused"]) for r in watcher.records] == [([0, 2, 3], [1])] * 2
    assert "the upload of client 1 was refused: its step is" in watcher.notes[0]


class Sleeper(FedNH):
    """Client 1 uploads a hundredth of its step in the first round and four times its step in the second."""

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        keep, upload = super().client_update(net, kept, received, data, fit)
        _, round_, client = data._address
        if client == 1:
            factor = {1: 0.01, 2: 4.0}[round_]
            upload = {n: received[n] + factor * (v - received[n]) if n in received else v for n, v in upload.items()}
        return keep, upload


def test_the_loop_remembers_how_long_a_clients_uploads_were(tmp_path: Path) -> None:
    """Four times the usual step is within the bound of ten, but four hundred times what the client took before."""
    config = sites(4, rounds=2).model_copy(update={"bound": 10.0})
    watcher, _ = simulated(config, tmp_path / "run", Sleeper())
    assert [r["refused"] for r in watcher.records] == [[], [1]]
    assert "times as long as what it uploaded before" in watcher.notes[0]


class Hostile(FedNH):
    """Client 1 uploads 1e30."""

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        keep, upload = super().client_update(net, kept, received, data, fit)
        return keep, times(1e30)(upload) if data._address[2] == 1 else upload


def simulated(config: Config, path: Path, method: Method | None = None) -> tuple[Recorder, Tree]:
    federation, watcher = build_federation(config), Recorder()
    if method is not None:
        federation = federation.with_method(method)
    with RunFolder(path) as folder:
        folder.begin(config, federation.dataset.classes, federation.class_counts(), federation.sites)
        threads.make_run(config, federation, folder, watcher).run()
    return watcher, read_tree(path / "models" / "global.safetensors")


# --- what sites agree on -------------------------------------------------------------------------------------------


def task(mean: float, std: float) -> Task:
    return Task(
        data="own",
        divided=False,
        shape=(3, 8, 8),
        classes=("a", "b"),
        scale=255.0,
        mean=(mean,) * 3,
        std=(std,) * 3,
        preprocessing="{}",
    )


def test_one_lie_about_the_data_moves_nothing_far() -> None:
    """Of three and more the median: what one of them says alone does not matter. Of two, the average."""
    honest = [task(0.4, 0.2), task(0.5, 0.3)]
    lie = task(1e29, 1e-29)
    assert agree([*honest, lie]).mean == (0.5,) * 3
    assert agree([*honest, lie]).std == (pytest.approx(0.3),) * 3  # 0.2 at a distance of 0.1, and 0.3, and the lie
    assert agree(honest).mean == (pytest.approx(0.45),) * 3
    same = [task(0.1, 0.3)] * 3
    assert agree(same) == same[0]


@pytest.mark.parametrize("std", [0.0, -1.0])
def test_a_site_refuses_an_agreement_without_a_deviation(std: float) -> None:
    """A site may say that a feature is constant there (0) or missing (-1); an agreed deviation is positive."""
    said = task(0.4, std)
    assert Task.read(said.text()) == said
    order = RecordDict({"config": ConfigRecord({"format": protocol.FORMAT, "toml": "", "task": said.text()})})
    with pytest.raises(ValueError, match=f"the agreed deviation {std} is not positive"):
        protocol.read_config(order)
    with pytest.raises(ValueError, match=r"the deviation -2\.0 is not positive"):
        Task.read(task(0.4, -2.0).text())
