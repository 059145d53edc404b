"""What travels between server and sites, and nothing else does: trees as ArrayRecords by name, facts as small records.

    server ---query    {config}                                     --->  site: who are you, and what is your data like
    server ---train    {config, order, down, [global]}              --->  site: evaluate the last round, train the next
    server ---evaluate {config, order, down, [global]}              --->  site: only evaluate
    server <--reply    {said} or {said, facts, [upload], [figures]} ----  site

Whatever does not read as one of these is a `ValueError` that says what is wrong: a reply may come from anybody.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fednh.core.federation import Federation
from fednh.core.tree import Tree, arranged
from fednh.words import name_problem, one_line

FORMAT = 1  # of these messages; server and sites must have the same
R = TypeVar("R", ArrayRecord, ConfigRecord, MetricRecord)
Number = int | float | list[float]


def to_arrays(tree: Tree) -> ArrayRecord:
    """A tree as it travels."""
    plain = {name: value.detach().cpu().contiguous().numpy() for name, value in tree.items()}
    return ArrayRecord({name: Array.from_numpy_ndarray(value) for name, value in plain.items()})


def to_tree(record: ArrayRecord, device: str = "cpu") -> Tree:
    """A tree from a message, copied and arranged: the bits of a result must not depend on where numbers came from."""
    try:
        return arranged({name: torch.from_numpy(array.numpy().copy()).to(device) for name, array in record.items()})
    except (TypeError, ValueError, OSError, EOFError, RuntimeError) as error:
        raise ValueError(f"its arrays cannot be read: {error}") from error


@dataclass(frozen=True)
class Task:
    """What all sites of a federation must agree on to train one model."""

    data: str  # a name for it
    divided: bool  # a set that everybody has, each site a part of it
    shape: tuple[int, ...]
    classes: tuple[str, ...]
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    preprocessing: str  # JSON, how a raw input becomes a sample

    @classmethod
    def of(cls, fed: Federation, name: str, divided: bool) -> Task:
        """Of a site's data; a site that scales features by its own statistics says which."""
        data, scale, mean, std = fed.dataset, fed.dataset.scale, fed.dataset.mean, fed.dataset.std
        if fed.scalings and not divided:
            scale, (mean, std) = fed.raw_scale, fed.scalings[0]
        how = json.dumps(data.preprocessing, sort_keys=True)
        return cls(name, divided, data.shape, data.classes, scale, mean, std, how)

    @classmethod
    def read(cls, text: str) -> Task:
        """From JSON, every field of the right kind."""
        try:
            found: dict[str, Any] = json.loads(text)
            if not all(str(name).isprintable() for name in (found["data"], *found["classes"])):
                raise ValueError("a name in it holds a character that cannot be printed")
            shape, mean, std = (found[key] for key in ("shape", "mean", "std"))
            return cls(
                data=str(found["data"]),
                divided=bool(found["divided"]),
                shape=tuple(int(n) for n in shape),
                classes=tuple(str(c) for c in found["classes"]),
                scale=float(found["scale"]),
                mean=tuple(float(v) for v in mean),
                std=tuple(float(v) for v in std),
                preprocessing=json.dumps(json.loads(found["preprocessing"]), sort_keys=True),
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"the description of its data cannot be read: {error}") from error

    def text(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Hello:
    """A site's answer to the query: its name, its data's form, and its number where the data set is divided by it."""

    site: str
    task: Task
    number: int = -1  # -1: the server gives it one

    def write(self) -> RecordDict:
        said = ConfigRecord({"format": FORMAT, "site": self.site, "number": self.number, "task": self.task.text()})
        return RecordDict({"said": said})

    @classmethod
    def read(cls, content: RecordDict) -> Hello:
        said = _said(content)
        _only(content, "said")
        site = _text(said, "site")
        if problem := name_problem(site):
            raise ValueError(f"its name cannot be used: {problem}")
        return cls(site, Task.read(_text(said, "task")), _integer(said, "number"))


@dataclass(frozen=True)
class Order:
    """What one site is asked to do in one exchange."""

    client: int  # its number: randomness is addressed by it
    round: int = 0  # train this round; 0: do not
    evaluate: int = 0  # first evaluate what this round left; 0: do not
    last: int = 0  # the round of the state to start from: the last one that the server took; 0: enrol
    since: int = 0  # states of earlier rounds will never be asked for again
    final: bool = False  # the federation ends: a site that never took part makes its personal model now

    def write(self, config: str, task: Task, down: ArrayRecord, more: ArrayRecord) -> RecordDict:
        """With the config (TOML), the agreed task, the broadcast, and what the global model has beyond it."""
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
        return cls(
            **{f.name: _integer(record, f.name) for f in fields(cls) if f.name != "final"}, final=bool(record["final"])
        )


@dataclass(frozen=True)
class Answer:
    """What one site replies to an order: the declared upload, and aggregate numbers."""

    client: int
    round: int
    upload: Tree | None = None  # None: it was not asked to train
    samples: int = 0  # training samples processed
    loss_sum: float = 0.0
    gradient_norm: float | None = None
    figures: dict[str, Number] = field(default_factory=dict)  # accuracies; empty: it was not asked to evaluate

    def write(self) -> RecordDict:
        facts: dict[str, Any] = {"client": self.client, "round": self.round}
        if self.upload is not None:
            facts |= {"samples": self.samples, "loss_sum": float(self.loss_sum)}
        if self.gradient_norm is not None:
            facts["gradient_norm"] = float(self.gradient_norm)
        content = RecordDict({"said": ConfigRecord({"format": FORMAT}), "facts": MetricRecord(facts)})
        if self.upload is not None:
            content["upload"] = to_arrays(self.upload)
        if self.figures:
            content["figures"] = MetricRecord(dict(self.figures))
        return content

    @classmethod
    def read(cls, content: RecordDict, device: str = "cpu") -> Answer:
        _said(content)
        _only(content, "said", "facts", "upload", "figures")
        facts = _record(content, "facts", MetricRecord)
        upload = to_tree(_record(content, "upload", ArrayRecord), device) if "upload" in content else None
        norm = facts.get("gradient_norm")
        return cls(
            client=_integer(facts, "client"),
            round=_integer(facts, "round"),
            upload=upload,
            samples=_integer(facts, "samples") if upload is not None else 0,
            loss_sum=_number(facts, "loss_sum") if upload is not None else 0.0,
            gradient_norm=None if norm is None else _number(facts, "gradient_norm"),
            figures=_figures(_record(content, "figures", MetricRecord)) if "figures" in content else {},
        )


def question(config: str) -> RecordDict:
    """The content of a query."""
    return RecordDict({"config": ConfigRecord({"format": FORMAT, "toml": config, "task": ""})})


def read_config(content: RecordDict) -> tuple[str, Task | None]:
    """The config's TOML text and the agreed task, if it is agreed yet."""
    record = _record(content, "config", ConfigRecord)
    if record.get("format") != FORMAT:
        raise ValueError(
            f"the server speaks format {record.get('format')!r}, this site {FORMAT}: install the same fednh"
        )
    task = _text(record, "task")
    return _text(record, "toml"), Task.read(task) if task else None


def read_tree(content: RecordDict, name: str, device: str) -> Tree:
    """A tree of a message; without one, an empty tree."""
    return to_tree(_record(content, name, ArrayRecord), device) if name in content else {}


def sorry(problem: str) -> RecordDict:
    """A reply that says why there is no other."""
    return RecordDict({"said": ConfigRecord({"format": FORMAT, "problem": problem})})


class SiteProblem(Exception):
    """A site says in words that it cannot do what it was asked."""


def _said(content: RecordDict) -> ConfigRecord:
    said = _record(content, "said", ConfigRecord)
    if said.get("format") != FORMAT:
        raise ValueError(f"it speaks format {said.get('format')!r}, this server {FORMAT}: install the same fednh")
    if "problem" in said:
        raise SiteProblem(one_line(_text(said, "problem"), 500))
    return said


def _only(content: RecordDict, *known: str) -> None:
    if unknown := sorted(set(content) - set(known)):
        raise ValueError(f"it holds {', '.join(unknown)}, which nobody asked for")


def _record(content: RecordDict, name: str, kind: type[R]) -> R:
    record = content.get(name)
    if not isinstance(record, kind):
        raise ValueError(f"it has no {kind.__name__} {name!r}")
    return record


def _integer(record: ConfigRecord | MetricRecord, key: str) -> int:
    value = record.get(key)
    if not isinstance(value, int):
        raise ValueError(f"{key} is {value!r}, not a whole number")
    return int(value)


def _number(record: MetricRecord, key: str) -> float:
    value = record.get(key)
    if not isinstance(value, int | float):
        raise ValueError(f"{key} is {value!r}, not a number")
    return float(value)


def _text(record: ConfigRecord, key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        raise ValueError(f"{key} is {value!r}, not a text")
    return value


def _figures(record: MetricRecord) -> dict[str, Number]:
    found: dict[str, Number] = {}
    for key, value in record.items():
        values = value if isinstance(value, list) else [value]
        if not all(abs(number) < float("inf") for number in values):
            raise ValueError(f"{key} is not finite")
        found[key] = [float(number) for number in value] if isinstance(value, list) else value
    return found
