"""Objects of one's own by import path: `package.module:name`.

A path may come with a config that somebody else wrote: what it names is looked at, and only a class or function of the
kind that is wanted is ever called.
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
    """What `package.module:name` names. The current folder counts, so a file beside the config can be named.

    Importing runs the module's code, whatever that is; anything it raises becomes one sentence.
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
    """The class at `path`, which derives from `base`; nothing else is taken."""
    found = imported(path, setting)
    if not isinstance(found, type) or not issubclass(found, base):
        kind = found.__name__ if isinstance(found, type) else type(found).__name__
        raise UserError(
            f"{setting} = {path!r} is not a class that can be used: {kind} does not derive from {base.__name__}"
        )
    return found


def imported_function(path: str, setting: str) -> Callable[[], Any]:
    """The Python function at `path`, which can be called without arguments; nothing else is taken."""
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
