"""The executor of many machines: clients as jobs of Ray actors, with the bits of one machine's thread pool.

The driver, this process, holds the run folder, the samples and the store of what clients keep. Samples go into Ray's
object store once, what clients receive once an exchange, and what a client kept travels with its job and comes back
with the result. Small clients are packed: a job is as many units as take about `JOB_SECONDS`. Results are read in the
order of the clients, so that sums have the same bits for any number of machines. A job whose actor or machine is lost
is computed again elsewhere.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import ceil
from types import TracebackType
from typing import Any, TypeAlias, cast

import ray
from ray import cloudpickle, exceptions

from fednh import extras
from fednh.backends.ray_worker import SAME, Done, LastWords, PackedMaterial, PackedStage, facts, gather, pack
from fednh.backends.tasks import ClientBatch, ClientTask
from fednh.backends.threads import Simulation
from fednh.callbacks.base import Callback
from fednh.config import Config
from fednh.config.schema import RayConfig
from fednh.errors import Interrupted, RunError, UserError
from fednh.federated.rounds import RoundLoop
from fednh.federated.setup import Federation
from fednh.runs.run_folder import RunFolder, worker_count
from fednh.tree import Tree, size

# --- connection -----------------------------------------------------------------------------------------------------
# Ray itself: joining a cluster or starting one on this machine, and noticing that it is gone.


PATIENCE = 10.0  # seconds that the cluster's head may be out of reach
LEAVING = 20.0  # seconds for Ray to shut down
AROUND = {
    "RAY_USAGE_STATS_ENABLED": "0",  # a run tells nobody about itself
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # silences a warning about the future
}
OWN = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # "no cluster of several machines": Ray listens on 127.0.0.1 alone
QUIET: Any = {"logging_level": logging.CRITICAL, "log_to_driver": False}
JOINED = {"RAY_gcs_rpc_server_reconnect_timeout_s": "3600"}  # `Pulse` notices earlier; Ray would end this process


def check_ray(address: str | None) -> None:
    """Refuse at once what cannot work."""
    extras.need("ray", "--backend ray")
    if address and "://" in address:
        raise UserError(
            f"--address {address} is for Ray's client; run fednh on a machine of the cluster and give HOST:PORT"
        )


def where(address: str | None) -> str | None:
    """The cluster to join: as asked for, else as RAY_ADDRESS says; None: start Ray on this machine."""
    given = os.environ.get("RAY_ADDRESS") or None
    return given if address in (None, "auto") and given else address


def own_cpus(config: Config) -> int:
    """How many CPUs Ray has, where a run starts it on this machine."""
    return ceil(worker_count(config) * (config.ray.cpus_per_client or 1))


@contextlib.contextmanager
def connected(address: str | None, cpus: int) -> Iterator[Pulse]:
    """Ray while a run lasts: the cluster at `address`, or one of this machine alone with so many CPUs."""
    check_ray(address)
    address = where(address)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with _environment({**AROUND, **(OWN if address is None else JOINED)}):
        import ray

        _silence()
        try:
            if address is None:
                ray.init("local", num_cpus=cpus, include_dashboard=False, **QUIET)
            else:
                _reach(address)
                ray.init(address, **QUIET)
        except (ConnectionError, ValueError, RuntimeError, OSError) as error:
            ray.shutdown()
            raise UserError(_refusal(address, error)) from error
        finally:
            if threading.current_thread() is threading.main_thread():
                for number, handler in handlers.items():  # Ray's own would end the run without saving
                    signal.signal(number, handler)
    pulse = Pulse(ray.get_runtime_context().gcs_address)
    pulse.environment = OWN if address is None else {}
    try:
        yield pulse
    finally:
        pulse.end()
        if pulse.gone():
            atexit.register(_end_at_once)  # Ray's own way out speaks to the head, and would crash
        else:
            _within(LEAVING, ray.shutdown)


class Pulse(threading.Thread):
    """Looks after the head of the cluster; `lost` is set when it has been out of reach for a while."""

    environment: Mapping[str, str] = {}  # of other processes that join the cluster

    def __init__(self, address: str, patience: float = PATIENCE):
        super().__init__(daemon=True, name="ray-pulse")
        self.address, self.patience = address, patience
        self.lost, self._over = threading.Event(), threading.Event()
        self.start()

    def run(self) -> None:
        seen = time.monotonic()
        while not self._over.wait(self.patience / 10):
            if reachable(self.address, self.patience):
                seen = time.monotonic()
            elif time.monotonic() - seen > self.patience:
                self.lost.set()
                return

    def gone(self) -> bool:
        """Whether the head cannot be reached now: Ray ends a process that asks it for anything."""
        return self.lost.is_set() or not reachable(self.address, self.patience)

    def end(self) -> None:
        self._over.set()


def reachable(address: str, seconds: float) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), seconds).close()
    except OSError:
        return False
    return True


def _reach(address: str) -> None:
    """Ray itself would try for a minute."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and not reachable(address, 5.0):
        raise ConnectionError("nothing answers there")


