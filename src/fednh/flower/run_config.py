"""All settings as Flower's run-config, and back.

Flower takes nested tables of numbers, booleans and text. Every other value is written as JSON text: a list, a table
whose keys Flower would split, and text that would be mistaken for one of these. Two more forms can be read: `-c
model.args.hidden=...` of `flwr run`, and lists as text with commas, which older federations have.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin

from fednh.config import Config, Section, flat, load, parse_value
from fednh.errors import UserError


def run_config(config: Config) -> dict[str, Any]:
    """Settings that read back as exactly this config; tables stay tables wherever that is possible."""
    tree = _tree(config, tables=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        same = _same(_load(flat(tree)), config)
    return tree if same else _tree(config, tables=False)


def read_config(run_config: Mapping[str, Any]) -> Config:
    """The Config for a federation's flat settings."""
    config = _load(run_config)
    if config.federation.folder is None or not Path(config.federation.folder).is_absolute():
        raise UserError("federation.folder must be the absolute path of the server's run folder")
    if config.data.folds is not None:
        raise UserError(
            "data.folds is for simulations: answers about other folds of the same samples would tell about single "
            "ones, so a real site agrees to one division; use data.holdout"
        )
    return config


def _load(run_config: Mapping[str, Any]) -> Config:
    keys = sorted(run_config, key=lambda key: key.count("."))  # a table before settings inside it
    return load(None, {key: _value(key, run_config[key]) for key in keys})


def _tree(config: Config, tables: bool) -> dict[str, Any]:
    def section(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
        return {key: _text(f"{name}.{key}", each, tables) for key, each in values.items() if each is not None}

    tree: dict[str, Any] = {}
    for name, value in config:
        if isinstance(value, Section | dict):
            tree[name] = section(name, dict(value))
        elif value is not None:
            tree[name] = _text(name, value, tables)
    return tree


def _text(key: str, value: Any, tables: bool) -> Any:
    """A value as Flower takes it."""
    if isinstance(value, dict) and tables and value and all(name.isidentifier() for name in value):
        return {name: _text(f"{key}.{name}", each, tables) for name, each in value.items() if each is not None}
    if isinstance(value, dict | list | tuple):
        return json.dumps(value, default=str)
    return json.dumps(value) if isinstance(value, str) and _value(key, value) != value else value


def _value(key: str, value: Any) -> Any:
    """The original value, from Flower's."""
    if not isinstance(value, str) or not _may_be_structured(key):
        return value
    if value.startswith(("[", "{", '"')):
        try:
            return json.loads(value)
        except ValueError:
            pass  # plain text, or a list as TOML writes it
    if not key.startswith("model.args."):
        return value
    return parse_value(value if value.startswith("[") or "," not in value else f"[{value}]")


def _may_be_structured(key: str) -> bool:
    """Whether this setting, or the one that it is a part of, can be a list or a table."""
    words = key.split(".")
    return any(".".join(words[:n]) in _structured() for n in range(1, len(words) + 1)) and key != "method.name"


@cache
def _structured() -> frozenset[str]:
    found = set()
    for name, field in Config.model_fields.items():
        section = field.annotation
        inner = section.model_fields if isinstance(section, type) and issubclass(section, Section) else None
        if inner is None:
            found |= {name} if _has_list(section) else set()
        else:
            found |= {f"{name}.{key}" for key, each in inner.items() if _has_list(each.annotation)}
    return frozenset(found)


def _has_list(annotation: Any) -> bool:
    return get_origin(annotation) in (list, dict, tuple) or any(map(_has_list, get_args(annotation)))


def _same(one: Config, other: Config) -> bool:
    """Equal in types too: 1 is not True."""
    left, right = (json.dumps(each.model_dump(), default=repr, sort_keys=True) for each in (one, other))
    return left == right
