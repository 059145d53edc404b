"""Personalised federated learning on class-imbalanced clients.

`fednh.api` lists the names of the Python API. They are imported when first used, so that `import fednh` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fednh.api import *  # noqa: F403
else:
    from importlib.util import find_spec

    def __getattr__(name):
        if name.startswith("_") and name != "__all__":
            raise AttributeError(f"module 'fednh' has no attribute {name!r}")
        if find_spec(f"fednh.{name}") is None:  # a module of the package is found by the import itself
            from fednh import api

            if name == "__all__" or name in api.__all__:
                return getattr(api, name)
        raise AttributeError(f"module 'fednh' has no attribute {name!r}")

    def __dir__():
        from fednh import api

        return [*api.__all__, "__version__"]
