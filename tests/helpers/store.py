"""Flower's own grid and object store without the network between them: tests can lay anything into the store."""

from __future__ import annotations

import hashlib
import json
from typing import Any, cast

from flwr.app import Message, RecordDict
from flwr.app.metadata import Metadata
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import ObjectTree, PullObjectRequest, PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.run import Run
from flwr.superlink.grid import HttpGrid


class Store:
    """What a SuperLink answers to a ServerApp that pulls: replies by message id, objects by their hash."""

    def __init__(self, verify: bool = True) -> None:
        self.objects, self.replies = InMemoryObjectStore(verify), dict[str, tuple[ProtoMessage, ObjectTree]]()
        self.pulled = 0  # bytes that left the store

    def PullMessages(self, request: PullAppMessagesRequest) -> PullAppMessagesResponse:
        found = [self.replies.pop(name) for name in list(request.message_ids) if name in self.replies]
        found += [self.replies.pop(name) for name in list(self.replies) if name.startswith("unasked")]
        protos, trees = [proto for proto, _ in found], [tree for _, tree in found]
        return PullAppMessagesResponse(messages_list=protos, message_object_trees=trees)

    def PullObject(self, request: PullObjectRequest) -> PullObjectResponse:
        content = self.objects.get(request.object_id)
        self.pulled += len(content or b"")
        return PullObjectResponse(
            object_found=content is not None, object_available=bool(content), object_content=content or b""
        )

    def ConfirmMessageReceived(self, request: Any) -> None:
        self.objects.delete(request.message_object_id)

    def put(self, name: str, tree: ObjectTree, contents: dict[str, bytes]) -> None:
        """A reply to the message `name`: any objects whatever, of which some may be missing."""
        self.objects.preregister(1, tree)
        for key, content in contents.items():
            self.objects.put(key, content)
        metadata = Metadata(1, tree.object_id, 7, 1, name, "", 1.0, 600.0, "train")
        shell = Message(metadata=metadata, content=RecordDict())  # type: ignore[call-overload]
        self.replies[name] = message_to_proto(shell), tree


def grid_of(store: Store) -> HttpGrid:
    grid = HttpGrid(token="t")
    grid._client = cast(Any, store)
    grid.set_run(Run.create_empty(1))
    return grid


def packed(content: RecordDict, name: str) -> tuple[ObjectTree, dict[str, bytes]]:
    """A reply as an honest site stores it."""
    metadata = Metadata(1, "", 7, 1, name, "", 1.0, 600.0, "train")
    message = Message(metadata=metadata, content=content)  # type: ignore[call-overload]
    return get_object_tree(message), {key: each.deflate() for key, each in get_all_nested_objects(message).items()}


def forged(kind: str, children: list[ObjectTree], body: bytes, contents: dict[str, bytes]) -> ObjectTree:
    """One object of Flower's store, with whatever children and body; it is added to the contents."""
    unique = ",".join(dict.fromkeys(each.object_id for each in children))
    content = f"{kind} {unique} {len(body)}".encode() + b"\0" + body
    name = hashlib.sha256(content).hexdigest()
    contents[name] = content
    return ObjectTree(object_id=name, children=children)


def forged_reply(body: Any, chunks: list[bytes], name: str) -> tuple[ObjectTree, dict[str, bytes]]:
    """A reply with one array whose description is `body` (JSON, or any bytes)."""
    contents: dict[str, bytes] = {}
    leaves = [forged("ArrayChunk", [], chunk, contents) for chunk in chunks]
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    array = forged("Array", leaves, raw, contents)
    record = forged("ArrayRecord", [array], json.dumps({"tree": array.object_id}).encode(), contents)
    records = forged("RecordDict", [record], json.dumps({"upload": record.object_id}).encode(), contents)
    metadata = Metadata(1, "", 7, 1, name, "", 1.0, 600.0, "train")
    shell = Message(metadata=metadata, content=RecordDict())  # type: ignore[call-overload]
    proto = message_to_proto(shell)
    proto.ClearField("content")
    return forged("Message", [records], proto.SerializeToString(), contents), contents
