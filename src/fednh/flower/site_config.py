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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w
from filelock import FileLock

from fednh.config import Config, validate
from fednh.config.schema import DEFAULT_METHOD
from fednh.data.sources.builtin import BUILTIN
from fednh.data.sources.images import KEPT
from fednh.data.sources.registry import PUBLISHED, agreed, with_prefix
from fednh.errors import Refused, UserError
from fednh.flower.layout import SiteFolder
from fednh.flower.protocol import RANGES
from fednh.flower.transport import read_toml
from fednh.io.files import expanded, write_json
from fednh.methods import METHODS
from fednh.models import MODELS
from fednh.text import name_problem

if TYPE_CHECKING:
    from fednh.flower.protocol import Order

METRICS = ("samples", "loss", "gradient_norm", *RANGES)
# site.toml: what may be read ...
DATA_KEYS = {
    "federation",
    "label",
    "site-column",
    "columns",
    "weights",
    "set",
    "ignore",
    "separator",
    "decimal",
    "missing",
    "group",
}
# ... and [allow], what may be run and what may leave.
COUNTS = ("rounds", "epochs", "sites", "samples", "parameters", "pixels")
ALLOW_KEYS = {"methods", "models", "metrics", "counts", "privacy", *COUNTS}
TEXTS = ("federation", "set", "label", "site-column", "weights", "separator", "decimal", "group")
KEYS = DATA_KEYS | {f"allow.{key}" for key in ALLOW_KEYS}
SAFE_DATA = ("augment", "holdout", *agreed())  # the server's data.*: how samples are made, not what is read
ARGUMENTS = 10_000  # characters of model.args: even layers without parameters take memory
QUESTIONS = 10  # different settings about a site's samples that it looks at until it agrees to one


