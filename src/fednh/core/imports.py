"""Objects of one's own by import path: `package.module:name`."""

from __future__ import annotations

import importlib
import sys
from operator import attrgetter
from pathlib import Path
from typing import Any

from fednh.errors import UserError


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
