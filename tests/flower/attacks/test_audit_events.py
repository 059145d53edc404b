"""What sites and server write into their audit logs, against what really travelled; and the command that reads it."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message
from typer.testing import CliRunner

from fednh.cli.app import app
from fednh.errors import UserError
from fednh.flower.audit_report import check, find
from fednh.flower.deploy import scaffold
from fednh.flower.layout import FederationFolder
from fednh.flower.protocol import to_tree
from fednh.io import chain
from tests.helpers.config import small
from tests.helpers.federation import Wire, deployed, serve, server_identity, travelled
from tests.helpers.process import fednh


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Wire]:
    """Two sites, two rounds; site s1 once answers a round wrongly."""
    folder = tmp_path_factory.mktemp("fed")
    nodes: dict[int, dict[str, Any]] = {
        k + 1: {"partition-id": k, "num-partitions": 2, "site": f"s{k}"} for k in range(2)
    }

    def tamper(node: int, request: Message, reply: Message) -> Message:
        if node == 2 and request.metadata.group_id == "2" and request.metadata.message_type == "train":
            reply.content["more"] = ConfigRecord({"x": 1})
        return reply

    wire = deployed(folder, nodes, tamper)
    settings = {"partition.clients": 2, "participation.rate": 1.0, "eval.every": 1, "federation.min_clients": 1}
    config = small("fednh", rounds=2, **settings)
    serve(config, wire, folder / "run", identity=server_identity(folder))
    return folder, wire


def lines(path: Path) -> list[dict[str, Any]]:
    found = chain.read(path)
    assert found.problem is None
    return found.lines


def digest(record: ArrayRecord) -> str:
    """By hand: every array's name, type, shape, form and length as JSON, a new line, its bytes."""
    total = hashlib.sha256()
    for name in sorted(record):
        array = record[name]
        head = json.dumps([name, array.dtype, list(array.shape), array.stype, len(array.data)])
        total.update(head.encode() + b"\n" + array.data)
    return total.hexdigest()


def test_what_left_is_what_travelled(made: tuple[Path, Wire]) -> None:
    folder, wire = made
    rows = lines(folder / "state" / "audit" / "s0.jsonl")
    replies = [r for q, r in wire.seen if q.metadata.dst_node_id == 1 and r is not None]
    assert [row["event"] for row in rows] == ["asked", "joined", *["asked", "left"] * 3]
    assert [row["kind"] for row in rows] == [k for k in ("query", "train", "train", "evaluate") for _ in range(2)]
    left = [row for row in rows if row["event"] != "asked"]
    for row, reply in zip(left, replies, strict=True):
        assert {record["record"] for record in row["sent"]} == set(reply.content) - {"seal"}
        for record in row["sent"]:
            if record["record"] == "upload":
                upload = cast(ArrayRecord, reply.content["upload"])
                assert record["sha256"] == digest(upload)
                assert record["names"] == {name: list(value.shape) for name, value in to_tree(upload).items()}
                assert record["bytes"] == sum(len(array.data) for array in upload.values())
        assert cast(ConfigRecord, reply.content["said"])["audit"] == f"{row['line']}:{row['hash']}"
    assert all(row["by"].startswith("the server, key SHA256:") for row in rows if row["event"] == "asked")
    assert left[0]["told"] == {"classes": [str(k) for k in range(10)], "columns": {}, "statistics": 1}


def test_the_server_has_the_same_in_its_own(made: tuple[Path, Wire]) -> None:
    folder, _ = made
    ours, theirs = lines(folder / "run" / "audit.jsonl"), lines(folder / "state" / "audit" / "s0.jsonl")
    events = [row["event"] for row in ours]
    assert events == ["asked", "joined", "joined", "asked", "took", "took", "asked", "took", "refused", *events[-4:]]
    assert events[-4:] == ["asked", "took", "took", "finished"]
    took = [row for row in ours if row["event"] == "took" and row["site"] == "s0"]
    left = [row for row in theirs if row["event"] == "left"]
    sums = [[{r["record"]: r["sha256"] for r in row["sent"]} for row in rows] for rows in (took, left)]
    for mine, other in zip(*sums, strict=True):
        assert {k: v for k, v in mine.items() if k != "said"} == {k: v for k, v in other.items() if k != "said"}
    assert [row["head"] for row in took] == [f"{row['line']}:{row['hash']}" for row in left]
    (refused,) = [row for row in ours if row["event"] == "refused"]
    assert (refused["site"], refused["round"]) == ("s1", 2)
    assert "refused" in refused["why"]
    joined = [row for row in ours if row["event"] == "joined"]
    assert [(row["site"], row["node"]) for row in joined] == [("s0", 1), ("s1", 2)]
    assert all(row["key"].startswith("SHA256:") for row in joined)


