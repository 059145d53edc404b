"""The executor of one machine: a pool of threads, each with one client at a time, or with a block of small ones.

Both engines, "loop" and "vmap", call the same methods on the same random draws and give the same numbers, up to
rounding. Within one engine the bits do not depend on the number of workers: blocks are made from the clients, not from
the workers. What clients keep lies in a store in the run folder.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import prod
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import torch

from fednh.config import Config, parse_bytes
from fednh.core import checks, failures, memory, novelty
from fednh.core import client as clients
from fednh.core.client import Update
from fednh.core.evaluate import Personal
from fednh.core.executor import Exchange, Missing, Outcome
from fednh.core.federation import Federation, ServerSide
from fednh.core.fit import Sgd
from fednh.core.meter import Meter
from fednh.core.progress import Watcher
from fednh.core.rounds import Rounds
from fednh.core.tree import Tree
from fednh.data.batches import ClientData, blank_samples, subset
from fednh.errors import Interrupted, UserError
from fednh.executors.vmap import Block, update_block
from fednh.storage.client_states import Store
from fednh.storage.run_folder import RunFolder, worker_count

A = TypeVar("A")
B = TypeVar("B")
Trained = tuple[int, Update | Exception | None]  # a client and its result; None: the run was asked to stop

FEWEST = 32  # clients per round: with fewer, vmap does not pay off
LARGEST = 64  # clients in a block: more gain nothing
STATE_BYTES = 16 << 20  # of one copy of a block's parameters
DATA_BYTES = 32 << 20  # of a block's padded samples


def rounds(
    config: Config, federation: Federation, folder: RunFolder, watcher: Watcher, stop: threading.Event | None = None
) -> Rounds:
    """A run on this machine, ready to `run`."""
    stop = stop or threading.Event()
    return Rounds(config, folder, Pool(config, federation, folder, watcher, stop), watcher, stop)


class Pool:
    """Clients as jobs of a thread pool."""

    backend, deployed, least = "simulator", False, 1

    def __init__(
        self, config: Config, federation: Federation, folder: RunFolder, watcher: Watcher, stop: threading.Event
    ):
        self.config, self.fed, self.folder, self.watcher, self.stop = config, federation, folder, watcher, stop
        self.meter = Meter(stop, watcher.evaluating)
        self.workers = worker_count(config)
        memory.keep_freed()
        budget = parse_bytes(config.store.memory, memory.total())
        self.store = Store(folder.clients, budget, {}, config.device)

    def __enter__(self) -> Pool:
        self.threads = ThreadPoolExecutor(self.workers, initializer=torch.set_num_threads, initargs=(1,))
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.threads.shutdown()

    def open(self, books: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> ServerSide:
        return self.fed.server_side(self.config)

    def begin(self, initial: Tree) -> None:
        self.store.newcomer = self.fed.method.enroll(initial)
        self.engine = choose(self.config, self.fed, initial)

    def present(self) -> Sequence[int]:
        return range(len(self.fed.parts))

    def exchange(self, asked: Exchange) -> PoolAnswers:
        return PoolAnswers(self, asked)

    def commit(self, round_: int, clients: Sequence[int]) -> None:
        self.store.commit(clients)

    def rollback(self) -> None:
        self.store.rollback()

    def books(self) -> dict[str, Any]:
        return {}

    def finished(self, rounds: int) -> dict[str, Any]:
        return {}

    def name(self, client: int) -> str:
        return self.fed.name(client)

    def note(self, text: str, client: int | None = None, round_: int = 0) -> None:
        self.watcher.note(text)

    def map(self, work: Callable[[A], B], items: Iterable[A]) -> Iterator[B]:
        """The results in the order of `items`; at most two per worker are running or waiting to be read."""
        return in_order(self.threads, work, items, ahead=2 * self.workers)


class PoolAnswers:
    """One exchange on the pool: clients start to work when their answers are asked for."""

    def __init__(self, pool: Pool, asked: Exchange):
        self.pool, self.asked = pool, asked
        self.config, self.fed, self.method, self.net = pool.config, pool.fed, pool.fed.method, pool.fed.net

    # --- training ----------------------------------------------------------------------------------------------

    def reports(self) -> Iterator[Outcome]:
        """Every client's report; what it keeps goes to the store and is committed if its upload is used."""
        config, pool, round_ = self.config, self.pool, self.asked.done + 1
        # The largest first, so that no long job starts last. The order is fixed, so sums have the same bits every time.
        order = sorted(self.asked.train, key=lambda k: (-len(self.fed.parts[k]), k))
        look, sgd, kept = config.diagnostics.gradient_norm, config.train.sgd(round_), pool.store.get
        work = Work(self.fed, self.asked.down, sgd, config.seed, round_, kept, pool.stop.is_set, look)
        for client, update in self._updates(work, order):
            if update is None:
                raise Interrupted
            if isinstance(update, Exception):
                told = failures.sentence(self.method, update, f"{pool.name(client)} failed in round {round_}")
                yield client, Missing("failed", told, update)
                continue
            pool.store.put(client, update.keep, round_)
            yield client, update.report

    def _updates(self, work: Work, order: Sequence[int]) -> Iterator[Trained]:
        if self.pool.engine == "loop":
            yield from self.pool.map(partial(one_client, work), order)
        else:
            for block in self.pool.map(partial(one_block, work), blocks(work.fed, order)):
                yield from block

    # --- evaluation --------------------------------------------------------------------------------------------

    def people(self) -> list[Personal]:
        """The metrics of the personal models; after the last round the models are saved too."""
        with failures.named(self.method, f"the server failed after round {self.asked.done}"):
            shared = self.method.global_model(self.asked.server) if self.fed.measures_held_out else None
        self.pool.meter.begin(sum(self._samples(client, shared) for client in self.asked.evaluate))
        return list(self.pool.map(partial(self._person, shared), self.asked.evaluate))  # stopped, it starts again

    def _person(self, shared: Tree | None, client: int) -> Personal:
        round_, fed, meter = self.asked.done, self.fed, self.pool.meter
        with failures.named(self.method, f"the personal model of {self.pool.name(client)} failed after round {round_}"):
            data = ClientData(fed.train, fed.parts[client], self.config.seed, round_, client, "personal")
            kept, sgd = self.pool.store.get(client), self.config.train.sgd(round_)
            model = clients.personal_model(self.method, self.net, kept, self.asked.down, data, sgd, meter)
            if self.asked.final:
                self._save(client, model)
            held = subset(fed.train, fed.held_out[client])
            final = self.asked.final
            return clients.measured(self.method, self.net, client, data, model, shared, fed.test, held, meter, final)

    def _save(self, client: int, model: Tree) -> None:
        seed, meter, part = self.config.seed, self.pool.meter, self.fed.parts[client]
        about = novelty.look(self.method, self.net, model, self.fed.train, part, seed, meter)
        card = {**self.fed.card(self.config, client), "novelty": about}
        folder = self.pool.folder
        folder.write_model(folder.personal_model(client), model, card)

    def _samples(self, client: int, shared: Tree | None) -> int:
        """How many forward-passed samples the evaluation of a client's model takes."""
        held = len(self.fed.held_out[client]) * (1 if shared is None else 2)
        saved = novelty.number(self.method, len(self.fed.parts[client])) if self.asked.final else 0
        test, train = self.fed.test, self.fed.train
        own = torch.bincount(train.y[torch.from_numpy(self.fed.parts[client])], minlength=train.num_classes)
        tested = len(test) if self.asked.final else len(clients.of_own_classes(test, own))
        return tested + held + saved

    def novelty(self) -> None:
        """None: the loop has all samples and computes it itself."""


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
    """`map` on the pool, results in the order of `items`; at most `ahead` of them are running or waiting to be read."""
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


