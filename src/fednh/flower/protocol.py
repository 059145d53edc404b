"""All that server and sites exchange: trees as arrays of bytes, facts as small records.

    server ---query    {config, [weights]}                          --->  site: who are you, what is your data like
    server ---train    {config, order, down, [global]}              --->  site: evaluate the last round, train next
    server ---evaluate {config, order, down, [global]}              --->  site: only evaluate
    server ---query.notice {notice}                                 --->  site: something for its log
    server <--reply    {said} or {said, facts, [upload], [figures]} ----  site

A query has the `weights` of a frozen body if the site has said that it lacks them and takes a file of that size.

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
from collections.abc import Callable, Set
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeVar

import safetensors.numpy
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from fednh.federated import checks, compress
from fednh.federated.checks import TensorSpecs
from fednh.federated.setup import Federation
from fednh.flower import secure_messages as secure
from fednh.flower import transport
from fednh.flower.signing import Identity
from fednh.flower.transport import FetchError, Limit, Reply, Request, StrictModel, quoted
from fednh.io.chain import Head
from fednh.models.backbone import Recipe
from fednh.models.features import is_features
from fednh.privacy.grid import Words
from fednh.privacy.ledger import Balance
from fednh.text import name_problem, one_line
from fednh.tree import Tree, canonical

# --- trees ----------------------------------------------------------------------------------------------------------


TREE = "tree"  # the name of the one array
KIND = "safetensors"  # its serialisation type
PACKED = "safetensors+zlib"  # that of a packed upload (federated/compress.py)
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


def to_packed(packed: Tree) -> ArrayRecord:
    """A packed upload as the record that a message carries."""
    data = compress.written(packed)
    return ArrayRecord({TREE: Array(dtype="uint8", shape=(len(data),), stype=PACKED, data=data)})


def from_packed(record: ArrayRecord, form: TensorSpecs, device: str = "cpu") -> tuple[Tree, int]:
    """A packed upload of this form, and the bytes that travelled; nothing larger than the form needs is allocated."""
    if list(record) != [TREE] or record[TREE].stype != PACKED:
        raise ValueError("its arrays cannot be read: they are not packed as federation.compress asks")
    sent = record[TREE].data
    data = compress.read(sent, Limit.of(form).bytes)
    plain = ArrayRecord({TREE: Array(dtype="uint8", shape=(len(data),), stype=KIND, data=data)})
    return to_tree(plain, device, form), len(sent)


def to_tree(record: ArrayRecord, device: str = "cpu", form: TensorSpecs | None = None) -> Tree:
    """A tree from a message, copied and arranged: the bits of a result must not depend on how the message stored it.

    With a `form`, a tree of another form is refused before anything is allocated.
    """
    specs = form_of(record)
    if form is not None and (problem := checks.form_problem(specs, form)):
        raise ValueError(problem)
    try:
        plain = safetensors.numpy.load(record[TREE].data) if record else {}
        tree = {name: torch.from_numpy(array) for name, array in plain.items()}
    except Exception as error:  # the header's offsets are checked by the library
        raise ValueError(f"its arrays cannot be read: {one_line(str(error), 200)}") from error
    if checks.form_of(tree) != specs:
        raise ValueError("its arrays cannot be read: the header can be understood in two ways")
    return canonical({name: value.to(device) for name, value in tree.items()})


def form_of(record: ArrayRecord) -> TensorSpecs:
    """The names, shapes and types that a record declares; ValueError unless exactly the bytes they need follow."""
    try:
        return _declared(record)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"its arrays cannot be read: {one_line(str(error), 200)}") from error


def _declared(record: ArrayRecord) -> TensorSpecs:
    if not record:
        return {}
    if list(record) != [TREE]:
        raise ValueError(f"it holds {quoted(sorted(record))} where one array {TREE!r} belongs")
    array, data = record[TREE], record[TREE].data
    if (array.stype, array.dtype, tuple(array.shape)) != (KIND, "uint8", (len(data),)):
        raise ValueError(f"{quoted([array.stype, array.dtype, *array.shape])} is an unsupported array type")
    length = int.from_bytes(data[:LENGTH], "little")
    if len(data) < LENGTH or length > min(len(data) - LENGTH, transport.TEXT):
        raise ValueError(f"its {len(data)} bytes cannot hold a header of {length}")
    form = {name: (row.shape, TYPES[row.dtype]) for name, row in _header(data[LENGTH : LENGTH + length]).items()}
    needed = sum(math.prod(shape) * dtype.itemsize for shape, dtype in form.values())
    if needed != (rest := len(data) - LENGTH - length):
        raise ValueError(f"its header declares {needed} bytes, and {rest} follow")
    return form


class TensorHeader(StrictModel):
    """What a header says of one tensor."""

    dtype: str = Field(json_schema_extra={"enum": list(TYPES)})
    shape: tuple[Annotated[int, Field(ge=0, le=transport.SAMPLE)], ...] = Field(max_length=AXES)
    data_offsets: Any  # checked by the library

    @field_validator("dtype")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in TYPES:
            raise PydanticCustomError("type", "an unknown type")
        return name


_HEADER = TypeAdapter(Annotated[dict[str, TensorHeader], Field(max_length=transport.NAMES)])


def _header(text: bytes) -> dict[str, TensorHeader]:
    try:
        return _HEADER.validate_json(text)
    except ValidationError as error:
        raise ValueError(transport.validation_problem(error, _HEADER.json_schema())) from None


# --- messages -------------------------------------------------------------------------------------------------------


FORMAT = 4  # version of these messages; server and sites must have the same
WEIGHTS = "weights"  # the record of a query that has the weights of a frozen body
NOTICE = "query.notice"  # Flower's message type for a notice from the server to a site
LONGEST = 2000  # characters of a problem: it may quote a request of any length
LARGE = 1e30  # the largest number that is not taken for a fault
SAMPLES = 10**12  # training samples that one site can process in a round
SIZE = 10**12  # bytes of a file of weights
R = TypeVar("R", ArrayRecord, ConfigRecord, MetricRecord)
Number = int | float | list[float]

Index = Annotated[int, Field(ge=0, le=transport.NUMBER)]  # of a client or a round; 0 is also "none"
Count = Annotated[int, Field(ge=1, le=SAMPLES)]
Text = Annotated[str, Field(max_length=transport.TEXT)]
Name = Annotated[str, Field(max_length=1000)]
Finite = Annotated[float, Field(gt=-LARGE, lt=LARGE)]
Percent = Annotated[float, Field(ge=0, le=100.001)]  # with a margin for rounding
Newest = Annotated[str, Field(pattern=r"^(\d{1,12}:[0-9a-f]{64})?$")]  # line of a site's audit log or ledger, LINE:HASH


def _may_diverge(least: float) -> tuple[AfterValidator, WithJsonSchema]:
    """A number from `least` to LARGE, or NaN or infinity, by which a site says that its training failed."""

    def check(value: float) -> float:
        if value < least or LARGE < value < math.inf:
            raise PydanticCustomError("range", "out of range")
        return value

    return AfterValidator(check), WithJsonSchema({"type": "number", "minimum": least, "maximum": LARGE})


Loss = Annotated[float, *_may_diverge(-LARGE)]
Norm = Annotated[float, *_may_diverge(0.0)]


class Task(StrictModel):
    """What all sites of a federation must agree on to train one model."""

    data: Text  # a name for it
    divided: bool  # True: a public set of which each site has a part
    shape: tuple[Annotated[int, Field(ge=1, le=transport.SAMPLE)], ...] = Field(min_length=1, max_length=3)
    classes: tuple[Name, ...] = Field(min_length=1, max_length=transport.NAMES)
    scale: float = Field(gt=0, lt=LARGE)
    mean: tuple[Finite, ...] = Field(min_length=1, max_length=transport.NAMES)
    std: tuple[Finite, ...]  # in a greeting 0: constant at this site, -1: without any value there
    preprocessing: Text  # JSON, how a raw input becomes a sample

    @classmethod
    def of(cls, fed: Federation, name: str, divided: bool) -> Task:
        """The task of a site's data, with what it measured; of a divided set all sites have the same statistics.

        Where the weights of a frozen body lie is not part of it.
        """
        data, described = fed.dataset, fed.dataset.preprocessing
        if is_features(described):
            described = {**described, "backbone": {**described["backbone"], "file": None}}
        mean, std = fed.statistics[0] if fed.statistics and not divided else (data.mean, data.std)
        return cls.model_construct(  # the server checks it like any other
            data=name,
            divided=divided,
            shape=data.shape,
            classes=data.classes,
            scale=data.scale,
            mean=mean,
            std=std,
            preprocessing=json.dumps(described, sort_keys=True),
        )

    @classmethod
    def read(cls, text: str) -> Task:
        """Parse JSON; a ValueError says what does not describe any data."""
        try:
            return cls.parse(text)
        except ValueError as error:
            raise ValueError(f"the description of its data cannot be used: {error}") from None

    @field_validator("preprocessing")
    @classmethod
    def _canonical(cls, text: str) -> str:
        return json.dumps(transport.read_json(text), sort_keys=True)

    @model_validator(mode="after")
    def _check(self) -> Task:
        if len(self.shape) == 2 or math.prod(self.shape) > transport.SAMPLE:
            raise ValueError(f"samples of shape {quoted(self.shape)}")
        if not all(name.isprintable() for name in (self.data, *self.classes)):
            raise ValueError("a name in it holds a character that cannot be printed")
        if len(set(self.classes)) < len(self.classes):
            raise ValueError("it has a class twice")
        if len(self.mean) != len(self.std) or len(self.mean) not in (1, self.shape[0]):
            numbers = f"{len(self.mean)} means and {len(self.std)} deviations"
            raise ValueError(f"{numbers} of {self.shape[0]} features or channels")
        marks = () if self.divided else (0, -1)
        if wrong := [value for value in self.std if value <= 0 and value not in marks]:
            raise ValueError(f"the deviation {quoted(wrong[0])} is not positive")
        if (body := self.body) is not None:
            SentImages.parse(json.dumps(json.loads(self.preprocessing).get("inputs")))
            if (self.shape, self.scale, self.mean, self.std) != ((body.dim,), 1.0, (0.0,), (1.0,)) or body.file:
                raise ValueError("features of a frozen body are told without statistics and without a path")
        return self

    @property
    def body(self) -> Recipe | None:
        """The frozen body whose features the samples are; None: they are no features."""
        described = json.loads(self.preprocessing)
        if not isinstance(described, dict) or not is_features(described):
            return None
        try:
            return Recipe.model_validate(described.get("backbone"))
        except ValidationError as error:
            raise ValueError(f"its frozen body cannot be read: {one_line(str(error), 200)}") from None

    def text(self) -> str:
        return json.dumps(self.model_dump())

    @property
    def recipe(self) -> dict[str, Any]:
        """How a raw input becomes the model's input, for the card of a model file."""
        return {**json.loads(self.preprocessing), "scale": self.scale, "mean": self.mean, "std": self.std}


