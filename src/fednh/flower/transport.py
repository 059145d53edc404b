"""Messages between server and sites: sent and polled for, and read within limits.

`Mailbox` sends signed requests through Flower's Grid; replies come in any order, too late or never.

`BoundedFetch` fetches a reply. The SuperLink stores it as a tree of objects. An array is a list of chunks, and a chunk
may be listed many times, so a small message can expand to a large array. Flower's own `pull_messages` assembles
everything before it can be checked, fails for all replies if one is bad, and waits for the slowest. So the objects are
fetched here, each reply by itself, bounded in number and size, and their sizes are added up before they are joined.
`take_order` does the same at a site.

Limits on the size, depth and values of what is received are checked before anything is allocated for it.
"""

from __future__ import annotations

import json
import math
import re
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Self

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid
from pydantic import BaseModel, ConfigDict, ValidationError

from fednh import machine
from fednh.errors import Interrupted
from fednh.flower import compat
from fednh.flower.compat import HttpGrid, ObjectTree, inflate_object_from_contents, iterate_object_tree, object_head
from fednh.text import one_line

if TYPE_CHECKING:
    from fednh.federated.checks import TensorSpecs


# --- limits ---------------------------------------------------------------------------------------------------------


WORDS = 1 << 20  # bytes of a message without its arrays
TEXT = 4 << 20  # characters of one text: a greeting may name many classes and columns
TENSOR = 1 << 12  # bytes of the description of one tensor in a tree
CHUNK = 128 << 10  # bytes; arrays are cut into chunks of at least this: 256 KiB (deploy/processes.py)
SAMPLE = 1 << 28  # numbers in one sample
NAMES = 1 << 16  # classes, features or names of any kind
PARTS = 10  # of a dotted key in TOML: reading one takes the square of their number, 5 s for 16,000
_QUOTED = re.compile(  # texts and comments; one that does not end is a fault that tomllib finds
    r""""{3}(?:[^\\]|\\.)*?(?:"{3,5}|\Z)|'{3}.*?(?:'{3,5}|\Z)"""
    r"""|"(?:[^"\\\n]|\\.)*+(?:"|(?=\n)|\Z)|'[^'\n]*+'?|\#[^\n]*+""",
    re.DOTALL,
)
_LONG_KEY = re.compile(rf"(?<![\w-])(?:[\w-]++[ \t]*+\.[ \t]*+){{{PARTS}}}")
NUMBER = 10**9  # of clients and rounds