def _refusal(address: str | None, error: Exception) -> str:
    reason = str(error).strip().partition("\n")[0].rstrip(".")
    if address is None:
        return f"Ray cannot be started on this machine: {reason}"
    if "ersion" in reason:
        return f"the Ray cluster at {address} has other versions than this machine: {' '.join(str(error).split())}"
    return (
        f"the Ray cluster at {address} cannot be joined: {reason}; `ray status` shows whether it runs, and this "
        f"machine must be one of it (ray start --address=HOST:PORT)"
    )


@contextlib.contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """Ray is configured by the environment; what the user has set holds."""
    mine = {key: value for key, value in settings.items() if key not in os.environ}
    os.environ |= mine
    try:
        yield
    finally:
        for key in mine:
            os.environ.pop(key, None)


def _silence() -> None:
    """Ray prints what it learns about lost machines on standard output, which is the run's: the run says it itself."""
    from ray._private import worker

    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda *_, **__: None
    logging.getLogger("ray").setLevel(logging.CRITICAL)


def _end_at_once() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _within(seconds: float, leave: Callable[[], None]) -> None:
    """A cluster whose head is gone may not answer any more: do not wait for it forever."""
    thread = threading.Thread(target=leave, daemon=True)
    thread.start()
    thread.join(seconds)


# --- crew -----------------------------------------------------------------------------------------------------------
# The near side of a cluster: one actor of Ray a slot, the jobs that they have, and what is done when one is lost.
#
# A slot is what one client reserves (`[ray]` in the config). Every slot of every machine gets an actor, which stays
# for the whole run and has at most two jobs: one at work and one waiting. A machine that joins later gets actors too.


Ref: TypeAlias = "ray.ObjectRef[Any]"
DEPTH = 2  # jobs of an actor: one at work, one waiting
# The actor or the machine that had a job is gone, or what it computed is: the job can be computed again.
LOST = (
    exceptions.RayActorError,
    exceptions.ObjectLostError,
    exceptions.WorkerCrashedError,
    exceptions.NodeDiedError,
    exceptions.OutOfMemoryError,
)


def _far_side() -> type:
    """The actor's class. It is defined here so that Ray sends it as it is: the machine may lack this package."""

    class FednhClient:
        def join(self, wanted: dict[str, str], keys: Sequence[str], material: Any) -> dict[str, str]:
            """This machine's facts; it gets ready to work if they are as wanted."""
            import socket

            import ray

            here = {"host": socket.gethostname(), "node": ray.get_runtime_context().get_node_id()}
            try:
                from fednh.backends import ray_worker
            except ImportError as error:
                return {**here, "problem": f"{type(error).__name__}: {error}"}
            here = {**ray_worker.facts(), **here}
            if all(here[key] == wanted[key] for key in keys):
                try:
                    self.bench = ray_worker.Bench(ray.get(material[0]))
                except Exception as error:
                    return {**here, "problem": f"{type(error).__name__}: {error}"}
            return here

        def work(self, *job: Any) -> Any:
            return self.bench.work(*job)

    return FednhClient


