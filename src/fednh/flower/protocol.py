"""All that server and sites exchange: trees as arrays of bytes, facts as small records.

    server ---query    {config}                                     --->  site: who are you, what is your data like
    server ---train    {config, order, down, [global]}              --->  site: evaluate the last round, train next
    server ---evaluate {config, order, down, [global]}              --->  site: only evaluate
    server ---query.notice {notice}                                 --->  site: something for its log
    server <--reply    {said} or {said, facts, [upload], [figures]} ----  site

Every message also has a `seal`: see signing.py. Anything else is a `ValueError` that says what is wrong: a message may
come from anybody. Sizes and kinds are checked before anything is allocated (transport.py).

A whole tree is one array of bytes in the safetensors format: Flower sends every array of a record as two objects of its
own, each with a call on every hop. The header of the bytes declares the name, type and shape of every tensor. Before
any number is read, they are compared with the expected form, and the number of bytes received with the number that they
need: a small message cannot claim a large tree.
"""

from __future__ import annotations

import json
import math
from collections.abc import Set
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TypeVar

import safetensors.numpy
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fednh.federated import checks
from fednh.federated.checks import TensorSpecs
from fednh.federated.setup import Federation
from fednh.flower import transport
from fednh.flower.signing import Identity
from fednh.flower.transport import FetchError, Reply, Request, quoted
from fednh.metric_names import HELD
from fednh.text import name_problem, one_line
from fednh.tree import Tree, canonical

# --- trees ----------------------------------------------------------------------------------------------------------


TREE = "tree"  # the name of the one array
KIND = "safetensors"  # its serialisation type
TYPES = {
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
LENGTH = 8  # bytes; the length of the header comes first, little-endian
AXES = 16


def to_arrays(tree: Tree) -> ArrayRecord:
    """A tree as the record that a message carries; an empty tree is an empty record."""
    if not tree:
        return ArrayRecord()
    data = safetensors.numpy.save({name: value.detach().cpu().contiguous().numpy() for name, value in tree.items()})
    return ArrayRecord({TREE: Array(dtype="uint8", shape=(len(data),), stype=KIND, data=data)})


def to_tree(record: ArrayRecord, device: str = "cpu", form: TensorSpecs | None = None) -> Tree:
    """A tree from a message, copied and arranged: the bits of a result must not depend on how the message stored it.

    With a `form`, a tree of another form is refused before anything is allocated.
    """
    found = form_of(record)
    if form is not None and (problem := checks.form_problem(found, form)):
        raise ValueError(problem)
    try:
        plain = safetensors.numpy.load(record[TREE].data) if record else {}
        tree = {name: torch.from_numpy(array) for name, array in plain.items()}
    except Exception as error:  # the header's offsets are checked by the library
        raise ValueError(f"its arrays cannot be read: {one_line(str(error), 200)}") from error
    if checks.form_of(tree) != found:
        raise ValueError("its arrays cannot be read: the header can be understood in two ways")
    return canonical({name: value.to(device) for name, value in tree.items()})


def form_of(record: ArrayRecord) -> TensorSpecs:
    """The names, shapes and types that a record declares; ValueError unless exactly the bytes they need follow."""
    try:
        return _declared(record)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"its arrays cannot be read: {one_line(str(error), 200)}") from error


def _declared(record: ArrayRecord) -> TensorSpecs:
    if not record:
        return {}
    if list(record) != [TREE]:
        raise ValueError(f"it holds {quoted(sorted(record))} where one array {TREE!r} belongs")
    array, data = record[TREE], record[TREE].data
    if (array.stype, array.dtype, tuple(array.shape)) != (KIND, "uint8", (len(data),)):
        raise ValueError(f"{quoted([array.stype, array.dtype, *array.shape])} is not a kind of array that travels here")
    length = int.from_bytes(data[:LENGTH], "little")
    if len(data) < LENGTH or length > min(len(data) - LENGTH, transport.TEXT):
        raise ValueError(f"its {len(data)} bytes cannot hold a header of {length}")
    header = transport.read_json(data[LENGTH : LENGTH + length].decode())
    if not isinstance(header, dict) or len(header) > transport.NAMES:
        raise ValueError(f"its header is not a table of up to {transport.NAMES} names")
    form = {name: _tensor(name, row) for name, row in header.items()}
    needed = sum(math.prod(shape) * dtype.itemsize for shape, dtype in form.values())
    if needed != (there := len(data) - LENGTH - length):
        raise ValueError(f"its header declares {needed} bytes, and {there} follow")
    return form


