"""A Config from a preset, a TOML file and dotted overrides, and a Config as TOML."""

from __future__ import annotations

import json
import tomllib
import warnings
from collections.abc import Collection, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from fednh.config.options import SHORT_OPTIONS, flat, parse_value
from fednh.config.schema import DEFAULT_METHOD, WRITTEN, Config, build_method, explain
from fednh.data.sources.folder import is_group_file
from fednh.data.sources.registry import absolute
from fednh.errors import ConfigError, Ignored, UserError, did_you_mean
from fednh.io.files import expanded
from fednh.methods.registry import find_method, hyper_parameters
from fednh.models.backbone import ONNX

PRESETS = (
    *("digits", "spiral", "cifar10", "cifar100", "tinyimagenet", "pfllib"),
    *("heart", "heart_flamby", "har", "femnist", "camelyon17"),
)
FEW_CLIENTS = 20  # so many all take part in every round, unless participation.rate is set
FRESH = ("method.name", "model.name")  # another one has other settings, so those given before are dropped


def load(source: str | None, overrides: Mapping[str, Any]) -> Config:
    """The config of a preset or TOML file with dotted overrides laid over it, e.g. {"method.rho": 0.7}.

    Without a source it is the preset of the data set named in the overrides, if there is one, else `digits`.
    """
    if source is None:
        data = overrides.get("data.name", "digits")
        tree, where = (_preset(data), "") if data in PRESETS else ({}, "")
    elif source in PRESETS:
        tree, where = _preset(source), ""
    else:
        tree, where = _read(Path(source)), f"{source}: "
    for key in sorted(overrides, key=lambda key: key not in FRESH):  # a name first, then what belongs to it
        _put(tree, key, overrides[key])
    _of_the_method(tree, where)
    chosen = {*overrides, *(flat(tree) if where else ())}  # what a preset says is nobody's choice
    _make_paths_absolute(tree)
    _few_clients(tree, overrides)
    _training_free(tree, chosen)
    _sums_under_privacy(tree, chosen)
    return validate(tree, where)


def _of_the_method(tree: dict[str, Any], where: str) -> None:
    """A file may have settings for several methods, each in a table [methods.NAME]: those of the run's method hold.

    What [method] itself and overrides say comes before them.
    """
    tables, chosen = tree.pop("methods", {}), tree.setdefault("method", {})
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise ConfigError(f"{where}methods should have tables, [methods.fedrod] for example")
    for name, table in tables.items():  # all are checked: a wrong word is told in every run
        try:
            build_method({**table, "name": name})
        except UserError as error:
            raise ConfigError(f"{where}[methods.{name}]: {error}") from error
    if isinstance(chosen, dict) and (name := str(chosen.get("name", DEFAULT_METHOD))) in tables:
        tree["method"] = {**tables[name], "name": name, **chosen}


def _make_paths_absolute(tree: dict[str, Any]) -> None:
    """Paths as seen from here, so that a written config works from anywhere."""
    model = tree.get("model")
    if isinstance(model, dict) and isinstance(model.get("weights"), str):
        model["weights"] = str(expanded(model["weights"]).absolute())
    if isinstance(model, dict) and str(model.get("name")).startswith(ONNX):
        model["name"] = ONNX + str(expanded(model["name"].removeprefix(ONNX)).absolute())
    data = tree.get("data")
    if not isinstance(data, dict):
        return
    if isinstance(data.get("dir"), str):
        data["dir"] = str(expanded(data["dir"]).absolute())
    if isinstance(data.get("name"), str):
        data["name"] = absolute(data["name"])
        if data["name"].startswith("folder:") and isinstance(data.get("group"), str) and is_group_file(data["group"]):
            data["group"] = str(expanded(data["group"]).absolute())


