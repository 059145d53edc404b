"""Slow sites: how long a round waits for them, and what becomes of an upload that arrives in a later round.

A round waits for no site longer than `federation.slack` times what its usual site takes. The usual site is the median
of those asked, each by what it took this time or, until it answers, by what it took in its last rounds: so a site on a
slow line is not waited for, and one that is as fast as the others is not given up early.

A late upload that is used (`federation.late`) counts less the older it is, by (1 + age)^(-1/2): what its site trained
is added, with this weight, to what the server has now. FedAsync and FedBuff weigh so: Xie et al., "Asynchronous
Federated Optimization", 2019; Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", AISTATS 2022.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from statistics import median_low

from fednh.errors import ConfigError
from fednh.federated.checks import form_of
from fednh.methods.base import Method, UploadSpec
from fednh.tree import Tree, is_statistic

MEMORY = 5  # answers of a site by which its speed is known


@dataclass
class Pace:
    """What sites took for their last answers, and how long a round waits."""

    slack: float | None  # times what the usual site takes; None: no such limit
    seconds: dict[int, deque[float]] = field(default_factory=dict)

    def heard(self, client: int, seconds: float) -> None:
        self.seconds.setdefault(client, deque(maxlen=MEMORY)).append(seconds)

    def limit(self, asked: Collection[int], answered: Mapping[int, float], least: int) -> float:
        """Seconds that a round waits for those `asked`, where some have `answered` after so many seconds.

        It waits for the `least` number of answers in any case, and until the median is known.
        """
        if self.slack is None or not asked or len(answered) < min(least, len(asked)):
            return math.inf
        known = [answered.get(client, self._expected(client)) for client in asked]
        return self.slack * median_low(known)

    def _expected(self, client: int) -> float:
        return median_low(self.seconds.get(client) or [math.inf])


def weight_of(age: int) -> float:
    """How much an upload counts that was trained from the server's state of `age` rounds before."""
    return float((1 + age) ** -0.5)


def aged(upload: Tree, sent: Tree, now: Tree, age: int, spec: UploadSpec) -> Tree:
    """A late upload as the server uses it: `sent` is what its site had received, `now` the server's state.

    Rows by class are shortened, unless marks say who owns which; sums, marks and the like count as they are.
    """
    weight, exact = weight_of(age), {*spec.marks, *spec.summed, *spec.recorded, *spec.untrained, spec.weight}
    theirs, ours, forms = form_of(sent), form_of(now), form_of(upload)
    made: Tree = {}
    for name, value in upload.items():
        if name in exact or is_statistic(name) or not value.is_floating_point():
            made[name] = value
        elif name in spec.by_class:
            made[name] = value if spec.marks else value * weight
        elif forms[name] == theirs.get(name) == ours.get(name):
            made[name] = now[name] + weight * (value - sent[name])
        else:
            made[name] = value
    return made


def check_late(late: str, secure: bool, method: Method, name: str) -> None:
    """Refuse to use late uploads where they cannot be."""
    if late == "drop":
        return
    if secure:
        raise ConfigError(
            "federation.late = 'use' needs single uploads, and with federation.secure a late one can no longer be "
            "unmasked; leave it at 'drop'"
        )
    if method.upload.recorded:
        raise ConfigError(
            f"federation.late = 'use' is not supported by method {name}, whose server makes something of its own for "
            f"each client from the uploads of one round; leave it at 'drop'"
        )