@dataclass(frozen=True)
class Policy:
    """A site's rules; the defaults apply where site.toml has no entry."""

    federation: str | None = None  # the only one it takes part in
    set: str | None = None  # the public set that it has a part of; None: any that the server names
    label: str | None = None  # the column of its own data that holds the class
    site_column: str | None = None  # the column that holds the site
    columns: tuple[str, ...] | None = None  # the columns that may be features
    group: str | None = None  # what says which of its samples belong together: a column, a pattern or a file
    ignore: tuple[str, ...] | None = None  # the columns that are none
    separator: str | None = None  # between the values of its own text files; None: found
    decimal: str | None = None  # of numbers in them; None: found
    missing: tuple[str, ...] = ()  # values of its tables that mean missing, "-9", or "age=-9" for one column
    weights: str | None = None  # its own copy of the pretrained weights that the federation starts from
    methods: tuple[str, ...] = tuple(METHODS)
    models: tuple[str, ...] = ("auto", *MODELS)
    rounds: int | None = None  # the most that it trains, over all runs together
    epochs: int | None = None  # the most in one round, for every kind of passes over its samples (Method.passes)
    metrics: tuple[str, ...] = METRICS  # which may leave
    sites: int = 1  # the fewest sites in a round in which it trains
    samples: int = 10  # of its own data: the fewest behind any number that leaves, and in a batch
    parameters: int = 100_000_000  # the most that a model has; and numbers in a tensor of a method
    pixels: int = 1_000_000  # the most of an image, where the config says its size: the site's images are brought to it
    counts: bool = False  # whether an upload may say how many samples of each class there are
    privacy: str = "none"  # the weakest privacy mechanism that it accepts

    def config(self, toml: str, source: str | None) -> Config:
        """The server's config as applied here; `source` is the site's own data (None: a part of a public set)."""
        try:
            tree = self.applied(read_toml(toml), source)
            config = validate(tree, "the server's config: ")
            self._check_method(config)
            self._check_pixels(config)
            if source is not None and missing_words(config.data.missing) != self.missing:
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
        _allowed("method.name", method.get("name", DEFAULT_METHOD), self.methods, "methods")
        _allowed("model.name", model.get("name", "auto"), self.models, "models")
        if len(str(model.get("args"))) > ARGUMENTS:
            raise Refused(f"model.args has more than {ARGUMENTS} characters")
        if model.get("weights") is not None:
            if self.weights is None:
                raise Refused("model.weights: this site starts from no file; its site.toml names none (weights =)")
            model["weights"] = self.weights
        batch = train.get("batch_size", 64)
        if source is not None and (type(batch) is not int or batch < self.samples):
            raise Refused(f"train.batch_size = {batch!r} is less than the {self.samples} of this site (allow.samples)")
        data = self._data(_section(tree, "data"), source)
        ours = {key: federation[key] for key in ("name", "min_clients") if key in federation}
        return {**tree, "method": method, "model": model, "data": data, "federation": ours}

    def check_order(self, order: Order) -> None:
        """Refuse an order for a round beyond the limit, or for training with too few sites."""
        if order.round and order.sites < self.sites:
            raise Refused(f"the round has {order.sites} sites, and this site trains only with {self.sites} or more")
        if self.rounds is not None and max(order.round, order.evaluate) > self.rounds:
            raise Refused(f"round {max(order.round, order.evaluate)} is beyond the {self.rounds} of this site's policy")

    def check_parameters(self, number: int) -> None:
        """Refuse a model that is too large; its size depends on the site's data, so the sentence does not say it."""
        if number > self.parameters:
            raise Refused(
                f"the model has more than the {self.parameters:,} parameters that this site allows (allow.parameters "
                "of its site.toml)"
            )

    def check_numbers(self, number: int) -> None:
        """Refuse a method that makes too large a tensor beside the model.

        With a small model it may be larger than that: the usual limit is allowed in any case.
        """
        if number > (most := max(self.parameters, Policy.parameters)):
            raise Refused(
                f"with this model and these settings the method makes a tensor of more than the {most:,} numbers that "
                "this site allows (allow.parameters of its site.toml)"
            )

    def _check_method(self, config: Config) -> None:
        """Refuse more rounds or work than allowed, and a method whose upload, with these settings, has class counts."""
        method = config.build_method()
        asked = [("rounds", config.rounds, self.rounds)]
        asked += [(key, number, self.epochs) for key, number in method.passes(config.train.epochs).items()]
        for key, number, most in asked:
            if most is not None and number > most:
                rule = "rounds" if key == "rounds" else "epochs"
                raise Refused(f"{key} = {number} is more than the {most} that this site allows (allow.{rule})")
        if method.upload.tells_counts and not self.counts:
            raise Refused(
                f"method.name = {config.method['name']!r} with these settings uploads how many samples of each class "
                "there are, which this site does not allow (allow.counts of its site.toml)"
            )

    def _check_pixels(self, config: Config) -> None:
        size = config.data.size
        if size is not None and math.prod(size) > self.pixels:
            raise Refused(
                f"data.size = {size} is more than the {self.pixels:,} pixels that this site allows (allow.pixels)"
            )

    def _check_federation(self, said: Mapping[str, Any]) -> None:
        name, fewest = said.get("name", "fednh"), said.get("min_clients", 1)
        if self.federation is not None and name != self.federation:
            raise Refused(f"federation.name = {name!r} is not the federation of this site")
        if type(fewest) is not int or fewest < self.sites:
            raise Refused(
                f"federation.min_clients = {fewest!r}, and this site takes part only with {self.sites} sites or more"
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


def read_policy(node: Mapping[str, Any]) -> Policy:
    """Read the rules from a node-config; other keys are ignored."""
    text = {key: _text(node, key) for key in TEXTS}
    most = {key: _count(node, f"allow.{key}") for key in COUNTS}
    usual, lists = Policy(), {key: _words(node, f"allow.{key}") for key in ("methods", "models", "metrics")}
    if unknown := sorted({*(lists["metrics"] or ())} - {*METRICS}):
        raise UserError(f"site.toml: allow.metrics has {unknown[0]!r}; metrics are {', '.join(METRICS)}")
    if node.get("allow.privacy", "none") != "none":
        raise UserError("site.toml: allow.privacy takes 'none' only: this version of fednh has no privacy mechanism")
    if type(counts := node.get("allow.counts", False)) is not bool:
        raise UserError(f"site.toml: allow.counts = {counts!r} should be true or false")
    return Policy(
        federation=text["federation"],
        set=text["set"],
        label=text["label"],
        site_column=text["site-column"],
        columns=_words(node, "columns"),
        ignore=_words(node, "ignore"),
        group=text["group"],
        separator=text["separator"],
        decimal=text["decimal"],
        missing=_words(node, "missing") or (),
        weights=None if text["weights"] is None else str(expanded(text["weights"]).absolute()),
        methods=usual.methods if lists["methods"] is None else lists["methods"],
        models=usual.models if lists["models"] is None else lists["models"],
        rounds=most["rounds"],
        epochs=most["epochs"],
        metrics=usual.metrics if lists["metrics"] is None else lists["metrics"],
        sites=most["sites"] or usual.sites,
        samples=most["samples"] or usual.samples,
        parameters=most["parameters"] or usual.parameters,
        pixels=most["pixels"] or usual.pixels,
        counts=counts,
    )


@dataclass(frozen=True)
class SiteConfig:
    """A site's own settings, from Flower's node-config."""

    site: str
    home: Path  # all that the site keeps is below it
    policy: Policy
    data: str | None = None  # the site's own data source; None: its part of the set that the config names
    part: int = -1
    parts: int = 0
    test: str | None = None  # a source whose test part is the balanced test set
    device: str | None = None
    reading: tuple[tuple[str, str], ...] = ()  # settings below [data] that say how the site's own files are read
    orders: Path = SiteFolder.orders  # the server's public key, which verifies orders
    key: Path = SiteFolder.key  # the private key that signs this site's replies

    @property
    def divided(self) -> bool:
        """Whether the data is a part of a public set: then nothing about it is secret."""
        return self.data is None


# Keys of a node-config that say how the site's own files are read, and the settings below [data] that they are.
READING = {"encoding": "encoding", "on-bad": "on_bad", "layout": "layout"}
# Further keys of a node-config whose values are text.
FACTS = ("data", "site", "state", "test", "device", *READING, "orders", "key")


def read_site_config(node: Mapping[str, Any]) -> SiteConfig:
    """Read a node-config: what the site is, and its rules."""
    known = {*FACTS, "partition-id", "num-partitions", *KEYS}
    if unknown := sorted(set(node) - known):
        raise UserError(f"node-config: {unknown[0]} is not known; it takes {', '.join(sorted(known))}")
    part, parts = node.get("partition-id", -1), node.get("num-partitions", 0)
    text = {key: str(node[key]) for key in FACTS if key in node}
    if "data" not in text and not (isinstance(part, int) and isinstance(parts, int) and 0 <= part < parts):
        raise UserError("node-config: give data=SOURCE, the site's own data, or partition-id=K and num-partitions=N")
    if "data" in text and "site" not in text:
        raise UserError(
            "node-config: data= needs site=NAME beside it; state and numbers of a site are kept by its name"
        )
    if "site" in text and (problem := name_problem(text["site"])):
        raise UserError(f"node-config: site= cannot be the site's name: {problem}")
    reading = {setting: _checked(key, setting, text[key]) for key, setting in READING.items() if key in text}
    if "state" not in text:
        raise UserError("node-config: give state=FOLDER, where the site keeps its personal state and model")
    return SiteConfig(
        site=text.get("site", f"client-{part:06d}"),
        home=expanded(text["state"]).absolute(),
        data=with_prefix(text["data"]) if "data" in text else None,
        part=-1 if "data" in text else part,
        parts=0 if "data" in text else parts,
        test=with_prefix(text["test"]) if "test" in text else None,
        device=text.get("device"),
        reading=tuple(reading.items()),
        policy=read_policy(node),
        orders=expanded(text.get("orders", SiteFolder.orders)).absolute(),
        key=expanded(text.get("key", SiteFolder.key)).absolute(),
    )


def _checked(key: str, setting: str, value: str) -> str:
    """A value of a node-config that is a setting below [data]."""
    try:
        validate({"data": {setting: value}})
    except UserError as error:
        raise UserError(f"node-config: {str(error).replace(f'data.{setting}', key)}") from error
    return value


def about_samples(config: Config) -> dict[str, Any]:
    """The server's settings that decide which samples of a site count, and how they are made."""
    data = {f"data.{key}": getattr(config.data, key) for key in (*SAFE_DATA, "columns", "missing")}
    more = {"partition.min_samples": config.partition.min_samples, "eval.samples": config.eval.samples}
    found: dict[str, Any] = json.loads(json.dumps({"seed": config.seed, **data, **more}))
    return found


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
            if known["settings"] is not None:
                self._compare(known["settings"], asked)
                return
            name = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
            if name in known["asked"]:
                return
            if len(known["asked"]) >= QUESTIONS:
                raise Refused(
                    f"it was asked about its samples in {QUESTIONS} different ways and its data fitted none; its owner "
                    f"lets it answer again by deleting {self._file.name} in its folder of state"
                )
            write_json(self._file, {**known, "asked": [*known["asked"], name]})

    def keep(self, config: Config, greeting: dict[str, Any] | None = None) -> tuple[dict[str, Any] | None, int]:
        """Agree to these settings; returns the first greeting, and how often it was given."""
        with self._lock:
            known = self._read()
            if known["settings"] is not None:
                self._compare(known["settings"], about_samples(config))
            known |= {"settings": about_samples(config), "greeting": known["greeting"] or greeting}
            known["greetings"] += greeting is not None
            write_json(self._file, known)
            return known["greeting"], known["greetings"]

    def _compare(self, agreed: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
        for key in sorted({*agreed, *asked}):
            if agreed.get(key) != asked.get(key):
                raise Refused(
                    f"{key} = {asked.get(key)!r}, but this site has agreed to {agreed.get(key)!r}, once for this "
                    f"federation; its owner agrees anew by deleting {self._file.name} in its folder of state"
                )

    def _read(self) -> dict[str, Any]:
        empty: dict[str, Any] = {"settings": None, "asked": [], "greeting": None, "greetings": 0}
        if not self._file.exists():
            return empty
        try:
            found: dict[str, Any] = json.loads(self._file.read_text())
            if set(found) != set(empty) or type(found["greetings"]) is not int:
                raise ValueError
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{self._file} is damaged; restore it, or delete it to agree anew") from error
        return found


def for_sites(config: Config) -> Config:
    """The config that the server sends: without its own paths and sources."""
    weights = None if config.model.weights is None else "pretrained"
    group = None if config.data.group is None else "group"  # that there are groups; each site says which
    return config.model_copy(
        update={
            "data": config.data.model_copy(update={"dir": None, "group": group}),
            "model": config.model.model_copy(update={"weights": weights}),
            "federation": config.federation.model_copy(update={"folder": None, "key": None, "test": None}),
        }
    )


def site_toml(facts: Mapping[str, Any], config: Config) -> str:
    """A new site's site.toml: the facts, what the config says about its data, and rules that allow just this config."""
    data, own = config.data, "data" in facts
    said = {"label": data.label, "site-column": data.site, "columns": ", ".join(data.columns or ()) or None}
    said |= {"layout": data.layout, "on-bad": None if data.on_bad == "refuse" else data.on_bad}
    said |= {
        "group": data.group,
        "ignore": ", ".join(data.ignore or ()) or None,
        "separator": data.separator,
        "decimal": data.decimal,
        "missing": ", ".join(missing_words(data.missing)) or None,
    }
    known = _known(federation=config.federation.name, **(said if own else {"set": data.name}))
    method, usual = config.build_method(), Policy()
    left_out = {"gradient_norm": config.diagnostics.gradient_norm, "per_class": not own, "novelty": method.cosine}
    metrics = ", ".join(name for name in METRICS if left_out.get(name, True))
    return f"""\
# What this site is, what may be read here, what may be run and what may leave: the server cannot change it.
# Flower takes no lists: write them as text with commas.
{tomli_w.dumps({**facts, **known})}
[allow]  # just what the federation agreed on; a line that is left out allows what docs/deployment.md says
methods = {_quoted(config.method["name"])}
models = {_quoted(config.model.name)}
rounds = {config.rounds}       # most that are trained here in all; twice as many are evaluated at most
epochs = {max(method.passes(config.train.epochs).values())}       # most in a round
sites = {config.federation.min_clients}        # fewest that train together
samples = {usual.samples}     # of this site's own data: the fewest behind a number that leaves, and in a batch
parameters = {usual.parameters}  # most that a model has
pixels = {math.prod(data.size or (KEPT, KEPT))}      # most of an image, where the config says its size
counts = {"true" if method.upload.tells_counts else "false"}   # whether an upload may hold the class counts
metrics = {_quoted(metrics)}
"""


def missing_words(missing: Any) -> tuple[str, ...]:
    """data.missing as site.toml has it: its values, "column=value" where they are those of one column."""
    if isinstance(missing, Mapping):
        return tuple(f"{column}={value}" for column, values in missing.items() for value in values)
    return tuple(map(str, missing or ()))


def _quoted(text: str) -> str:
    return tomli_w.dumps({"x": text}).strip().removeprefix("x = ")


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


def _text(node: Mapping[str, Any], key: str) -> str | None:
    value = node.get(key)
    if value is not None and not isinstance(value, str):
        raise UserError(f"site.toml: {key} = {value!r} should be a text")
    return value


def _words(node: Mapping[str, Any], key: str) -> tuple[str, ...] | None:
    """A list, written as text with commas; empty text is an empty list."""
    text = _text(node, key)
    return None if text is None else tuple(word.strip() for word in text.split(",") if word.strip())


def _count(node: Mapping[str, Any], key: str) -> int | None:
    value = node.get(key)
    if value is not None and (type(value) is not int or value < 1):
        raise UserError(f"site.toml: {key} = {value!r} should be a whole number, 1 or more")
    return value