@dataclass(eq=False)
class Hand:
    """One actor."""

    actor: Any
    joining: Ref | None  # its answer to `join`, until that is there
    about: dict[str, str] = field(default_factory=dict)
    jobs: int = 0

    @property
    def place(self) -> str:
        return f"{self.about.get('host', 'a machine')} (node {self.about.get('node', '')[:8]})"


def needs(settings: RayConfig, device: str) -> dict[str, float]:
    """What one client reserves, by Ray's names."""
    gpus = settings.gpus_per_client
    if gpus is None:
        gpus = 0.0 if device == "cpu" else 1.0
    wanted = {"CPU": settings.cpus_per_client, "GPU": gpus, **settings.resources}
    return {name: float(amount) for name, amount in wanted.items() if amount}


def slots(wanted: Mapping[str, float], machines: Sequence[Mapping[str, float]]) -> int:
    """How many clients fit on these machines at once; a client does not span two of them."""
    return sum(min(int(has.get(name, 0.0) / amount + 1e-9) for name, amount in wanted.items()) for has in machines)


def nodes() -> list[dict[str, Any]]:
    """The machines of the cluster, as Ray tells of them."""
    found: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return found


def room(config: Config) -> int:
    """How many clients of a run fit on the cluster at once."""
    wanted = needs(config.ray, config.device)
    number = slots(wanted, [node["Resources"] for node in nodes() if node["Alive"]])
    if not number:
        raise UserError(f"no machine of the Ray cluster has room for a client, which needs {in_words(wanted)}")
    return number


def in_words(wanted: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in wanted.items())


class Crew:
    """The actors of one run."""

    def __init__(self, wanted: Mapping[str, float], limit: int, material: Ref, note: Callable[[str], None]):
        """At most `limit` actors; 0: as many as there are slots."""
        self.wanted, self.limit, self.data, self.note = wanted, limit, material, note
        self.hands: list[Hand] = []
        self._refused: set[str] = set()  # nodes that cannot be used
        self._cpus = {facts()["cpu"]}

    @property
    def ready(self) -> list[Hand]:
        return [hand for hand in self.hands if hand.joining is None]

    def call(self) -> int:
        """Start an actor for every slot that has none; returns the number of slots."""
        alive = [node for node in nodes() if node["Alive"] and node["NodeID"] not in self._refused]
        number = slots(self.wanted, [node["Resources"] for node in alive])
        number = min(number, self.limit) if self.limit else number
        for _ in range(number - len(self.hands)):
            actor = _remote(self.wanted).remote()
            mine = {key: facts()[key] for key in SAME}
            self.hands.append(Hand(actor, actor.join.remote(mine, SAME, [self.data])))
        return number

    def assemble(self, number: int, seconds: float, check: Callable[[], None], strict: bool = True) -> None:
        """Wait until `number` actors are ready; when the time is over, those that are there will do."""
        deadline = time.monotonic() + seconds
        while len(self.ready) < number and time.monotonic() < deadline:
            check()
            coming = [hand for hand in self.hands if hand.joining is not None]
            if not coming:
                return
            ray.wait([hand.joining for hand in coming], num_returns=1, timeout=0.1)
            self.welcome(strict)

    def welcome(self, strict: bool = False) -> None:
        """Take in the actors that have answered; one on a machine with other versions is refused."""
        coming = [hand for hand in self.hands if hand.joining is not None]
        if not coming:
            return
        there, _ = ray.wait([hand.joining for hand in coming], num_returns=len(coming), timeout=0)
        for hand in [hand for hand in coming if hand.joining in there]:
            try:
                hand.about = ray.get(cast(Ref, hand.joining))
            except LOST:
                self.forget(hand)
                continue
            hand.joining = None
            if words := _problem(hand):
                if strict:
                    raise UserError(words)
                self._refused.add(hand.about["node"])
                self.dismiss(hand)
                self.note(f"{words}; it is not used")
                continue
            self._look_at_processor(hand)

    def _look_at_processor(self, hand: Hand) -> None:
        cpu = hand.about["cpu"]
        if cpu not in self._cpus:
            self._cpus.add(cpu)
            self.note(
                f"machines have different processors ({', '.join(sorted(self._cpus))}): the last bits of results may "
                f"depend on which of them computes a client"
            )

    def free(self) -> Hand | None:
        """The actor with the fewest jobs, if it can take one more."""
        chosen = min(self.ready, key=lambda hand: hand.jobs, default=None)
        return chosen if chosen is not None and chosen.jobs < DEPTH else None

    def forget(self, hand: Hand) -> None:
        """It is lost: Ray knows that, or will end it when nobody knows it any more."""
        if hand in self.hands:
            self.hands.remove(hand)

    def dismiss(self, hand: Hand) -> None:
        self.forget(hand)
        ray.kill(hand.actor)

    def leave(self) -> None:
        for hand in list(self.hands):
            self.dismiss(hand)