class Limit(NamedTuple):
    """The largest size of one message."""

    bytes: int
    parts: int  # objects in Flower's store: records, and the chunks of a tree

    @classmethod
    def of(cls, form: TensorSpecs | None) -> Limit:
        """The limit for an answer with an upload of this form; None: without an upload."""
        size = sum(math.prod(shape) * dtype.itemsize + TENSOR for shape, dtype in (form or {}).values())
        return cls(WORDS + size, 16 + size // CHUNK)


GREETING = Limit(TEXT + WORDS, 8)


def read_json(text: str) -> Any:
    """Parse JSON; any fault, also too great a length or depth, is a ValueError."""
    if len(text) > TEXT:
        raise ValueError(f"a text of {len(text)} characters is too long")
    try:
        return json.loads(text, parse_constant=_refused)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_toml(text: str) -> dict[str, Any]:
    """Parse TOML; a key of more than `PARTS` parts is a fault, too."""
    if _LONG_KEY.search(_QUOTED.sub("x", text)):
        raise tomllib.TOMLDecodeError(f"a key has more than {PARTS} parts")
    return tomllib.loads(text)


def _refused(word: str) -> NoReturn:
    raise ValueError(f"it holds {word}")


class StrictModel(BaseModel):
    """What arrives from elsewhere: no field of another type or out of its bounds, no unknown key, no conversion."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    @classmethod
    def parse(cls, values: str | bytes | Mapping[str, Any]) -> Self:
        """The model of a record, or of JSON text; a ValueError says in one sentence what is wrong first."""
        try:
            if isinstance(values, str | bytes):
                return cls.model_validate_json(values)
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise ValueError(validation_problem(error, cls.model_json_schema())) from None


def validation_problem(error: ValidationError, schema: Mapping[str, Any]) -> str:
    """The first problem of a received value as a sentence; `schema` is the JSON schema that it does not fit."""
    row = error.errors(include_url=False)[0]
    where, kind = row["loc"], row["type"]
    if kind == "value_error":
        return one_line(str(row["ctx"]["error"]), 500)
    if kind == "json_invalid":
        return f"it is not valid JSON: {one_line(row['ctx']['error'], 200)}"
    if not where:
        return f"{quoted(row['input'])} is not a table"
    key = one_line("".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in where)[1:], 200)
    if kind in ("missing", "extra_forbidden"):
        return f"{key} is {'missing' if kind == 'missing' else 'not known'}"
    entries = row.get("ctx", {}).get("actual_length")  # of a list that is too long or too short
    value = f"is {quoted(row['input'])}" if entries is None else f"has {entries} entries"
    return f"{key} {value}, not {_expected(schema, where)}"


def _expected(schema: Mapping[str, Any], where: Sequence[int | str]) -> str:
    """What the JSON schema wants at a place, in words."""
    part = schema
    for each in where:
        fields = part.get("properties", {})
        part = part["items"] if isinstance(each, int) else fields.get(each) or part["additionalProperties"]
        part = part["anyOf"][0] if "anyOf" in part else part
        part = schema["$defs"][part["$ref"].rpartition("/")[2]] if "$ref" in part else part
    if "enum" in part or "const" in part:
        return f"one of {', '.join(map(str, part.get('enum', [part.get('const')])))}"
    name = {"integer": "a whole number", "number": "a number", "boolean": "true or false", "array": "a list"}
    name |= {"string": "a text", "object": "a table"}
    least = part.get("minimum", part.get("exclusiveMinimum", part.get("minItems")))
    most = part.get("maximum", part.get("exclusiveMaximum", part.get("maxItems")))
    text = name[part["type"]]
    if part.get("format") == "binary":
        return f"up to {part['maxLength']} bytes"
    if "maxLength" in part:
        return f"{text} of up to {part['maxLength']} characters"
    if most is None:
        return text if least is None else f"{text} of {least:g} or more"
    return f"{text} {'of' if text == 'a list' else 'from'} {_shown(least or 0)} to {_shown(most)}"


def _shown(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"


def quoted(value: Any) -> str:
    """A received value, safe to quote in a message: short, on one line, without control characters."""
    return one_line(repr(value if not isinstance(value, list | dict) else list(value)[:8])[:200], 80)


# --- fetching -------------------------------------------------------------------------------------------------------


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


@dataclass(frozen=True)
class FetchError:
    """A reply that could not be fetched, and why."""

    problem: Exception


class BoundedFetch:
    """The replies that are being fetched."""

    def __init__(self, grid: Grid):
        self.grid = grid
        self._waiting: dict[str, _PartialReply] = {}

    def pull(self, limits: Mapping[str, Limit]) -> Iterator[tuple[str, Message | FetchError]]:
        """Complete replies, by the id of the message they answer; `limits` has the size limit of each."""
        if not isinstance(self.grid, HttpGrid):  # everything is in this process already
            for message in self.grid.pull_messages(list(limits)):
                yield message.metadata.reply_to_message_id, message
            return
        link, run = compat.runtime_client(self.grid), self.grid.run.run_id
        pulled = link.PullMessages(
            compat.PullAppMessagesRequest(message_ids=sorted(limits.keys() - self._waiting.keys()))
        )
        for proto, tree in zip(pulled.messages_list, pulled.message_object_trees, strict=True):
            name = proto.metadata.reply_to_message_id
            if name in limits:
                self._waiting[name] = _PartialReply(self.grid, tree, limits[name])
        for name, partial_reply in list(self._waiting.items()):
            try:
                reply: Message | FetchError | None = partial_reply.assembled()
            except Exception as error:
                reply = FetchError(error)
            if reply is not None:
                del self._waiting[name]
                received = compat.ConfirmMessageReceivedRequest(
                    node=self.grid.node, run_id=run, message_object_id=partial_reply.tree.object_id
                )
                link.ConfirmMessageReceived(received)
                yield name, reply

    def drop(self, name: str) -> None:
        """Stop fetching this reply: its time has passed."""
        self._waiting.pop(name, None)


@dataclass
class _PartialReply:
    """One reply; some of its objects may still be on their way."""

    grid: HttpGrid
    tree: ObjectTree
    limit: Limit
    objects: dict[str, bytes] = field(default_factory=dict)

    def assembled(self) -> Message | None:
        """The reply if it is complete, else None."""
        names = [each.object_id for each in islice(iterate_object_tree(self.tree), self.limit.parts + 1)]
        if len(names) > self.limit.parts:
            raise ValueError(f"it has more than {self.limit.parts} parts")
        for name in dict.fromkeys(names):
            if name not in self.objects and not self._fetch(name):
                return None
        self._check(joined_size(self.tree.object_id, self.objects))
        reply = inflate_object_from_contents(self.tree.object_id, self.objects)
        if not isinstance(reply, Message):
            raise ValueError(f"it is a {type(reply).__name__}, not a message")
        compat.set_message_id(reply, self.tree.object_id)
        return reply

    def _fetch(self, name: str) -> bool:
        request = compat.PullObjectRequest(node=self.grid.node, run_id=self.grid.run.run_id, object_id=name)
        response = compat.runtime_client(self.grid).PullObject(request)
        if not response.object_found:
            raise ValueError("a part of it is gone: it was not sent in time")
        if not response.object_available:
            return False
        self.objects[name] = response.object_content
        self._check(sum(map(len, self.objects.values())))
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
    objects = compat.pull_objects(
        names, pull, max_time=patience, initial_backoff=compat.BACKOFF, backoff_cap=min(5.0, patience)
    )
    confirm(tree.object_id)
    size, most = joined_size(tree.object_id, objects), machine.total_memory() // 4
    if size > most:
        raise ValueError(f"the order has {size} bytes, and a quarter of this machine's memory is {most}")
    order = inflate_object_from_contents(tree.object_id, objects)
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
            kind, children, length = object_head(contents[name])
            if kind != kinds[name]:
                raise ValueError(f"it holds {quoted(kind)} where {kinds[name]} belongs")
            for child in children:
                theirs = object_head(contents[child])[0]
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


# --- mailbox --------------------------------------------------------------------------------------------------------


Reply = Message | FetchError


@dataclass(frozen=True)
class Request:
    """What was sent, and to whom."""

    node: int
    kind: str  # query, train or evaluate
    limit: Limit  # of the reply
    client: int = -1
    round: int = 0
    site: str = ""  # its name; empty in a query, which asks for it
    counter: int = 0  # of the signed order; its reply must repeat it


Sign = Callable[[Request, RecordDict], tuple[Request, RecordDict]]


class Mailbox:
    """Sends signed requests and polls for replies.

    `on_unexpected` gets every reply that no caller waits for: to queries, and to requests that timed out.
    """

    def __init__(
        self,
        grid: Grid,
        stop: threading.Event,
        on_unexpected: Callable[[Request, Reply], None],
        pause: float,
        sign: Sign,
    ):
        self.grid, self.stop, self.on_unexpected, self.pause, self.sign = grid, stop, on_unexpected, pause, sign
        self._open: dict[str, Request] = {}
        self._sent: dict[str, float] = {}  # when, of the open ones
        self._fetch = BoundedFetch(grid)

    def asked(self) -> set[int]:
        """Nodes that owe an answer to a query."""
        return {request.node for request in self._open.values() if request.kind == MessageType.QUERY}

    def busy(self, seconds: float) -> set[int]:
        """Nodes that owe an answer to an order of the last `seconds`."""
        work, since = (MessageType.TRAIN, MessageType.EVALUATE), time.monotonic() - seconds
        return {row.node for name, row in self._open.items() if row.kind in work and self._sent[name] > since}

    def send(self, requests: Sequence[tuple[Request, RecordDict]], keep: float) -> dict[str, Request]:
        """Send requests, whose replies are valid for `keep` seconds; returns those that were sent, by message id."""
        requests = [self.sign(*request) for request in requests]
        messages = [
            Message(content, row.node, row.kind, ttl=keep, group_id=str(row.round)) for row, content in requests
        ]
        posted = set(self.grid.push_messages(messages)) if messages else set()
        sent = {m.metadata.message_id: row for m, (row, _) in zip(messages, requests, strict=True)}
        sent = {name: row for name, row in sent.items() if name in posted}
        self._open |= sent
        self._sent |= dict.fromkeys(sent, time.monotonic())
        return sent

    def replies(
        self, sent: dict[str, Request], timeout: float, limit: Callable[[], float] | None = None
    ) -> Iterator[tuple[Request, Reply]]:
        """Replies to what was `sent`, as they arrive, until all are in or the timeout has passed.

        With a `limit`, of seconds that may change with every reply, it may end sooner; then late replies are still
        fetched, for `on_unexpected`.
        """
        waiting, start = set(sent), time.monotonic()
        while waiting and time.monotonic() - start < (timeout if limit is None else min(timeout, limit())):
            for name, request, reply in self._pull():
                if name in waiting:
                    waiting.remove(name)
                    yield request, reply
                else:
                    self.on_unexpected(request, reply)
            if waiting:
                self._wait()
        if limit is None:
            for name in waiting:
                self._fetch.drop(name)

    def poll(self) -> None:
        """Handle the replies that have arrived, waiting for none in particular, then pause."""
        for _, request, reply in self._pull():
            self.on_unexpected(request, reply)
        self._wait()

    def _pull(self) -> list[tuple[str, Request, Reply]]:
        if not self._open:
            return []
        limits = {name: request.limit for name, request in self._open.items()}
        replies = [(name, reply) for name, reply in self._fetch.pull(limits) if name in self._open]
        for name, _ in replies:
            self._sent.pop(name, None)
        return [(name, self._open.pop(name), reply) for name, reply in replies if name in self._open]

    def _wait(self) -> None:
        if self.stop.wait(self.pause):
            raise Interrupted
