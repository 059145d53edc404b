"""A Grid without a network: every message becomes bytes and back, is handled by a real ClientApp, and is remembered."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from uuid import uuid4

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fednh.config import Config
from fednh.core.rounds import Simulation
from fednh.flower.client_app import client_app
from fednh.flower.server import Manner, Server
from fednh.storage.run_folder import RunFolder

Tamper = Callable[[int, Message, Message], Message | None]  # (node, request, reply) -> what the server gets


class Wire(Grid):
    """Nodes with their node-configs; `tamper` may change or swallow a reply."""

    def __init__(self, nodes: dict[int, dict[str, Any]], app: ClientApp, tamper: Tamper | None = None):
        self.nodes, self.app, self.tamper = nodes, app, tamper
        self.seen: list[tuple[Message, Message | None]] = []  # every request with its reply, as they travelled
        self._replies: list[Message] = []
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1  # who sends, as Flower has it

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        names = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(uuid4())
            names.append(message.metadata.message_id)
            node = message.metadata.dst_node_id
            context = Context(0, node, self.nodes[node], RecordDict(), {})
            request = travelled(message)
            reply: Message | None = travelled(self.app(request, context))
            if self.tamper is not None:
                reply = self.tamper(node, request, reply)
            self.seen.append((request, reply))
            if reply is not None:
                self._replies.append(reply)
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        wanted = set(message_ids)
        found = [reply for reply in self._replies if reply.metadata.reply_to_message_id in wanted]
        self._replies = [reply for reply in self._replies if reply not in found]
        return found

    def set_run(self, run: Any) -> None: ...

    run = property(lambda self: None)

    def create_message(self, *args: Any, **more: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise NotImplementedError


def travelled(message: Message) -> Message:
    """What comes out at the other end of a wire."""
    return message_from_proto(ProtoMessage.FromString(message_to_proto(message).SerializeToString()))


class Quiet:
    """A watcher that remembers."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.notes: list[str] = []

    def round_done(self, record: dict[str, Any]) -> None:
        self.records.append(record)

    def evaluating(self, done: int, total: int) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)


def federate(config: Config, out: Path, tamper: Tamper | None = None, simulated: bool = True) -> tuple[Wire, Quiet]:
    """The config as a federation of divided sites over a Wire, in the run folder `out`."""
    sites = config.partition.clients
    nodes = {1000 + k: {"partition-id": k, "num-partitions": sites} for k in range(sites)}
    wire = Wire(nodes, client_app(out / "clients", out / "models" / "personal" if simulated else None), tamper)
    return wire, serve(config, wire, out, simulated)


def serve(config: Config, wire: Wire, out: Path, simulated: bool = False, enough: int | None = None) -> Quiet:
    watcher = Quiet()
    with RunFolder(out) as folder:
        manner = Manner(0.2, enough or len(wire.nodes), simulated, pause=0.001)
        Server(config, wire, folder, watcher, manner).run()
    return watcher


def simulate(config: Config, out: Path) -> Quiet:
    """The same config in the simulator."""
    from fednh.core.federation import build_federation

    federation, watcher = build_federation(config), Quiet()
    with RunFolder(out) as folder:
        folder.begin(config, federation.dataset.classes, federation.class_counts(), federation.sites)
        Simulation(config, federation, folder, watcher).run()
    return watcher
