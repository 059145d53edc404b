"""The executor of many machines: clients as jobs of Ray actors, with the bits of one machine's thread pool.

The driver, this process, holds the run folder, the samples and the store of what clients keep. Samples go into Ray's
object store once, what clients receive once an exchange, and what a client kept travels with its job and comes back
with the result. Small clients are packed: a job is as many units as take about `JOB_SECONDS`. Results are read in the
order of the clients, so that sums have the same bits for any number of machines. A job whose actor or machine is lost
is computed again elsewhere.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import ceil
from types import TracebackType
from typing import Any

import ray
from ray import cloudpickle, exceptions

from fednh.config import Config
from fednh.core.federation import Federation
from fednh.core.progress import Watcher
from fednh.core.rounds import Rounds
from fednh.core.tree import Tree, size
from fednh.errors import Interrupted, RunError, UserError
from fednh.executors.connection import connected, own_cpus
from fednh.executors.crew import DEPTH, LOST, Crew, Hand, Ref, in_words, needs, room
from fednh.executors.hand import Done, PackedMaterial, PackedStage
from fednh.executors.last_words import LastWords
from fednh.executors.packing import pack
from fednh.executors.simulation import Simulation
from fednh.executors.user_code import gather
from fednh.executors.work import Stage, Unit
from fednh.storage.run_folder import RunFolder

JOB_SECONDS = 0.1  # a job of small clients takes about so long: a hundred times what Ray needs to pass it on
JOB_BYTES = 16 << 20  # of the models in a packed job
LIVES = 4  # a job that is lost so often is not given out again
START = 180.0  # seconds in which a cluster must find room for one client and start its actor
GATHER = 15.0  # seconds for the others to come: those that others use will come later
TURN = 0.1  # seconds between two looks at whether the run should stop


def rounds(
    config: Config,
    federation: Federation,
    folder: RunFolder,
    watcher: Watcher,
    stop: threading.Event | None = None,
    address: str | None = None,
) -> Rounds:
    """A run on the Ray cluster at `address`, or on one that is started here; ready to `run`."""
    stop = stop or threading.Event()
    return Rounds(config, folder, Cluster(config, federation, folder, watcher, stop, address), watcher, stop)


@dataclass(eq=False)
class Job:
    """Some neighbouring units, computed by one actor."""

    units: Sequence[Unit]
    hand: Hand | None = None
    ref: Ref | None = None
    done: Done | None = None
    losses: int = 0

    @property
    def clients(self) -> int:
        return sum(map(len, self.units))


@dataclass
class Pace:
    """How long a unit takes; the same kind of exchange takes about as long the next time."""

    seconds: float | None = None

    def learn(self, job: Job) -> None:
        if job.done is not None:
            self.seconds = job.done.seconds / len(job.units)

    def units(self, left: int, slots: int, heaviest: int) -> int:
        """How many units make a job: for `JOB_SECONDS`, but fewer towards the end, so that all actors end together."""
        if not self.seconds:
            return 1
        fair = ceil(left / (DEPTH * slots))
        return max(1, min(int(JOB_SECONDS / self.seconds), fair, heaviest))


class Cluster(Simulation):
    """Clients as jobs of Ray actors."""

    backend = "ray"

    def __init__(
        self,
        config: Config,
        federation: Federation,
        folder: RunFolder,
        watcher: Watcher,
        stop: threading.Event,
        address: str | None = None,
    ):
        super().__init__(config, federation, folder, watcher, stop)
        self.address, self.needs = address, needs(config.ray, config.device)
        self._paces: dict[type[Stage], Pace] = {}
        self._exchanges = 0
        self.machines: set[str] = set()  # that have computed clients
        self.computed_again = 0  # clients whose first computation was lost

    crew: Crew

    def __enter__(self) -> Cluster:
        self._stack = ExitStack()
        self.pulse = self._stack.enter_context(connected(self.address, own_cpus(self.config)))
        told = f"Ray has ended this run, as it does when this machine's part of the cluster is lost; {self.next}"
        self._stack.callback(LastWords(f"fednh: {told}").not_needed)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()

    def begin(self, initial: Tree) -> None:
        """Send the samples, and start the actors."""
        super().begin(initial)
        device = self.config.device.partition(":")[0]  # each actor sees its own accelerator alone
        packed = PackedMaterial.of(self.material, gather(), device, cloudpickle.dumps)
        self.crew = Crew(self.needs, self.config.workers, ray.put(packed), self.note)
        self._stack.callback(self._dismiss)
        room(self.config)
        slots = self.crew.call()
        self.crew.assemble(1, START, self.check)
        if not self.crew.ready:
            raise UserError(
                f"the Ray cluster started no actor for a client, which needs {in_words(self.needs)}, in {START:g} s; "
                f"`ray status` shows whether others use it all"
            )
        self.crew.assemble(slots, GATHER, self.check)

    def _dismiss(self) -> None:
        if not self.pulse.gone():
            self.crew.leave()

    def finished(self, rounds: int) -> dict[str, Any]:
        return {"ray": {"machines": len(self.machines), "computed_again": self.computed_again}}

    # --- jobs --------------------------------------------------------------------------------------------------

    def map(self, stage: Stage, units: Sequence[Unit]) -> Iterator[list[Any]]:
        """The results in the order of `units`; at most two jobs an actor are at work or waiting to be read."""
        flight = Flight(self, stage, units)
        for job in flight.jobs():
            assert job.done is not None
            for unit, packed in zip(job.units, job.done.results, strict=True):
                self.meter(sum(stage.samples(self.material, client) for client in unit))
                yield packed.results(self.config.device, stage.apart)

    def send(self, stage: Stage) -> Ref:
        self._exchanges += 1
        return ray.put(PackedStage.of(self._exchanges, stage))

    def pace(self, stage: Stage) -> Pace:
        return self._paces.setdefault(type(stage), Pace())

    def check(self) -> None:
        """Stop if the user asked for it, or if the cluster is gone."""
        if self.stop.is_set():
            raise Interrupted
        if self.pulse.lost.is_set():
            raise self.over(f"its head at {self.pulse.address} does not answer")

    def slots(self) -> int:
        """The slots of the cluster as it is now, each with an actor; asks the head, so it must be there."""
        while self.pulse.gone():
            self.check()
            time.sleep(TURN)
        return max(1, self.crew.call())

    def over(self, why: str) -> RunError:
        """What the user is told when nothing is left to compute on."""
        saved = "the run is saved; " if self.config.checkpoint.every else ""
        return RunError(f"the Ray cluster is lost ({why}); {saved}{self.next}")

    @property
    def next(self) -> str:
        """What the user can do then."""
        if not self.config.checkpoint.every:
            return "checkpoint.every = 0: nothing is saved"
        again = f"fednh resume {self.folder.path}"
        return f"continue with `{again} --backend ray`, or on this machine with `{again}`"


@dataclass(eq=False)
class Flight:
    """The jobs of one exchange."""

    cluster: Cluster
    stage: Stage
    units: Sequence[Unit]
    under_way: deque[Job] = field(default_factory=deque)  # in the order of the clients
    again: list[Job] = field(default_factory=list)  # lost, to be given out first
    given: int = 0  # units in jobs so far

    def jobs(self) -> Iterator[Job]:
        """The jobs with their results, in order."""
        cluster = self.cluster
        self.slots = cluster.slots()
        self.common = cluster.send(self.stage)
        self.heaviest = max(1, JOB_BYTES // max(1, size(self.stage.down)))
        while self.given < len(self.units) or self.under_way:
            cluster.check()
            try:
                cluster.crew.welcome()
                self._give_out()
                self._collect()
            except exceptions.RayError as error:  # its store or its disk is full, or a part of it is gone
                raise cluster.over(" ".join(str(error).split())[:300]) from error
            while self.under_way and self.under_way[0].done is not None:
                yield self.under_way.popleft()

    def _give_out(self) -> None:
        crew = self.cluster.crew
        while (hand := crew.free()) is not None:
            if self.again:
                job = self.again.pop(0)
            elif self.given < len(self.units) and len(self.under_way) < DEPTH * self.slots:
                job = self._next()
                self.under_way.append(job)
            else:
                return
            kept = [pack(self.cluster.kept(unit)) for unit in job.units]
            job.hand, job.ref = hand, hand.actor.work.remote(self.common, job.units, kept)
            hand.jobs += 1

    def _next(self) -> Job:
        left = len(self.units) - self.given
        number = self.cluster.pace(self.stage).units(left, self.slots, self.heaviest)
        job = Job(self.units[self.given : self.given + number])
        self.given += number
        return job

    def _collect(self) -> None:
        """Wait for a job to end, for a moment; results stay in the object store until they are read."""
        waiting = {job.ref: job for job in self.under_way if job.ref is not None and job.done is None}
        if not waiting:
            self._nobody()
            return
        there, _ = ray.wait(list(waiting), num_returns=1, timeout=TURN)
        for ref in there:
            job = waiting[ref]
            try:
                job.done = ray.get(ref)
            except LOST as error:
                self._lose(job, error)
                continue
            job.ref = None
            if job.hand is not None:
                job.hand.jobs -= 1
                self.cluster.machines.add(job.hand.about["node"])
            if job.done.problem:
                raise RunError(job.done.problem)
            self.cluster.pace(self.stage).learn(job)

    def _lose(self, job: Job, error: Exception) -> None:
        """An actor is gone: give its jobs to others, unless they are what it died of."""
        hand = job.hand
        assert hand is not None
        mine = [other for other in self.under_way if other.hand is hand and other.ref is not None]
        self.cluster.crew.forget(hand)
        for other in mine:
            other.hand, other.ref = None, None
        self.again += mine
        mine[0].losses += 1  # the one that it was working on
        number = sum(other.clients for other in mine)
        self.cluster.computed_again += number
        if mine[0].losses == LIVES:
            raise RunError(
                f"client {mine[0].units[0][0]} was lost {LIVES} times with the process that computed it; is memory "
                f"short there? ({' '.join(str(error).split())[:300]})"
            )
        self.cluster.note(f"lost a worker on {hand.place}; its {number} client(s) are computed again elsewhere")
        self.slots = self.cluster.slots()

    def _nobody(self) -> None:
        """No actor is left: wait for one on what remains of the cluster."""
        cluster = self.cluster
        cluster.slots()
        cluster.crew.assemble(1, START, cluster.check, strict=False)
        if not cluster.crew.ready:
            raise cluster.over(f"no machine has room for a client, which needs {in_words(cluster.needs)}")
