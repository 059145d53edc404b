"""The executor of one machine: a pool of threads, each with one client at a time, or with a block of small ones."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

import torch

from fednh import machine
from fednh.backends.tasks import ClientBatch, ClientTask, EvaluateTask, Failure, Measured, SimulatedData, TrainTask
from fednh.backends.vmap import blocks, choose_engine
from fednh.config import Config, parse_bytes
from fednh.errors import Interrupted
from fednh.federated import checks
from fednh.federated.evaluate import Personal
from fednh.federated.protocol import Exchange, Missing, Outcome, Watcher
from fednh.federated.rounds import Rounds
from fednh.federated.setup import Federation, ServerSide
from fednh.interrupt import Meter
from fednh.runs.client_states import Store
from fednh.runs.run_folder import RunFolder, worker_count
from fednh.tree import Tree

# --- simulation -----------------------------------------------------------------------------------------------------
# A run whose clients are all simulated: what the executors on one machine and on a cluster have in common.
#
# The samples and the store of what clients keep are in this process. An executor decides only who computes: its `map`
# applies a stage (work.py) to units of clients and returns the results in their order, whoever was fast.


class Simulation:
    """The executor of simulated clients, without the part that computes them."""

    backend: str
    deployed, least = False, 1
    engine: str
    told = False  # that a block could not be computed at once

    def __init__(
        self, config: Config, federation: Federation, folder: RunFolder, watcher: Watcher, stop: threading.Event
    ):
        self.config, self.fed, self.folder, self.watcher, self.stop = config, federation, folder, watcher, stop
        self.material = SimulatedData.of(federation)
        self.meter = Meter(stop, watcher.evaluating)
        machine.keep_freed()
        budget = parse_bytes(config.store.memory, machine.total_memory())
        self.store = Store(folder.clients, budget, {}, config.device)

    @abstractmethod
    def __enter__(self) -> Simulation: ...

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None
    ) -> None: ...

    @abstractmethod
    def map(self, stage: ClientTask, units: Sequence[ClientBatch]) -> Iterator[list[Any]]:
        """The results of the units, in their order; Interrupted when the run is asked to stop."""

    def kept(self, unit: ClientBatch) -> list[Tree]:
        return [self.store.get(client) for client in unit]

    def open(self, books: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> ServerSide:
        return self.fed.server_side(self.config)

    def begin(self, initial: Tree) -> None:
        self.store.newcomer = self.fed.method.enroll(initial)
        self.engine = choose_engine(self.config, self.fed, initial, self.note)

    def present(self) -> Sequence[int]:
        return range(len(self.fed.parts))

    def exchange(self, asked: Exchange) -> SimulationAnswers:
        return SimulationAnswers(self, asked)

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

    def tell_if_alone(self, why: str, round_: int) -> None:
        """Tell once that a block did not work where its clients do: results are as good, but later."""
        if why and not self.told:
            self.told = True
            self.note(
                f"round {round_}: a block of clients could not be computed at once ({why}); they were computed one by "
                f"one, which is slower. engine = 'loop' leaves out the attempt"
            )

    def note(self, text: str, client: int | None = None, round_: int = 0) -> None:
        self.watcher.note(text)


class SimulationAnswers:
    """One exchange of simulated clients, which start to work when their answers are asked for."""

    def __init__(self, simulation: Simulation, asked: Exchange):
        self.simulation, self.asked, self.config, self.fed = simulation, asked, simulation.config, simulation.fed

    def reports(self) -> Iterator[Outcome]:
        """Every client's report; what it keeps goes to the store and is committed if its upload is used."""
        config, store, round_ = self.config, self.simulation.store, self.asked.done + 1
        # The largest first, so that no long job starts last. The order is fixed, so sums have the same bits every time.
        order = sorted(self.asked.train, key=lambda k: (-len(self.fed.parts[k]), k))
        together = self.simulation.engine == "vmap"
        units: list[ClientBatch] = list(blocks(self.fed, order)) if together else [[client] for client in order]
        look, sgd = config.diagnostics.gradient_norm, config.train.sgd(round_)
        down, records = self.asked.down, self.asked.records
        stage = TrainTask(down, sgd, config.seed, round_, look, together, records=records)
        done = 0
        for unit, updates in zip(units, self.simulation.map(stage, units), strict=True):
            done += len(unit)
            self.simulation.watcher.training(done, len(order))
            for client, update in zip(unit, updates, strict=True):
                if isinstance(update, Failure):
                    yield client, Missing("failed", update.words, update.error)
                    continue
                self.simulation.tell_if_alone(update.alone, round_)
                store.put(client, update.keep, round_)
                yield client, update.report

    def people(self) -> list[Personal]:
        """The metrics of the personal models; after the last round the models are saved too."""
        asked, config, simulation, method = self.asked, self.config, self.simulation, self.fed.method
        with checks.with_context(method, f"the server failed after round {asked.done}"):
            shared = method.global_model(asked.server) if self.fed.measures_held_out else None
        sgd, prior = config.train.sgd(asked.done), config.eval.prior
        stage = EvaluateTask(
            asked.down,
            shared,
            sgd,
            config.seed,
            asked.done,
            asked.final,
            prior,
            records=asked.records,
            how=config.personal,
        )
        simulation.meter.begin(sum(stage.samples(simulation.material, client) for client in asked.evaluate))
        found = []
        for unit in simulation.map(stage, [[client] for client in asked.evaluate]):  # stopped, it starts again
            for measured in unit:
                self._save(measured)
                found.append(measured.person)
        return found

    def _save(self, measured: Measured) -> None:
        if measured.model is not None:
            folder, client = self.simulation.folder, measured.person.client
            card = {**self.fed.card(self.config, client), "novelty": measured.novelty}
            folder.write_model(folder.personal_model(client), measured.model, card)

    def novelty(self) -> None:
        """None: the loop has all samples and computes it itself."""


# --- pool -----------------------------------------------------------------------------------------------------------


A = TypeVar("A")
B = TypeVar("B")


def make_run(
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

    def map(self, stage: ClientTask, units: Sequence[ClientBatch]) -> Iterator[list[Any]]:
        """The results in the order of `units`; at most two per worker are running or waiting to be read."""

        def work(unit: ClientBatch) -> list[Any] | None:
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