class SentImages(StrictModel):
    """What a task says of the images whose features the samples are."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")
    kind: Literal["image"]
    size: tuple[Annotated[int, Field(ge=1, le=transport.SAMPLE)], ...] = Field(min_length=2, max_length=2)
    channels: int = Field(ge=1, le=4)
    fit: Name = "stretch"


class Said(StrictModel):
    """The record `said` of a reply: an acknowledgement, or a problem of the site that it names."""

    format: int
    problem: Text | None = None
    site: Name = ""
    audit: Newest = ""
    ledger: Newest = ""  # under privacy
    epsilon: float | None = Field(None, ge=0)  # what all that it has released of these samples comes to ...
    delta: float | None = Field(None, gt=0, lt=1)  # ... at this delta
    room: int = Field(0, ge=0, le=SIZE)  # it lacks the weights of the frozen body, and takes a file of so many bytes


class Hello(StrictModel):
    """A site's answer to the query: its name, the form of its data, and, for a divided set, the number of its part."""

    format: int = FORMAT
    site: Name
    number: int = Field(-1, ge=-1, le=transport.NUMBER)  # -1: the server gives it one
    task: Task
    network: Name = ""  # the one that it has chosen of those in model.name; empty: the server deals it one
    audit: Newest = ""

    @field_validator("site")
    @classmethod
    def _name(cls, site: str) -> str:
        if problem := name_problem(site):
            raise ValueError(f"its name cannot be used: {problem}")
        return site

    @field_validator("task", mode="before")
    @classmethod
    def _read_task(cls, task: object) -> object:
        return Task.read(task) if isinstance(task, str) else task

    def write(self) -> RecordDict:
        said = ConfigRecord({"format": FORMAT, "site": self.site, "number": self.number, "task": self.task.text()})
        if self.network:
            said["network"] = self.network
        return RecordDict({"said": said})

    @classmethod
    def read(cls, content: RecordDict) -> Hello:
        said = _said(content)
        _only(content, "said")
        return cls.parse(said)


