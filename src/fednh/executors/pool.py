"""How a round's clients are worked through: one after the other on every worker, or small ones a block at a time.

Both engines call the same methods on the same random draws and give the same numbers, up to rounding. Within one
engine the bits do not depend on the number of workers: blocks are made from the clients, not from the workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TypeVar

import numpy as np

from fednh.config import Config
from fednh.core import checks
from fednh.core import client as clients
from fednh.core.client import Update
from fednh.core.federation import Federation
from fednh.core.fit import Sgd
from fednh.core.tree import Tree
from fednh.data.batches import ClientData, blank_samples
from fednh.errors import UserError
from fednh.executors.vmap import Block, update_block

A = TypeVar("A")
B = TypeVar("B")
Outcome = tuple[int, Update | Exception | None]  # a client and what came of it; None: the run was asked to stop

FEWEST = 32  # clients a round from which on a block is worth its while
LARGEST = 64  # clients in a block: beyond it nothing is gained
STATE_BYTES = 16 << 20  # of one copy of a block's parameters
DATA_BYTES = 32 << 20  # of a block's padded samples


@dataclass(frozen=True)
class Work:
    """What the clients of a round have in common."""

    fed: Federation
    down: Tree
    sgd: Sgd
    seed: int
    round: int
    kept: Callable[[int], Tree]
    stopped: Callable[[], bool]
    gradient_norm: bool = False


def in_order(pool: ThreadPoolExecutor, work: Callable[[A], B], items: Iterable[A], ahead: int) -> Iterator[B]:
    """`map` on the pool, results in the order of `items`, with at most `ahead` of them under way or waiting."""
    waiting: deque[Future[B]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) >= ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


def updates(engine: str, pool: ThreadPoolExecutor, work: Work, order: Sequence[int], ahead: int) -> Iterator[Outcome]:
    """The clients' updates in the given order, as they are ready."""
    if engine == "loop":
        yield from in_order(pool, partial(one_client, work), order, ahead)
    else:
        for block in in_order(pool, partial(one_block, work), blocks(work.fed, order), ahead):
            yield from block


def one_client(work: Work, client: int) -> Outcome:
    if work.stopped():
        return client, None
    try:
        fed = work.fed
        data = ClientData(fed.train, fed.parts[client], work.seed, work.round, client, "train")
        checks.check_share(data.share, client)
        kept = work.kept(client)
        return client, clients.update(fed.method, fed.net, kept, work.down, data, work.sgd, work.gradient_norm)
    except Exception as error:  # whatever a method, a model or a disk may raise; the caller tells it with names
        return client, error


def one_block(work: Work, members: Sequence[int]) -> list[Outcome]:
    if work.stopped():
        return [(client, None) for client in members]
    try:
        # Those who bring the same names: newcomers may bring none. What is received anyway need not be brought.
        alike: dict[tuple[str, ...], dict[int, Tree]] = {}
        for client in members:
            brought = {name: value for name, value in work.kept(client).items() if name not in work.down}
            alike.setdefault(tuple(sorted(brought)), {})[client] = brought
        done = {client: update for kept in alike.values() for client, update in _together(work, kept).items()}
        return [(client, done[client]) for client in members]
    except Exception:  # one after the other: so the one that fails is named, and the rest have their results
        return [one_client(work, client) for client in members]


def _together(work: Work, kept: dict[int, Tree]) -> dict[int, Update]:
    fed, members = work.fed, list(kept)
    block = Block(fed.train, [fed.parts[k] for k in members], members, work.seed, work.round, "train")
    made = update_block(fed.method, fed.net, block, list(kept.values()), work.down, work.sgd)
    return dict(zip(members, made, strict=True))


def blocks(fed: Federation, order: Sequence[int]) -> Iterator[list[int]]:
    """Neighbours in the order, as many as fit; the order is by size, so little is padded."""
    block: list[int] = []
    limit = 0
    for client in order:
        if not block:
            limit = block_size(fed, len(fed.parts[client]))
        block.append(client)
        if len(block) == limit:
            yield block
            block = []
    if block:
        yield block


def block_size(fed: Federation, samples: int) -> int:
    """How many clients of so many samples go into one block: their states and their data should stay in the cache."""
    parameters = sum(prod(shape) for shape in fed.net.parameter_shapes)
    by_data = DATA_BYTES // (4 * prod(fed.net.shape) * max(1, samples))
    return max(1, min(LARGEST, STATE_BYTES // (4 * parameters), by_data))


def choose(config: Config, fed: Federation, server: Tree) -> str:
    """The engine that a config asks for; "auto" follows a rule, so that the same run always takes the same.

    The rule: vmap where at least `FEWEST` clients are picked a round, the model has no convolutions, eight typical
    clients or more fit into a block, and nothing is asked for that only the loop does.
    """
    if config.engine == "loop" or (config.engine == "auto" and not _worth(config, fed)):
        return "loop"
    obstacle = _obstacle(config, fed) or _does_not_map(fed, server)
    if obstacle and config.engine == "vmap":
        raise UserError(f"engine = 'vmap' cannot be used: {obstacle}; use engine = 'loop'")
    return "loop" if obstacle else "vmap"


def _worth(config: Config, fed: Federation) -> bool:
    typical = int(np.median([len(part) for part in fed.parts]))
    convolutions = any(len(shape) > 2 for shape in fed.net.parameter_shapes)
    picked = config.participation.rate * len(fed.parts)
    return picked >= FEWEST and not convolutions and block_size(fed, typical) >= 8


def _obstacle(config: Config, fed: Federation) -> str | None:
    if fed.train.augment:
        return "training images are augmented, each client's on its own (data.augment = 'none' turns it off)"
    if config.diagnostics.gradient_norm:
        return "diagnostics.gradient_norm looks at one client at a time"
    if fed.net.stateful:
        return "model.norm = 'local' gives every client a normalisation of its own"
    return None


def _does_not_map(fed: Federation, server: Tree) -> str | None:
    """Try the method on two blank clients without training: why it cannot be mapped, or None."""
    samples = blank_samples(fed.net.shape, fed.net.num_classes, fed.train.x.device)
    everything = np.arange(len(samples))
    kept, down = fed.method.enroll(server), fed.method.broadcast(server)
    try:
        block = Block(samples, [everything, everything[:1]], [0, 1], 0, 0, "train")
        update_block(fed.method, fed.net, block, [kept, kept], down, Sgd(epochs=1))
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        return f"{type(fed.method).__name__} or its model does not run for many clients at once ({reason})"
    return None
