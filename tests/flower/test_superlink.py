"""The SuperLink: what sites may send to it, and its database where Flower's path has a blank or a percent sign."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from alembic import command as alembic
from fastapi import HTTPException
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    PullMessagesRequest,
    PullMessagesResponse,
    PushMessagesRequest,
    PushMessagesResponse,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest, SendNodeHeartbeatResponse
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    Message,
    Metadata,
    ObjectTree,
    PullObjectRequest,
    PullObjectResponse,
    PushObjectRequest,
    PushObjectResponse,
)
from flwr.proto.node_pb2 import Node
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.state.alembic import utils
from flwr.superlink.routers.fleet import router
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
from sqlalchemy import create_engine
from sqlalchemy import inspect as inspect_database

import fednh
from fednh.flower.deploy import scaffold, superlink
from fednh.flower.deploy.processes import marked
from fednh.flower.signing import read_site_private
from tests.helpers.deployment import SMALL, trial


def test_the_database_has_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "a b%c" / "alembic"
    shutil.copytree(utils.ALEMBIC_DIR, place, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(utils, "ALEMBIC_DIR", place)
    engine = create_engine(f"sqlite:///{tmp_path / 'link.db'}")
    try:
        alembic.upgrade(superlink.migrations_config(engine), "heads")
        assert {"node", "run", "message_ins", "alembic_version"} <= set(inspect_database(engine).get_table_names())
    finally:
        engine.dispose()


# --- what a site may send --------------------------------------------------------------------------------------------

OWN, OTHER = 11, 12


class Store(dict[str, bytes]):
    """Flower's store of objects: those that the server has not taken."""


class Handlers:
    """Flower's handlers: they take everything."""

    def push_messages(self, request: PushMessagesRequest, state: Any) -> PushMessagesResponse:
        name = request.messages_list[0].metadata.message_id
        state.object_store[name] = b""
        return PushMessagesResponse(session_id=f"session of {name}")

    def push_object(self, request: PushObjectRequest, state: Any) -> PushObjectResponse:
        return PushObjectResponse(stored=True)

    def pull_messages(self, request: PullMessagesRequest, state: Any, store: Any) -> PullMessagesResponse:
        return PullMessagesResponse(messages_list=[Message()])

    def pull_object(self, request: PullObjectRequest, state: Any) -> PullObjectResponse:
        if request.run_id:
            raise FlowerError(request.run_id, "the run is not running")
        return PullObjectResponse(object_content=bytes(int(request.object_id)))

    def send_node_heartbeat(self, request: SendNodeHeartbeatRequest, state: Any) -> SendNodeHeartbeatResponse:
        return SendNodeHeartbeatResponse(success=True)

    activate_node = staticmethod(fleet_handlers.activate_node)

    def confirm_message_received(self, request: ConfirmMessageReceivedRequest, state: Any, store: Any) -> None:
        raise FlowerError(request.run_id, "the run is not running")


@pytest.fixture
def state() -> Any:
    return SimpleNamespace(object_store=Store())


def message(name: str = "m", node: int = OWN, **changed: Any) -> PushMessagesRequest:
    facts = {"src_node_id": node, "dst_node_id": SUPERLINK_NODE_ID, "reply_to_message_id": "order", "message_id": name}
    tree = ObjectTree(object_id=changed.pop("tree", name))
    metadata = Metadata(**{**facts, **changed})
    return PushMessagesRequest(
        node=Node(node_id=node), messages_list=[Message(metadata=metadata)], message_object_trees=[tree]
    )


def part(size: int, name: str = "m", node: int = OWN) -> PushObjectRequest:
    return PushObjectRequest(node=Node(node_id=node), session_id=f"session of {name}", object_content=bytes(size))


def test_a_site_answers_its_orders(state: Any) -> None:
    gate = superlink.Gate(1000, Handlers())
    assert gate.push_messages(message(), state).session_id == "session of m"
    assert gate.push_object(part(100), state).stored


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"src_node_id": OTHER}, "in the name of node 12"),
        ({"dst_node_id": OTHER}, "for node 12"),
        ({"dst_node_id": OWN}, "for node 11"),
        ({"reply_to_message_id": ""}, "answers none"),
        ({"tree": "another"}, "parts of another"),
    ],
)
def test_a_site_sends_nothing_else(changed: dict[str, Any], words: str, state: Any) -> None:
    gate = superlink.Gate(1000, Handlers())
    with pytest.raises(HTTPException, match=words):
        gate.push_messages(message(**changed), state)
    assert state.object_store == {}


