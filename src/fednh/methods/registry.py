"""Methods by name: this library's, those that installed packages provide, and classes by import path.

A package provides a method by an entry point in the group `fednh.methods`, whose name becomes the method's.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points

from fednh.errors import ConfigError, UserError, did_you_mean
from fednh.extras import imported
from fednh.methods import METHODS
from fednh.methods.base import Method

GROUP = "fednh.methods"


def find_method(name: object) -> type[Method]:
    """The method called `name`: one of METHODS, an entry point, or "package.module:Class"."""
    if isinstance(name, str) and name in METHODS:
        return METHODS[name]
    offered = _offered()
    if isinstance(name, str) and name in offered:
        return _loaded(offered[name])
    if isinstance(name, str) and ":" in name:
        return _checked(imported(name, "method.name"), f"method.name = {name!r}")
    known = did_you_mean(str(name), [*METHODS, *offered])
    raise ConfigError(f"method.name = {name!r} is not known{known} (or give 'package.module:Class')")


def hyper_parameters(name: str) -> list[str]:
    return [field.name for field in dataclasses.fields(find_method(name))]


def listed() -> Iterator[tuple[str, type[Method] | UserError]]:
    """Every method that has a name; for one of an installed package that cannot be used, the error instead."""
    yield from METHODS.items()
    for name, point in sorted(_offered().items()):
        try:
            yield name, _loaded(point)
        except UserError as error:
            yield name, error


def _offered() -> dict[str, EntryPoint]:
    """Entry points by name; our own names cannot be taken over."""
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in METHODS}


def _loaded(point: EntryPoint) -> type[Method]:
    where = f"method {point.name!r} (entry point {point.value})"
    try:
        imported = point.load()
    except Exception as error:  # anything that another package may raise when it is imported
        raise ConfigError(f"{where} cannot be imported: {type(error).__name__}: {error}") from error
    return _checked(imported, where)


def _checked(cls: object, where: str) -> type[Method]:
    """The class, if a run can use it, or a ConfigError that says what it lacks."""
    if not isinstance(cls, type) or not issubclass(cls, Method) or cls is Method:
        kind = cls.__name__ if isinstance(cls, type) else type(cls).__name__
        raise ConfigError(f"{where} is not a method: {kind} does not derive from fednh.methods.Method")
    if "__dataclass_fields__" not in vars(cls):
        raise ConfigError(f"{where} is not a dataclass; put @dataclass(frozen=True) above class {cls.__name__}")
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(cls.__abstractmethods__))
        raise ConfigError(f"{where} is not complete: class {cls.__name__} lacks {missing}")
    if problem := _unlike_the_base(cls):
        raise ConfigError(f"{where}: {problem}")
    fields = dataclasses.fields(cls)
    if any(field.name == "name" for field in fields):
        raise ConfigError(f"{where} has a hyper-parameter called 'name', which means the method itself; rename it")
    for field in fields:
        if hasattr(Method, field.name) and type(field.default) is not type(getattr(Method, field.name)):
            raise ConfigError(f"{where} has a hyper-parameter called {field.name!r}, a part of every method; rename it")
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{where}: the hyper-parameter {field.name} has no default; give it one")
    return cls


def _unlike_the_base(cls: type[Method]) -> str | None:
    """Names a hook whose signature does not match how a run calls it: found here, not in the first round."""
    for name, hook in inspect.getmembers(Method, inspect.isfunction):
        own = inspect.getattr_static(cls, name)
        if name.startswith("_") or not inspect.isfunction(own):
            continue
        given = list(inspect.signature(hook).parameters)
        try:
            inspect.signature(own).bind(*given)
        except TypeError:
            takes = ", ".join(list(inspect.signature(own).parameters)[1:])
            return f"{name} takes ({takes}), but a run calls it with ({', '.join(given[1:])}); change its parameters"
    return None
