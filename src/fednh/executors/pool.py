"""The executor of one machine: a pool of threads, each with one client at a time, or with a block of small ones."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

import torch

from fednh.config import Config
from fednh.core.federation import Federation
from fednh.core.progress import Watcher
from fednh.core.rounds import Rounds
from fednh.errors import Interrupted
from fednh.executors.simulation import Simulation
from fednh.executors.work import Stage, Unit
from fednh.storage.run_folder import RunFolder, worker_count

A = TypeVar("A")
B = TypeVar("B")


def rounds(
    config: Config, federation: Federation, folder: RunFolder, watcher: Watcher, stop: threading.Event | None = None
) -> Rounds:
    """A run on this machine, ready to `run`."""
    stop = stop or threading.Event()
    return Rounds(config, folder, Pool(config, federation, folder, watcher, stop), watcher, stop)


class Pool(Simulation):
    """Clients as jobs of a thread pool."""

    backend = "simulator"

    def __enter__(self) -> Pool:
        self.workers = worker_count(self.config)
        self.threads = ThreadPoolExecutor(self.workers, initializer=torch.set_num_threads, initargs=(1,))
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.threads.shutdown()

    def map(self, stage: Stage, units: Sequence[Unit]) -> Iterator[list[Any]]:
        """The results in the order of `units`; at most two per worker are running or waiting to be read."""

        def work(unit: Unit) -> list[Any] | None:
            return None if self.stop.is_set() else stage(self.material, unit, self.kept(unit), self.meter)

        for result in in_order(self.threads, work, units, ahead=2 * self.workers):
            if result is None:
                raise Interrupted
            yield result


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
