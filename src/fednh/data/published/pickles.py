"""Loads the pickles of CIFAR's python version without trusting them.

A pickle is a program. This reader admits only what a data batch needs (numbers, strings, bytes, lists, tuples,
dicts and plain numeric arrays) and runs nothing of numpy while the pickle is in control: the few names that a
pickled array mentions are bound to small stand-ins that only take notes, and the array is built afterwards from
checked notes.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fednh.errors import UserError

ADMITTED_OPCODES = frozenset(
    """
    PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 FLOAT BINFLOAT
    STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE SHORT_BINUNICODE BINBYTES SHORT_BINBYTES
    LIST EMPTY_LIST APPEND APPENDS TUPLE EMPTY_TUPLE TUPLE1 TUPLE2 TUPLE3 DICT EMPTY_DICT SETITEM SETITEMS
    GET BINGET LONG_BINGET PUT BINPUT LONG_BINPUT MEMOIZE GLOBAL STACK_GLOBAL REDUCE BUILD
    """.split()  # noqa: SIM905 (a list literal would fill fifty lines)
)
NUMERIC = re.compile(r"[|<>=]?[biuf][1248]")


class UnsafePickle(Exception):
    """Something that a data batch has no business to hold; the text names it."""


def load(data: bytes, where: str) -> dict[str, Any]:
    """The dict that `data` pickles; arrays stand directly among its values. `where` names the file in errors."""
    try:
        _scan(data)
        # latin1: the published files were written by Python 2, whose strings are bytes.
        content = _Unpickler(io.BytesIO(data), encoding="latin1").load()
    except UnsafePickle as error:
        raise UserError(f"{where} is refused: it contains {error}, which a data batch never does") from error
    except Exception as error:
        # The pickle machine reports damage through almost any exception type.
        raise UserError(f"{where} is not a readable pickle ({type(error).__name__}); download it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{where} holds a {type(content).__name__} instead of a dict of arrays; download it again")
    return {
        key.decode("latin1") if isinstance(key, bytes) else str(key): _finished(value, where)
        for key, value in content.items()
    }


def _finished(value: Any, where: str) -> Any:
    if not isinstance(value, _Array):
        return value
    if value.array is None:
        raise UserError(f"{where} holds an array without content; download it again")
    return value.array


def _scan(data: bytes) -> None:
    """Goes through the opcodes without running any."""
    for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        if opcode.name not in ADMITTED_OPCODES:
            raise UnsafePickle(f"the pickle instruction {opcode.name}")
        # The memo is a list that grows to the index asked for: a huge index would eat all memory.
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and not 0 <= int(argument or 0) <= count + 1:
            raise UnsafePickle(f"a memo index of {argument}")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return _Name(_reconstruct)
        if (module, name) == ("numpy", "ndarray"):
            return _NDARRAY
        if (module, name) == ("numpy", "dtype"):
            return _Name(_Dtype)
        if (module, name) == ("_codecs", "encode"):
            return _Name(_encode)
        raise UnsafePickle(f"{module}.{name}")


class _Name:
    """What a global name in a pickle is bound to: can be called, and cannot be altered (BUILD sets attributes)."""

    __slots__ = ("_target",)

    def __init__(self, target: Callable[..., Any]) -> None:
        self._target = target

    def __call__(self, *args: Any) -> Any:
        return self._target(*args)

    def __setstate__(self, state: Any) -> None:
        raise UnsafePickle("an attempt to alter a function")


def _not_callable(*args: Any) -> Any:
    raise UnsafePickle("a call of numpy.ndarray")


_NDARRAY = _Name(_not_callable)


class _Dtype:
    """Notes of a numpy.dtype: only booleans, integers and floats."""

    __slots__ = ("code",)

    def __init__(self, code: Any, *_: Any) -> None:
        if not (isinstance(code, str) and NUMERIC.fullmatch(code)):
            raise UnsafePickle(f"an array of type {str(code)[:40]!r}")
        self.code = code

    def __setstate__(self, state: Any) -> None:
        # (version, byte order, subarray, names, fields, ...): a plain number type has none of the last three.
        if not (isinstance(state, tuple) and len(state) >= 5 and state[1] in ("<", ">", "|", "=")):
            raise UnsafePickle("a malformed array type")
        if any(part is not None for part in state[2:5]):
            raise UnsafePickle("a structured array")
        self.code = state[1] + self.code.lstrip("|<>=")


class _Array:
    """Notes of a numpy.ndarray, turned into a real one once type, shape and content agree."""

    __slots__ = ("array",)

    def __init__(self) -> None:
        self.array: NDArray[Any] | None = None

    def __setstate__(self, state: Any) -> None:
        if not (isinstance(state, tuple) and len(state) == 5):
            raise UnsafePickle("a malformed array")
        _, shape, dtype, fortran, content = state
        if isinstance(content, str):  # a Python 2 string
            content = content.encode("latin1")
        if not (isinstance(dtype, _Dtype) and isinstance(content, bytes) and isinstance(shape, tuple)):
            raise UnsafePickle("an array of Python objects")
        if not all(type(n) is int and n >= 0 for n in shape):
            raise UnsafePickle("an array of impossible shape")
        kind = np.dtype(dtype.code)
        if math.prod(shape) * kind.itemsize != len(content):
            raise UnsafePickle(f"an array of shape {shape} with {len(content)} bytes")
        self.array = np.frombuffer(content, kind).reshape(shape, order="F" if fortran else "C")


def _reconstruct(subtype: Any, *_: Any) -> _Array:
    if subtype is not _NDARRAY:
        raise UnsafePickle("an array of a foreign class")
    return _Array()


def _encode(text: Any, encoding: Any = None) -> bytes:
    if not (isinstance(text, str) and encoding in ("latin1", "latin-1")):
        raise UnsafePickle("a call of _codecs.encode with an unusual encoding")
    return text.encode("latin1")
