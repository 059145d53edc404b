"""The start and the end of a process that is one command: what Python does there beyond the command's own work.

Importing PyTorch makes half a million objects. The garbage collector looks at them while they are made, and at the
end of the process Python frees them one by one: together a quarter of the CPU time of a short run.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

ALLOCATIONS = 100_000  # between two collections; imports make many objects and hardly any garbage


def fewer_collections() -> None:
    gc.set_threshold(ALLOCATIONS)


@contextmanager
def exit_at_once() -> Iterator[None]:
    """After the block has ended by `sys.exit`, or with its end, the process ends without freeing its memory.

    That happens after everything else that is registered for the end of the process, so this has to come before other
    imports. An exception goes Python's usual way.
    """
    ended: list[int] = []
    atexit.register(_end, ended)
    try:
        yield
    except SystemExit as exit_:
        if exit_.code is None or isinstance(exit_.code, int):
            ended.append(exit_.code or 0)
        raise
    ended.append(0)


def _end(ended: list[int]) -> None:
    if not ended:
        return
    logging.shutdown()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):  # nobody reads it, or it is closed: Python says so in its own way
        return
    os._exit(ended[0])
