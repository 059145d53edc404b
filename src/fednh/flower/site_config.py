"""What a site is and permits. Its owner writes it into `site.toml`, Flower's node-config; no message can change it.

A config that the server sends is a request. `Policy.applied` takes from it the settings that the server may decide,
replaces the others with the site's own, and refuses what the site does not allow, before anything is imported or read.
Flower's node-config cannot hold lists, so lists are written as text with commas.
"""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from filelock import FileLock
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from fednh.config import Config, validate
from fednh.config.schema import DEFAULT_METHOD
from fednh.data.sources.builtin import BUILTIN
from fednh.data.sources.registry import PUBLISHED, agreed, with_prefix
from fednh.errors import Refused, UserError
from fednh.federated.setup import frozen_recipe, weights_of
from fednh.flower.layout import SiteFolder
from fednh.flower.protocol import Metrics
from fednh.flower.transport import StrictModel, read_toml
from fednh.io.files import expanded, write_json
from fednh.methods import METHODS
from fednh.models import MODELS
from fednh.models.backbone import ONNX, PINNED, checksum_of, plain_name
from fednh.privacy.ledger import Allowance
from fednh.text import name_problem

if TYPE_CHECKING:
    from fednh.flower.protocol import Order

METRICS = ("samples", "loss", "gradient_norm", *(name for name in Metrics.model_fields if name != "samples"))
PARAMETERS = 100_000_000  # the most that a model has, unless site.toml says otherwise
SAFE_DATA = ("augment", "holdout", *agreed())  # the server's data.*: how samples are made, not what is read
FEDERATION = ("name", "min_clients", "secure", "compress", "compress_share")  # what a site uses of that section
ARGUMENTS = 10_000  # characters of model.args: even layers without parameters take memory
QUESTIONS = 10  # different settings about a site's samples that it looks at until it agrees to one


def _split(text: object) -> object:
    """A list, written as text with commas; empty text is an empty list."""
    return tuple(word.strip() for word in text.split(",") if word.strip()) if isinstance(text, str) else text


def _path(text: object) -> object:
    return expanded(text).absolute() if isinstance(text, str) else text


_TEXT = WithJsonSchema({"type": "string"})
Names = Annotated[tuple[str, ...], BeforeValidator(_split), _TEXT]
FilePath = Annotated[Path, BeforeValidator(_path), _TEXT]
Limit = Annotated[int, Field(ge=1)]


