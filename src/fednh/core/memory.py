"""The machine's memory size, and how the C library and Python treat memory that is in use or freed."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
LARGEST_ON_HEAP = 32 << 20  # the most that glibc accepts


def total() -> int:
    """Bytes of memory that this machine has."""
    return int(psutil.virtual_memory().total)


def keep_freed() -> None:
    """Have glibc keep freed blocks for the next request, where it would hand them back to the system at once.

    A training step frees and asks for the same tens of megabytes again; every return costs fresh, zeroed pages: about
    a tenth of a convolution step's time. Does nothing where the C library is not glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(M_MMAP_THRESHOLD, LARGEST_ON_HEAP)
    mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


@contextmanager
def settled() -> Iterator[None]:
    """Spare what exists now the garbage collections until the end: modules and data sets are not going to be garbage.

    A round of many small clients makes so many objects that Python looks through everything every other round.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