def _tensor(name: str, row: object) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and type of one tensor."""
    if not isinstance(row, dict) or row.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{quoted(name)} is described by {quoted(row)}")
    if not isinstance(row["dtype"], str) or row["dtype"] not in TYPES:
        raise ValueError(f"{quoted(name)} is of type {quoted(row['dtype'])}, which does not travel here")
    shape = transport.numbers(row["shape"], 0, transport.SAMPLE)
    if len(shape) > AXES:
        raise ValueError(f"{quoted(name)} has {len(shape)} axes, where up to {AXES} travel")
    return shape, TYPES[row["dtype"]]


# --- messages -------------------------------------------------------------------------------------------------------


FORMAT = 3  # version of these messages; server and sites must have the same
NOTICE = "query.notice"  # Flower's message type for a notice from the server to a site
LONGEST = 2000  # characters of a problem: it may quote a request of any length
LARGE = 1e30  # the largest number that is not taken for a fault
SAMPLES = 10**12  # training samples that one site can process in a round
R = TypeVar("R", ArrayRecord, ConfigRecord, MetricRecord)
Number = int | float | list[float]

PERCENT = (0.0, 100.001, False)  # with a margin for rounding
# The metrics of an evaluation: least, most, and whether it is a list; in per_class -1 is a class without samples.
RANGES = {
    "pm_v": PERCENT,
    "pm_l": PERCENT,
    "per_class": (-1.0, 100.001, True),
    **dict.fromkeys(HELD, PERCENT),
    "novelty": (-1.001, 1.001, True),
}


@dataclass(frozen=True)
class Task:
    """What all sites of a federation must agree on to train one model."""

    data: str  # a name for it
    divided: bool  # True: a public set of which each site has a part
    shape: tuple[int, ...]
    classes: tuple[str, ...]
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]  # in a greeting 0: constant at this site, -1: without any value there
    preprocessing: str  # JSON, how a raw input becomes a sample

    @classmethod
    def of(cls, fed: Federation, name: str, divided: bool) -> Task:
        """The task of a site's data, with what it measured; of a divided set all sites have the same statistics."""
        data = fed.dataset
        mean, std = fed.statistics[0] if fed.statistics and not divided else (data.mean, data.std)
        how = json.dumps(data.preprocessing, sort_keys=True)
        return cls(name, divided, data.shape, data.classes, data.scale, mean, std, how)

    @classmethod
    def read(cls, text: str) -> Task:
        """Parse JSON, and check the type and range of every field."""
        try:
            task = cls._found(transport.read_json(text))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            words = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"the description of its data cannot be read: {one_line(words, 500)}") from error
        if problem := task._problem():
            raise ValueError(f"the description of its data cannot be true: {problem}")
        return task

    @classmethod
    def _found(cls, found: dict[str, Any]) -> Task:
        (scale,) = transport.floats([found["scale"]])
        data, preprocessing = transport.texts([found["data"], found["preprocessing"]], longest=transport.TEXT)
        return cls(
            data=data,
            divided=transport.flag(found["divided"]),
            shape=transport.numbers(found["shape"], 1, transport.SAMPLE),
            classes=transport.texts(found["classes"]),
            scale=scale,
            mean=transport.floats(found["mean"]),
            std=transport.floats(found["std"]),
            preprocessing=json.dumps(transport.read_json(preprocessing), sort_keys=True),
        )

    def _problem(self) -> str | None:
        """Why this cannot describe any data, or None."""
        if len(self.shape) not in (1, 3) or math.prod(self.shape) > transport.SAMPLE:
            return f"samples of shape {quoted(self.shape)}"
        if not all(name.isprintable() for name in (self.data, *self.classes)):
            return "a name in it holds a character that cannot be printed"
        if not self.classes or len(set(self.classes)) < len(self.classes):
            return "it has no classes, or one of them twice"
        if self.scale <= 0 or len(self.mean) != len(self.std) or len(self.mean) not in (1, self.shape[0]):
            return f"{len(self.mean)} means and {len(self.std)} deviations of {self.shape[0]} features or channels"
        said = () if self.divided else (0, -1)
        if wrong := [value for value in self.std if value <= 0 and value not in said]:
            return f"the deviation {quoted(wrong[0])} is not positive"
        return None

    def text(self) -> str:
        return json.dumps(asdict(self))

    @property
    def recipe(self) -> dict[str, Any]:
        """How a raw input becomes the model's input, for the card of a model file."""
        return {**json.loads(self.preprocessing), "scale": self.scale, "mean": self.mean, "std": self.std}


