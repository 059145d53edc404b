"""The table of short options: settings so common that they have a name of their own, `--method` for `method.name`.

The options of all commands and the keyword arguments of `fednh.run` derive from it. It imports nothing else of fednh:
the command line reads it before anything is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


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
        ShortOption("epochs", "train.epochs", int, "Local epochs a round."),
        ShortOption("seed", "seed", int, "Everything random derives from it."),
        ShortOption("workers", "workers", int, "Clients trained at once; default: one per core."),
        ShortOption("engine", "engine", str, "loop, vmap (many small clients at once) or auto."),
        ShortOption("device", "device", str, "cpu, cuda, ..."),
    )
}