class Nodes:
    """Flower's table of nodes: one that is online cannot be activated."""

    def __init__(self) -> None:
        self.keys, self.online = {b"own": OWN, b"other": OTHER}, set[int]()

    def get_node_id_by_public_key(self, key: bytes) -> int | None:
        return self.keys.get(key)

    def activate_node(self, node: int, _: float) -> bool:
        new = node not in self.online
        self.online.add(node)
        return new

    def deactivate_node(self, node: int) -> bool:
        known = node in self.online
        self.online.discard(node)
        return known


def arrive(gate: superlink.Gate, nodes: Any, key: bytes = b"own") -> bool:
    try:
        gate.activate_node(ActivateNodeRequest(public_key=key, heartbeat_interval=30), nodes)
    except FlowerError:
        return False
    return True


def test_a_killed_supernode_is_back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower once refused it for a minute, in which it missed rounds."""
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(superlink, "time", clock)
    gate: superlink.Gate = superlink.Gate(1000, Handlers())
    nodes: Any = Nodes()
    look = PullMessagesRequest(node=Node(node_id=OWN))
    assert arrive(gate, nodes)
    for found, silent in (([], superlink.SILENT), ([Message()], superlink.WORKING)):
        answer = PullMessagesResponse(messages_list=found)
        monkeypatch.setattr(gate, "_pull_messages", lambda answer=answer, **_: answer)
        gate.pull_messages(look, nodes, None)
        clock.now += silent - 0.1
        assert not arrive(gate, nodes), "it may be alive: a second one with its key is refused"
        clock.now += 0.2
        assert arrive(gate, nodes), "it is gone"
    gate.pull_messages(look, nodes, None)
    for _ in range(2):
        clock.now += 30
        gate.send_node_heartbeat(SendNodeHeartbeatRequest(node=Node(node_id=OWN)), nodes)
    assert not arrive(gate, nodes), "it works, and sends heartbeats"
    assert arrive(superlink.Gate(1000, Handlers()), nodes), "a SuperLink that was started again has not heard of it"
    assert not arrive(gate, nodes, b"unknown")
    assert arrive(gate, nodes, b"other")
    assert nodes.online == {OWN, OTHER}


def test_a_request_has_one_message(state: Any) -> None:
    request = message()
    request.messages_list.append(message(dst_node_id=OTHER).messages_list[0])
    with pytest.raises(HTTPException, match="one message"):
        superlink.Gate(1000, Handlers()).push_messages(request, state)


def test_a_site_adds_nothing_to_the_message_of_another(state: Any) -> None:
    gate = superlink.Gate(1000, Handlers())
    gate.push_messages(message("theirs", OTHER), state)
    for session in ("session of theirs", ""):
        with pytest.raises(HTTPException, match="no message of its own"):
            gate.push_object(PushObjectRequest(node=Node(node_id=OWN), session_id=session), state)


def test_a_site_keeps_so_many_bytes_until_the_server_takes_them(state: Any) -> None:
    gate = superlink.Gate(1000, Handlers())
    gate.push_messages(message("first"), state)
    gate.push_object(part(700, "first"), state)
    with pytest.raises(HTTPException, match="up to 1000 are allowed") as refused:
        gate.push_object(part(700, "first"), state)
    assert refused.value.status_code == 413
    gate.push_messages(message("theirs", OTHER), state)
    gate.push_object(part(700, "theirs", OTHER), state)  # each site has its own limit
    gate.push_messages(message("second"), state)
    with pytest.raises(HTTPException, match="up to 1000"):
        gate.push_object(part(300, "second"), state)
    del state.object_store["first"]
    gate.push_messages(message("third"), state)
    gate.push_object(part(700, "third"), state)


def test_the_limit_grows_with_the_orders_that_a_site_receives(state: Any) -> None:
    """A model of 3 x 400 bytes: four of them may wait."""
    gate, node = superlink.Gate(1000, Handlers()), Node(node_id=OWN)
    gate.pull_messages(PullMessagesRequest(node=node), state, state.object_store)
    for _ in range(3):
        gate.pull_object(PullObjectRequest(node=node, object_id="400"), state)
    gate.push_messages(message(), state)
    gate.push_object(part(4600), state)
    with pytest.raises(HTTPException, match="up to 4800 are allowed"):
        gate.push_object(part(200), state)
    gate.pull_messages(PullMessagesRequest(node=node), state, state.object_store)
    gate.pull_object(PullObjectRequest(node=node, object_id="400"), state)  # a small order takes nothing away
    with pytest.raises(HTTPException, match="up to 4800 are allowed"):
        gate.push_object(part(200), state)


def test_an_order_of_a_run_that_has_ended_is_gone(state: Any) -> None:
    """Flower's SuperNode would keep it, and send every later answer one order too late."""
    gate, over, other = superlink.Gate(1000, Handlers()), ApiErrorCode.FLEET_RUN_STATUS_NOT_ALLOWED, 1
    assert not gate.pull_object(PullObjectRequest(object_id="1", run_id=over), state).object_found
    gate.confirm_message_received(ConfirmMessageReceivedRequest(run_id=over), state, None)
    with pytest.raises(FlowerError):
        gate.pull_object(PullObjectRequest(object_id="1", run_id=other), state)
    with pytest.raises(FlowerError):
        gate.confirm_message_received(ConfirmMessageReceivedRequest(run_id=other), state, None)