@pytest.mark.parametrize("cut", [1, 2, 5])
def test_lines_cut_off_the_end_are_found_by_what_the_server_knows(
    cut: int, made: tuple[Path, Wire], tmp_path: Path
) -> None:
    folder, _ = made
    logs = [folder / "run" / "audit.jsonl", *(folder / "state" / "audit" / f"s{k}.jsonl" for k in (0, 1))]
    assert [row.problem for row in check(find(*logs))] == [None, None, None]
    short = tmp_path / "s0.jsonl"
    short.write_bytes(b"".join(logs[1].read_bytes().splitlines(keepends=True)[:-cut]))
    assert chain.read(short).problem is None  # the chain alone cannot tell
    first, second, third = check(find(logs[0], short, logs[2]))
    assert (first.problem, third.problem) == (None, None)
    assert second.problem is not None
    assert "the end of the log was cut off" in second.problem


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A federation's folder after a trial of one round on this machine."""
    folder = tmp_path_factory.mktemp("whole") / "fed"
    sites = scaffold.write(folder, 2, [], {"method.name": "fedavg", "rounds": 1})
    nodes: dict[int, dict[str, Any]] = {
        k + 1: {"partition-id": k, "num-partitions": 2, "site": site.name} for k, site in enumerate(sites)
    }
    wire = deployed(folder, nodes)
    for place, site in zip(nodes.values(), sites, strict=True):
        own = FederationFolder(folder).trial_site(site.name)
        own.path.mkdir(parents=True)
        own.node_config.write_text(site.node_config.read_text())
        place["state"] = str(own.state)
    config = small("fedavg", rounds=1, **{"partition.clients": 2, "participation.rate": 1.0, "eval.every": 0})
    serve(config, wire, folder / "run", identity=server_identity(folder))
    return folder


