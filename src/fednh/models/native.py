"""Kernels in C (kernels.c), compiled on this machine when first needed; without a compiler, torch does their work.

The library is kept in the cache folder `native`, under a name made of all that it depends on, with a checksum at its
end. It will be executed, so it is read only if file and folder are this user's and nobody else can write them, and what
was read and checked is loaded from memory or a private copy: what happens to the file later does not matter. Anything
else is compiled anew. FEDNH_NATIVE=0 leaves kernels out, as on a machine without a compiler.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from fednh.io import cache as caches
from fednh.io.files import private_folder

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
        name = hashlib.sha256("\0".join([*facts, *flags]).encode()).hexdigest()
        with suppress(OSError, AttributeError):
            return _loaded(_kept(name))
        made = _compiled(compiler, flags)
        kernels = _loaded(made)
        with suppress(OSError):  # a cache that cannot be written, or is somebody else's, must not stop a run
            _keep(name, made)
        return kernels
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
    kernels = library()
    return 0 if kernels is None else int(kernels.width())


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


def _compiled(compiler: str, flags: list[str]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernels.so"
        _run([compiler, *flags, "-o", str(file), str(SOURCE)])
        return file.read_bytes()


def _kept(name: str) -> bytes:
    """The library in the cache; OSError if there is none that can be trusted and is whole."""
    with _folder() as folder:
        descriptor = os.open(_file(name), os.O_RDONLY | os.O_NONBLOCK, dir_fd=folder)
        with os.fdopen(descriptor, "rb") as file:
            _check_mine(os.fstat(descriptor))
            content = file.read()
    content, checksum = content[: -hashlib.sha256().digest_size], content[-hashlib.sha256().digest_size :]
    if checksum != _checksum(name, content):
        raise OSError("the library in the cache is damaged")
    return content


def _keep(name: str, content: bytes) -> None:
    """Put the library into the cache, in one step; OSError where that cannot be."""
    private_folder(caches.folder("native"))
    with _folder() as folder:
        draft = f".{_file(name)}.{os.getpid()}-{threading.get_ident()}.tmp"
        try:
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content + _checksum(name, content))
            os.replace(draft, _file(name), src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(draft, dir_fd=folder)
            raise


def _file(name: str) -> str:
    return f"kernels-{name[:16]}.so"


def _checksum(name: str, content: bytes) -> bytes:
    return hashlib.sha256(name.encode() + content).digest()


@contextmanager
def _folder() -> Iterator[int]:
    """The cache's folder, opened: what is done through this descriptor is done in the folder that was checked."""
    descriptor = os.open(caches.folder("native"), os.O_RDONLY | os.O_DIRECTORY)
    try:
        _check_mine(os.fstat(descriptor))
        yield descriptor
    finally:
        os.close(descriptor)


def _check_mine(facts: os.stat_result) -> None:
    """OSError unless nobody else can have put or changed it."""
    if facts.st_uid != os.getuid() or facts.st_mode & 0o022:
        raise PermissionError("others can write the library in the cache, or the folder")


def _loaded(content: bytes) -> ctypes.CDLL:
    """Load a library that is in memory; no file that others could reach has a part in it."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("fednh-kernels")
        try:
            with os.fdopen(descriptor, "wb", closefd=False) as file:
                file.write(content)
            return _ready(ctypes.CDLL(f"/proc/self/fd/{descriptor}"))  # it stays open: the loader knows it by this name
        except OSError:  # no /proc, or what is in memory may not be executed
            os.close(descriptor)
    with tempfile.TemporaryDirectory() as folder:
        private = Path(folder) / "kernels.so"
        private.write_bytes(content)
        return _ready(ctypes.CDLL(str(private)))


def _ready(kernels: ctypes.CDLL) -> ctypes.CDLL:
    kernels.width.restype = ctypes.c_long
    for name in ("conv_pool", "conv_pool_gradient", "transform", "pool_relu", "pool_relu_gradient"):
        getattr(kernels, name).restype = None
    return kernels
