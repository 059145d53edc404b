"""Facts about this machine: whether it supports a device and precision, its cores and threads, its memory.

`check_machine` is asked before a run starts. The functions on memory say how the C library and Python treat what is in
use or freed.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import psutil
import torch

from fednh.errors import ConfigError

# --- device, precision, cores ---------------------------------------------------------------------------------------


SECONDS = 120.0  # for the trial, most of it to import torch on a busy machine
# No core file: a trial leaves nothing behind, however it ends.
_QUIETLY = "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
TRIAL = """
import sys, torch
from torch import nn
torch.set_num_threads(1)
device = sys.argv[1]
body = nn.Sequential(
    nn.Conv2d(3, 64, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(64, 64, 5), nn.GroupNorm(2, 64), nn.Flatten(),
    nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 64),
).to(device)
for batch in (64, 3):
    x = torch.ones(batch, 3, 16, 16, device=device).contiguous(memory_format=torch.channels_last)
    with torch.autocast(device.partition(":")[0], torch.bfloat16):
        out = body(x)
    out.float().square().sum().backward()
if not all(bool(p.grad.isfinite().all()) for p in body.parameters()):
    sys.exit("the gradients are not finite")
"""


def check_machine(devices: Sequence[str], precision: str) -> None:
    """Raise a ConfigError if a device or the precision cannot be used here."""
    for device in devices:
        check_device(device)
        if precision == "bf16":
            check_bf16(device)


def check_device(device: str) -> None:
    try:
        float(torch.zeros(1, device=device).add_(1))
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"device = {device!r} cannot be used here: {reason}") from error


def check_bf16(device: str = "cpu", trial: str = TRIAL, seconds: float = SECONDS) -> None:
    """Try bfloat16 in a child process: if the CPU claims an instruction that it lacks, the trial is killed by a signal.

    The result is cached: one trial per process.
    """
    if reason := _outcome(device, trial, seconds):
        raise ConfigError(
            f"precision = 'bf16' cannot be used on this machine: a trial of it in a process of its own {reason}; "
            f"use precision = 'float32'"
        )


@cache
def _outcome(device: str, trial: str, seconds: float) -> str | None:
    """What went wrong with the trial, in words; None if nothing did."""
    command = [sys.executable, "-c", _QUIETLY + trial, device]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"did not end within {seconds:g} seconds"
    except OSError as error:
        return f"could not be started ({error.strerror})"
    if done.returncode < 0:
        return f"was killed by {signal.Signals(-done.returncode).name}"
    if done.returncode > 0:
        return f"failed ({(done.stderr.strip().splitlines() or ['it gave no reason'])[-1]})"
    return None


def cores() -> int:
    """The number of cores that this process may use; where the system does not say (macOS, Windows), the machine's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute in this thread alone: a sum's last bits depend on how many threads share it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --- memory ---------------------------------------------------------------------------------------------------------


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
LARGEST_ON_HEAP = 32 << 20  # the most that glibc accepts


def total_memory() -> int:
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
def gc_frozen() -> Iterator[None]:
    """Spare what exists now the garbage collections until the end: modules and data sets are not going to be garbage.

    A round of many small clients makes so many objects that Python looks through everything every other round.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
