"""The executor of one machine: a pool of threads, each with one client at a time, or with a block of small ones."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import torch

from fednh import machine
from fednh.backends.tasks import (
    ClientBatch,
    ClientTask,
    CompressedTrainTask,
    EvaluateTask,
    Measured,
    SimulatedData,
    TrainTask,
)
from fednh.backends.vmap import blocks, choose_engine
from fednh.callbacks import Callback
from fednh.config import Config, parse_bytes
from fednh.errors import Interrupted
from fednh.federated import checks
from fednh.federated.client import ClientResult
from fednh.federated.compress import Compression
from fednh.federated.evaluate import Personal
from fednh.federated.executor import RoundPolicy, RoundTask
from fednh.federated.plan import result_order
from fednh.federated.rounds import RoundLoop
from fednh.federated.setup import Federation, ServerSide
from fednh.interrupt import Meter
from fednh.runs.client_states import Store
from fednh.runs.model_file import after_rounds
from fednh.runs.run_folder import RunFolder, worker_count
from fednh.tree import Tree, to_device


class Simulation:
    """What the executors of simulated clients have in common: threads of this machine, and a Ray cluster.

    The samples and the store of what clients keep are in this process. A subclass decides only who computes: its `map`
    applies a task (tasks.py) to batches of clients and returns the results in their order, whoever was fast.
    """

    backend: str
    engine: str
    warned = False  # that a block could not be computed at once

    def __init__(
        self, config: Config, federation: Federation, folder: RunFolder, callback: Callback, stop: threading.Event
    ):
        self.config, self.fed, self.folder, self.callback, self.stop = config, federation, folder, callback, stop
        self.policy = RoundPolicy(norm_bound=config.upload_bound(deployed=False), client_error=config.on_error)
        self.data = SimulatedData.of(federation)
        self.meter = Meter(stop, partial(callback.on_progress, "evaluating"))
        machine.keep_freed()
        budget = parse_bytes(config.store.memory, machine.total_memory())
        self.store = Store(folder.clients, budget, lambda client: {}, config.home)

    @abstractmethod
    def __enter__(self) -> Simulation: ...

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None
    ) -> None: ...

    @abstractmethod
    def map(self, task: ClientTask, batches: Sequence[ClientBatch]) -> Iterator[list[Any]]:
        """The results of the batches, in their order; Interrupted when the run is asked to stop."""

    def kept(self, batch: ClientBatch) -> list[Tree]:
        return [self.store.get(client) for client in batch]

    def open(self, extras: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> ServerSide:
        return self.fed.server_side(self.config)

    def begin(self, initial: Tree) -> None:
        fed = self.fed
        newcomers = {name: fed.architectures.enroll(initial, name) for name in fed.architectures.nets}
        self.store.newcomer = lambda client: newcomers[fed.dealt[client]]
        self.engine = choose_engine(self.config, self.fed, initial, self.note)

    def present(self) -> Sequence[int]:
        return range(len(self.fed.parts))

    def ask(self, task: RoundTask) -> SimulationReplies:
        return SimulationReplies(self, task)

    def commit(self, round_: int, clients: Sequence[int]) -> None:
        self.store.commit(clients)

    def rollback(self) -> None:
        self.store.rollback()

    def go_back(self, round_: int, store: Store) -> None:
        store.newcomer, self.store = self.store.newcomer, store

    def checkpoint_extras(self) -> dict[str, Any]:
        return {}

    def finished(self, rounds: int) -> dict[str, Any]:
        return {}

    def name(self, client: int) -> str:
        return self.fed.name(client)

    def warn_of_fallback(self, why: str, round_: int) -> None:
        """Tell once that a block did not work where its clients do: results are as good, but later."""
        if why and not self.warned:
            self.warned = True
            self.note(
                f"round {round_}: a block of clients could not be computed at once ({why}); they were computed one by "
                f"one, which is slower. engine = 'loop' leaves out the attempt"
            )

    def note(self, text: str, client: int | None = None, round_: int = 0) -> None:
        self.callback.on_note(text)


class SimulationReplies:
    """One exchange of simulated clients, which start to work when their results are asked for."""

    def __init__(self, simulation: Simulation, task: RoundTask):
        self.simulation, self.task, self.config, self.fed = simulation, task, simulation.config, simulation.fed

    def results(self) -> Iterator[ClientResult]:
        """Every client's result; what it keeps goes to the store and is committed if its upload is used."""
        config, simulation, asked, round_ = self.config, self.simulation, self.task, self.task.done + 1
        # The order is fixed, so sums have the same bits every time.
        order = result_order(config, asked.train, lambda k: len(self.fed.parts[k]))
        together = simulation.engine == "vmap"
        batches: list[ClientBatch] = list(blocks(self.fed, order)) if together else [[client] for client in order]
        settings, gradient_norm = config.fit_settings(round_), config.diagnostics.gradient_norm
        compression = Compression.of(config.federation)
        make = TrainTask if compression is None else partial(CompressedTrainTask, compression=compression)
        task = make(
            asked.down,
            settings,
            config.seed,
            round_,
            gradient_norm,
            together,
            asked.mechanisms,
            asked.sums,
            records=asked.overrides,
        )
        done = 0
        for batch, results in zip(batches, simulation.map(task, batches), strict=True):
            done += len(batch)
            simulation.callback.on_progress("training", done, len(order))
            for client, result in zip(batch, results, strict=True):
                if result.upload is not None:
                    simulation.warn_of_fallback(result.fallback_reason, round_)
                    simulation.store.put(client, result.keep, round_)
                yield replace(result, client=client)

    def personal_metrics(self) -> list[Personal]:
        """The metrics of the personal models; after the last round the models are saved too."""
        asked, config, simulation, method = self.task, self.config, self.simulation, self.fed.method
        with checks.with_context(method, f"the server failed after round {asked.done}"):
            shared = self.fed.architectures.global_models(asked.server) if self.fed.measures_held_out else {}
        task = EvaluateTask(
            asked.down,
            shared,
            config.fit_settings(asked.done),
            config.seed,
            asked.done,
            asked.final,
            records=asked.overrides,
            how=config.personal,
        )
        simulation.meter.begin(sum(task.samples(simulation.data, client) for client in asked.evaluate))
        metrics = []
        for batch in simulation.map(task, [[client] for client in asked.evaluate]):  # stopped, it starts again
            for measured in batch:
                self._save(measured)
                metrics.append(measured.person)
        return metrics

    def _save(self, measured: Measured) -> None:
        if measured.model is not None:
            folder, client = self.simulation.folder, measured.person.client
            card = {**after_rounds(self.fed.card(self.config, client), self.task.done), "novelty": measured.novelty}
            folder.write_model(folder.personal_model(client), measured.model, card)

    def similarity(self) -> None:
        """None: the loop has all samples and computes it itself."""