def _few_clients(tree: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """Natural sites, and up to FEW_CLIENTS others, all take part in every round, unless the user sets it."""
    partition = tree.get("partition")
    if not isinstance(partition, dict):
        return
    natural, clients = partition.get("name") == "site", partition.get("clients")
    if natural and "partition.clients" in overrides:
        warnings.warn("partition.clients is not a setting of natural sites: ignored", Ignored, stacklevel=3)
    few = isinstance(clients, int) and clients <= FEW_CLIENTS
    participation = tree.setdefault("participation", {}) if natural or few else None
    if isinstance(participation, dict):
        participation.setdefault("rate", 1.0)


def _training_free(tree: dict[str, Any], chosen: Collection[str]) -> None:
    """A method that trains nothing has one round in which every client takes part, unless the user sets it."""
    method, participation = tree.get("method"), tree.setdefault("participation", {})
    try:
        free = isinstance(method, dict) and find_method(method.get("name", DEFAULT_METHOD)).training_free
    except UserError:  # which `validate` reports, with the file
        return
    if not free or not isinstance(participation, dict):
        return
    if "rounds" not in chosen:
        tree["rounds"] = 1
    if "participation.rate" not in chosen:
        participation["rate"] = 1.0


def _sums_under_privacy(tree: dict[str, Any], chosen: Collection[str]) -> None:
    """Samples' privacy wants sums over samples of a method that can send them, unless the user sets what it sends."""
    method, privacy = tree.get("method"), tree.get("privacy")
    if not isinstance(method, dict) or not isinstance(privacy, dict) or privacy.get("level") != "sample":
        return
    try:
        offered = hyper_parameters(method.get("name", DEFAULT_METHOD))
    except UserError:  # which `validate` reports, with the file
        return
    if "aggregation" in offered and "method.aggregation" not in chosen:
        method["aggregation"] = "sum"


def validate(tree: Mapping[str, Any], where: str = "", written: bool = False) -> Config:
    """A Config from plain values, or one sentence that says what is wrong with them.

    A config `written` by a run is complete: a user's own method need not be importable to read it.
    """
    if isinstance(section := tree.get("eval"), dict) and "prior" in section:  # a measurement that earlier runs made
        tree = {**tree, "eval": {key: value for key, value in section.items() if key != "prior"}}
    try:
        return Config.model_validate(tree, context=WRITTEN if written else None)
    except ValidationError as error:
        raise ConfigError(where + explain(error)) from error
    except UserError as error:
        raise ConfigError(where + str(error)) from error


def dump(config: Config) -> str:
    """The complete config as TOML; running it again gives the same numbers."""
    return tomli_w.dumps(_without_none(config.model_dump()))


def with_settings(config: Config, given: Mapping[str, Any]) -> Config:
    """The config with settings by dotted name laid over it; another method starts from its own defaults."""
    other = given.get("method.name", config.method["name"]) != config.method["name"]
    every = flat(_without_none(config.model_dump()))
    if config.partition.kind.natural:
        del every["partition.clients"]  # no setting of natural sites
    kept = {key: value for key, value in every.items() if not (other and key.startswith("method."))}
    return load(None, {**kept, **given})


def difference(config: Config) -> dict[str, Any]:
    """The settings by dotted name, data, partition and method first, that make this config of no file at all.

    Those that do not change the models are left out.
    """
    first = {"data.name": config.data.name, "partition.name": config.partition.name}
    first["method.name"] = config.method["name"]
    defaults = flat(_without_none(load(None, first).model_dump(mode="json")))
    here = flat(_without_none(config.model_dump(mode="json")))
    no_matter = ("workers", "eval.every", "checkpoint.every")
    rest = {key: value for key, value in here.items() if defaults.get(key) != value and key not in no_matter}
    return first | rest


def as_options(settings: Mapping[str, Any]) -> list[str]:
    """Settings by dotted name as words of a command line."""
    flags, words = {option.key: option.flag for option in SHORT_OPTIONS.values()}, list[str]()
    for key, value in settings.items():
        text = value if isinstance(value, str) and parse_value(value) == value else json.dumps(value)
        words += [flags[key], text] if key in flags else ["--set", f"{key}={text}"]
    return words


def _preset(name: str) -> dict[str, Any]:
    text = resources.files("fednh.config").joinpath("presets", f"{name}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def _read(path: Path) -> dict[str, Any]:
    if not path.exists() and path.suffix != ".toml":
        raise ConfigError(f"{str(path)!r} is neither a preset nor a TOML file{did_you_mean(str(path), PRESETS)}")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a TOML file: it is not UTF-8 text") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key. Another method or model than before starts from its own defaults."""
    *sections, last = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"{key}: {section} is a value, not a section")
    if key in FRESH and tree.get("name") != value:
        tree.clear()
    tree[last] = value


def _without_none(tree: dict[str, Any]) -> dict[str, Any]:
    return {k: _without_none(v) if isinstance(v, dict) else v for k, v in tree.items() if v is not None}
