"""A Grid without a network: every message becomes bytes and back, is handled by a real ClientApp, and is remembered."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fednh.config import Config, load
from fednh.flower import signing
from fednh.flower.client_app import app
from fednh.flower.deploy import certificates as certs
from fednh.flower.layout import FederationFolder
from fednh.flower.server_app import Transport, make_run
from fednh.flower.signing import Identity
from fednh.runs.layout import RunLayout
from fednh.runs.run_folder import RunFolder
from tests.helpers.callbacks import Recorder

RUN = 1  # Flower's number of the run
Tamper = Callable[[int, Message, Message], Message | None]  # (node, request, reply) -> what the server gets


class Wire(Grid):
    """Nodes with their node-configs. A reply may be changed or swallowed: by a hostile site before it signs it, or
    by `tamper` on its way."""

    def __init__(
        self,
        nodes: dict[int, dict[str, Any]],
        tamper: Tamper | None = None,
        hostile: Tamper | None = None,
        client: ClientApp = app,
    ):
        self.nodes, self.app, self.tamper, self.hostile = nodes, client, tamper, hostile
        self.seen: list[tuple[Message, Message | None]] = []  # every request with its reply, as they travelled
        self._replies: list[Message] = []
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, RUN, 1  # who sends, as Flower has it

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        names = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(uuid4())
            names.append(message.metadata.message_id)
            node = message.metadata.dst_node_id
            request = travelled(message)
            reply: Message | None = travelled(self.deliver(node, request))
            if self.hostile is not None:
                reply = self._signed_again(node, request, self.hostile(node, request, _unsigned(reply)))
            if self.tamper is not None and reply is not None:
                reply = self.tamper(node, request, reply)
            self.seen.append((request, reply))
            if reply is not None:
                self._replies.append(reply)
        return names

    def deliver(self, node: int, request: Message) -> Message:
        """What a node answers to a message, wherever that comes from."""
        return self.app(request, Context(RUN, node, self.nodes[node], RecordDict(), {}))

    def _signed_again(self, node: int, request: Message, reply: Message | None) -> Message | None:
        """The reply with the seal that the site itself puts on it."""
        if reply is None or reply.has_error():
            return reply
        place, data, seal = self.nodes[node], request.metadata, request.content[signing.SEAL]
        where = (data.message_type, data.group_id, node, place["site"], seal["counter"])
        envelope = signing.Envelope(str(seal["federation"]), RUN, *where)  # type: ignore[arg-type]
        reply.content = signing.sign_reply(reply.content, signing.read_site_private(Path(place["key"])), envelope)
        return reply

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


def _unsigned(reply: Message) -> Message:
    if not reply.has_error():
        reply.content = signing.without_signature(reply.content)
    return reply


def travelled(message: Message) -> Message:
    """What comes out at the other end of a wire."""
    return message_from_proto(ProtoMessage.FromString(message_to_proto(message).SerializeToString()))


def federate(config: Config, out: Path, hostile: Tamper | None = None) -> tuple[Wire, Recorder]:
    """The config as a federation of divided sites over a Wire, in the run folder `out`."""
    wire = divided(config, out, hostile=hostile)
    watcher = serve(config, wire, out, identity=server_identity(out / "fed"))
    collect_models(out)
    return wire, watcher


def divided(config: Config, out: Path, *, parts: int | None = None, hostile: Tamper | None = None) -> Wire:
    """A site for each of the first `parts` parts, default all, of a divided set; they allow what the config asks."""
    sites = config.partition.clients
    nodes = {1000 + k: part_of(config, k) for k in range(parts or sites)}
    return deployed(out / "fed", nodes, hostile=hostile)


def part_of(config: Config, part: int) -> dict[str, Any]:
    """The node-config of a site that has a part of a divided set, without its keys."""
    models = ", ".join(config.model.names)
    allow = {"allow.methods": config.method["name"], "allow.models": models, "allow.counts": True}
    place = {"partition-id": part, "num-partitions": config.partition.clients, "site": f"client-{part:06d}"}
    return {**place, **allow}


def collect_models(run: Path) -> None:
    """Copy the personal models of the sites in the summary to where a simulator has them, to compare them."""
    for row in json.loads((run / "summary.json").read_text())["clients"]:
        model = run / f"fed/state/fednh/client-{row['client']:06d}/personal.safetensors"
        copy = RunLayout(run).personal_model(row["client"])
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(model.read_bytes())


def serve(
    config: Config,
    wire: Wire,
    out: Path,
    identity: Identity,
    enough: int | None = None,
    wait: float = 60.0,
    recorder: Recorder | None = None,
) -> Recorder:
    watcher = recorder or Recorder()
    with RunFolder(out) as folder:
        least = min(config.federation.min_clients, enough or len(wire.nodes))
        transport = Transport(0.2, enough or len(wire.nodes), 0.001, least, wait)
        make_run(config, wire, folder, watcher, transport, identity).run()
    return watcher


def deployed(
    folder: Path, nodes: dict[int, dict[str, Any]], tamper: Tamper | None = None, hostile: Tamper | None = None
) -> Wire:
    """Real sites, which obey signed orders only; the key of a site lies in sites/NAME of `folder`, as after `certs`."""
    for place in nodes.values():
        own = folder / "sites" / place["site"]
        if not (own / "key").exists():
            write_site_key(own)
            certs.make_orders(folder, [place["site"]])
        place |= {"orders": str(own / "orders.pub"), "key": str(own / "key"), "state": str(folder / "state")}
    for place in nodes.values():
        certs.make_peers(folder, [place["site"]])
        place["peers"] = str(folder / "sites" / place["site"] / "peers")
    return Wire(nodes, tamper, hostile)


def write_site_key(folder: Path) -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "key").write_bytes(key.private_bytes(*form))
    (folder / "key.pub").write_text(signing.public_text(key.public_key()) + " comment\n")


def server_identity(folder: Path, name: str = "fednh", run: int = RUN) -> Identity:
    """The server's side of `deployed`."""
    certs.make_orders(folder, [])
    signer = signing.OrderSigner(signing.read_orders_private(FederationFolder(folder).orders_key))
    return Identity(signer, name, run, FederationFolder(folder))


def own_sites(folder: Path, settings: dict[str, object], names: tuple[str, ...] = ("b", "a", "c")) -> Wire:
    """Three sites with npz files of their own, each half its own test part, and a test set at the server."""
    from fednh.data.sources.builtin import digits

    data, nodes = digits(), {}
    for k, name in enumerate(names):
        rows = slice(k * 60, (k + 1) * 60)
        x, y = data.x_train[rows], data.y_train[rows]
        np.savez(
            folder / f"{name}.npz", x_train=x, y_train=y, x_test=x[:20], y_test=y[:20], classes=np.array(data.classes)
        )
        nodes[7 + k] = {"data": str(folder / f"{name}.npz"), "site": name}
    defaults = {"rounds": 2, "model.name": "mlp", "participation.rate": 1.0, "eval.every": 1, "federation.name": "own"}
    config = load(None, {"data.name": "digits", **defaults, "federation.test": "digits", **settings})
    wire = deployed(folder, nodes)
    serve(config, wire, folder / "run", identity=server_identity(folder, "own"))
    return wire
