"""Values of settings as TOML files and command lines spell them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted name, as --set takes them."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return found


def parse_value(text: str) -> Any:
    """A value as TOML reads it (`0.7`, `true`, `[16, 8]`), or the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def parse_bytes(value: int | str, total: int) -> int:
    """A number of bytes from 1000000, "500MB", "2GiB" or "25%" of `total`."""
    units = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
    text = str(value).strip()
    digits = text.rstrip("%BKMGTIbkmgti ")
    unit = text[len(digits) :].strip().upper()
    try:
        number = float(digits)
        result = int(total * number / 100) if unit == "%" else int(number * units[unit])
    except (ValueError, KeyError, OverflowError):
        raise ValueError(
            "should be a number of bytes, a size such as '2GiB', or a share of memory such as '25%'"
        ) from None
    if result < 0 or (unit == "%" and number > 100):
        raise ValueError("should not be negative, nor more than 100%")
    return result