def rewritten(log: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Write a log anew, with a chain that holds, as its owner can."""
    rows = lines(log)
    log.unlink()
    for row in rows:
        facts = {key: value for key, value in row.items() if key not in ("line", "time", "event", "before", "hash")}
        change(facts)
        chain.append(log, row["event"], **facts)


def other_of(log: Path) -> Path:
    return log.parents[3] / "site-2" / "state" / "audit" / "site-2.jsonl"


REWRITES: dict[str, tuple[Callable[[Path], object], str]] = {
    "emptied": (lambda log: log.write_bytes(b""), "it is empty"),
    "deleted": (lambda log: log.unlink(), "the log of site site-1 is missing, which the server's log names"),
    "another own": (lambda log: rewritten(log, lambda row: row.update(own="site-3")), "line 1 is of site site-3"),
    "no own": (lambda log: rewritten(log, lambda row: row.pop("own")), "line 1 is of the server"),
    "another run": (lambda log: rewritten(log, lambda row: row.update(run=77)), "the log was written anew"),
    "the log of another": (lambda log: log.write_bytes(other_of(log).read_bytes()), "line 1 is of site site-2"),
    "one line of another": (
        lambda log: chain.append(log, "left", own="site-2", round=1),
        "is of site site-2, and this is the place of the log of site site-1",
    ),
    "the last line changed": (
        lambda log: (cut(log), chain.append(log, "left", own="site-1", round=1)),
        "is not the one that the other side knows",
    ),
}


def cut(log: Path) -> None:
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:-1]))


@pytest.mark.parametrize("how", REWRITES)
@pytest.mark.parametrize("given", ["the federation", "each folder"])
def test_a_rewritten_log_of_a_site_ends_the_audit_with_1(given: str, how: str, federation: Path) -> None:
    """Whose log it is comes from site.toml, and what must be in it from the server's log."""
    folders = [federation] if given == "the federation" else [federation / "run", *sorted(federation.glob("trial/*"))]
    words = ["federation", "audit", *map(str, folders)]
    log = federation / "trial/site-1/state/audit/site-1.jsonl"
    whole, (rewrite, problem) = log.read_bytes(), REWRITES[how]
    assert CliRunner().invoke(app, words).exit_code == 0
    try:
        rewrite(log)
        ended = CliRunner().invoke(app, words)
    finally:
        log.write_bytes(whole)
    assert ended.exit_code == 1, ended.output
    assert problem in ended.stderr
    assert "site-1.jsonl: " in ended.stderr
    assert "site-2.jsonl: " not in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_the_log_of_the_server_must_be_there(federation: Path) -> None:
    """Without it nothing is compared; a site's log in its place is found too."""
    log, words = federation / "run/audit.jsonl", ["federation", "audit", str(federation)]
    whole = log.read_bytes()
    try:
        log.unlink()
        ended = CliRunner().invoke(app, words)
        assert (ended.exit_code, "the server's log is missing" in ended.stderr) == (1, True)
        log.write_bytes((federation / "trial/site-1/state/audit/site-1.jsonl").read_bytes())
        ended = CliRunner().invoke(app, words)
        assert (ended.exit_code, "place of the log of the server" in ended.stderr) == (1, True)
    finally:
        log.write_bytes(whole)


def test_a_site_may_have_two_logs_after_a_trial(federation: Path) -> None:
    """What the server has recorded must be in one of them; the log of another run knows nothing of it."""
    log, words = federation / "sites/site-1/state/audit/site-1.jsonl", ["federation", "audit", str(federation)]
    try:
        chain.append(log, "asked", own="site-1", run=5)
        ended = CliRunner().invoke(app, words)
        assert ended.exit_code == 0, ended.stderr
        assert str(log) in ended.stdout
    finally:
        shutil.rmtree(log.parents[1])


def test_a_log_in_a_folder_of_states_has_its_sites_name(made: tuple[Path, Wire], tmp_path: Path) -> None:
    """Without a site.toml the name of the file tells; and a site.toml must say what the site is called."""
    state = tmp_path / "state"
    shutil.copytree(made[0] / "state" / "audit", state / "audit")
    assert [row.problem for row in check(find(state))] == [None, None]
    shutil.copy(state / "audit/s1.jsonl", state / "audit/s0.jsonl")
    assert [row.problem for row in check(find(state))] == ["its name is not that of the log of site s1", None]
    (tmp_path / "site.toml").write_text('state = "state"\n')
    with pytest.raises(UserError, match=r"site\.toml does not say what the site is called; add site = \.\.\."):
        find(tmp_path)


def test_orders_of_somebody_else_are_in_the_log(made: tuple[Path, Wire]) -> None:
    """A message of another node, not signed by the server: refused, logged with who sent it and why."""
    folder, wire = made
    before = lines(folder / "state" / "audit" / "s1.jsonl")
    request = next(q for q, _ in wire.seen if q.metadata.dst_node_id == 2)
    forged = travelled(request)
    del forged.content["seal"]
    reply = wire.deliver(2, forged)
    assert "not signed" in str(cast(ConfigRecord, reply.content["said"])["problem"])
    (row,) = lines(folder / "state" / "audit" / "s1.jsonl")[len(before) :]
    assert row["event"] == "refused"
    assert row["why"] == "the order is not signed"
    assert row["by"] == f"node {request.metadata.src_node_id}, which has not proven who it is"
    again = wire.deliver(2, travelled(request))  # sent again as it was
    assert "given before" in str(cast(ConfigRecord, again.content["said"])["problem"])
    assert "given before" in lines(folder / "state" / "audit" / "s1.jsonl")[-1]["why"]


def test_nothing_leaves_if_it_cannot_be_written_down(tmp_path: Path) -> None:
    nodes: dict[int, dict[str, Any]] = {1: {"partition-id": 0, "num-partitions": 2, "site": "s0"}}
    wire = deployed(tmp_path, nodes)
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "audit").write_text("a file where the folder should be")
    from fednh.config import dump
    from fednh.flower import protocol
    from fednh.flower.site_config import for_sites
    from fednh.flower.transport import GREETING, Request

    question = protocol.hello_request(dump(for_sites(small("fednh", **{"partition.clients": 2}))))
    letter, content = server_identity(tmp_path).sign(Request(1, "query", GREETING), question)
    wire.push_messages([Message(content, letter.node, letter.kind, group_id="0")])
    ((_, reply),) = wire.seen
    assert reply is not None
    said = cast(ConfigRecord, reply.content["said"])
    assert set(reply.content) == {"said", "seal"}
    assert set(said) == {"format", "problem", "site"}
    assert said["problem"] == "FileExistsError; the site's own log says more"


