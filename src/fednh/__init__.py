"""Personalised federated learning on class-imbalanced clients.

`__all__` is the Python API; its names are imported when first used, so that `import fednh` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fednh.api import (
        Callback,
        Config,
        Dataset,
        Interrupted,
        Method,
        Model,
        Refused,
        Result,
        RunError,
        UserError,
        load_model,
        load_run,
        resume,
        run,
    )
else:

    def __getattr__(name):
        if name not in __all__ or name.startswith("__"):
            raise AttributeError(f"module 'fednh' has no attribute {name!r}")
        from fednh import api

        return getattr(api, name)


__all__ = [
    "Callback",
    "Config",
    "Dataset",
    "Interrupted",
    "Method",
    "Model",
    "Refused",
    "Result",
    "RunError",
    "UserError",
    "__version__",
    "load_model",
    "load_run",
    "resume",
    "run",
]