def test_flowers_server_calls_the_handlers_that_are_replaced() -> None:
    """What the wrapper relies on: routes look the handlers up when they are called."""
    text = inspect.getsource(router)
    assert all(f"fleet_handlers.{name}(" in text for name in superlink.compat.REPLACED[fleet_handlers])


@pytest.mark.soak
def test_a_registered_site_cannot_silence_another(tmp_path: Path) -> None:
    """A real SuperLink over TLS, and a site that uses its own key for what Flower itself would let pass."""
    with trial(tmp_path) as fed:
        process = fed.init(2, rounds=2, **{"federation.min_clients": 1, "federation.start": 2}).up()
        fed.wait_for(lambda: len(fed.lines()) >= 1, process)
        (link,) = marked(fed.folder, "deploy.superlink")
        port = link.cmdline()[link.cmdline().index("--port") + 1]
        keys = [read_site_private(fed.folder / f"sites/site-{site}/key") for site in (1, 2)]
        interceptors = [
            RuntimeVersionHttpInterceptor(component_name="SuperNode"),
            NodeAuthHttpInterceptor(keys[0], keys[0].public_key()),
        ]
        ca = (fed.folder / "certs/ca.crt").read_bytes()
        client = FleetHttpClient.from_server_address(f"127.0.0.1:{port}", False, ca, interceptors=interceptors)
        log = (fed.folder / "logs/superlink.log").read_text()
        own, other = (int(node) for node in re.findall(r"Activated node_id=(\d+)", log)[:2])
        found = {}
        for node in (own, other):  # the log does not say whose they are
            request = message(node=node, dst_node_id=other if node == own else own)
            try:
                client.PushMessages(request)
            except httpx.HTTPStatusError as error:
                found[error.response.status_code] = error.response.text
        assert 401 in found, "in the name of the other site's node it is not let in at all"
        assert "sites may write to the server alone" in found[400]
        client.close()
        assert process.wait(240).code == 0, fed.said()
        assert all(line["clients"] == [0, 1] for line in fed.lines())


@pytest.mark.soak
def test_a_federation_from_an_installation_with_a_blank_in_its_path(tmp_path: Path) -> None:
    """Flower itself at such a path: its own SuperLink makes a database without tables, and every call fails."""
    import flwr

    place = tmp_path / "my python"
    shutil.copytree(Path(flwr.__file__).parent, place / "flwr", ignore=shutil.ignore_patterns("__pycache__"))
    ours = str(Path(fednh.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(place), ours])}
    folder = tmp_path / "my federation"
    scaffold.write(folder, 2, [], {**SMALL, "rounds": 1})
    command = [sys.executable, "-m", "fednh", "federation", "up", str(folder), "--local"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (folder / "run/summary.json").exists()
