"""Which clients take part in a round, which of them drop out, and whose models are evaluated."""

from __future__ import annotations

import math

from fednh.config import Config
from fednh.seeding import numpy_rng


def picked_clients(config: Config, round_: int, clients: int | None = None, least: int = 1) -> list[int]:
    """The clients of a round: ceil(gamma * K) of them, but at least `least`, the same for every method.

    K is the number of clients: partition.clients, except for natural sites.
    """
    total = config.partition.clients if clients is None else clients
    count = max(least, math.ceil(config.participation.rate * total - 1e-9))  # 0.07 * 100 is a bit over 7
    return sorted(numpy_rng(config.seed, "picks", round_).choice(total, count, replace=False).tolist())


def dropped_clients(config: Config, round_: int, picked: list[int]) -> list[int]:
    """The picked clients that drop out and never report."""
    fate = numpy_rng(config.seed, "dropout", round_).random(len(picked))
    return [client for client, f in zip(picked, fate, strict=True) if f < config.participation.dropout]


def sampled_clients(config: Config, number: str | int, members: list[int], round_: int) -> list[int]:
    """Whose personal models are evaluated: a sample of `number` members, or all of them for "all"."""
    if number == "all" or int(number) >= len(members):
        return members
    return sorted(numpy_rng(config.seed, "eval", round_).choice(members, int(number), replace=False).tolist())
