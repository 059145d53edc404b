"""Sites that are late, wrong, lost or new, and a server that is started again: the federation ends, and says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from fednh.errors import RunError
from fednh.flower import signing
from fednh.flower.protocol import FORMAT, to_arrays, to_tree
from fednh.flower.transport import GREETING, Request
from fednh.io.files import read_tree
from fednh.runs.model_file import read_outcomes
from tests.helpers.compare import identical, same_runs
from tests.helpers.config import small
from tests.helpers.federation import (
    Wire,
    collect_models,
    deployed,
    divided,
    federate,
    own_sites,
    serve,
    server_identity,
)
from tests.helpers.process import fednh
from tests.helpers.simulator import simulate


def upload_of(reply: Message) -> dict[str, torch.Tensor]:
    return to_tree(reply.content["upload"])


def nan(reply: Message) -> None:
    reply.content["upload"] = to_arrays({n: v * torch.nan for n, v in upload_of(reply).items()})


def wrong_shape(reply: Message) -> None:
    reply.content["upload"] = to_arrays({n: v[None] for n, v in upload_of(reply).items()})


def missing_name(reply: Message) -> None:
    reply.content["upload"] = to_arrays(dict(list(upload_of(reply).items())[1:]))


def personal_beside(reply: Message) -> None:
    reply.content["personal"] = to_arrays({"head.weight": torch.zeros(2)})


def another_round(reply: Message) -> None:
    facts = reply.content["facts"]
    assert isinstance(facts, MetricRecord)
    facts["round"] = 1


def no_arrays(reply: Message) -> None:
    upload = reply.content["upload"]
    assert isinstance(upload, ArrayRecord)
    for array in upload.values():
        array.data = b"nonsense"


def nothing(reply: Message) -> None:
    reply.content = RecordDict()


def sorry(reply: Message) -> None:
    reply.content = RecordDict({"said": ConfigRecord({"format": FORMAT, "problem": "the disk\nis full"})})


def crashed(reply: Message) -> None:
    reply.__dict__.update(_content=None, _error=Error(2, "the app raised an exception"))


WRONG: dict[Callable[[Message], None], tuple[str, str]] = {
    nan: ("refused", "the upload of site client-000001 (client 1) is not finite and was refused"),
    wrong_shape: ("refused", "is (1, 16) torch.float32, not (16,) torch.float32"),
    missing_name: ("refused", "is missing"),
    personal_beside: ("refused", "personal, which nobody asked for"),
    another_round: ("refused", "it is for client 1 and round 1"),
    no_arrays: ("refused", "its arrays cannot be read"),
    nothing: ("refused", "it has no ConfigRecord 'said'"),
    sorry: ("failed", "the disk is full"),
    crashed: ("failed", "the app raised an exception"),
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_a_wrong_answer_is_refused_and_told(wrong: Callable[[Message], None], tmp_path: Path) -> None:
    """Client 1 answers wrongly in round 2 of 3: the others go on, and it is taken again in round 3."""
    config = small("fedavg", **{"partition.clients": 3, "participation.rate": 1.0})

    def tamper(node: int, request: Message, reply: Message) -> Message:
        if node == 1001 and request.metadata.message_type == "train" and request.metadata.group_id == "2":
            wrong(reply)
        return reply

    _, watcher = federate(config, tmp_path, tamper)
    kind, words = WRONG[wrong]
    rounds = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [r["clients"] for r in rounds] == [[0, 1, 2], [0, 2], [0, 1, 2]]
    assert [r[kind] for r in rounds] == [[], [1], []]
    (told,) = [note for note in watcher.notes if "client 1" in note]
    assert told.startswith("round 2: ")
    assert words in told
    assert told in [json.loads(line)["text"] for line in (tmp_path / "federation.log").read_text().splitlines()]
    assert (tmp_path / "models" / "global.safetensors").exists()


def test_a_state_that_is_not_finite_is_not_kept_and_the_server_refuses_the_upload(tmp_path: Path) -> None:
    """One step of Local with an absurd weight decay: the loss is computed before it, and nothing is uploaded."""
    one_step = {"train.batch_size": 2000, "train.weight_decay": 1e38, "train.lr": 1e3, "train.clip": 0.0, "rounds": 2}
    config = small("local", **{"partition.clients": 3, "participation.rate": 1.0, "eval.every": 0, **one_step})
    with pytest.raises(RunError, match="2 of 2 rounds changed nothing"):
        federate(config, tmp_path)
    rounds = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(r["clients"], r["refused"]) for r in rounds] == [([], [0, 1, 2])] * 2
    notes = (tmp_path / "federation.log").read_text().splitlines()
    assert any("the upload of site client-000002 (client 2) is not finite and was refused" in note for note in notes)
    assert list(tmp_path.rglob("state.round-*")) == []


def test_who_does_not_answer_is_left_out_and_late_answers_are_refused(tmp_path: Path) -> None:
    config = small("fedavg", **{"partition.clients": 3, "participation.rate": 1.0})
    held: list[Message] = []

    def tamper(node: int, request: Message, reply: Message) -> Message | None:
        if node == 1002 and request.metadata.message_type == "train" and request.metadata.group_id == "1":
            held.append(reply)
            return None
        return reply

    wire = divided(config, tmp_path, hostile=tamper)
    pull = wire.pull_messages

    def pull_with_late(ids: list[str]) -> list[Message]:
        asked = any(request.metadata.group_id == "2" for request, _ in wire.seen)
        late = [held.pop() for _ in list(held) if asked]
        return [*pull(ids), *late]

    wire.pull_messages = pull_with_late  # type: ignore[method-assign, assignment]
    watcher = serve(config, wire, tmp_path / "run", server_identity(tmp_path / "fed"))
    first, second, _ = (json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert first["clients"] == [0, 1]
    assert first["dropped"] == [2]
    assert second["clients"] == [0, 1, 2]
    assert any("did not answer in 0.2 s" in note for note in watcher.notes)
    assert any(note == "round 1: site client-000002 (client 2) answered too late; refused" for note in watcher.notes)


@pytest.mark.parametrize("method", ["fednh", "ditto"])
def test_a_killed_server_goes_on_and_ends_as_if_nothing_had_happened(method: str, tmp_path: Path) -> None:
    """Killed after sites have done round 3 and before anybody saved it: their states of that round are not used."""
    config = small(method, rounds=4, **{"checkpoint.every": 1, "eval.every": 1})
    simulate(config, tmp_path / "simulator")

    class Killed(BaseException):
        pass

    def kill(node: int, request: Message, reply: Message) -> Message:
        if request.metadata.group_id == "3" and len([1 for q, _ in wire_of[0].seen if q.metadata.group_id == "3"]) == 2:
            raise Killed
        return reply

    out = tmp_path / "flower"
    wire_of = [divided(config, out, hostile=kill)]
    with pytest.raises(Killed):
        serve(config, wire_of[0], out, server_identity(out / "fed"))
    renamed = {node + 50: place for node, place in wire_of[0].nodes.items()}  # nodes come back under other ids
    watcher = serve(config, Wire(renamed), out, server_identity(out / "fed"))
    collect_models(out)
    assert "going on after round 2" in watcher.notes
    same_runs(tmp_path / "simulator", out)


def test_an_order_that_comes_twice_gives_the_same_answer(tmp_path: Path) -> None:
    config = small("ditto", **{"eval.every": 1})
    federate(config, tmp_path / "once")

    def twice(node: int, request: Message, reply: Message) -> Message:
        data = request.metadata
        site = "" if data.message_type == "query" else wire_of[0].nodes[node]["site"]
        same = Request(node, data.message_type, GREETING, round=int(data.group_id), site=site)
        _, sealed = identity.sign(same, signing.without_signature(request.content))  # with the next number
        again = Message(sealed, node, data.message_type, ttl=60.0, group_id=data.group_id)
        again.metadata.__dict__["_message_id"] = data.message_id
        again = wire_of[0].deliver(node, again)
        if "upload" in reply.content:
            identical(upload_of(reply), upload_of(again))
        assert again.content.get("figures") == reply.content.get("figures")
        return again

    out = tmp_path / "twice"
    wire_of, identity = [divided(config, out, hostile=twice)], server_identity(out / "fed")
    serve(config, wire_of[0], out, identity)
    collect_models(out)
    same_runs(tmp_path / "once", out)


def test_sites_with_data_of_their_own(tmp_path: Path) -> None:
    """Numbers by name; personal models on the sites' disks; one line of normalisation for all; a test set gives GM."""
    own_sites(tmp_path, {"method.name": "fedper"})
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [row["site"] for row in summary["sites"]] == ["a", "b", "c"]
    assert summary["gm"] is not None
    assert summary["pm_v"] is None
    assert summary["held_share"] == pytest.approx(sum(row["held_share"] for row in summary["clients"]) / 3)
    models = sorted((tmp_path / "state" / "own").glob("*/personal.safetensors"))
    assert [path.parent.name for path in models] == ["a", "b", "c"]
    heads = [read_tree(path)["head.weight"] for path in models]
    assert not torch.equal(heads[0], heads[1])
    assert json.loads((tmp_path / "run" / "partition.json").read_text())["counts"] == []