class Allow(StrictModel):
    """The section [allow] of site.toml: what may be run, and what may leave. Descriptions are the reference's rows."""

    methods: Names = Field(
        tuple(METHODS), description='names; one of your own is `"mymethods:Mine"`, importable at the site'
    )
    models: Names = Field(("auto", *MODELS, *PINNED), description="names, or `mynets:Net`, `onnx:net.onnx`")
    rounds: Limit | None = Field(
        None, description="most that the site trains in all, over every run; it evaluates twice as many at most"
    )
    epochs: Limit | None = Field(None, description="most of one round, for each of the method's kinds of passes")
    sites: Limit = Field(1, description="fewest that train together, as the server says")
    samples: Limit = Field(10, description="of its own data: fewest behind any number that leaves, and in a batch")
    parameters: Limit = Field(
        PARAMETERS, description="most that a model has, or a frozen body, counted before it is built"
    )
    pixels: Limit = Field(
        1_000_000, description="most of an image, where the config says its size (`data.size`, `features.size`)"
    )
    views: Limit = Field(10, description="most of an image that a frozen body sees (`features.views`)")
    weights: int = Field(
        0, ge=0, description="bytes of a frozen body's weights that it takes from the server and keeps, in all; 0: none"
    )
    counts: bool = Field(False, description="whether an upload may hold how many samples of each class there are")
    secure: bool = Field(
        False, description="whether the site trains in secure sums only (`federation.secure`): no upload of its alone"
    )
    metrics: Names = Field(
        METRICS, description='which numbers may leave, `""` for none: ' + ", ".join(f"`{name}`" for name in METRICS)
    )
    privacy: Literal["none", "sample"] = Field(
        "none", description='`"sample"`: it obeys only orders with this `privacy.level`; `"none"`: any'
    )
    epsilon: float | None = Field(
        None,
        gt=0,
        description="most that all answers about the same samples come to, in every run and federation; with `privacy`",
    )
    delta: float = Field(1e-5, gt=0, le=1e-3, description="at which epsilon is counted")

    @field_validator("metrics")
    @classmethod
    def _known_metrics(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if unknown := sorted({*names} - {*METRICS}):
            raise ValueError(f"allow.metrics has {unknown[0]!r}; metrics are {', '.join(METRICS)}")
        return names

    @model_validator(mode="after")
    def _has_budget(self) -> Allow:
        if self.privacy != "none" and self.epsilon is None:
            raise ValueError(f"allow.privacy = {self.privacy!r} needs a budget; add epsilon = 8.0, say, below [allow]")
        if self.privacy == "none" and self.epsilon is not None:
            raise ValueError('allow.epsilon bounds nothing without allow.privacy; add privacy = "sample" below [allow]')
        return self

    @property
    def budget(self) -> Allowance:
        """What all answers about the same samples may come to."""
        return Allowance(math.inf if self.epsilon is None else self.epsilon, self.delta)


class Policy(StrictModel):
    """A site's rules: what may be read, run and sent."""

    model_config = ConfigDict(validate_by_name=True, alias_generator=lambda name: name.replace("_", "-"))

    federation: str | None = Field(None, description="the only federation that the site takes part in")
    set: str | None = Field(None, description="the public set that a part is of")
    label: str | None = Field(None, description="of a table: the column with the class")
    site_column: str | None = Field(None, description="of a table: the column with the site")
    columns: Names | None = Field(
        None, description="of a table: what may be a feature; the config's `data.columns` may name no other"
    )
    ignore: Names | None = Field(None, description="of a table: columns that are no features")
    group: str | None = Field(
        None, description="which samples belong together, as `data.group`; required if the federation has groups"
    )
    separator: str | None = Field(None, description="between the values of its text files, unless it is detected")
    decimal: str | None = Field(None, description="the sign in numbers of its text files, unless it is detected")
    missing: Names = Field(
        (),
        description='values of its table that mean missing, `"-9, ?"`, or of one column `"age=-9"`; the config\'s '
        "`data.missing` must be the same",
    )
    network: str | None = Field(
        None, description="the one of the config's `model.name` that it trains, where sites have different ones"
    )
    weights: Annotated[str, AfterValidator(lambda text: str(expanded(text).absolute()))] | None = Field(
        None, description="its own copy of the file, where the federation has `model.weights`, or an `onnx:` network"
    )
    allow: Allow = Allow()

    def config(self, toml: str, source: str | None) -> Config:
        """The server's config as applied here; `source` is the site's own data (None: a part of a public set)."""
        try:
            tree = self.applied(read_toml(toml), source)
            config = validate(tree, "the server's config: ")
            self._check_method(config)
            self._check_pixels(config)
            self._check_body(config)
            self._check_privacy(config)
            if source is not None and missing_values(config.data.missing) != self.missing:
                raise Refused("data.missing: which values mean missing, this site's site.toml says (missing =)")
            return config
        except (tomllib.TOMLDecodeError, RecursionError):
            raise Refused("the server's config is not valid TOML") from None
        except Refused:
            raise
        except UserError as error:
            if tree["method"].get("name") not in METHODS:  # a user's own method wrote the message
                raise
            raise Refused(str(error)) from error  # the message quotes nothing but the request

    def applied(self, tree: Mapping[str, Any], source: str | None) -> dict[str, Any]:
        """The settings that this site uses for a request, in the form that `validate` takes."""
        method, model, train = (dict(_section(tree, name)) for name in ("method", "model", "train"))
        federation = _section(tree, "federation")
        self._check_federation(federation)
        _allowed("method.name", method.get("name", DEFAULT_METHOD), self.allow.methods, "methods")
        for name in self._candidates(model.get("name", "auto")):
            _allowed("model.name", name, self.allow.models, "models")
        if len(str(model.get("args"))) > ARGUMENTS:
            raise Refused(f"model.args has more than {ARGUMENTS} characters")
        if model.get("frozen", "none") != "none":
            model["weights"] = self.weights  # its owner's file; None: one that was received, or none at all
        elif model.get("weights") is not None:
            if self.weights is None:
                raise Refused("model.weights: this site starts from no file; its site.toml names none (weights =)")
            model["weights"] = self.weights
        batch, fewest = train.get("batch_size", 64), self.allow.samples
        if source is not None and (type(batch) is not int or batch < fewest):
            raise Refused(f"train.batch_size = {batch!r} is less than the {fewest} of this site (allow.samples)")
        data = self._data(_section(tree, "data"), source)
        ours = {key: federation[key] for key in FEDERATION if key in federation}
        return {**tree, "method": method, "model": model, "data": data, "federation": ours}

    def _candidates(self, asked: object) -> list[object]:
        """The networks that this site may be asked to train: the one that it has chosen, or all of model.name."""
        several = list(asked.values()) if isinstance(asked, Mapping) else asked if isinstance(asked, list) else [asked]
        if self.network is None:
            return several
        if self.network not in several:
            raise Refused(
                f"model.name does not have {self.network!r}, which this site trains (network = of its site.toml)"
            )
        return [self.network]

    def check_order(self, order: Order) -> None:
        """Refuse an order for a round beyond the limit, or for training with too few sites."""
        rounds, fewest = self.allow.rounds, self.allow.sites
        if order.round and order.sites < fewest:
            raise Refused(f"the round has {order.sites} sites, and this site trains only with {fewest} or more")
        if rounds is not None and max(order.round, order.evaluate) > rounds:
            raise Refused(f"round {max(order.round, order.evaluate)} is beyond the {rounds} of this site's policy")

    def check_parameters(self, number: int) -> None:
        """Refuse a model that is too large; its size depends on the site's data, so the sentence does not say it."""
        if number > (most := self.allow.parameters):
            raise Refused(
                f"the model has more than the {most:,} parameters that this site allows (allow.parameters "
                "of its site.toml)"
            )

    def check_numbers(self, number: int) -> None:
        """Refuse a method that makes too large a tensor beside the model.

        With a small model it may be larger than that: the default limit is allowed in any case.
        """
        if number > (most := max(self.allow.parameters, PARAMETERS)):
            raise Refused(
                f"with this model and these settings the method makes a tensor of more than the {most:,} numbers that "
                "this site allows (allow.parameters of its site.toml)"
            )

    def _check_method(self, config: Config) -> None:
        """Refuse more rounds or work than allowed, and a method whose upload, with these settings, has class counts."""
        method = config.build_method()
        asked: list[tuple[str, float, int | None]] = [("rounds", config.rounds, self.allow.rounds)]
        asked += [(key, number, self.allow.epochs) for key, number in config.passes().items()]
        for key, number, most in asked:
            if most is not None and number > most:
                rule = "rounds" if key == "rounds" else "epochs"
                raise Refused(f"{key} = {number} is more than the {most} that this site allows (allow.{rule})")
        if method.upload.tells_counts and not self.allow.counts:
            raise Refused(
                f"method.name = {config.method['name']!r} with these settings uploads how many samples of each class "
                "there are, which this site does not allow (allow.counts of its site.toml)"
            )

    def _check_privacy(self, config: Config) -> None:
        level, asked = self.allow.privacy, config.privacy.level
        if level not in ("none", asked):
            raise Refused(f"privacy.level = {asked!r} is not the {level!r} that this site asks for (allow.privacy)")

    def _check_pixels(self, config: Config) -> None:
        size = config.data.size
        if size is not None and math.prod(size) > self.allow.pixels:
            raise Refused(
                f"data.size = {size} is more than the {self.allow.pixels:,} pixels that this site allows (allow.pixels)"
            )

    def _check_body(self, config: Config) -> None:
        """Refuse a frozen body whose features take too much, or whose weights the config does not fix."""
        name, how = config.model.network, config.features
        if config.model.frozen == "none":
            return
        if how.size**2 > self.allow.pixels:
            raise Refused(
                f"features.size = {how.size} is more than the {self.allow.pixels:,} pixels that this site allows "
                "(allow.pixels)"
            )
        if how.views > self.allow.views:
            raise Refused(
                f"features.views = {how.views} is more than the {self.allow.views} that this site allows (allow.views)"
            )
        if how.sha256 is None:
            raise Refused("features.sha256 is missing: it says which weights the frozen body has")
        if name.startswith(ONNX) and self.weights is None:
            raise Refused(
                f"model.name = {name[:100]!r} is a program, which this site takes from nobody: it needs its own copy "
                "of the file (weights = of its site.toml)"
            )

    def _check_federation(self, said: Mapping[str, Any]) -> None:
        name, count, fewest = said.get("name", "fednh"), said.get("min_clients", 1), self.allow.sites
        if self.allow.secure and said.get("secure", False) is not True:
            raise Refused("federation.secure is not true, and this site trains in secure sums only (allow.secure)")
        if self.federation is not None and name != self.federation:
            raise Refused(f"federation.name = {name!r} is not the federation of this site")
        if type(count) is not int or count < fewest:
            raise Refused(
                f"federation.min_clients = {count!r}, and this site takes part only with {fewest} sites or more"
            )

    def _data(self, asked: Mapping[str, Any], source: str | None) -> dict[str, Any]:
        """The site decides what is read; the federation decides how samples are made from it."""
        how = {key: asked[key] for key in SAFE_DATA if key in asked}
        if source is None:
            name = asked.get("name", "digits")
            if name not in (*BUILTIN, *PUBLISHED) or self.set not in (None, name):
                named = self.set or "the public sets that have a name"
                raise Refused(f"data.name = {name!r} is not read here; this site has a part of {named}")
            return {**how, **_known(merge_test=asked.get("merge_test")), "name": name}
        for key, ours, law in (("label", self.label, "label"), ("site", self.site_column, "site-column")):
            if asked.get(key) not in (None, key, ours) and ours is None:
                raise Refused(
                    f"data.{key} = {asked[key]!r}: which column that is, this site's site.toml says ({law} =)"
                )
        if asked.get("group") not in (None, "") and self.group is None:  # or samples of one person would be separated
            raise Refused("data.group: which samples belong together, this site's site.toml says (group =)")
        own = _known(label=self.label, site=self.site_column, separator=self.separator, decimal=self.decimal)
        own |= _known(
            group=self.group, columns=self._columns(asked), ignore=None if self.ignore is None else list(self.ignore)
        )
        return {**how, "name": source, **own, **_known(missing=asked.get("missing"))}

    def _columns(self, asked: Mapping[str, Any]) -> Any:
        """The federation's columns, if all of them may be read."""
        columns = asked.get("columns")
        if self.columns is None and not columns:
            return None
        if self.columns is None:
            raise Refused("data.columns: this site's site.toml does not say which columns may be read (columns =)")
        if not isinstance(columns, Mapping) or not columns:
            raise Refused("data.columns must name the columns and their values: this site reads no others")
        if strange := [name for name in columns if name not in self.columns]:
            raise Refused(f"data.columns names {strange[0]!r}, which may not be read at this site")
        return columns


class SiteConfig(StrictModel):
    """A site's own settings, from Flower's node-config."""

    model_config = ConfigDict(validate_by_name=True)

    site: str = Field("", description="the site's name in the federation")
    home: FilePath = Field(alias="state", description="folder for personal state and model, on the site's disk")
    data: str | None = Field(None, description="any source that `fednh run --data` takes; read here and nowhere else")
    part: int = Field(-1, alias="partition-id", description="which part of a public set it has, from 0")
    parts: int = Field(0, alias="num-partitions", description="how many parts there are")
    test: str | None = Field(None, description="a balanced test set at the site, for PM(V) and PM(L)")
    device: str | None = Field(None, description="where it computes, `cpu` or `cuda`; without it as the config says")
    encoding: str | None = Field(None, description="of its text files, unless it is detected")
    layout: str | None = Field(None, description='of a folder of images: `"SITE/CLASS"` where folders leave doubt')
    on_bad: str | None = Field(
        None, alias="on-bad", description='`"skip"` leaves out unreadable images, and the site\'s log names them'
    )
    orders: FilePath = Field(
        default_factory=SiteFolder.orders.absolute, description='file with the server\'s public key, as `"orders.pub"`'
    )
    ledger: FilePath | None = Field(
        None,
        description="file in which it keeps what was released of its data; default: in `state`. Give one file to all "
        "sites of a machine that have the same data",
    )
    key: FilePath = Field(
        default_factory=SiteFolder.key.absolute,
        description="file with its own key, as in `--auth-supernode-private-key`; it signs what the site sends",
    )
    peers: FilePath = Field(
        default_factory=SiteFolder.peers.absolute,
        description="file with the other sites' public keys, a line `NAME KEY` each, for secure sums",
    )
    policy: Policy

    @property
    def divided(self) -> bool:
        """Whether the data is a part of a public set: then nothing about it is secret."""
        return self.data is None

    @property
    def reading(self) -> dict[str, str]:
        """The settings below [data] that say how the site's own files are read."""
        return _known(encoding=self.encoding, on_bad=self.on_bad, layout=self.layout)

    @field_validator("data", "test")
    @classmethod
    def _source(cls, source: str | None) -> str | None:
        return None if source is None else with_prefix(source)

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, node: dict[str, Any]) -> dict[str, Any]:
        part, parts, data = node.get("partition-id", -1), node.get("num-partitions", 0), "data" in node
        if not data and not (type(part) is int and type(parts) is int and 0 <= part < parts):
            raise ValueError("give data=SOURCE, the site's own data, or partition-id=K and num-partitions=N")
        if data and "site" not in node:
            raise ValueError("data= needs site=NAME beside it; state and numbers of a site are kept by its name")
        if "state" not in node:
            raise ValueError("give state=FOLDER, where the site keeps its personal state and model")
        return {**node, "partition-id": -1, "num-partitions": 0} if data else {"site": f"client-{part:06d}", **node}

    @model_validator(mode="after")
    def _check(self) -> SiteConfig:
        if problem := name_problem(self.site):
            raise ValueError(f"site= cannot be the site's name: {problem}")
        for setting, value in self.reading.items():
            try:
                validate({"data": {setting: value}})
            except UserError as error:
                raise ValueError(str(error).replace(f"data.{setting}", setting.replace("_", "-"))) from None
        return self