class Order(StrictModel):
    """What one site is asked to do in one exchange."""

    client: Index  # its number, from which its random streams derive
    round: Index = 0  # train this round; 0: do not
    evaluate: Index = 0  # first evaluate the state after this round; 0: do not
    last: Index = 0  # start from the state of this round, the last whose upload was accepted; 0: enrol
    since: Index = 0  # states of earlier rounds will not be needed again
    final: bool = False  # the federation ends: a site that never took part makes its personal model now
    sites: Index = 1  # how many are asked to train this round
    network: Name = ""  # the site's, where sites have different ones
    ledger: Newest = ""  # the newest line of the site's ledger that the server has heard of

    def write(self, config: str, task: Task, down: ArrayRecord, more: ArrayRecord) -> RecordDict:
        """The message: config (TOML), agreed task, order, broadcast, and the rest of the global model."""
        records: dict[str, ArrayRecord | MetricRecord | ConfigRecord] = {
            "config": ConfigRecord({"format": FORMAT, "toml": config, "task": task.text()}),
            "order": ConfigRecord(self.model_dump()),
            "down": down,
        }
        if more:
            records["global"] = more
        return RecordDict(records)

    @classmethod
    def read(cls, content: RecordDict) -> Order:
        return cls.parse(_record(content, "order", ConfigRecord))


