"""Names of run folders: the settings that matter at a glance, in characters that every file system accepts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

from fednh.config import Config
from fednh.errors import UserError

_LONGEST = 150


def run_name(config: Config, swept: Mapping[str, Any] | None = None) -> str:
    """<data>-<method>-<partition>[-<setting><value>...]-seed<n>; `swept` are settings that the rest does not show."""
    data = config.data.name
    stem = Path(data.rpartition(":")[2]).stem if ":" in data else data
    settings = swept or {}
    words = [f"{_short(key, settings)}{_value(value)}" for key, value in settings.items()]
    return _safe("-".join([stem, config.method["name"], config.partition.kind.slug(), *words, f"seed{config.seed}"]))


def new_folder(config: Config) -> Path:
    """runs/<name>, with a number behind it if that is taken."""
    name = run_name(config)
    for number in range(1, 100_000):
        path = Path("runs") / (name if number == 1 else f"{name}-{number}")
        if not path.exists():
            return path
    raise UserError("runs/ is full; choose a folder with --out")


def unlike(names: Sequence[str], meanings: Sequence[str]) -> list[str]:
    """The names; where different meanings share a name, a checksum of the meaning is appended."""
    return [
        f"{name}-{crc32(meaning.encode()):08x}" if names.count(name) > 1 else name
        for name, meaning in zip(names, meanings, strict=True)
    ]


def _short(key: str, keys: Mapping[str, Any]) -> str:
    """The last part of a dotted key, unless another key ends the same."""
    last = key.rpartition(".")[2]
    return key if sum(other.rpartition(".")[2] == last for other in keys) > 1 else last


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return f"={str(value).lower()}"
    if isinstance(value, int | float):
        return f"{value:g}" if isinstance(value, float) else str(value)
    return f"={value}"


def _safe(name: str) -> str:
    safe = re.sub(r"[^A-Za-z0-9._+=-]+", "_", name).strip("._") or "run"
    return safe if len(safe) <= _LONGEST else f"{safe[:_LONGEST]}-{crc32(name.encode()):08x}"
