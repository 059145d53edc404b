"""`flower-superlink` for a federation whose sites do not trust each other: `python -m ... LIMIT OPTIONS`.

Flower 1.41 lets a registered site send messages to other sites, in any site's name and of any size. One message that is
announced and never sent blocks its receiver for minutes. Here a site can answer its own orders, and nothing else:
`Gate` refuses a message whose source is not the site itself, whose destination is not the SuperLink or that answers no
message, objects that belong to another site's message, and more bytes than the limit.

If a run ends while a site receives an order of it, Flower's SuperNode keeps the order and from then on sends each
answer one order too late. `Gate` says that its parts are gone, not that the run has ended: then the SuperNode drops it.

Flower takes a killed SuperNode for online until its heartbeats have been missing for a minute, and refuses the new one
with its key. `Gate` lets it in as soon as the old one, by what it does, must have been heard again.

Flower also passes the path of its database migrations to Alembic unescaped, in a list separated by blanks. If the path
has a blank or a percent sign, it creates a database without tables, and every call to the server fails.
`migrations_config` builds that list with escaped paths.
"""

from __future__ import annotations

import sys
import threading
import time
from logging import ERROR
from typing import Any, NoReturn

from alembic.config import Config
from fastapi import HTTPException
from sqlalchemy import Engine

from fednh.flower import compat
from fednh.flower.compat import ApiErrorCode, FlowerError, LinkState, fleet_handlers, migrations

ORDERS = 4  # a site may keep as many bytes here as this many of the largest order that it has received

SILENT = 5.0  # seconds after which a SuperNode without an order is gone: it asks for one every 3 at least
WORKING = 35.0  # and one with an order: it sends a heartbeat every 30