def test_what_became_of_single_samples_stays_with_the_site(tmp_path: Path) -> None:
    """The server has accuracies without intervals; the site itself can tell which model to use, on its 20 samples."""
    wire = own_sites(tmp_path, {"method.name": "fednh"})
    assert not (tmp_path / "run" / "outcomes").exists()
    for _, reply in wire.seen:
        assert reply is not None
        assert not {"outcomes", "label", "personal"} & {key for record in reply.content.values() for key in record}
    kept = tmp_path / "state" / "own" / "a" / "outcomes.safetensors"
    found, summary = read_outcomes(kept), json.loads((tmp_path / "run" / "summary.json").read_text())
    assert len(found) == 20
    assert summary["clients"][0]["site"] == "a"
    assert 100 * float((found.personal == found.label).mean()) == pytest.approx(summary["clients"][0]["held_share"])
    told = {}
    for name, folder in (("server", tmp_path / "run"), ("site", tmp_path / "state")):
        ended = fednh(["compare", str(folder), "--site", "a", "--format", "markdown"], tmp_path / "io")
        assert ended.code == 0, ended.stderr
        told[name] = ended.stdout
    assert "how sure that is cannot be said here" in told["server"]
    assert "without numbers of samples, so there are no intervals" in told["server"]
    assert "(n = 20" in told["site"]
    assert "| a | 20 | " in told["site"]
    assert "fednh at a" in told["site"]