class Facts(StrictModel):
    """The record `facts` of an answer; what the site does not disclose is None."""

    client: Index
    round: Index
    samples: Count | None = None  # training samples processed
    loss_sum: Loss | None = None
    gradient_norm: Norm | None = None


class Metrics(StrictModel):
    """The record `figures` of an answer: what an evaluation measured, as far as the site discloses it."""

    samples: Count | None = None
    pm_v: Percent | None = None
    pm_l: Percent | None = None
    # -1: a class without samples
    per_class: list[Annotated[float, Field(ge=-1, le=100.001)]] | None = Field(None, max_length=transport.NAMES)
    held_macro: Percent | None = None
    held_share: Percent | None = None
    held_gm_macro: Percent | None = None
    held_gm_share: Percent | None = None
    novelty: list[Annotated[float, Field(ge=-1.001, le=1.001)]] | None = Field(None, max_length=transport.NAMES)


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
    balance: Balance | None = None  # of the site's ledger, under privacy
    masked: tuple[Words, bytes] | None = None  # in a secure sum, in place of the upload: see secure_messages.py
    sent: int | None = None  # bytes of a packed upload that travelled; None: those of its tensors

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

    def upload_alone(self) -> Answer:
        """The same answer with nothing that was measured; a loss that is not finite says that the upload is no use."""
        loss = None if self._usable else self.loss_sum
        return replace(self, samples=None, loss_sum=loss, gradient_norm=None, metrics={})

    @property
    def _usable(self) -> bool:
        """Whether the server would use it; an empty upload cannot spoil anything."""
        return not self.upload or math.isfinite(self.loss_sum or 0.0)

    def write(self, packed: bool = False) -> RecordDict:
        """The records of the answer; `packed`: its upload is (federated/compress.py)."""
        numbers = {"samples": self.samples, "loss_sum": self.loss_sum, "gradient_norm": self.gradient_norm}
        facts = {"client": self.client, "round": self.round, **numbers}
        known: dict[str, Any] = {key: value for key, value in facts.items() if value is not None}
        said = ConfigRecord({"format": FORMAT, **_said_of(self.balance)})
        content = RecordDict({"said": said, "facts": MetricRecord(known)})
        if self.upload is not None:
            content["upload"] = to_packed(self.upload) if packed else to_arrays(self.upload)
        if self.metrics:
            content["figures"] = MetricRecord(dict(self.metrics))
        return content

    @classmethod
    def read(
        cls, content: RecordDict, form: TensorSpecs | None, device: str = "cpu", masked: int = 0, packed: bool = False
    ) -> Answer:
        """Read an answer whose upload has this form; with None, it must not have an upload.

        With `masked` it has a masked upload of so many numbers in place of it. A `packed` upload has the packed form.
        """
        balance = balance_of(content)
        uploads = [secure.RECORD, secure.MASKED] if masked else ["upload"] if form is not None else []
        _only(content, "said", "facts", "figures", *uploads)
        facts = Facts.parse(_record(content, "facts", MetricRecord))
        upload, sent = None, None
        if "upload" in content and packed and form is not None:
            upload, sent = from_packed(_record(content, "upload", ArrayRecord), form, device)
        elif "upload" in content:
            upload = to_tree(_record(content, "upload", ArrayRecord), device, form)
        metrics = Metrics.parse(_record(content, "figures", MetricRecord)) if "figures" in content else Metrics()
        signed = secure.SignatureReply.read(content).signature if masked else b""
        hidden = (secure.read_words(content, masked), signed) if masked else None
        numbers = metrics.model_dump(exclude_none=True)
        return cls(**facts.model_dump(), upload=upload, metrics=numbers, masked=hidden, balance=balance, sent=sent)