def one_client(work: Work, client: int) -> Trained:
    if work.stopped():
        return client, None
    try:
        fed = work.fed
        data = ClientData(fed.train, fed.parts[client], work.seed, work.round, client, "train")
        checks.check_share(data.share, client)
        kept = work.kept(client)
        return client, clients.update(fed.method, fed.net, kept, work.down, data, work.sgd, work.gradient_norm)
    except Exception as error:  # anything a method, a model or a disk may raise; the caller reports it
        return client, error


def one_block(work: Work, members: Sequence[int]) -> list[Trained]:
    if work.stopped():
        return [(client, None) for client in members]
    try:
        # Group clients that kept the same names: new clients may have kept none. Received names need not be kept.
        alike: dict[tuple[str, ...], dict[int, Tree]] = {}
        for client in members:
            brought = {name: value for name, value in work.kept(client).items() if name not in work.down}
            alike.setdefault(tuple(sorted(brought)), {})[client] = brought
        done = {client: update for kept in alike.values() for client, update in _together(work, kept).items()}
        return [(client, done[client]) for client in members]
    except Exception:  # one by one: the error names the client that fails, and the others succeed
        return [one_client(work, client) for client in members]


def _together(work: Work, kept: dict[int, Tree]) -> dict[int, Update]:
    fed, members = work.fed, list(kept)
    block = Block(fed.train, [fed.parts[k] for k in members], members, work.seed, work.round, "train")
    made = update_block(fed.method, fed.net, block, list(kept.values()), work.down, work.sgd)
    return dict(zip(members, made, strict=True))


def blocks(fed: Federation, order: Sequence[int]) -> Iterator[list[int]]:
    """Blocks of neighbours in the order, as many as fit; the order is by size, so little is padded."""
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
    """How many clients with this many samples go into a block: their states and data should stay in the CPU cache."""
    parameters = sum(prod(shape) for shape in fed.net.parameter_shapes)
    by_data = DATA_BYTES // (4 * prod(fed.net.shape) * max(1, samples))
    return max(1, min(LARGEST, STATE_BYTES // (4 * parameters), by_data))


def choose(config: Config, fed: Federation, server: Tree) -> str:
    """The engine that a config asks for; "auto" follows a fixed rule, so that the same run always gets the same engine.

    The rule: vmap where at least `FEWEST` clients are picked a round, the model has no convolutions, eight typical
    clients or more fit into a block, and no setting needs the loop.
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
        return "diagnostics.gradient_norm measures one client at a time"
    if fed.net.random:
        return "the model has random layers, such as dropout, which each client draws for itself"
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