AT_TIMES = ((1, 0, "early0"), (2, 1, "early1"), (9, 2, "late"))


def test_a_site_that_joins_late(tmp_path: Path) -> None:
    """It gets the next number, takes part from then on, and has a personal model at the end."""
    nodes = {k: {"partition-id": part, "num-partitions": 3, "site": site} for k, part, site in AT_TIMES}
    wire = deployed(tmp_path, nodes)
    late = wire.nodes.pop(9)
    config = small("fedper", rounds=3, **{"participation.rate": 1.0, "eval.every": 1, "partition.clients": 3})

    def later(node: int, request: Message, reply: Message) -> Message:
        if request.metadata.group_id == "2":
            wire.nodes[9] = late
        return reply

    wire.tamper = later
    serve(config, wire, tmp_path / "run", enough=2, identity=server_identity(tmp_path))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [(row["site"], row["rounds"]) for row in summary["sites"]] == [("early0", 3), ("early1", 3), ("late", 0)]
    assert (tmp_path / "state" / "fednh" / "late" / "personal.safetensors").exists()
    assert [row["client"] for row in summary["clients"]] == [0, 1]


def test_a_site_that_joins_late_receives_what_all_receive(tmp_path: Path) -> None:
    """FedPAC: those who took part receive heads of their own, a newcomer the mean of the heads of the last round."""
    places = {k: {"partition-id": part, "num-partitions": 3, "site": site} for k, part, site in AT_TIMES}
    wire = deployed(tmp_path, {k: {**place, "allow.counts": True} for k, place in places.items()})
    late = wire.nodes.pop(9)
    config = small("fedpac", rounds=4, **{"participation.rate": 1.0, "eval.every": 0, "partition.clients": 3})

    def later(node: int, request: Message, reply: Message) -> Message:
        if request.metadata.group_id == "1":
            wire.nodes[9] = late
        return reply

    wire.tamper = later
    serve(config, wire, tmp_path / "run", enough=2, identity=server_identity(tmp_path))
    received: dict[str, dict[int, torch.Tensor]] = {}  # round -> node -> the head that travelled down
    uploaded: dict[str, list[torch.Tensor]] = {}
    for request, reply in wire.seen:
        if request.metadata.message_type == "train" and reply is not None:
            round_, node = request.metadata.group_id, request.metadata.dst_node_id
            received.setdefault(round_, {})[node] = to_tree(request.content["down"])["head.weight"]
            uploaded.setdefault(round_, []).append(to_tree(reply.content["upload"])["head.weight"])
    first = min(round_ for round_ in received if 9 in received[round_])
    before = torch.stack(uploaded[str(int(first) - 1)]).mean(0)
    torch.testing.assert_close(received[first][9], before)
    assert not any(torch.allclose(received[first][node], before, atol=1e-4) for node in (1, 2))
    assert not torch.allclose(received["4"][9], torch.stack(uploaded["3"]).mean(0), atol=1e-4), "now it has a record"


def test_the_wait_for_sites_has_an_end(tmp_path: Path) -> None:
    nodes = {k: {"partition-id": part, "num-partitions": 3, "site": site} for k, part, site in AT_TIMES[:2]}
    config = small("fedavg", rounds=1, **{"partition.clients": 3})
    wire = deployed(tmp_path, nodes)
    with pytest.raises(
        RunError, match=r"waiting for sites: 2 of 3 are here \(early0, early1\), and federation.wait = 0.5"
    ):
        serve(config, wire, tmp_path / "run", enough=3, identity=server_identity(tmp_path), wait=0.5)