class Gate:
    """Flower's handlers of what sites send and fetch, with checks.

    Flower has verified by the site's key that a request comes from `request.node`; what is in it may be forged.
    Replies that the server has not taken yet count against the limit of the site that sent them.
    """

    def __init__(self, limit: int, handlers: Any = fleet_handlers):
        """`limit`: bytes a site, or ORDERS times its largest order if that is more: uploads are as large as models."""
        self.limit = limit
        self._lock = threading.Lock()
        self._order: dict[int, int] = {}  # node -> bytes that it has fetched of its order
        self._largest: dict[int, int] = {}
        self._kept: dict[int, dict[str, int]] = {}  # node -> message id -> bytes
        self._messages: dict[str, tuple[int, str]] = {}  # push session -> node and message id
        self._push_messages, self._push_object = handlers.push_messages, handlers.push_object
        self._pull_messages, self._pull_object = handlers.pull_messages, handlers.pull_object
        self._confirm, self._heartbeat = handlers.confirm_message_received, handlers.send_node_heartbeat
        self._activate = handlers.activate_node
        self._offline_at: dict[int, float] = {}  # node -> when it is gone if nothing more is heard of it
        self._max_silence: dict[int, float] = {}  # node -> seconds for which it may be silent

    def activate_node(self, request: compat.ActivateNodeRequest, state: LinkState) -> compat.ActivateNodeResponse:
        """Flower has verified the key, so whoever asks could as well deactivate the old SuperNode first."""
        node = state.get_node_id_by_public_key(request.public_key)
        if node is not None and time.monotonic() >= self._offline_at.get(node, 0.0):
            state.deactivate_node(node)
        answer: compat.ActivateNodeResponse = self._activate(request=request, state=state)
        self._mark_alive(answer.node_id)
        return answer

    def send_node_heartbeat(
        self, request: compat.SendNodeHeartbeatRequest, state: LinkState
    ) -> compat.SendNodeHeartbeatResponse:
        self._mark_alive(request.node.node_id, self._max_silence.get(request.node.node_id, WORKING))
        answer: compat.SendNodeHeartbeatResponse = self._heartbeat(request=request, state=state)
        return answer

    def _mark_alive(self, node: int, silent: float = SILENT) -> None:
        self._offline_at[node], self._max_silence[node] = time.monotonic() + silent, silent

    def push_messages(self, request: compat.PushMessagesRequest, state: LinkState) -> compat.PushMessagesResponse:
        node = request.node.node_id
        if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
            _refuse(node, "a request has one message")
        data, tree = request.messages_list[0].metadata, request.message_object_trees[0]
        if data.src_node_id != node:
            _refuse(node, f"its message is in the name of node {data.src_node_id}")
        if data.dst_node_id != compat.SUPERLINK_NODE_ID:
            _refuse(node, f"its message is for node {data.dst_node_id}; sites may write to the server alone")
        if not data.reply_to_message_id:
            _refuse(node, "its message answers none; sites may answer orders alone")
        if data.message_id != tree.object_id:
            _refuse(node, "its message announces the parts of another one")
        with self._lock:
            kept = self._kept.setdefault(node, {})
            for name in [name for name in kept if state.object_store.get(name) is None]:
                del kept[name]  # the server has taken it
            self._messages = {key: row for key, row in self._messages.items() if row[1] in self._kept.get(row[0], {})}
            self._add(node, data.message_id, request.ByteSize())
        answer: compat.PushMessagesResponse = self._push_messages(request=request, state=state)
        with self._lock:
            self._messages[answer.session_id] = (node, data.message_id)
        return answer

    def push_object(self, request: compat.PushObjectRequest, state: LinkState) -> compat.PushObjectResponse:
        node = request.node.node_id
        with self._lock:
            owner, message = self._messages.get(request.session_id, (None, ""))
            if owner != node:
                _refuse(node, "its object belongs to no message of its own")
            self._add(node, message, len(request.object_content))
        answer: compat.PushObjectResponse = self._push_object(request=request, state=state)
        return answer

    def pull_messages(
        self, request: compat.PullMessagesRequest, state: LinkState, store: Any
    ) -> compat.PullMessagesResponse:
        answer: compat.PullMessagesResponse = self._pull_messages(request=request, state=state, store=store)
        if answer.messages_list:
            with self._lock:
                self._order[request.node.node_id] = 0
        self._mark_alive(request.node.node_id, WORKING if answer.messages_list else SILENT)
        return answer

    def pull_object(self, request: compat.PullObjectRequest, state: LinkState) -> compat.PullObjectResponse:
        node = request.node.node_id
        try:
            answer: compat.PullObjectResponse = self._pull_object(request=request, state=state)
        except FlowerError as error:
            if error.code != ApiErrorCode.FLEET_RUN_STATUS_NOT_ALLOWED:
                raise
            return compat.PullObjectResponse(object_found=False, object_available=False)
        with self._lock:
            self._order[node] = self._order.get(node, 0) + len(answer.object_content)
            self._largest[node] = max(self._largest.get(node, 0), self._order[node])
        return answer

    def confirm_message_received(
        self, request: compat.ConfirmMessageReceivedRequest, state: LinkState, store: Any
    ) -> compat.ConfirmMessageReceivedResponse:
        try:
            self._confirm(request=request, state=state, store=store)
        except FlowerError as error:
            if error.code != ApiErrorCode.FLEET_RUN_STATUS_NOT_ALLOWED:
                raise  # else: the order is whole, and its answer will find that the run has ended
        return compat.ConfirmMessageReceivedResponse()

    def _add(self, node: int, message: str, size: int) -> None:
        kept, most = self._kept[node], max(self.limit, ORDERS * self._largest.get(node, 0))
        if (total := sum(kept.values()) + size) > most:
            _refuse(node, f"its replies that wait here would have {total} bytes; up to {most} are allowed", 413)
        kept[message] = kept.get(message, 0) + size


def _refuse(node: int, why: str, status: int = 400) -> NoReturn:
    compat.log(ERROR, "refused: node %d: %s", node, why)
    raise HTTPException(status, why)


def migrations_config(engine: Engine) -> Config:
    """The config that Flower's own function builds, with paths escaped."""
    config = Config()
    url = engine.url.render_as_string(hide_password=False)
    places = [migrations.ALEMBIC_DIR / "versions", *migrations._version_locations]
    options = {
        "path_separator": "newline",
        "script_location": str(migrations.ALEMBIC_DIR),
        "sqlalchemy.url": url,
        "version_locations": "\n".join(map(str, places)),
    }
    for name, value in options.items():
        config.set_main_option(name, value.replace("%", "%%"))
    return config


if __name__ == "__main__":
    compat.replace(migrations, "build_alembic_config", migrations_config)
    gate = Gate(int(sys.argv.pop(1)))
    for handler in compat.REPLACED[fleet_handlers]:
        compat.replace(fleet_handlers, handler, getattr(gate, handler))
    compat.flower_superlink()