def _said_of(balance: Balance | None) -> dict[str, Any]:
    """What a site says of its ledger; an epsilon that is too large to be told is left out."""
    if balance is None:
        return {}
    known = {"ledger": str(balance.head) if balance.head else "", "delta": balance.delta}
    return known | ({"epsilon": balance.epsilon} if math.isfinite(balance.epsilon) else {})


def balance_of(content: RecordDict) -> Balance | None:
    """What a reply says of its site's ledger of privacy; None if it says nothing."""
    said = Said.parse(_said(content))
    if said.delta is None:
        return None
    return Balance(math.inf if said.epsilon is None else said.epsilon, said.delta, Head.read(said.ledger))


class SiteNotice(StrictModel):
    """What the server tells a site for its log."""

    format: int = FORMAT
    text: Text


class SentConfig(StrictModel):
    """The record `config` of an order or a query."""

    format: int
    toml: Text
    task: Text  # JSON; empty: not agreed yet


def hello_request(config: str, weights: bytes | None = None) -> RecordDict:
    """The content of a query; `weights` is a safetensors file for a site that lacks it."""
    content = RecordDict({"config": ConfigRecord({"format": FORMAT, "toml": config, "task": ""})})
    if weights is not None:
        content[WEIGHTS] = ArrayRecord({TREE: Array(dtype="uint8", shape=(len(weights),), stype=KIND, data=weights)})
    return content


def read_weights(content: RecordDict) -> bytes:
    """The file of weights in a query, as it is; empty if there is none."""
    record = _record(content, WEIGHTS, ArrayRecord) if WEIGHTS in content else ArrayRecord()
    return record[TREE].data if list(record) == [TREE] else b""