@dataclass(frozen=True)
class Hello:
    """A site's answer to the query: its name, the form of its data, and, for a divided set, the number of its part."""

    site: str
    task: Task
    number: int = -1  # -1: the server gives it one
    key: str = ""  # the public key that signed it, filled in by the server
    audit: str = ""  # the newest line of the site's audit log, filled in by the server

    def write(self) -> RecordDict:
        said = ConfigRecord({"format": FORMAT, "site": self.site, "number": self.number, "task": self.task.text()})
        return RecordDict({"said": said})

    @classmethod
    def read(cls, content: RecordDict) -> Hello:
        said = _said(content)
        _only(content, "said")
        site, number = _text(said, "site", 1000), _integer(said, "number", -1, transport.NUMBER)
        if problem := name_problem(site):
            raise ValueError(f"its name cannot be used: {problem}")
        return cls(site, Task.read(_text(said, "task")), number)


@dataclass(frozen=True)
class Order:
    """What one site is asked to do in one exchange."""

    client: int  # its number, from which its random streams derive
    round: int = 0  # train this round; 0: do not
    evaluate: int = 0  # first evaluate the state after this round; 0: do not
    last: int = 0  # start from the state of this round, the last whose upload was accepted; 0: enrol
    since: int = 0  # states of earlier rounds will not be needed again
    final: bool = False  # the federation ends: a site that never took part makes its personal model now
    sites: int = 1  # how many are asked to train this round

    def write(self, config: str, task: Task, down: ArrayRecord, more: ArrayRecord) -> RecordDict:
        """The message: config (TOML), agreed task, order, broadcast, and the rest of the global model."""
        records: dict[str, ArrayRecord | MetricRecord | ConfigRecord] = {
            "config": ConfigRecord({"format": FORMAT, "toml": config, "task": task.text()}),
            "order": ConfigRecord(asdict(self)),
            "down": down,
        }
        if more:
            records["global"] = more
        return RecordDict(records)

    @classmethod
    def read(cls, content: RecordDict) -> Order:
        record = _record(content, "order", ConfigRecord)
        names = [each.name for each in fields(cls) if each.name != "final"]
        return cls(
            **{n: _integer(record, n, 0, transport.NUMBER) for n in names}, final=transport.flag(record.get("final"))
        )


