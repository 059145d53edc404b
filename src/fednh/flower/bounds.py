"""Limits on the size, depth and values of received messages, checked before anything is allocated for them."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from fednh.words import one_line

if TYPE_CHECKING:  # a SuperNode imports this module, and does without PyTorch
    from fednh.core.checks import Form

WORDS = 1 << 20  # bytes of a message without its arrays
TEXT = 4 << 20  # characters of one text: a greeting may name many classes and columns
TENSOR = 1 << 12  # bytes of the description of one tensor in a tree
CHUNK = 1 << 20  # bytes; Flower cuts arrays into chunks of 5 MB
SAMPLE = 1 << 28  # numbers in one sample
NAMES = 1 << 16  # classes, features or names of any kind
NUMBER = 10**9  # of clients and rounds


class Limit(NamedTuple):
    """The largest size of one message."""

    bytes: int
    parts: int  # objects in Flower's store: records, and the chunks of a tree

    @classmethod
    def of(cls, form: Form | None) -> Limit:
        """The limit for an answer with an upload of this form; None: without an upload."""
        size = sum(math.prod(shape) * dtype.itemsize + TENSOR for shape, dtype in (form or {}).values())
        return cls(WORDS + size, 16 + size // CHUNK)


GREETING = Limit(TEXT + WORDS, 8)


def read_json(text: str) -> Any:
    """Parse JSON; any fault, also too great a length or depth, is a ValueError."""
    if len(text) > TEXT:
        raise ValueError(f"a text of {len(text)} characters is too long")
    try:
        return json.loads(text, parse_constant=_refused)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refused(word: str) -> NoReturn:
    raise ValueError(f"it holds {word}")


def numbers(values: Any, least: int, most: int) -> tuple[int, ...]:
    """Whole numbers from `least` to `most`."""
    found = _list(values)
    if not all(type(value) is int and least <= value <= most for value in found):
        raise ValueError(f"{quoted(values)} should be whole numbers from {least} to {most}")
    return tuple(found)


def floats(values: Any) -> tuple[float, ...]:
    """Finite numbers."""
    found = _list(values)
    if not all(type(value) in (int, float) and abs(value) < 1e30 for value in found):
        raise ValueError(f"{quoted(values)} should be numbers")
    return tuple(float(value) for value in found)


def texts(values: Any, longest: int = 1000) -> tuple[str, ...]:
    found = _list(values)
    if not all(isinstance(value, str) and len(value) <= longest for value in found):
        raise ValueError(f"{quoted(values)} should be texts of up to {longest} characters")
    return tuple(found)


def flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{quoted(value)} should be true or false")
    return value


def _list(values: Any) -> list[Any]:
    if not isinstance(values, list) or len(values) > NAMES:
        raise ValueError(f"{quoted(values)} should be a list of up to {NAMES}")
    return values


def quoted(value: Any) -> str:
    """A received value, safe to quote in a message: short, on one line, without control characters."""
    return one_line(repr(value if not isinstance(value, list | dict) else list(value)[:8])[:200], 80)
