"""How settings are spelled: values as TOML files and command lines have them, and short options.

SHORT_OPTIONS has the settings so common that they have a name of their own, `--method` for `method.name`.

The options of all commands and the keyword arguments of `fednh.run` derive from it. It imports nothing else of fednh:
the command line reads it before anything is loaded.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# --- values ---------------------------------------------------------------------------------------------------------
# Values of settings as TOML files and command lines spell them.


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted name, as --set takes them."""
    settings: dict[str, Any] = {}
    for key, value in tree.items():
        settings |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return settings


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


# --- short options --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShortOption:
    """One name for one setting. A command may take it with other words, or several values."""

    name: str  # data_dir in Python, --data-dir on the command line
    key: str  # the setting
    type: type
    help: str
    metavar: str | None = None
    required: bool = False
    several: bool = False  # the command takes a list with commas, as text

    @property
    def flag(self) -> str:
        """As the command line spells it."""
        return f"--{self.name.replace('_', '-')}"


SHORT_OPTIONS = {
    option.name: option
    for option in (
        ShortOption("method", "method.name", str, "See `fednh methods`."),
        ShortOption("data", "data.name", str, "A set by name, or a source of your own; see `fednh datasets`."),
        ShortOption("data_dir", "data.dir", Path, "Where data sets lie."),
        ShortOption("partition", "partition.name", str, "How samples are divided; see `fednh partitions`."),
        ShortOption("beta", "partition.beta", float, "Of the Dirichlet distribution; smaller is more uneven."),
        ShortOption("clients", "partition.clients", int, "How many clients there are."),
        ShortOption("participation", "participation.rate", float, "The share of clients picked in a round."),
        ShortOption("rounds", "rounds", int, "Communication rounds."),
        ShortOption("epochs", "train.epochs", float, "Local epochs a round; 0.5: half of the samples."),
        ShortOption("seed", "seed", int, "Everything random derives from it."),
        ShortOption("workers", "workers", int, "Clients trained at once; default: one per core."),
        ShortOption("engine", "engine", str, "loop, vmap (many small clients at once) or auto."),
        ShortOption("device", "device", str, "cpu, cuda, ..."),
    )
}
