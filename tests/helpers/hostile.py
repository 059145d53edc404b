"""A federation of real sites on a wire, and what somebody who sends them messages of their own can try."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict

from fednh.config import Config, dump, load
from fednh.federated.architectures import initial_state
from fednh.federated.setup import network
from fednh.flower import protocol, signing
from fednh.flower.protocol import to_arrays
from fednh.flower.signing import Identity
from fednh.flower.transport import GREETING, Request
from fednh.tree import Tree
from tests.helpers.federation import Wire, deployed, server_identity, travelled

QUERY = "query"
SMALL = {"partition.clients": 2, "rounds": 2, "train.epochs": 1, "model.args": {"hidden": [8]}, "method.name": "fedavg"}


def config_of(**more: Any) -> Config:
    return load("digits", {**SMALL, **more})


class Scene:
    """Two sites: node 11 is site `a`, node 12 is site `b`. Messages are delivered to `a` unless said otherwise."""

    def __init__(self, folder: Path, **node: Any):
        self.folder = folder
        parts = {"partition-id": 0, "num-partitions": 2} if "data" not in node else {}
        self.nodes: dict[int, dict[str, Any]] = {
            11: {"site": "a", **parts, **node},
            12: {"site": "b", "partition-id": 1, "num-partitions": 2},
        }
        self.wire: Wire = deployed(folder, self.nodes)
        self.server: Identity = server_identity(folder)
        self.agreed: protocol.Task | None = None  # what orders say is agreed; None: what the site greets with
        self.wrong: Tree = {}  # tensors that replace those of the broadcast

    def signed(
        self, content: RecordDict, node: int = 11, kind: str = QUERY, round_: int = 0, site: str = ""
    ) -> Message:
        """A message as the server itself would send it."""
        letter, sealed = self.server.sign(Request(node, kind, GREETING, round=round_, site=site), content)
        return message(sealed, letter.node, letter.kind, letter.round)

    def asked(self, toml: str | Config) -> str:
        """What `a` says to a query of the real server with this config; empty if it greets."""
        text = dump(toml) if isinstance(toml, Config) else toml
        return problem(self.deliver(self.signed(question(text))))

    def ordered(self, config: Config, order: protocol.Order) -> Message:
        """What `a` answers to an order of the real server."""
        agreed = self.agreed
        if agreed is None:
            hello = self.deliver(self.signed(question(dump(config))))
            agreed = protocol.Hello.read(signing.without_signature(hello.content)).task
        net, method = network(config, agreed.shape, len(agreed.classes)), config.build_method()
        down = to_arrays({**method.broadcast(initial_state(method, net, config.seed)), **self.wrong})
        content = order.write(dump(config), agreed, down, to_arrays({}))
        kind = "train" if order.round else "evaluate"
        return self.deliver(self.signed(content, kind=kind, round_=order.round or order.evaluate, site="a"))

    def deliver(self, request: Message, node: int = 11) -> Message:
        return travelled(self.wire.deliver(node, travelled(request)))


def question(toml: str) -> RecordDict:
    return RecordDict({"config": ConfigRecord({"format": protocol.FORMAT, "toml": toml, "task": ""})})


def message(content: RecordDict, node: int, kind: str = QUERY, round_: int = 0) -> Message:
    sent = Message(content, node, kind, ttl=60.0, group_id=str(round_))
    sent.metadata.__dict__["_message_id"] = "m"
    return sent


def problem(reply: Message) -> str:
    """The sentence with which a site declines; empty if it does what it is asked."""
    said = reply.content["said"]
    assert isinstance(said, ConfigRecord)
    return str(said.get("problem", ""))


def everything(reply: Message) -> str:
    """All texts and numbers of a reply, to look for what should not be there."""
    return json.dumps({n: {k: str(v) for k, v in r.items()} for n, r in reply.content.items()})
