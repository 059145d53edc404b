"""What a run releases, before anything is computed: the multipliers that its budget asks for, and what answers cost.

Under level "sample" an answer's releases are found by a round without training on blank samples: what a method asks of
its data and how often it calls `fit` do not depend on any sample, so they are those of every client. A method that
asks for something that is not noised is refused here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NoReturn

import numpy as np

from fednh.config import Config
from fednh.config.schema import LARGEST_EPSILON, PrivacyConfig
from fednh.data.batches import ClientData, blank_samples
from fednh.errors import ConfigError
from fednh.extras import need
from fednh.methods.base import Method
from fednh.methods.fit import moving_names
from fednh.methods.losses import BatchLoss, Loss
from fednh.methods.optimizers import FitSettings
from fednh.models.net import Net
from fednh.privacy import rules
from fednh.privacy.accounting import Release, epsilon, noise_for
from fednh.privacy.noise import SeededNoise
from fednh.privacy.private_data import COUNTS, GRADIENTS, SAMPLES, SUMS, Mechanisms, PrivateData, refuse_batchwise
from fednh.tree import Tree, Uploads

ONCE = (COUNTS, SAMPLES)  # drawn at most once in a run
MOVES = "moves"


@dataclass(frozen=True)
class PrivacyPlan:
    """What every answer of a run spends, and with how much noise."""

    config: PrivacyConfig
    mechanisms: Mechanisms | None  # of level "sample"; None: of clients
    first: tuple[Release, ...]  # of a client's answer in round 1, less those of `once`
    later: tuple[Release, ...]  # in any other round
    once: tuple[Release, ...] = ()  # with a client's first answer, or as soon as it is asked for
    early: frozenset[str] = frozenset()  # the names of those that an answer in round 1 asks for

    def answer(self, round_: int, is_first: bool) -> tuple[Release, ...]:
        """What a client's answer in this round spends; `is_first`: it has not answered in this run before."""
        spent = self.first if round_ == 1 else self.later
        return (*spent, *self.once) if is_first else spent

    def due(self, round_: int, held: Collection[str]) -> tuple[Release, ...]:
        """What a client's answer in this round releases that keeps what it has released once under the names `held`.

        All that a client is due comes to what `answer` says of it, and not to more.
        """
        now = [each for each in self.once if each.name not in held and (round_ > 1 or each.name in self.early)]
        return (*self.answer(round_, False), *now)

    def spent(self, rounds: Iterable[int]) -> list[Release]:
        """What a client has spent that answered in these rounds."""
        return [release for k, round_ in enumerate(sorted(rounds)) for release in self.answer(round_, k == 0)]

    def epsilon(self, rounds: Iterable[int]) -> float:
        return epsilon(self.spent(rounds), self.config.delta)


def make_plan(config: Config, method: Method, net: Net, initial: Tree, answers: int) -> PrivacyPlan | None:
    """The plan of a run in which no client answers in more than `answers` rounds; None without privacy.

    Everything that the level does not allow is refused.
    """
    privacy = config.privacy
    if privacy.level == "none":
        return None
    need("privacy", f"privacy.level = {privacy.level!r}")
    rules.check(config, method, net)
    if privacy.level == "client":
        rate = config.participation.rate
        noise = _found(privacy, lambda noise: [Release(MOVES, noise, rate, config.rounds)])
        move = Release(MOVES, noise, rate)
        return PrivacyPlan(privacy, None, (move,), (move,))
    with rules.refusing(config.method):
        rounds = _tried(config, method, net, initial)
    if rounds is None:
        return PrivacyPlan(privacy, None, (), ())
    make = partial(_multipliers, privacy, rounds, answers)
    mechanisms = make(_found(privacy, lambda noise: _all(rounds, make(noise), answers)))
    first, later = ([_noised(r, mechanisms) for r in each if r.name not in ONCE] for each in rounds)
    once = {r.name: _noised(r, mechanisms) for each in rounds for r in each if r.name in ONCE}
    early = frozenset(r.name for r in rounds[0] if r.name in once)
    return PrivacyPlan(privacy, mechanisms, tuple(first), tuple(later), tuple(once.values()), early)


def _found(privacy: PrivacyConfig, plan: Callable[[float], Sequence[Release]]) -> float:
    """The multiplier that the config gives, or that its budget asks for."""
    if privacy.epsilon is not None:
        return noise_for(plan, privacy.epsilon, privacy.delta)
    noise = privacy.noise or 0.0
    if epsilon(plan(noise), privacy.delta) > LARGEST_EPSILON:
        raise ConfigError(
            f"privacy.noise = {noise:g} protects nothing in the planned rounds: epsilon would be more than "
            f"{LARGEST_EPSILON:g}; raise it, or plan fewer rounds or epochs"
        )
    return noise


Rounds = tuple[list[Release], list[Release]]  # of an answer in round 1, and in a later one


def _tried(config: Config, method: Method, net: Net, initial: Tree) -> Rounds | None:
    """What answers release, their multipliers not known yet: two rounds of a client with blank samples.

    None where clients upload nothing: then nothing needs noise.
    """
    samples = blank_samples(net.shape, net.num_classes, next(iter(initial.values())).device)
    some = Mechanisms(1.0, config.privacy.rate, 1.0, 1.0, 1.0)
    server, kept, rounds = initial, method.enroll(initial), list[list[Release]]()
    for round_ in (1, 2):
        raw = ClientData(samples, np.arange(len(samples)))
        data = PrivateData(raw, some, SeededNoise(0, round_, 0), {})
        fit = _CountingFit(data, config.fit_settings(round_), net.frozen)
        kept, upload = method.client_update(net, kept, method.broadcast(server), data, fit)  # type: ignore[arg-type]
        if not upload:
            return None
        rounds.append(list(data.spent))
        if config.rounds == 1:
            return rounds[0], rounds[0]
        server = method.aggregate(server, Uploads.of([upload]))
    return rounds[0], rounds[1]