def test_data_that_does_not_fit_is_told(tmp_path: Path) -> None:
    import numpy as np

    rng = np.random.default_rng(0)
    nodes = {}
    for k, width in enumerate((4, 4, 5)):
        x, y = rng.normal(size=(30, width)).astype(np.float32), np.arange(30) % 3
        np.savez(tmp_path / f"{k}.npz", x_train=x, y_train=y, x_test=x, y_test=y)
        nodes[k + 1] = {"data": str(tmp_path / f"{k}.npz"), "site": f"s{k}"}
    nodes[9] = {"data": str(tmp_path / "gone.npz"), "site": "gone"}
    config = small("fedavg", rounds=1, **{"participation.rate": 1.0})
    identity = server_identity(tmp_path)
    watcher = serve(config, deployed(tmp_path, nodes), tmp_path / "run", enough=2, identity=identity)
    assert any(note.startswith("site s2 cannot take part: its samples have shape (5,)") for note in watcher.notes)
    assert any("its data cannot be used" in note and "gone.npz" not in note for note in watcher.notes)


def test_a_site_whose_data_change_between_rounds_says_so_in_its_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every message is a process of its own at a real site, so each reads the data anew; another run starts afresh."""
    import numpy as np

    from fednh.flower import client_app as site

    rng, nodes = np.random.default_rng(0), {}
    x, y = rng.normal(size=(40, 4)).astype(np.float32), np.arange(40) % 2
    for k, name in enumerate(("north", "south")):
        np.savez(tmp_path / f"{name}.npz", x_train=x, y_train=y, classes=np.array(["a", "b"]))
        nodes[k + 1] = {"data": str(tmp_path / f"{name}.npz"), "site": name}
    more = {"participation.rate": 1.0, "data.classes": ["a", "b"]}

    def changed(node: int, request: Message, reply: Message) -> Message:
        if request.metadata.group_id == "1" and node == 2:
            np.savez(tmp_path / "south.npz", x_train=x[:-1], y_train=y[:-1], classes=np.array(["a", "b"]))
        site._own_data.cache_clear()
        site._federation.cache_clear()
        return reply

    config, identity = small("fedper", rounds=3, **more), server_identity(tmp_path)
    serve(config, deployed(tmp_path, nodes, changed), tmp_path / "run", identity=identity)
    told = [r.getMessage() for r in caplog.records if "are not those of the rounds before" in r.getMessage()]
    assert len(told) == 1
    assert "there were 40 training samples and are 39" in told[0] or "had 40 training samples and has 39" in told[0]
    assert (tmp_path / "state" / "fednh" / "south" / "fingerprint.json").exists()


def test_a_round_most_of_whose_uploads_are_refused_is_given_up(tmp_path: Path) -> None:
    """Two of three are not finite: what the third says alone is not taken for the federation's will."""
    config = small("fedavg", **{"partition.clients": 3, "participation.rate": 1.0, "rounds": 3, "eval.every": 0})

    def tamper(node: int, request: Message, reply: Message) -> Message:
        if node != 1000 and request.metadata.message_type == "train" and request.metadata.group_id == "2":
            nan(reply)
        return reply

    with pytest.raises(RunError, match=r"1 of 3 rounds changed nothing \(round 2\)"):
        federate(config, tmp_path, tamper)
    rounds = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(r["clients"], r["refused"]) for r in rounds] == [([0, 1, 2], []), ([], [1, 2]), ([0, 1, 2], [])]
    assert "2 of 3 uploads were not finite or refused" in rounds[1]["lost"]
    assert rounds[1]["train_loss"] is None


def test_a_checkpoint_adds_what_is_new(tmp_path: Path) -> None:
    """Finished rounds are in the journal, once; who took part in which is read from them."""
    config = small("fedavg", **{"rounds": 4, "eval.every": 0, "checkpoint.every": 1})
    federate(config, tmp_path)
    newest = json.loads(sorted((tmp_path / "checkpoints").glob("round-*.json"))[-1].read_text())["body"]["progress"]
    assert [record["round"] for record in newest["records"]] == [4], "the last one is not evaluated yet"
    assert all(set(row) <= {"number", "site", "key", "network", "ledger"} for row in newest["sites"])
    journal = [json.loads(line) for line in (tmp_path / "checkpoints" / "journal.jsonl").read_text().splitlines()]
    assert [line["log"]["round"] for line in journal if "log" in line] == [1, 2, 3]
