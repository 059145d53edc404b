"""User-defined objects by import path: `package.module:name`.

A path may come from a config that somebody else wrote: the object is checked first, and only a class or function of
the expected kind is ever called.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

from fednh.errors import UserError

T = TypeVar("T")


def imported(path: str, setting: str) -> Any:
    """The object at `package.module:name`. The current folder is on the import path.

    Importing runs the module's code; whatever it raises becomes a one-sentence UserError.
    """
    module, _, name = path.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:  # as `python -m` does
        sys.path.insert(0, here)
    try:
        return attrgetter(name)(importlib.import_module(module))
    except Exception as error:  # a syntax error, a missing package, a file that is not there
        kind = "" if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: "
        raise UserError(f"{setting} = {path!r} cannot be imported: {kind}{error}") from error


def imported_class(path: str, setting: str, base: type[T]) -> type[T]:
    """The class at `path`, which must derive from `base`; anything else is a UserError."""
    found = imported(path, setting)
    if not isinstance(found, type) or not issubclass(found, base):
        kind = found.__name__ if isinstance(found, type) else type(found).__name__
        raise UserError(
            f"{setting} = {path!r} is not a class that can be used: {kind} does not derive from {base.__name__}"
        )
    return found


def imported_function(path: str, setting: str) -> Callable[[], Any]:
    """The Python function at `path`, which must need no arguments; anything else is a UserError."""
    found = imported(path, setting)
    inner = inspect.unwrap(found.func if isinstance(found, functools.partial) else found)
    if not isinstance(inner, FunctionType):
        kind = "a class" if isinstance(found, type) else type(found).__name__
        raise UserError(f"{setting} = {path!r} is not a Python function but {kind}; it is not called")
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise UserError(f"{setting} = {path!r} cannot be called without arguments: {error}") from None
    function: Callable[[], Any] = found
    return function
