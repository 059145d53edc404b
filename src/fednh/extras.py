"""The optional extras of this package, and the error message when a missing one is needed.

pyproject.toml says which packages an extra installs; `MODULES` has the modules that show that it is installed.
"""

from __future__ import annotations

from importlib.util import find_spec

from fednh.errors import UserError

MODULES = {
    "report": ("matplotlib", "jinja2"),
    "flower": ("flwr", "cryptography"),
    "ray": ("ray",),
    "tables": ("pyarrow",),
    "hf": ("datasets",),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "tensorboard": ("tensorboard",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
    "wandb": ("wandb",),
    "timm": ("timm",),
}


def installed(extra: str) -> bool:
    """Whether the extra is installed."""
    return all(_found(module) for module in MODULES[extra])


def need(extra: str, what: str) -> None:
    """Refuse `what` ("a figure", "--track mlflow") where the extra is not installed."""
    if not installed(extra):
        raise UserError(f"{what} needs the extra `{extra}`: pip install 'fednh[{extra}]'")


def _found(module: str) -> bool:
    """Whether there is such a module; a plain folder of that name in the current one does not count."""
    spec = find_spec(module)
    return spec is not None and spec.origin is not None