@dataclass(frozen=True)
class Answer:
    """What one site replies to an order: the declared upload, and aggregate numbers."""

    client: int
    round: int
    upload: Tree | None = None  # None: it was not asked to train
    samples: int | None = None  # training samples processed; None: not disclosed
    loss_sum: float | None = None  # None: not disclosed
    gradient_norm: float | None = None
    metrics: dict[str, Number] = field(default_factory=dict)  # accuracies; empty: it was not asked to evaluate

    def without_metrics(self, names: Set[str]) -> Answer:
        """The same answer without the metrics of these names, of training or of evaluation."""
        return replace(
            self,
            samples=None if "samples" in names else self.samples,
            # A loss that is not finite tells the server to leave this client's upload out: it is sent if there is one.
            loss_sum=None if "loss" in names and self._usable else self.loss_sum,
            gradient_norm=None if "gradient_norm" in names else self.gradient_norm,
            metrics={key: value for key, value in self.metrics.items() if key not in names},
        )

    @property
    def _usable(self) -> bool:
        """Whether the server would use it; an empty upload cannot spoil anything."""
        return not self.upload or math.isfinite(self.loss_sum or 0.0)

    def write(self) -> RecordDict:
        facts: dict[str, Any] = {"client": self.client, "round": self.round}
        if self.samples is not None:
            facts["samples"] = self.samples
        for name, value in (("loss_sum", self.loss_sum), ("gradient_norm", self.gradient_norm)):
            if value is not None:
                facts[name] = float(value)
        content = RecordDict({"said": ConfigRecord({"format": FORMAT}), "facts": MetricRecord(facts)})
        if self.upload is not None:
            content["upload"] = to_arrays(self.upload)
        if self.metrics:
            content["figures"] = MetricRecord(dict(self.metrics))
        return content

    @classmethod
    def read(cls, content: RecordDict, form: TensorSpecs | None, device: str = "cpu") -> Answer:
        """Read an answer whose upload has this form; with None, it must not have an upload."""
        _said(content)
        _only(content, "said", "facts", "figures", *(["upload"] if form is not None else []))
        facts = _record(content, "facts", MetricRecord)
        upload = to_tree(_record(content, "upload", ArrayRecord), device, form) if "upload" in content else None
        return cls(
            client=_integer(facts, "client", 0, transport.NUMBER),
            round=_integer(facts, "round", 0, transport.NUMBER),
            upload=upload,
            samples=_integer(facts, "samples", 1, SAMPLES) if "samples" in facts else None,
            loss_sum=_number(facts, "loss_sum", -LARGE) if "loss_sum" in facts else None,
            gradient_norm=_number(facts, "gradient_norm", 0) if "gradient_norm" in facts else None,
            metrics=_read_metrics(_record(content, "figures", MetricRecord)) if "figures" in content else {},
        )


def hello_request(config: str) -> RecordDict:
    """The content of a query."""
    return RecordDict({"config": ConfigRecord({"format": FORMAT, "toml": config, "task": ""})})


def notice(text: str) -> RecordDict:
    """The content of a notice: text for a site's log."""
    return RecordDict({"notice": ConfigRecord({"format": FORMAT, "text": text})})


def read_notice(content: RecordDict) -> str:
    return one_line(_text(_record(content, "notice", ConfigRecord), "text"), 500)


def ack() -> RecordDict:
    """The reply to a notice."""
    return RecordDict({"said": ConfigRecord({"format": FORMAT})})


def read_config(content: RecordDict) -> tuple[str, Task | None]:
    """The config's TOML text and the agreed task, if it is agreed yet."""
    record = _record(content, "config", ConfigRecord)
    if record.get("format") != FORMAT:
        raise ValueError(
            f"the server speaks format {quoted(record.get('format'))}, this site {FORMAT}: install the same fednh"
        )
    task = _text(record, "task")
    agreed = Task.read(task) if task else None
    if agreed is not None and min(agreed.std) <= 0:
        raise ValueError(f"the agreed deviation {quoted(min(agreed.std))} is not positive")
    return _text(record, "toml"), agreed


def read_tree(content: RecordDict, name: str, device: str, form: TensorSpecs | None = None) -> Tree:
    """A tree in a message, checked against `form` if given; empty if the message has none of this name."""
    return to_tree(_record(content, name, ArrayRecord), device, form) if name in content else {}


def tree_names(content: RecordDict, name: str) -> list[str]:
    """The names in a tree of a message; none if the message has no such tree."""
    return list(form_of(_record(content, name, ArrayRecord))) if name in content else []


def error_reply(problem: str, site: str = "") -> RecordDict:
    """A reply that states a problem in place of an answer."""
    return RecordDict({"said": ConfigRecord({"format": FORMAT, "problem": problem[:LONGEST], "site": site})})


def claimed_name(content: RecordDict) -> str:
    """The name that a site gives itself, proven or not; empty if it gives none that can be used."""
    said = content.get("said")
    name = said.get("site") if isinstance(said, ConfigRecord) else None
    return name if isinstance(name, str) and name_problem(name) is None else ""


class SiteProblem(Exception):
    """A site reports that it cannot carry out an order."""


