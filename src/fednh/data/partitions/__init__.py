"""PARTITIONS: every kind by name. Settings, their ranges, the command line, tables and tests derive from it.

To add one: a file with a frozen dataclass beside this one, and a line in the registry.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from fednh.data import declared_settings
from fednh.data.partitions.base import Drawn, Indices, Partition, class_table, left_out
from fednh.data.partitions.dirichlet import Dirichlet, LongTail
from fednh.data.partitions.simple import BySite, ClassesPerClient, Iid, Quantity, Shards

PARTITIONS: dict[str, type[Partition]] = {
    kind.name: kind for kind in (Dirichlet, LongTail, Iid, ClassesPerClient, Shards, Quantity, BySite)
}


def settings() -> dict[str, tuple[Any, Any]]:
    """The settings of all kinds: name -> type with its range, and default."""
    return declared_settings(PARTITIONS.values(), "partition")


def uses(name: str, setting: str) -> bool:
    """Whether the partition `name` uses partition.`setting`."""
    return setting == "name" or setting in {field.name for field in fields(PARTITIONS[name])}


__all__ = ["PARTITIONS", "Drawn", "Indices", "Partition", "class_table", "left_out", "settings", "uses"]