def _remote(wanted: Mapping[str, float]) -> Any:
    others = {name: amount for name, amount in wanted.items() if name not in ("CPU", "GPU")}
    return ray.remote(_far_side()).options(
        num_cpus=wanted.get("CPU", 0),
        num_gpus=wanted.get("GPU", 0),
        resources=others,
        max_restarts=0,
        scheduling_strategy="SPREAD",
    )


def _problem(hand: Hand) -> str | None:
    """Why a machine cannot be used, in a sentence."""
    about, mine = hand.about, facts()
    if words := about.get("problem"):
        return f"the machine {hand.place} cannot compute clients: {words}; install there what is installed here"
    for key in SAME:
        if about[key] != mine[key]:
            if key == "source":
                return f"the machine {hand.place} has another source of fednh {mine['fednh']}; install this machine's"
            return f"the machine {hand.place} has {key} {about[key]}, this one {mine[key]}; install the same versions"
    return None


# --- cluster --------------------------------------------------------------------------------------------------------


JOB_SECONDS = 0.1  # a job of small clients takes about so long: a hundred times what Ray needs to pass it on
JOB_BYTES = 16 << 20  # of the models in a packed job
LIVES = 4  # a job that is lost so often is not given out again
START = 180.0  # seconds in which a cluster must find room for one client and start its actor
GATHER = 15.0  # seconds for the others to come: those that others use will come later
TURN = 0.1  # seconds between two looks at whether the run should stop


def make_run(
    config: Config,
    federation: Federation,
    folder: RunFolder,
    callback: Callback,
    stop: threading.Event | None = None,
    address: str | None = None,
) -> RoundLoop:
    """A run on the Ray cluster at `address`, or on one that is started here; ready to `run`."""
    stop = stop or threading.Event()
    return RoundLoop(config, folder, Cluster(config, federation, folder, callback, stop, address), callback, stop)


@dataclass(eq=False)
class Job:
    """Some neighbouring units, computed by one actor."""

    units: Sequence[ClientBatch]
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
        callback: Callback,
        stop: threading.Event,
        address: str | None = None,
    ):
        super().__init__(config, federation, folder, callback, stop)
        self.address, self.needs = address, needs(config.ray, config.device)
        self._paces: dict[type[ClientTask], Pace] = {}
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
        packed = PackedMaterial.of(self.data, gather(), device, cloudpickle.dumps)
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

    def map(self, stage: ClientTask, units: Sequence[ClientBatch]) -> Iterator[list[Any]]:
        """The results in the order of `units`; at most two jobs an actor are at work or waiting to be read."""
        flight = Flight(self, stage, units)
        for job in flight.jobs():
            assert job.done is not None
            for unit, packed in zip(job.units, job.done.results, strict=True):
                self.meter(sum(stage.samples(self.data, client) for client in unit))
                yield packed.results(self.config.device, stage.apart)

    def send(self, stage: ClientTask) -> Ref:
        self._exchanges += 1
        return ray.put(PackedStage.of(self._exchanges, stage))

    def pace(self, stage: ClientTask) -> Pace:
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
    stage: ClientTask
    units: Sequence[ClientBatch]
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
