"""Replies as Flower stores them: fetched piece by piece, measured, and only then put together.

The SuperLink stores a reply as a tree of objects. An array is a list of chunks, and a chunk may be listed many times,
so a small message can expand to a large array. Flower's own `pull_messages` assembles everything before it can be
checked, fails for all replies if one is bad, and waits for the slowest. So over a network the pieces are fetched here,
each reply by itself, bounded in number and size, and their sizes are added up before they are joined.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from flwr.app import Message
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree, PullObjectRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_object_head_values_from_object_content as head_of
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects
from flwr.superlink.grid import HttpGrid

from fednh.core import memory
from fednh.flower.bounds import Limit, quoted

CHILDREN = {  # which objects may contain which
    "Message": ("RecordDict",),
    "RecordDict": ("ConfigRecord", "MetricRecord", "ArrayRecord"),
    "ArrayRecord": ("Array",),
    "Array": ("ArrayChunk",),
    "ConfigRecord": (),
    "MetricRecord": (),
    "ArrayChunk": (),
}


PATIENCE = 600.0  # seconds that a site waits for the parts of an order
BACKOFF = 0.05  # seconds until a part that is not there yet is asked for again, doubled up to 5; Flower begins with 1


@dataclass(frozen=True)
class Broken:
    """A reply that could not be fetched, and why."""

    problem: Exception


class Parcels:
    """The replies that are being fetched."""

    def __init__(self, grid: Grid):
        self.grid = grid
        self._waiting: dict[str, _Parcel] = {}

    def pull(self, limits: Mapping[str, Limit]) -> Iterator[tuple[str, Message | Broken]]:
        """Complete replies, by the id of the message they answer; `limits` has the size limit of each."""
        if not isinstance(self.grid, HttpGrid):  # a simulation: everything is in this process already
            for message in self.grid.pull_messages(list(limits)):
                yield message.metadata.reply_to_message_id, message
            return
        link, run = self.grid._runtime_client, self.grid.run.run_id
        found = link.PullMessages(PullAppMessagesRequest(message_ids=sorted(limits.keys() - self._waiting.keys())))
        for proto, tree in zip(found.messages_list, found.message_object_trees, strict=True):
            name = proto.metadata.reply_to_message_id
            if name in limits:
                self._waiting[name] = _Parcel(self.grid, tree, limits[name])
        for name, parcel in list(self._waiting.items()):
            try:
                reply: Message | Broken | None = parcel.taken()
            except Exception as error:
                reply = Broken(error)
            if reply is not None:
                del self._waiting[name]
                received = ConfirmMessageReceivedRequest(
                    node=self.grid.node, run_id=run, message_object_id=parcel.tree.object_id
                )
                link.ConfirmMessageReceived(received)
                yield name, reply

    def drop(self, name: str) -> None:
        """Stop fetching this reply: its time has passed."""
        self._waiting.pop(name, None)


@dataclass
class _Parcel:
    """One reply; some of its objects may still be on their way."""

    grid: HttpGrid
    tree: ObjectTree
    limit: Limit
    there: dict[str, bytes] = field(default_factory=dict)

    def taken(self) -> Message | None:
        """The reply if it is complete, else None."""
        names = [each.object_id for each in islice(iterate_object_tree(self.tree), self.limit.parts + 1)]
        if len(names) > self.limit.parts:
            raise ValueError(f"it has more than {self.limit.parts} parts")
        for name in dict.fromkeys(names):
            if name not in self.there and not self._fetch(name):
                return None
        self._check(joined_size(self.tree.object_id, self.there))
        reply = inflate_object_from_contents(self.tree.object_id, self.there)
        if not isinstance(reply, Message):
            raise ValueError(f"it is a {type(reply).__name__}, not a message")
        reply.metadata.__dict__["_message_id"] = self.tree.object_id
        return reply

    def _fetch(self, name: str) -> bool:
        question = PullObjectRequest(node=self.grid.node, run_id=self.grid.run.run_id, object_id=name)
        found = self.grid._runtime_client.PullObject(question)
        if not found.object_found:
            raise ValueError("a part of it is gone: it was not sent in time")
        if not found.object_available:
            return False
        self.there[name] = found.object_content
        self._check(sum(map(len, self.there.values())))
        return True

    def _check(self, size: int) -> None:
        if size > self.limit.bytes:
            raise ValueError(f"it has {size} bytes or more, where up to {self.limit.bytes} are expected")


def take_order(
    tree: ObjectTree,
    pull: Callable[[str], bytes],
    confirm: Callable[[str], None],
    return_type: type[Message] = Message,
    patience: float = PATIENCE,
) -> Message:
    """Fetch an order at a site. Replaces Flower's function, which has no size limit and too long a timeout.

    If a server ends while it sends, parts of the order never arrive; Flower waits for them for over an hour.
    """
    names = list(dict.fromkeys(each.object_id for each in iterate_object_tree(tree)))
    there = pull_objects(names, pull, max_time=patience, initial_backoff=BACKOFF, backoff_cap=min(5.0, patience))
    confirm(tree.object_id)
    size, most = joined_size(tree.object_id, there), memory.total() // 4
    if size > most:
        raise ValueError(f"the order has {size} bytes, and a quarter of this machine's memory is {most}")
    order = inflate_object_from_contents(tree.object_id, there)
    if not isinstance(order, return_type):
        raise ValueError(f"it is a {type(order).__name__}, not a message")
    return order


def joined_size(root: str, contents: Mapping[str, bytes]) -> int:
    """The size of a message once its chunks are joined, computed without joining; ValueError if it is malformed."""
    total, kinds = 0, {root: "Message"}
    level = [root]
    while level:
        below: list[str] = []
        for name in level:
            kind, children, length = head_of(contents[name])
            if kind != kinds[name]:
                raise ValueError(f"it holds {quoted(kind)} where {kinds[name]} belongs")
            for child in children:
                theirs = head_of(contents[child])[0]
                if theirs not in CHILDREN[kind] or kinds.setdefault(child, theirs) != theirs:
                    raise ValueError(f"it holds {quoted(theirs)} in {kind}")
            total += _array_size(contents[name], children, contents) if kind == "Array" else length
            below += [child for child in children if kind != "Array"]
        level = list(dict.fromkeys(below))
    return total


def _array_size(content: bytes, chunks: list[str], contents: Mapping[str, bytes]) -> int:
    """The size of an array: each chunk counts as often as it is listed."""
    sizes = [len(contents[name]) for name in chunks]
    listed = json.loads(content[content.index(b"\0") + 1 :])["arraychunk_ids"]
    if not isinstance(listed, list) or not all(type(place) is int and 0 <= place < len(sizes) for place in listed):
        raise ValueError("an array lists chunks that are not there")
    return sum(sizes[place] for place in listed)
