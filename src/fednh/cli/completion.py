"""What a shell may offer behind an option: names from the registries. `fednh --install-completion` turns it on.

A completion is asked for by a shell between two keystrokes: whatever goes wrong, the answer is that nothing is offered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

Completer = Callable[[str], list[str]]


def _offering(names: Callable[[], Iterable[str]], several: bool = False) -> Completer:
    """A completer that offers the names that begin with what is written; with `several`, behind the last comma."""

    def offer(incomplete: str) -> list[str]:
        before, comma, begun = incomplete.rpartition(",") if several else ("", "", incomplete)
        with suppress(Exception):
            return [f"{before}{comma}{name}" for name in names() if name.startswith(begun)]
        return []

    return offer


def _methods() -> list[str]:
    from fednh.methods.registry import listed

    return [name for name, cls in listed() if isinstance(cls, type)]


def _partitions() -> Iterable[str]:
    from fednh.data.partitions import PARTITIONS

    return PARTITIONS


def _data() -> list[str]:
    from fednh.data.published import PUBLISHED
    from fednh.data.sources.builtin import BUILTIN
    from fednh.data.sources.registry import SOURCES

    return [*BUILTIN, *PUBLISHED, *(f"{kind}:" for kind in SOURCES)]


def _published() -> Iterable[str]:
    from fednh.data.published import PUBLISHED

    return PUBLISHED


def _configs() -> list[str]:
    from fednh.config import PRESETS

    return [*PRESETS, *sorted(path.name for path in Path().glob("*.toml"))]


def _models() -> list[str]:
    from fednh.models import MODELS

    return [f"model.name={name}" for name in MODELS]


def _trackers() -> Iterable[str]:
    from fednh.callbacks.trackers import TRACKERS

    return TRACKERS


def _engines() -> Iterable[str]:
    from typing import get_args

    from fednh.config import Config

    return get_args(Config.model_fields["engine"].annotation)


def _figures() -> list[str]:
    from fednh.report.figures import FIGURES

    return ["list", "all", *FIGURES]


method = _offering(_methods)
methods = _offering(lambda: ["all", *_methods()], several=True)
partition = _offering(_partitions)
data = _offering(_data)
published = _offering(_published)
config = _offering(_configs)
setting = _offering(_models)
tracker = _offering(_trackers)
engine = _offering(_engines)
figure = _offering(_figures)