def read_policy(node: Mapping[str, Any]) -> Policy:
    """Read the rules from a node-config, whose keys are flat; those of SiteConfig are ignored."""
    allow = {key.removeprefix("allow."): value for key, value in node.items() if key.startswith("allow.")}
    rest = {key: value for key, value in node.items() if key not in _site_keys() and not key.startswith("allow.")}
    return _parsed(Policy, {**rest, "allow": _parsed(Allow, allow, "allow.")})


def read_site_config(node: Mapping[str, Any]) -> SiteConfig:
    """Read a node-config: what the site is, and its rules."""
    own = {key: value for key, value in node.items() if key in _site_keys()}
    return _parsed(SiteConfig, {**own, "policy": read_policy(node)})


def _site_keys() -> set[str]:
    return {field.alias or name for name, field in SiteConfig.model_fields.items() if name != "policy"}


M = TypeVar("M", Allow, Policy, SiteConfig)


def _parsed(kind: type[M], values: Mapping[str, Any], section: str = "") -> M:
    try:
        return kind.parse(values)
    except ValueError as error:
        key = section if not str(error).startswith(section) else ""
        raise UserError(f"site.toml: {key}{error}") from None


def about_samples(config: Config) -> dict[str, Any]:
    """The server's settings that decide which samples of a site count, and how they are made."""
    data = {f"data.{key}": getattr(config.data, key) for key in (*SAFE_DATA, "columns", "missing")}
    more = {"partition.min_samples": config.partition.min_samples, "eval.samples": config.eval.samples}
    if config.model.frozen != "none":
        more |= {f"model.{key}": getattr(config.model, key) for key in ("frozen", "name", "args", "head")}
        more |= {f"features.{key}": value for key, value in config.features}
    settings: dict[str, Any] = json.loads(json.dumps({"seed": config.seed, **data, **more}))
    return settings