def check_problem(content: RecordDict) -> None:
    """Raise the problem that a site reports. It needs no signature: a site may report that it cannot sign."""
    said = content.get("said")
    if isinstance(said, ConfigRecord) and "problem" in said:
        raise SiteProblem(one_line(_text(said, "problem"), 500))


def _said(content: RecordDict) -> ConfigRecord:
    said = _record(content, "said", ConfigRecord)
    if said.get("format") != FORMAT:
        raise ValueError(f"it speaks format {quoted(said.get('format'))}, this server {FORMAT}: install the same fednh")
    check_problem(content)
    return said


def _only(content: RecordDict, *known: str) -> None:
    if unknown := sorted(set(content) - set(known)):
        raise ValueError(f"it holds {one_line(', '.join(unknown), 200)}, which nobody asked for")


def _record(content: RecordDict, name: str, kind: type[R]) -> R:
    record = content.get(name)
    if not isinstance(record, kind):
        raise ValueError(f"it has no {kind.__name__} {name!r}")
    return record


def _integer(record: ConfigRecord | MetricRecord, key: str, least: int, most: int) -> int:
    value = record.get(key)
    if not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{key} is {quoted(value)}, not a whole number from {least} to {most}")
    return int(value)


def _number(record: MetricRecord, key: str, least: float) -> float:
    """A number of at least `least`; NaN, by which a site says that its training failed, passes."""
    value = record.get(key)
    if not isinstance(value, int | float) or value < least or LARGE < value < math.inf:
        raise ValueError(f"{key} is {quoted(value)}, not a number from {least:g} to {LARGE:g}")
    return float(value)


def _text(record: ConfigRecord, key: str, longest: int = transport.TEXT) -> str:
    value = record.get(key)
    if not isinstance(value, str) or len(value) > longest:
        raise ValueError(f"{key} is {quoted(value)}, not a text of up to {longest} characters")
    return value


def _read_metrics(record: MetricRecord) -> dict[str, Number]:
    """Metrics by their names, each in its range."""
    found: dict[str, Number] = {}
    for key, value in record.items():
        if key == "samples":
            found[key] = _integer(record, key, 1, SAMPLES)
            continue
        if key not in RANGES:
            raise ValueError(f"{quoted(key)} is not a metric")
        least, most, several = RANGES[key]
        numbers = value if isinstance(value, list) else [value]
        if isinstance(value, list) != several or len(numbers) > transport.NAMES:
            raise ValueError(f"{key} should be {'a list' if several else 'one number'}")
        if not all(isinstance(number, int | float) and least <= number <= most for number in numbers):
            raise ValueError(f"{key} is {quoted(value)}, not from {least:g} to {most:g}")
        found[key] = [float(number) for number in numbers] if several else float(numbers[0])
    return found


# --- replies --------------------------------------------------------------------------------------------------------


def content_of(reply: Reply) -> RecordDict:
    """The records of a reply; if it is an error, raise it."""
    if isinstance(reply, FetchError):
        raise reply.problem
    if reply.has_error():
        raise SiteProblem(one_line(str(reply.error.reason or f"error {reply.error.code}"), 500))
    return reply.content


def describe_error(error: Exception) -> str:
    """What was wrong with a received message; an unexpected error is named with its type."""
    foreseen = isinstance(error, ValueError | SiteProblem)
    return str(error) if foreseen else f"{type(error).__name__}: {one_line(str(error), 200)}"


def read_answer(
    request: Request, order: Order, reply: Reply, form: TensorSpecs, device: str, identity: Identity
) -> tuple[Answer, RecordDict]:
    """The answer to this order, and the records that it came in.

    A wrong answer raises; `SiteProblem` if the site itself reports a problem.
    """
    content = content_of(reply)
    check_problem(content)
    content, *_ = identity.verify_reply(request, content)
    answer = Answer.read(content, form if order.round else None, device)
    if (answer.client, answer.round) != (order.client, order.round):
        raise ValueError(f"it is for client {answer.client} and round {answer.round}")
    if order.round and answer.upload is None:
        raise ValueError("it has no upload")
    return answer, content
