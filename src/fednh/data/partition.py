"""Who holds what: labels -> one index array per client. Pure and seeded; every sample lands in exactly one client."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fednh.errors import UserError

Indices = NDArray[np.int64]
TRIES = 1000  # draws of a random partition before giving up
HOPELESS = 20, 30  # if in so many draws never fewer clients fell short, that none should is one chance in e^30 a draw

# Which partitions use a setting; those not named here are used by all.
USES = {
    "partition.beta": ("dirichlet", "quantity"),
    "partition.clients": ("dirichlet", "iid", "classes", "shards", "quantity"),
    "partition.min_classes": ("dirichlet",),
    "partition.classes_per_client": ("classes",),
    "partition.shards_per_client": ("shards",),
}


def dirichlet(
    labels: Indices, clients: int, rng: np.random.Generator, beta: float, min_samples: int, min_classes: int
) -> list[Indices]:
    """Every class is dealt to the clients by a Dirichlet(beta) draw (the scheme of FedDF, Lin et al. 2020).

    A client that already holds its fair share N/K gets no more of the later classes. Drawn again until every client
    has `min_samples` samples of at least `min_classes` classes.
    """
    _enough(labels, clients, min_samples)
    present = np.unique(labels)
    if len(present) < min_classes:
        raise UserError(
            f"partition: every client should have {min_classes} classes, but the data has only {len(present)}; "
            f"lower partition.min_classes"
        )
    fewest = clients
    for tried in range(1, TRIES + 1):
        owner = _dirichlet_owner(labels, present, clients, rng, beta)
        table = class_table(labels, owner, clients)
        short = int(((table.sum(1) < min_samples) | ((table > 0).sum(1) < min_classes)).sum())
        if short == 0:
            return _by_owner(owner, clients)
        fewest = min(fewest, short)
        if tried >= HOPELESS[0] and fewest >= HOPELESS[1]:
            break
    raise UserError(
        f"partition: no Dirichlet({beta:g}) draw in {tried} gave all {clients} clients at least {min_samples} "
        f"samples of {min_classes} classes; use fewer clients, a larger beta, or lower partition.min_samples"
    )


def _dirichlet_owner(labels: Indices, present: Indices, clients: int, rng: np.random.Generator, beta: float) -> Indices:
    owner = np.empty(len(labels), np.int64)
    held = np.zeros(clients, np.int64)
    for label in present:
        members = rng.permutation(np.flatnonzero(labels == label))
        share = rng.dirichlet(np.full(clients, beta)) * (held < len(labels) / clients)
        if share.sum() <= 0:  # a tiny beta put everything on clients that are full
            share = (held < len(labels) / clients).astype(float)
        cuts = (np.cumsum(share / share.sum())[:-1] * len(members)).astype(np.int64)
        sizes = np.diff(cuts, prepend=0, append=len(members))
        owner[members] = np.repeat(np.arange(clients), sizes)
        held += sizes
    return owner


def iid(labels: Indices, clients: int, rng: np.random.Generator, min_samples: int) -> list[Indices]:
    """A random split into equal parts."""
    _enough(labels, clients, min_samples)
    order = rng.permutation(len(labels))
    owner = np.empty(len(labels), np.int64)
    owner[order] = np.repeat(np.arange(clients), [len(part) for part in np.array_split(order, clients)])
    return _by_owner(owner, clients)


def classes(
    labels: Indices, clients: int, rng: np.random.Generator, classes_per_client: int, min_samples: int
) -> list[Indices]:
    """Every client holds the same number of classes; a class is divided evenly among those who hold it."""
    _enough(labels, clients, min_samples)
    present = np.unique(labels)
    if classes_per_client > len(present):
        raise UserError(
            f"partition.classes_per_client = {classes_per_client}, but the data has only {len(present)} classes"
        )
    if clients * classes_per_client < len(present):
        raise UserError(
            f"partition: {clients} clients of {classes_per_client} classes each cannot cover {len(present)} classes; "
            f"raise partition.classes_per_client or --clients"
        )
    holders: list[list[int]] = [[] for _ in present]
    load = np.zeros(len(present))
    for client in range(clients):  # the classes with the fewest holders so far, ties broken at random
        for c in np.lexsort((rng.random(len(present)), load))[:classes_per_client]:
            holders[c].append(client)
            load[c] += 1
    owner = np.empty(len(labels), np.int64)
    for label, who in zip(present, holders, strict=True):
        members = rng.permutation(np.flatnonzero(labels == label))
        for client, part in zip(rng.permutation(who), np.array_split(members, len(who)), strict=True):
            owner[part] = client
    return _large_enough(_by_owner(owner, clients), min_samples)


def shards(
    labels: Indices, clients: int, rng: np.random.Generator, shards_per_client: int, min_samples: int
) -> list[Indices]:
    """Samples sorted by label, cut into shards of equal size, dealt at random (McMahan et al. 2017)."""
    _enough(labels, clients, min_samples)
    if clients * shards_per_client > len(labels):
        raise UserError(
            f"partition: {len(labels)} samples cannot be cut into {clients * shards_per_client} shards; "
            f"lower --clients or partition.shards_per_client"
        )
    by_label = np.lexsort((rng.random(len(labels)), labels))
    pieces = np.array_split(by_label, clients * shards_per_client)
    order = rng.permutation(len(pieces)).reshape(clients, shards_per_client)
    return _large_enough([np.sort(np.concatenate([pieces[i] for i in row])) for row in order], min_samples)


def quantity(labels: Indices, clients: int, rng: np.random.Generator, beta: float, min_samples: int) -> list[Indices]:
    """Sizes by one Dirichlet(beta) draw, labels at random: clients differ in amount, not in kind."""
    _enough(labels, clients, min_samples)
    for _ in range(TRIES):
        cuts = (np.cumsum(rng.dirichlet(np.full(clients, beta)))[:-1] * len(labels)).astype(np.int64)
        if np.diff(cuts, prepend=0, append=len(labels)).min() >= min_samples:
            return [np.sort(part) for part in np.split(rng.permutation(len(labels)), cuts)]
    raise UserError(
        f"partition: no Dirichlet({beta:g}) draw of sizes in {TRIES} gave all {clients} clients at least {min_samples} "
        f"samples; use fewer clients, a larger beta, or lower partition.min_samples"
    )


def by_site(site: Indices, sites: Sequence[str], min_samples: int) -> list[Indices]:
    """The natural sites: client k holds what the k-th site holds."""
    parts = _by_owner(site, len(sites))
    for name, part in zip(sites, parts, strict=True):
        if len(part) < min_samples:
            raise UserError(
                f"partition: the site {name!r} has only {len(part)} training samples, fewer than {min_samples}; "
                f"leave it out or lower partition.min_samples"
            )
    return parts


def hold_out(labels: Indices, part: Indices, share: float, rng: np.random.Generator) -> tuple[Indices, Indices]:
    """A client's samples to train on and to measure on: `share` of each class, to the nearest whole number.

    Every class keeps a training sample, so a class with one sample is not measured.
    """
    if share == 0:
        return part, part[:0]
    held = []
    for label in np.unique(labels[part]):
        members = part[labels[part] == label]
        count = min(int(share * len(members) + 0.5), len(members) - 1)
        held.append(rng.choice(members, count, replace=False))
    chosen = np.sort(np.concatenate(held)) if held else part[:0]
    return np.setdiff1d(part, chosen), chosen


def class_table(labels: Indices, owner: Indices, clients: int, width: int | None = None) -> NDArray[np.int64]:  # (K, C)
    """How many samples of each class every client holds; `width` is the number of classes, if not the labels' own."""
    width = width or int(labels.max()) + 1
    return np.bincount(owner * width + labels, minlength=clients * width).reshape(clients, width)


def _by_owner(owner: Indices, clients: int) -> list[Indices]:
    order = np.argsort(owner, kind="stable")
    return list(np.split(order, np.cumsum(np.bincount(owner, minlength=clients))[:-1]))


def _enough(labels: Indices, clients: int, min_samples: int) -> None:
    if len(labels) < clients * min_samples:
        raise UserError(
            f"partition: {len(labels)} training samples cannot give {clients} clients at least {min_samples} each; "
            f"lower --clients or partition.min_samples"
        )


def _large_enough(parts: list[Indices], min_samples: int) -> list[Indices]:
    smallest = min(range(len(parts)), key=lambda k: len(parts[k]))
    if len(parts[smallest]) < min_samples:
        raise UserError(
            f"partition: client {smallest} gets only {len(parts[smallest])} samples, fewer than {min_samples}; "
            f"lower --clients or partition.min_samples"
        )
    return parts