class AgreementState(StrictModel):
    """The file of an Agreement."""

    settings: dict[str, Any] | None
    asked: tuple[str, ...]  # digests of settings that were looked at before one was agreed
    greeting: dict[str, Any] | None
    greetings: int = Field(ge=0)  # how often it was given


class Agreement:
    """What a site with its own data has agreed with one federation: which samples count, and what it said of them.

    Two answers about different samples can be subtracted, until one sample is left. So a site agrees to one choice of
    samples, the first that its data fits, and from then on repeats its first greeting. It looks at no more than
    `QUESTIONS` choices, because each refusal says something, too. To agree anew, its owner deletes the file.
    """

    def __init__(self, file: Path):
        self._file, self._lock = file, FileLock(file.with_suffix(".lock"))

    def check(self, config: Config) -> None:
        """Refuse settings other than those agreed; call it before the data is read."""
        asked = about_samples(config)
        with self._lock:
            known = self._read()
            if known.settings is not None:
                self._compare(known.settings, asked)
                return
            name = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
            if name in known.asked:
                return
            if len(known.asked) >= QUESTIONS:
                raise Refused(
                    f"it was asked about its samples in {QUESTIONS} different ways and its data fitted none; its owner "
                    f"lets it answer again by deleting {self._file.name} in its folder of state"
                )
            self._write(known, asked=(*known.asked, name))

    def keep(self, config: Config, greeting: dict[str, Any] | None = None) -> tuple[dict[str, Any] | None, int]:
        """Agree to these settings; returns the first greeting, and how often it was given."""
        settings = about_samples(config)
        with self._lock:
            known = self._read()
            if known.settings is not None:
                self._compare(known.settings, settings)
            first, times = known.greeting or greeting, known.greetings + (greeting is not None)
            self._write(known, settings=settings, greeting=first, greetings=times)
            return first, times

    def _write(self, known: AgreementState, **values: Any) -> None:
        write_json(self._file, known.model_copy(update=values).model_dump())

    def _compare(self, agreed: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
        for key in sorted({*agreed, *asked}):
            if agreed.get(key) != asked.get(key):
                raise Refused(
                    f"{key} = {asked.get(key)!r}, but this site has agreed to {agreed.get(key)!r}, once for this "
                    f"federation; its owner agrees anew by deleting {self._file.name} in its folder of state"
                )

    def _read(self) -> AgreementState:
        if not self._file.exists():
            return AgreementState(settings=None, asked=(), greeting=None, greetings=0)
        try:
            return AgreementState.parse(self._file.read_bytes())
        except (OSError, ValueError) as error:
            raise UserError(f"{self._file} is damaged; restore it, or delete it to agree anew") from error


def for_sites(config: Config) -> Config:
    """The config that the server sends: without its own paths and sources, with the checksum of a frozen body."""
    weights = None if config.model.weights is None else "pretrained"
    name = {"name": plain_name(config.model.name)} if isinstance(config.model.name, str) else {}
    frozen, features = config.model.frozen != "none", config.features
    if frozen:
        checksum = checksum_of(frozen_recipe(config), weights_of(config))
        features = features.model_copy(update={"sha256": checksum})
    group = None if config.data.group is None else "group"  # that there are groups; each site says which
    return config.model_copy(
        update={
            "data": config.data.model_copy(update={"dir": None, "group": group}),
            "model": config.model.model_copy(update={"weights": weights, **name}),
            "features": features,
            "federation": config.federation.model_copy(update={"folder": None, "key": None, "test": None}),
        }
    )


def missing_values(missing: Any) -> tuple[str, ...]:
    """data.missing as site.toml has it: its values, "column=value" where they are those of one column."""
    if isinstance(missing, Mapping):
        return tuple(f"{column}={value}" for column, values in missing.items() for value in values)
    return tuple(map(str, missing or ()))


def _section(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = tree.get(name, {})
    if not isinstance(section, Mapping):
        raise Refused(f"the server's config: {name} is not a section")
    return section


def _allowed(key: str, name: Any, allowed: tuple[str, ...], rule: str) -> None:
    if name not in allowed:
        raise Refused(f"{key} = {str(name)[:100]!r} is not allowed at this site (allow.{rule} of its site.toml)")


def _known(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