def test_the_command(made: tuple[Path, Wire], tmp_path: Path) -> None:
    """A run folder, a folder of state, a site's folder; in words; exit code 1 and the line if it was changed."""
    folder, _ = made
    ended = fednh(["federation", "audit", str(folder / "run")], tmp_path / "io")
    assert ended.code == 0, ended.stderr
    assert "s0 joined (node 1, key SHA256:" in ended.stdout
    assert "answers were accepted" in ended.stdout
    assert "round 2: the answer of site s1 (client 1) was refused" in ended.stdout
    (tmp_path / "site.toml").write_text(f'site = "s0"\nstate = "{folder}/state"\n')
    ended = fednh(["federation", "audit", str(tmp_path)], tmp_path / "io")
    assert ended.code == 0, ended.stderr
    assert "4 answers have left this site" in ended.stdout
    assert "upload (the method's upload): 2 times in rounds 1 to 2" in ended.stdout
    assert "prototypes (10, " in ended.stdout
    assert "joined fednh as s0; sent its name, the names of 10 classes (0, 1, 2, 3, 4, 5, 6, 7, 8, 9)" in ended.stdout
    newest = chain.read(folder / "state" / "audit" / "s0.jsonl").head
    changed = tmp_path / "audit.jsonl"
    whole = (folder / "state" / "audit" / "s0.jsonl").read_bytes()
    changed.write_bytes(whole.replace(b'"kind": "train"', b'"kind": "tr4in"', 1))
    ended = fednh(["federation", "audit", str(changed)], tmp_path / "io")
    assert ended.code == 1
    assert ended.stderr.strip() == f"fednh: {changed}: line 3 was changed: it does not match its own hash"
    changed.write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]))
    ended = fednh(["federation", "audit", str(changed), "--known", str(newest)], tmp_path / "io")
    assert ended.code == 1
    assert "line 8 is missing" in ended.stderr
    for words, told in ((["--known", "x"], "LINE:HASH"), ([], "has no audit log")):
        ended = fednh(["federation", "audit", str(tmp_path / "io"), *words], tmp_path / "io")
        assert ended.code == 2
        assert told in ended.stderr


def test_who_takes_part(made: tuple[Path, Wire], tmp_path: Path) -> None:
    """`fednh federation status`: names, keys as `ssh-keygen -l` shows them, the last answer, rounds; refusals."""
    folder, _ = made
    ended = fednh(["federation", "status", str(folder / "run")], tmp_path / "io")
    assert ended.code == 0, ended.stderr
    header, first, second, *rest = ended.stdout.splitlines()
    assert header.split("  ")[0].strip() == "site"
    blob = base64.b64decode((folder / "sites/s1/key.pub").read_text().split()[1])
    key = "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")
    took = [row["time"] for row in lines(folder / "run" / "audit.jsonl") if row["event"] == "took"]
    day, hour = took[-1][:10], took[-1][11:19]
    assert first.split()[0] == "s0"
    assert first.split()[-3:] == ["2", "2", "-"]  # in two rounds, the last is round 2
    assert second.split() == ["s1", key, "2", "unknown", day, hour, "UTC", "1", "1", "-"]
    assert rest == []  # it was refused once, and has answered since
    ended = fednh(["federation", "status", str(tmp_path)], tmp_path / "io")
    assert ended.code == 2
    assert "knows of no site" in ended.stderr


def test_status_before_anything_has_begun(tmp_path: Path) -> None:
    """Sites and their keys are in the folder; no SuperLink answers, which is said."""
    from fednh.flower.deploy import certificates
    from fednh.flower.deploy.processes import free_ports

    sites = scaffold.write(tmp_path / "fed", 2, [], {})
    certificates.make(tmp_path / "fed", [site.name for site in sites])
    connection = tmp_path / "fed/.flwr/config.toml"
    [port] = free_ports(1)  # another federation may use the usual one
    connection.write_text(connection.read_text().replace(f":{scaffold.PORT}", f":{port}"))
    ended = fednh(["federation", "status", str(tmp_path / "fed")], tmp_path / "io")
    assert ended.code == 0, ended.stderr
    rows = [line.split() for line in ended.stdout.splitlines()]
    assert [row[0] for row in rows[1:3]] == ["site-1", "site-2"]
    assert all(row[1].startswith("SHA256:") and row[4] == "never" for row in rows[1:3])
    assert ended.stdout.splitlines()[3].startswith(f"no SuperLink answers at 127.0.0.1:{port}")
