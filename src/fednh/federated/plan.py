"""Which clients take part in a round, which of them drop out, and whose models are evaluated."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fednh.config import Config
from fednh.seeding import numpy_rng


@dataclass(frozen=True)
class RoundPlan:
    """Who trains the next round. A plan without picks is of no round: there is none left, or too few are present."""

    round: int
    picked: Sequence[int] = ()
    dropped: Sequence[int] = ()  # those of them that never report

    @property
    def train(self) -> list[int]:
        return sorted(set(self.picked) - set(self.dropped))


def plan_round(config: Config, round_: int, present: Sequence[int], least: int) -> RoundPlan:
    """Pick clients for a round from those present, and decide which of them drop out."""
    if round_ > config.rounds or len(present) < least:
        return RoundPlan(round_)
    picked = [present[k] for k in picked_clients(config, round_, len(present), least)]
    return RoundPlan(round_, picked, dropped_clients(config, round_, picked))


def is_evaluated(config: Config, round_: int) -> bool:
    """Whether the models are evaluated after this round."""
    return round_ == config.rounds or bool(config.eval.every and round_ % config.eval.every == 0)


def evaluated_clients(config: Config, record: Mapping[str, Any], members: Iterable[int]) -> list[int]:
    """The clients whose personal models give a round's metrics (`eval.clients`), from its record and its members."""
    if config.eval.clients == "active":
        active: list[int] = record["clients"]
        return active
    return sampled_clients(config, config.eval.clients, sorted(members), record["round"])


def result_order(config: Config, clients: Iterable[int], samples: Callable[[int], int]) -> list[int]:
    """The order of the clients' results in the server's sums: the largest first, so that no long job starts last.

    Of real sites the server knows only how many samples each has processed. After steps or a fraction of an epoch that
    does not tell who is larger; then the order is that of the clients.
    """
    if not config.train.whole_epochs:
        return sorted(clients)
    return sorted(clients, key=lambda client: (-samples(client), client))


def picked_clients(config: Config, round_: int, clients: int | None = None, least: int = 1) -> list[int]:
    """The clients of a round: ceil(gamma * K) of them, but at least `least`, the same for every method.

    K is the number of clients: partition.clients, except for natural sites.
    """
    total = config.partition.clients if clients is None else clients
    if config.privacy.level == "client":  # each with the same chance, independently: the account is of Poisson sampling
        fate = numpy_rng(config.seed, "picks", round_).random(total)
        return [client for client, f in enumerate(fate) if f < config.participation.rate]
    count = max(least, math.ceil(config.participation.rate * total - 1e-9))  # 0.07 * 100 is a bit over 7
    return sorted(numpy_rng(config.seed, "picks", round_).choice(total, count, replace=False).tolist())


def most_answers(config: Config, clients: int) -> int:
    """In how many rounds the client that is picked most often takes part."""
    times = Counter(k for round_ in range(1, config.rounds + 1) for k in picked_clients(config, round_, clients))
    return max(times.values(), default=1)


def dropped_clients(config: Config, round_: int, picked: list[int]) -> list[int]:
    """The picked clients that drop out and never report."""
    fate = numpy_rng(config.seed, "dropout", round_).random(len(picked))
    return [client for client, f in zip(picked, fate, strict=True) if f < config.participation.dropout]


def sampled_clients(config: Config, number: str | int, members: list[int], round_: int) -> list[int]:
    """Whose personal models are evaluated: a sample of `number` members, or all of them for "all"."""
    if number == "all" or int(number) >= len(members):
        return members
    return sorted(numpy_rng(config.seed, "eval", round_).choice(members, int(number), replace=False).tolist())
