"""A registered site of a real federation sends orders to another one: through Flower, with its own good key."""

from __future__ import annotations

import re
import subprocess
import time
import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.fleet_http_connection import http_request_response

from fednh.flower import signing
from fednh.flower.deploy.processes import Processes, register_command
from tests.helpers.deployment import Trial, trial
from tests.helpers.federation import write_site_key
from tests.helpers.hostile import question

pytestmark = pytest.mark.soak

ROUNDS = 12


def test_a_registered_site_cannot_give_orders(tmp_path: Path) -> None:
    harm = tmp_path / "harm"
    with trial(tmp_path) as made:
        made.init(2, "fedavg", rounds=ROUNDS)
        process = made.up()
        made.wait_for(made.lines, process)  # the first round is over: sites and server know each other
        log = made.folder / "logs" / "site-1.log"
        victim, run = found(log, r"SuperNode ID: (\d+)"), found(log, r"\[RUN (\d+)")
        rogue = Rogue(made, tmp_path, run)
        toml = f'[model]\nname = "subprocess:Popen"\n[model.args]\nargs = ["touch", "{harm}"]\n'
        with rogue.connected() as link:
            order = link.received()  # what the server asks everybody who is new: who are you
            for message in (question(toml), order):  # its own, and the server's own signature for another node
                with pytest.raises(httpx.HTTPStatusError, match="400"):
                    link.send(victim, message)
        superlink = (made.folder / "logs" / "superlink.log").read_text()
        assert superlink.count("its message is in the name of node 1") >= 2
        assert process.wait(300).code == 0, made.said()
        assert not harm.exists()
        assert [line["clients"] for line in made.lines()] == [[0, 1]] * ROUNDS, "the others were not disturbed"


def found(log: Path, pattern: str) -> int:
    match = re.search(pattern, log.read_text())
    assert match, log.read_text()[-2000:]
    return int(match[1])


class Rogue:
    """A site with a key that the server's owner has registered."""

    def __init__(self, made: Trial, folder: Path, run: int):
        self.run, self.key = run, folder / "rogue" / "key"
        write_site_key(self.key.parent)
        home = made.folder / ".flwr" / "local"
        self.ca = (made.folder / "certs" / "ca.crt").read_bytes()
        self.address = tomllib.loads((home / "config.toml").read_text())["superlink"]["local"]["address"]
        environment = Processes(made.folder, home, None).environment
        command = register_command(self.key.with_suffix(".pub"), "local")
        subprocess.run(command, env=environment, check=True, timeout=120, capture_output=True)

    def connected(self) -> Link:
        return Link(self)


class Link:
    """A SuperNode's own connection, in the hands of somebody who does not play by the rules."""

    def __init__(self, rogue: Rogue):
        private = signing.read_site_private(rogue.key)
        self.run = rogue.run
        self.open = http_request_response(rogue.address, False, rogue.ca, (private, private.public_key()))

    def __enter__(self) -> Link:
        self.node, self.receive, self.push, _, _, self.pull, self.push_object, self.confirm = self.open.__enter__()
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, self.run, self.node
        return self

    def __exit__(self, *left: Any) -> None:
        self.open.__exit__(*left)

    def received(self) -> RecordDict:
        """The content of the next message for this node."""
        deadline = time.monotonic() + 60
        while (got := self.receive()) is None:
            assert time.monotonic() < deadline, "the server asks nothing"
            time.sleep(0.2)
        _, tree = got
        message = pull_and_inflate_object_from_tree(
            tree,
            lambda name: self.pull(self.run, name),
            lambda name: self.confirm(self.run, name),
            return_type=Message,
        )
        assert isinstance(message.content["seal"], ConfigRecord), "the server's orders are signed"
        return message.content

    def send(self, node: int, content: RecordDict) -> None:
        """An order to another node, in the server's name: Flower does not look who really sends it."""
        message = Message(content, node, "query", ttl=600.0, group_id="0")
        facts = message.metadata.__dict__
        facts |= {"_run_id": self.run, "_src_node_id": SUPERLINK_NODE_ID}
        facts["_message_id"] = message.object_id
        wanted, session = self.push(message, get_object_tree(message), 0.0)
        assert wanted, "Flower has not taken the message, so this attacks nothing"
        for name, each in get_all_nested_objects(message).items():
            if name in wanted:
                self.push_object(self.run, session, name, each.deflate())