class _CountingFit:
    """`fit` that trains nothing and notes what it would have released."""

    def __init__(self, data: PrivateData, settings: FitSettings, frozen: frozenset[str]):
        self.data, self.settings, self.frozen = data, settings, frozen

    def __call__(
        self, params: Tree, loss: Loss, *, only: tuple[str, ...], epochs: float | None = None, plain: bool = False
    ) -> Tree:
        release = self.data.mechanisms.of_fit(self.settings, epochs)
        if moving_names(params, only, self.frozen) and release.count:
            self.data.spent.append(release)
            _ = self.data.samples
        return params

    def batchwise(
        self, params: Tree, loss: BatchLoss, *, only: tuple[str, ...], epochs: float | None = None, plain: bool = False
    ) -> NoReturn:
        refuse_batchwise()

    def reach(self, epochs: float | None = None) -> float:
        return 1.0


def _multipliers(privacy: PrivacyConfig, rounds: Rounds, answers: int, noise: float) -> Mechanisms:
    """All multipliers, if that of gradients is `noise`; of what leaves beside them each kind costs the same.

    By the central limit of many small releases (mu^2 adds up) these take `privacy.sums_share` of the budget together.
    Without gradients everything has this noise.
    """
    most = [*_most(*rounds), *rounds[1] * (answers - 1)]
    steps = sum(r.count for r in most if r.name == GRADIENTS)
    if not steps:
        return Mechanisms(float(privacy.clip), privacy.rate, noise, noise, noise)
    slope = math.expm1(min(1 / noise**2, 700)) * privacy.rate**2 if privacy.rate < 1 else 1 / noise**2
    others = {r.name for each in rounds for r in each} - {GRADIENTS}
    each = steps * slope * privacy.sums_share / (1 - privacy.sums_share) / max(1, len(others))  # mu^2 of a kind
    times = sum(r.count for r in most if r.name == SUMS)
    return Mechanisms(
        float(privacy.clip),
        privacy.rate,
        noise,
        sums=math.sqrt(max(times, 1) / each),
        counts=math.sqrt(1 / each),
    )


def _all(rounds: Rounds, mechanisms: Mechanisms, answers: int) -> list[Release]:
    """Everything that a client may release in a run, an upper bound."""
    seen, releases = set[str](), list[Release]()
    first, later = rounds
    for release in [*_most(first, later), *later * (answers - 1)]:
        if release.name in ONCE:
            if release.name in seen:
                continue
            seen.add(release.name)
        releases.append(_noised(release, mechanisms))
    return releases


def _most(first: list[Release], later: list[Release]) -> list[Release]:
    """The answer of the two that releases more; both, where neither contains the other."""
    if Counter(first) <= Counter(later):
        return later
    return first if Counter(later) <= Counter(first) else [*first, *later]


def _noised(release: Release, mechanisms: Mechanisms) -> Release:
    noise = {GRADIENTS: mechanisms.gradients, SUMS: mechanisms.sums}.get(release.name, mechanisms.counts)
    return replace(release, noise=noise)


# --- the account of a run -------------------------------------------------------------------------------------------
# It is read from the run's records, which every checkpoint holds: an interruption forgets nothing that was spent.


def entry(plan: PrivacyPlan, round_: int, asked: Sequence[int], records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a round's record says: who was asked, what an answer released, and epsilon of all rounds so far."""
    row = {"asked": sorted(asked), "releases": [asdict(r) for r in plan.answer(round_, False)]}
    row["once"] = [asdict(r) for r in plan.once]
    return {**row, "epsilon": epsilon_so_far(plan.config, [*records, {"privacy": row}])}


def epsilon_so_far(privacy: PrivacyConfig, records: Iterable[Mapping[str, Any]]) -> float:
    """The largest epsilon of a record's owner: a client's that was asked most, or of all rounds together.

    A client that was asked counts as one that answered, also where its answer was lost.
    """
    rows = [record["privacy"] for record in records if "privacy" in record]
    if privacy.level == "client":
        return epsilon([Release(**r) for row in rows for r in row["releases"]], privacy.delta)
    spent: dict[int, list[Release]] = {}
    for row in rows:
        for client in row["asked"]:
            fresh = [] if client in spent else [Release(**r) for r in row["once"]]
            spent.setdefault(client, []).extend([*fresh, *(Release(**r) for r in row["releases"])])
    kinds = {_kind(releases): releases for releases in spent.values()}
    return max((epsilon(releases, privacy.delta) for releases in kinds.values()), default=0.0)


def _kind(releases: Sequence[Release]) -> tuple[tuple[str, float, float, int], ...]:
    total: dict[tuple[str, float, float], int] = {}
    for r in releases:
        total[r.name, r.noise, r.rate] = total.get((r.name, r.noise, r.rate), 0) + r.count
    return tuple(sorted((*key, count) for key, count in total.items()))


def exceeds(plan: PrivacyPlan, round_: int, asked: Sequence[int], records: Sequence[Mapping[str, Any]]) -> bool:
    """Whether this round would bring somebody above the budget."""
    budget = plan.config.epsilon
    return budget is not None and entry(plan, round_, asked, records)["epsilon"] > budget + 1e-9
