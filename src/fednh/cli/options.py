"""Arguments and options that several commands have, and what a shell offers behind an option.

Short options such as `--method` come from the table in `fednh.config.options`: a command has a parameter that is
marked with `Short` and gets the settings that were given, by dotted name. `fednh --install-completion` lets a shell ask
for what is `OFFERED`: names from the registries.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from fednh.config.options import SHORT_OPTIONS, ShortOption
from fednh.errors import UserError

Given = dict[str, Any]  # settings by dotted name, those that were given

# --- what a shell offers ---------------------------------------------------------------------------------------------

Completer = Callable[[str], list[str]]


def _offering(names: Callable[[], Iterable[str]], several: bool = False) -> Completer:
    """A completer that offers the names that begin with what is written; with `several`, behind the last comma.

    A shell asks between two keystrokes: whatever goes wrong, nothing is offered.
    """

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
    from fednh.data.partitions.kinds import PARTITIONS

    return PARTITIONS


def _data() -> list[str]:
    from fednh.data.sources.builtin import BUILTIN
    from fednh.data.sources.registry import PUBLISHED, SOURCES

    return [*BUILTIN, *PUBLISHED, *(f"{kind}:" for kind in SOURCES)]


def _published() -> Iterable[str]:
    from fednh.data.sources.registry import PUBLISHED

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


OFFERED = {
    "config": _offering(_configs),
    "data": _offering(_data),
    "engine": _offering(_engines),
    "figure": _offering(_figures),
    "method": _offering(_methods),
    "methods": _offering(lambda: ["all", *_methods()], several=True),
    "partition": _offering(_partitions),
    "published": _offering(_published),
    "setting": _offering(_models),
    "tracker": _offering(_trackers),
}


# --- options that several commands have ------------------------------------------------------------------------------

ConfigOrPreset = Annotated[
    str | None,
    typer.Argument(
        metavar="[CONFIG-OR-PRESET]",
        help="A TOML file, or a preset; none: digits.",
        autocompletion=OFFERED["config"],
    ),
]


def set_option(help: str, metavar: str = "KEY=VALUE", offered: Completer | None = None) -> Any:
    """`--set`, which takes any setting."""
    return typer.Option("--set", metavar=metavar, help=help, autocompletion=offered)


RunFolders = Annotated[list[Path], typer.Argument(metavar="DIR...", help="Run folders, or folders of them.")]
DataDir = Annotated[Path | None, typer.Option(help=SHORT_OPTIONS["data_dir"].help)]
Setting = Annotated[list[str] | None, set_option("Any setting, e.g. method.rho=0.7.", offered=OFFERED["setting"])]
Track = Annotated[
    list[str] | None,
    typer.Option(
        help="Also write to tensorboard, mlflow or wandb (extras). Repeatable.", autocompletion=OFFERED["tracker"]
    ),
]
Backend = Annotated[
    str,
    typer.Option(
        help="Who computes clients: simulator (this machine) or ray, a cluster (extra); the bits are the same."
    ),
]
Address = Annotated[
    str | None,
    typer.Option(
        metavar="auto|HOST:PORT",
        help="With --backend ray: the cluster to join; default: RAY_ADDRESS, or this machine.",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing but the run folder.")]


class Short:
    """Marks a parameter of a command that stands for short options; the command gets those that were `Given`."""

    def __init__(self, *options: str | ShortOption):
        self.options = [SHORT_OPTIONS[option] if isinstance(option, str) else option for option in options]

    def take(self, values: dict[str, Any]) -> Given:
        """The settings among the values of all options; they are removed there."""
        given = {option.key: values.pop(option.name) for option in self.options}
        return {key: str(v) if isinstance(v, Path) else v for key, v in given.items() if v is not None}


def short(name: str, **other: Any) -> ShortOption:
    """A short option with another help, required, or with several values."""
    return replace(SHORT_OPTIONS[name], **other)


def with_short_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command as the parser sees it: with the options that its `Short` parameters stand for."""
    hints = get_type_hints(command, include_extras=True)
    marked: dict[str, Short] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        marks = [each for each in getattr(hints[name], "__metadata__", ()) if isinstance(each, Short)]
        if marks:
            marked[name] = marks[0]
            parameters += [_parameter(option) for option in marks[0].options]
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name]))

    @wraps(command)
    def parsed(**values: Any) -> None:
        command(**{name: short.take(values) for name, short in marked.items()}, **values)

    parsed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    parsed.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return parsed


def _parameter(option: ShortOption) -> inspect.Parameter:
    offered = OFFERED.get("methods" if option.several and option.name == "method" else option.name)
    kind: Any = str if option.several else option.type
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if option.required else None,
        annotation=Annotated[
            kind if option.required else kind | None,
            typer.Option(metavar=option.metavar, help=option.help, autocompletion=offered),
        ],
    )


def set_texts(words: Sequence[str] | None) -> dict[str, str]:
    """The --set options: key -> the text of its value."""
    settings = {}
    for word in words or ():
        key, equals, value = word.partition("=")
        if not equals or not key.strip():
            raise UserError(f"--set {word!r} should be KEY=VALUE, for example --set method.rho=0.7")
        settings[key.strip()] = value.strip()
    return settings


def set_values(words: Sequence[str] | None) -> Given:
    """The --set options: key -> its value."""
    from fednh.config import parse_value

    return {key: parse_value(text) for key, text in set_texts(words).items()}
