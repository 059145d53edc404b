"""Kernels in C (kernels.c), compiled on this machine when first needed; without a compiler, torch does their work.

The library is kept in the cache folder `native`, under a name made of all that it depends on. FEDNH_NATIVE=0 leaves
kernels out, as on a machine without a compiler.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from fednh.storage import cache as caches

SOURCE = Path(__file__).with_name("kernels.c")
INSTRUCTIONS = {  # what torch itself uses on this processor, so it is there
    "AVX512": ["-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq", "-mavx2", "-mfma"],
    "AVX2": ["-mavx2", "-mfma"],
}
SECONDS = 60  # that a compiler may take


class Sizes(ctypes.Structure):
    """A kernel's sizes and strides, all of them longs."""

    def pointer(self) -> ctypes.c_void_p:
        return ctypes.cast(ctypes.byref(self), ctypes.c_void_p)


class Conv(Sizes):
    _fields_ = [(name, ctypes.c_long) for name in ("images", "height", "width", "channels", "side", "kernels")]


class Tiles(Sizes):
    _fields_ = [
        *((name, ctypes.c_long) for name in ("rows", "columns", "channels", "add")),
        ("count", ctypes.c_long * 3),
        ("from_tile", ctypes.c_long * 3),
        ("from_", ctypes.c_long * 2),
        ("to_tile", ctypes.c_long * 3),
        ("to", ctypes.c_long * 2),
    ]


class Image(Sizes):
    _fields_ = [(name, ctypes.c_long) for name in ("images", "height", "width", "channels")]


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None where there is no compiler, or it fails."""
    compiler = _compiler()
    if compiler is None or os.environ.get("FEDNH_NATIVE") == "0":
        return None
    flags = ["-O3", "-shared", "-fPIC", *INSTRUCTIONS.get(torch.backends.cpu.get_cpu_capability(), [])]
    try:
        facts = [SOURCE.read_text(encoding="utf-8"), _version(compiler), platform.machine(), *platform.libc_ver()]
        name = hashlib.sha256("\0".join([*facts, *flags]).encode()).hexdigest()[:16]
        kept = caches.folder("native") / f"kernels-{name}.so"
        if _is_mine(kept) or caches.keep(kept, lambda file: _compile(compiler, flags, file)):
            return _ready(ctypes.CDLL(str(kept)))
        return _loaded_once(compiler, flags)
    except (OSError, AttributeError, subprocess.SubprocessError):
        return None


def described() -> str | None:
    """With what the kernels were compiled, and for which instructions; None without them."""
    compiler = _compiler()
    if compiler is None or library() is None:
        return None
    return f"{_version(compiler).partition(chr(10))[0]}, {torch.backends.cpu.get_cpu_capability()}"


def width() -> int:
    """Channels come in vectors of so many; 0 without kernels."""
    found = library()
    return 0 if found is None else int(found.width())


def call(name: str, *arguments: Tensor | Sizes | None) -> None:
    """Call a kernel: tensors go by their addresses, sizes by theirs. Other threads run in the meantime."""
    kernel = getattr(library(), name)
    kernel(*(_address(each) for each in arguments))


def _address(argument: Tensor | Sizes | None) -> ctypes.c_void_p:
    if argument is None:
        return ctypes.c_void_p()
    return ctypes.c_void_p(argument.data_ptr()) if isinstance(argument, Tensor) else argument.pointer()


def _compiler() -> str | None:
    if platform.system() not in ("Linux", "Darwin"):
        return None
    return next(filter(None, map(shutil.which, filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")))), None)


@cache
def _version(compiler: str) -> str:
    return _run([compiler, "--version"])


def _run(command: list[str]) -> str:
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, check=True, capture_output=True, text=True, timeout=SECONDS
    ).stdout


def _compile(compiler: str, flags: list[str], file: Path) -> None:
    _run([compiler, *flags, "-o", str(file), str(SOURCE)])
    file.chmod(0o700)


def _is_mine(file: Path) -> bool:
    """Whether the file is there and nobody else can have put or changed it: it will be executed."""
    try:
        found = file.stat()
    except OSError:
        return False
    return found.st_uid == os.getuid() and not found.st_mode & 0o022


def _loaded_once(compiler: str, flags: list[str]) -> ctypes.CDLL:
    """For a cache folder that cannot be written: compiled for this process alone."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernels.so"
        _compile(compiler, flags, file)
        return _ready(ctypes.CDLL(str(file)))


def _ready(found: ctypes.CDLL) -> ctypes.CDLL:
    found.width.restype = ctypes.c_long
    for name in ("conv_pool", "conv_pool_gradient", "transform", "pool_relu", "pool_relu_gradient"):
        getattr(found, name).restype = None
    return found