# --- threads --------------------------------------------------------------------------------------------------------


A = TypeVar("A")
B = TypeVar("B")


class Pool(Simulation):
    """Clients as jobs of a thread pool."""

    backend = "simulator"

    def __enter__(self) -> Pool:
        self.workers = worker_count(self.config)
        devices = self.config.devices
        self.samples = {devices[0]: self.data} | {device: to_device(self.data, device) for device in devices[1:]}
        self.threads = ThreadPoolExecutor(self.workers, initializer=torch.set_num_threads, initargs=(1,))
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.threads.shutdown()

    def map(self, task: ClientTask, batches: Sequence[ClientBatch]) -> Iterator[list[Any]]:
        """The results in the order of `batches`; at most two per worker are running or waiting to be read."""

        devices = self.config.devices
        move = to_device if len(devices) > 1 else _stay
        tasks = {device: move(task, device) for device in devices}

        def work(numbered: tuple[int, ClientBatch]) -> list[Any]:
            if self.stop.is_set():
                raise Interrupted
            number, batch = numbered
            device = devices[number % len(devices)]  # by place, not by who is free: bits depend on it
            kept = move(self.kept(batch), device)
            made: list[Any] = move(tasks[device](self.samples[device], batch, kept, self.meter), devices[0])
            return made

        return in_order(self.threads, work, enumerate(batches), ahead=2 * self.workers)


def _stay(value: Any, device: str) -> Any:
    """The value, which is on the only device."""
    return value


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


def make_run(
    config: Config,
    federation: Federation,
    folder: RunFolder,
    callback: Callback,
    stop: threading.Event | None = None,
    executor: Callable[..., Simulation] = Pool,
) -> RoundLoop:
    """A run on this machine, or where else `executor` computes clients; ready to `run`."""
    stop = stop or threading.Event()
    return RoundLoop(config, folder, executor(config, federation, folder, callback, stop), callback, stop)