def notice(text: str) -> RecordDict:
    """The content of a notice: text for a site's log."""
    return RecordDict({"notice": ConfigRecord(SiteNotice(text=text).model_dump())})


def read_notice(content: RecordDict) -> str:
    return one_line(SiteNotice.parse(_record(content, "notice", ConfigRecord)).text, 500)


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
    sent = SentConfig.parse(record)
    agreed = Task.read(sent.task) if sent.task else None
    if agreed is not None and min(agreed.std) <= 0:
        raise ValueError(f"the agreed deviation {quoted(min(agreed.std))} is not positive")
    return sent.toml, agreed


def read_tree(content: RecordDict, name: str, device: str, form: TensorSpecs | None = None) -> Tree:
    """A tree in a message, checked against `form` if given; empty if the message has none of this name."""
    return to_tree(_record(content, name, ArrayRecord), device, form) if name in content else {}


def tree_names(content: RecordDict, name: str) -> list[str]:
    """The names in a tree of a message; none if the message has no such tree."""
    return list(form_of(_record(content, name, ArrayRecord))) if name in content else []


def error_reply(problem: str, site: str = "", room: int = 0) -> RecordDict:
    """A reply that states a problem in place of an answer; with `room`, that it takes weights of so many bytes."""
    said = ConfigRecord({"format": FORMAT, "problem": problem[:LONGEST], "site": site})
    if room:
        said["room"] = room
    return RecordDict({"said": said})


def claimed_name(content: RecordDict) -> str:
    """The name that a site gives itself, proven or not; empty if it gives none that can be used."""
    said = content.get("said")
    name = said.get("site") if isinstance(said, ConfigRecord) else None
    return name if isinstance(name, str) and name_problem(name) is None else ""


class SiteProblem(Exception):
    """A site reports that it cannot carry out an order; with `room`, for lack of weights of so many bytes at most."""

    def __init__(self, text: str, room: int = 0):
        super().__init__(text)
        self.room = room


def check_problem(content: RecordDict) -> None:
    """Raise the problem that a site reports. It needs no signature: a site may report that it cannot sign."""
    said = content.get("said")
    if isinstance(said, ConfigRecord) and "problem" in said:
        problem = Said.parse(said)
        raise SiteProblem(one_line(problem.problem or "", 500), problem.room)


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
    request: Request,
    order: Order,
    reply: Reply,
    form: TensorSpecs,
    device: str,
    identity: Identity,
    masked: int = 0,
    unpack: Callable[[Tree], Tree] | None = None,
) -> tuple[Answer, RecordDict]:
    """The answer to this order, and the records that it came in; `masked`: how many numbers a masked upload has.

    A packed upload, of the packed `form`, is unpacked by `unpack`. A wrong answer raises; `SiteProblem` if the site
    itself reports a problem.
    """
    content = verified(request, reply, identity)
    trains = bool(order.round)
    hidden = masked if trains else 0
    answer = Answer.read(content, form if trains and not hidden else None, device, hidden, unpack is not None)
    if (answer.client, answer.round) != (order.client, order.round):
        raise ValueError(f"it is for client {answer.client} and round {answer.round}")
    if trains and not hidden and answer.upload is None:
        raise ValueError("it has no upload")
    if unpack is not None and answer.upload is not None:
        answer = replace(answer, upload=unpack(answer.upload))
    return answer, content


def verified(request: Request, reply: Reply, identity: Identity) -> RecordDict:
    """The records of a reply that the site has signed; `SiteProblem` if it reports a problem."""
    content = content_of(reply)
    check_problem(content)
    content, *_ = identity.verify_reply(request, content)
    return content


def read_stage(request: Request, reply: Reply, identity: Identity) -> RecordDict:
    """The records of a site's reply to a stage of a secure sum."""
    content = verified(request, reply, identity)
    Said.parse(_said(content))
    _only(content, "said", secure.RECORD)
    return content
