"""The executor of many machines: clients as tasks of Ray, with the bits of one machine's thread pool.

The driver, this process, holds the run folder, the samples and the store of what clients keep. Ray brings this package
to the machines. Samples go into Ray's object store once, what clients receive once an exchange, and what a client kept
travels with its job and comes back with the result. Small clients are packed: a job is as many batches as take about
`JOB_SECONDS`. Results are read in the order of the clients, and uploads are added up in a tree that follows from this
order alone, so that sums have the same bits for any number of machines: by the driver where single uploads are needed,
else on the machines (`ClusterSums`), and the driver receives their sum. Ray computes a job again if its worker or its
machine is lost.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import accumulate
from math import ceil
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NamedTuple

import ray
from ray import exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import fednh
from fednh.backends.ray_worker import JobResult, Sums, combine, compute, pack, pack_data, unpack
from fednh.backends.tasks import ClientBatch, ClientTask
from fednh.backends.threads import Simulation
from fednh.config import Config
from fednh.config.schema import RayConfig
from fednh.errors import ConfigError, Interrupted, RunError, UserError
from fednh.runs.run_folder import cpu, worker_count
from fednh.text import one_line, plural
from fednh.tree import FAN, RemoteTree, Tree, size

MAX_ATTEMPTS = 4  # of a job whose worker is lost
JOB_SECONDS = 0.1  # a job of small clients takes about so long: a hundred times what Ray needs to pass it on
JOB_BYTES = 16 << 20  # of the models in a packed job
AHEAD = 2  # jobs a slot: one at work, one waiting
UNREAD = 4  # jobs a slot, with those that ended before their turn
MANY_PARTS = 4  # of a sum in the tree: fewer are left to the next level
INLINE_BYTES = 100 << 10  # of what clients kept: more is put into the object store ...
HELD_BYTES = 256 << 20  # ... and as much stays there until the round's uploads are added up
START_SECONDS = 180.0  # for a cluster to find room for one client and start its worker
GATHER_SECONDS = 15.0  # for the other machines to answer; those that others use will come later
SHUTDOWN_SECONDS = 20.0  # a lost cluster may not answer
POLL_INTERVAL = 0.1  # seconds between two looks at whether the run should stop
LOST = tuple(getattr(exceptions, f"{what}Error") for what in ("WorkerCrashed", "NodeDied", "OutOfMemory", "ObjectLost"))

# --- connection -----------------------------------------------------------------------------------------------------

RAY_ENV = {
    "RAY_USAGE_STATS_ENABLED": "0",  # a run tells nobody about itself
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # silences a warning about the future
    "RAY_task_oom_retries": str(MAX_ATTEMPTS - 1),  # Ray would try for ever
    "RAY_gcs_rpc_server_reconnect_timeout_s": "20",  # then Ray ends this process; see `message_if_killed`
}
LOCAL_ENV = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # "no cluster of several machines": listen on 127.0.0.1 alone
# Ray starts workers by a shell that splits Python's path at a space; machines must then have Python at the same path.
PYTHON = {"py_executable": shlex.quote(sys.executable)} if " " in sys.executable else {}
CODE = {"py_modules": [fednh], **PYTHON}  # machines compute with this source, whatever they have themselves
INIT_OPTIONS: Any = {"logging_level": logging.CRITICAL, "log_to_driver": False, "runtime_env": CODE}


def check_address(address: str | None) -> None:
    """Refuse at once what cannot work."""
    if address and "://" in address:
        raise UserError(
            f"address = {address} is for Ray's client; run fednh on a machine of the cluster and give HOST:PORT"
        )


def cluster_address(address: str | None) -> str | None:
    """The cluster to join: as asked for, else as RAY_ADDRESS says; None: start Ray on this machine."""
    given = os.environ.get("RAY_ADDRESS") or None
    return given if address in (None, "auto") and given else address


def local_cpus(config: Config) -> int:
    """How many CPUs Ray has, where a run starts it on this machine."""
    return ceil(worker_count(config) * (config.ray.cpus_per_client or 1))


@contextlib.contextmanager
def connected(address: str | None, cpus: int) -> Iterator[str]:
    """Ray while a run lasts, and its address: the cluster at `address`, or one of this machine with so many CPUs."""
    check_address(address)
    address = cluster_address(address)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with environment(RAY_ENV | (LOCAL_ENV if address is None else {})):
        _silence()
        try:
            if address is None:
                ray.init("local", num_cpus=cpus, include_dashboard=False, **INIT_OPTIONS)
            else:
                _check_reachable(address)
                ray.init(address, **INIT_OPTIONS)
        except (ConnectionError, ValueError, RuntimeError, OSError) as error:
            ray.shutdown()
            raise UserError(_refusal(address, error)) from error
        finally:
            if threading.current_thread() is threading.main_thread():
                for number, handler in handlers.items():  # Ray's own would end the run without saving
                    signal.signal(number, handler)
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        leaving = threading.Thread(target=ray.shutdown, daemon=True)
        leaving.start()
        leaving.join(SHUTDOWN_SECONDS)


def _check_reachable(address: str) -> None:
    """Refuse at once; Ray would try for a minute."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), 5.0).close()
        except OSError:
            raise ConnectionError("nothing answers there") from None


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
def environment(settings: dict[str, str]) -> Iterator[None]:
    """Ray is configured by the environment; what the user has set holds."""
    added = {key: value for key, value in settings.items() if key not in os.environ}
    os.environ |= added
    try:
        yield
    finally:
        for key in added:
            os.environ.pop(key, None)


def _silence() -> None:
    """Ray prints what it learns about lost machines on standard output, which is the run's: the run says it itself."""
    from ray._private import worker

    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda *_, **__: None
    logging.getLogger("ray").setLevel(logging.CRITICAL)


@contextlib.contextmanager
def message_if_killed(sentence: str) -> Iterator[None]:
    """Print `sentence` if this process ends inside the block: Ray ends it when this machine's part of it is lost.

    A tiny process waits at the other end of a pipe, in a session of its own: Ctrl-C is not for it.
    """
    wait = "import sys; sys.stdin.buffer.read() or print(sys.argv[1], file=sys.stderr)"
    command = [sys.executable, "-I", "-S", "-c", wait, sentence]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        yield
    finally:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            process.communicate(b"over", timeout=5)


# --- machines -------------------------------------------------------------------------------------------------------
# A slot is what one client reserves (`[ray]` in the config).


def needs(settings: RayConfig, device: str) -> dict[str, float]:
    """What one client reserves, by Ray's names."""
    if "," in device:
        raise ConfigError(
            f"device = {device!r} divides clients between devices of one machine, and Ray does that itself: use "
            f"device = {device.partition(':')[0]!r} with ray.gpus_per_client"
        )
    gpus = settings.gpus_per_client
    if gpus is None:
        gpus = 0.0 if device == "cpu" else 1.0
    wanted = {"CPU": settings.cpus_per_client, "GPU": gpus, **settings.resources}
    return {name: float(amount) for name, amount in wanted.items() if amount}


def slots(wanted: Mapping[str, float], machines: Sequence[Mapping[str, float]]) -> int:
    """How many clients fit on these machines at once; a client does not span two of them."""
    return sum(min(int(has.get(name, 0.0) / amount + 1e-9) for name, amount in wanted.items()) for has in machines)


def alive() -> dict[str, Mapping[str, float]]:
    """The resources of the machines of the cluster, by their node."""
    return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]


def room(config: Config) -> int:
    """How many clients of a run fit on the cluster at once."""
    wanted = needs(config.ray, config.device)
    number = slots(wanted, list(alive().values()))
    if not number:
        raise UserError(f"no machine of the Ray cluster has room for a client, which needs {in_words(wanted)}")
    return number


def in_words(wanted: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in wanted.items())


# --- code -----------------------------------------------------------------------------------------------------------


def own_modules() -> list[ModuleType]:
    """The loaded modules of a file outside of Python's own folders and of this package: other machines lack them."""
    folders = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    modules = []
    for name, module in list(sys.modules.items()):
        file = Path(str(getattr(getattr(module, "__spec__", None), "origin", None)))
        other = name.partition(".")[0] in ("fednh", "__main__") or name != getattr(module, "__name__", None)
        if other or file.suffix != ".py" or not file.is_file():
            continue
        installed = {"site-packages", "dist-packages"} & set(file.parts)
        if not installed and not any(file.resolve().is_relative_to(folder) for folder in folders):
            modules.append(module)
    return modules


def pickled_by_value(value: Any) -> bytes:
    """The pickled value, with the classes and functions of the user's own modules that it needs."""
    cloudpickle: Any = ray.cloudpickle
    modules = own_modules()
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:  # whatever a class of the user's raises
        raise UserError(f"the method or the model cannot be sent to other machines: {one_line(str(error))}") from error
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


# --- executor -------------------------------------------------------------------------------------------------------


def job_size(seconds: float | None, left: int, slots: int, most: int) -> int:
    """How many of the batches that are left make a job, where one takes so many seconds.

    For `JOB_SECONDS`, but fewer towards the end, so that all workers end together.
    """
    return max(1, min(int(JOB_SECONDS / seconds), ceil(left / (AHEAD * slots)), most)) if seconds else 1


def whole_groups(batches: Sequence[ClientBatch], place: int) -> Sequence[ClientBatch]:
    """The batches of a job that begins at this place: as many as end with a group of the tree of sums, or all."""
    ends = list(accumulate(map(len, batches), initial=place))[1:]
    aligned = [number for number, end in enumerate(ends, 1) if end % FAN == 0]
    return batches[: aligned[-1]] if aligned else batches


class Job(NamedTuple):
    """Some neighbouring batches, computed by one task of Ray."""

    batches: Sequence[ClientBatch]
    ref: Any
    sums: Any  # a reference to the sums of its uploads
    start: int  # its places in the round's order
    stop: int
    held: tuple[Any, ...]  # what it was given: Ray computes it again by itself as long as that is there
    again: Callable[[], Iterator[list[Any]]]  # computes all jobs of the exchange again


class Schedule:
    """Which node gets the next job of a round, where all slots are ours; else Ray decides."""

    def __init__(self, slots: Mapping[str, int], workers: int):
        self.slots = {node: number for node, number in slots.items() if number}
        free = sum(self.slots.values()) or 1
        self.limit = min(workers or free, free)  # jobs at work at once
        self.ours = bool(self.slots) and self.limit == free
        self.jobs: dict[Any, str | None] = {}  # that have not ended -> their node
        self.groups: dict[str, int] = {}  # node -> the group of sums of its last job

    @property
    def room(self) -> bool:
        """Whether another job may be given: a slot has one at work and, if it is ours, one waiting."""
        return len(self.jobs) < (AHEAD * self.limit if self.ours else self.limit)

    def choose(self, group: int) -> str | None:
        """The node where the job waits least; of those with a free slot one that has others of the group."""
        if not self.ours:
            return None
        loads = Counter(self.jobs.values())

        def wait(node: str) -> tuple[float, bool, float]:
            load, number = loads[node], self.slots[node]
            return max(0, load + 1 - number) / number, self.groups.get(node) != group, load / number

        best = min(self.slots, key=wait)
        self.groups[best] = group
        return best


class Uploaded(RemoteTree):
    """An upload that is in the sums of a job, on the job's node."""

    def __init__(self, form: Tree, cluster: RayCluster, job: Job, done: JobResult):
        super().__init__(form)
        self.cluster, self.job, self.done = cluster, job, done

    def sums(self) -> ClusterSums:
        return ClusterSums(self.cluster)


class SumPart(NamedTuple):
    """A sum, or a job's sums, of neighbours in the round's order."""

    start: int
    stop: int
    ref: Any
    attempt: int  # of the job, when its result was read
    held: tuple[Any, ...]


class ClusterSums:
    """The sums of a round's uploads, made where these are: Ray runs `combine` where most of its parts lie.

    A group of the tree is combined as soon as all of it is there, if it has `MANY_PARTS`; the rest in the end. Parts
    that are lost with their node are computed again: by Ray, or with all others where it does not have what they need.
    """

    def __init__(self, cluster: RayCluster, attempt: int = 1):
        self.cluster, self.attempt, self.places = cluster, attempt, list[int]()
        self.parts, self.last = list[SumPart](), list[tuple[Job, JobResult, list[int]]]()

    def add(self, tree: RemoteTree, number: int) -> None:
        assert isinstance(tree, Uploaded)
        if not self.last or self.last[0][0] is not tree.job:
            self._enlist()
            self._combine_before(tree.job.start)
            self.last = [(tree.job, tree.done, [])]
        self.last[0][2].append(number)
        self.places.append(number)
        self.again = tree.job.again

    def total(self) -> Tree:
        self._enlist()
        try:
            return self.cluster.fetch_sum(self._combined(self.parts, 0, 0).ref)
        except exceptions.ObjectLostError as error:
            if self.attempt == MAX_ATTEMPTS:
                raise self.cluster.lost(one_line(str(error), 300)) from error
        return self._computed_again().total()

    def _computed_again(self) -> ClusterSums:
        self.cluster.note("a machine was lost with sums of this round; all its clients are computed again")
        sums, wanted, results = ClusterSums(self.cluster, self.attempt + 1), {*self.places}, self.again()
        self.parts = []
        for place, result in enumerate(result for some in results for result in some):
            self.cluster.computed_again += 1
            if place in wanted:
                sums.add(result.upload, place)
        return sums

    def _enlist(self) -> None:
        """All of the last job was added: check that its sums are of the uploads that the loop has accepted."""
        for job, done, places in self.last:
            if tuple(places) != done.places:
                raise RunError(f"invariant broken: a sum is of the places {done.places}, not {tuple(places)}")
            self.parts.append(SumPart(job.start, job.stop, job.sums, done.attempt, job.held))
        self.last = []

    def _combine_before(self, place: int) -> None:
        """Combine the groups that end before this place, or with it."""
        level, width = 0, FAN
        while width <= place:
            end = place // width * width
            inside = [part for part in self.parts if end - width < part.stop and part.start < end]
            apart = all(end - width <= part.start and part.stop <= end for part in inside)
            if apart and len(inside) >= MANY_PARTS:
                at = self.parts.index(inside[0])
                self.parts[at : at + len(inside)] = [self._combined(inside, end // width - 1, level)]
            level, width = level + 1, width * FAN

    def _combined(self, parts: Sequence[SumPart], group: int, level: int) -> SumPart:
        known = [part.attempt for part in parts]
        ref = self.cluster.combine(known, group, level, *(part.ref for part in parts))
        held = tuple({id(each): each for part in parts for each in part.held}.values())
        return SumPart(parts[0].start, parts[-1].stop, ref, 0, held)


class RayCluster(Simulation):
    """Clients as tasks of Ray, on the cluster at `address` or on one that is started here."""

    backend = "ray"

    def __init__(self, address: str | None, *common: Any):
        super().__init__(*common)
        self.address, self.needs = address, needs(self.config.ray, self.config.device)
        self.machines: set[str] = set()  # nodes that have computed clients
        self.computed_again = 0  # clients whose first computation was lost
        self.sent = self.received = 0  # bytes from and to this process; what clients received counts once a machine
        self._held = 0  # bytes of what clients kept, of the jobs of this exchange
        self._seconds: dict[type[ClientTask], float] = {}  # of a batch, the last time
        self._cpus = {cpu()}

    def __enter__(self) -> RayCluster:
        self._stack = ExitStack()
        self._stack.enter_context(connected(self.address, local_cpus(self.config)))
        why = f"Ray has ended this run, as it does when its head or this machine's part of it is lost; {self.next}"
        self._stack.enter_context(message_if_killed(f"fednh: {why}"))
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()

    def begin(self, initial: Tree) -> None:
        """Send the samples, and have every machine say whether it can compute clients."""
        super().begin(initial)
        room(self.config)
        self._data = ray.put(pack_data(self.data, pickled_by_value))
        same: Any = {
            "num_cpus": self.needs.get("CPU", 0),
            "resources": {name: amount for name, amount in self.needs.items() if name not in ("CPU", "GPU")},
            "max_retries": MAX_ATTEMPTS - 1,
            "max_calls": 0,  # a worker is used again
        }
        self._compute: Any = ray.remote(**same, num_gpus=self.needs.get("GPU", 0), num_returns=2)(compute)
        self._combine: Any = ray.remote(**same)(combine)
        nodes = [node for node, has in alive().items() if slots(self.needs, [has])]
        asked = []
        for node in nodes:
            there: Any = self._compute.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
            asked.append(there.remote(self.config.device.partition(":")[0], [self._data, None], [], [pack([])], 0)[0])
        if not self._wait(asked, 1, START_SECONDS):
            raise UserError(
                f"the Ray cluster started no worker for a client, which needs {in_words(self.needs)}, in "
                f"{START_SECONDS:g} s; `ray status` shows whether others use it all"
            )
        for ref in self._wait(asked, len(asked), GATHER_SECONDS):
            with contextlib.suppress(*LOST):  # it is lost already
                _result(ref)

    def finished(self, rounds: int) -> dict[str, Any]:
        return {"ray": {"machines": len(self.machines), "computed_again": self.computed_again}}

    def map(self, task: ClientTask, batches: Sequence[ClientBatch]) -> Iterator[list[Any]]:
        """The results in the order of `batches`; at most `AHEAD` jobs a slot are at work or waiting for one."""
        with self._lost_if_ray_fails():
            shared = ray.put(packed := pack(task))
            schedule = Schedule({node: slots(self.needs, [has]) for node, has in alive().items()}, self.config.workers)
            self.sent += packed.nbytes * len(schedule.slots)
            most = max(1, JOB_BYTES // max(1, size(task.down)))
            given, place, unread, self._held = 0, 0, deque[Job](), 0
            while given < len(batches) or unread:
                while given < len(batches) and len(unread) < UNREAD * schedule.limit and schedule.room:
                    number = job_size(self._seconds.get(type(task)), len(batches) - given, schedule.limit, most)
                    chosen = whole_groups(batches[given : given + number], place)
                    node = schedule.choose(place // FAN)
                    job = self._submit(chosen, shared, place, node, partial(self.map, task, batches))
                    unread.append(job)
                    schedule.jobs[job.ref] = node
                    given, place = given + len(chosen), job.stop
                if unread[0].ref in schedule.jobs:
                    self._wait_for_next(schedule)
                    continue
                job = unread.popleft()
                done = self._done(job)
                self.received += done.results.nbytes
                self._seconds[type(task)] = done.seconds / len(job.batches)
                for batch, results in zip(job.batches, unpack(done.results, self.config.device), strict=True):
                    self.meter(sum(task.samples(self.data, client) for client in batch))
                    yield [self._here(result, job, done) for result in results]

    @contextlib.contextmanager
    def _lost_if_ray_fails(self, but: type[Exception] | tuple[()] = ()) -> Iterator[None]:
        try:
            yield
        except but:
            raise
        except (exceptions.RayError, OSError) as error:  # its store or disk is full, or a part of it is gone
            if getattr(error, "errno", None):  # of this machine's own files: an error of Ray's has no number
                raise
            raise self.lost(one_line(str(error), 300)) from error

    def _submit(
        self,
        batches: Sequence[ClientBatch],
        task: Any,
        place: int,
        node: str | None,
        again: Callable[[], Iterator[list[Any]]],
    ) -> Job:
        kept = pack([self.kept(batch) for batch in batches])
        given = ray.put(kept) if kept.nbytes > INLINE_BYTES else kept
        self.sent += kept.nbytes
        strategy = "SPREAD" if node is None else NodeAffinitySchedulingStrategy(node, soft=True)
        remote = self._compute.options(scheduling_strategy=strategy, name="fednh_client").remote
        # In a list, references are not resolved by Ray: the worker keeps what it has read for its next job.
        refs = [self._data, task]
        ref, sums = remote(self.config.device.partition(":")[0], refs, batches, [given], place)
        self._held += kept.nbytes if given is not kept else 0
        held = (task, given) if self._held <= HELD_BYTES else (task,)
        return Job(batches, ref, sums, place, place + sum(map(len, batches)), held, again)

    def _here(self, result: Any, job: Job, done: JobResult) -> Any:
        """A client's result as the loop takes it: where its upload stayed away, with a tree that says where."""
        if not done.summed or result.upload is None:
            return result
        return replace(result, upload=Uploaded(result.upload, self, job, done))

    def combine(self, known: Sequence[int], group: int, level: int, *parts: Any) -> Any:
        """A reference to the sum of these parts."""
        return self._combine.options(name="fednh_sum").remote(known, group, level, *parts)

    def fetch_sum(self, ref: Any) -> Tree:
        """The sum behind the reference: all of a round's uploads that comes here. Raises if it is lost for good."""
        with self._lost_if_ray_fails(exceptions.ObjectLostError):
            while not self._wait([ref], 1, START_SECONDS):
                if not slots(self.needs, list(alive().values())):
                    raise self.lost(f"no machine has room for a sum, which needs {in_words(self.needs)}")
            sums: Sums = _result(ref)
        self._count_again(sums.again)
        self.received += sums.trees.nbytes
        ((total, _, _),) = unpack(sums.trees, self.config.device)
        found: Tree = total
        return found

    def _count_again(self, number: int) -> None:
        if number:
            self.computed_again += number
            self.note(f"a worker or its machine was lost; {plural(number, 'client')} computed again elsewhere")

    def _wait(self, refs: Sequence[Any], number: int, seconds: float) -> list[Any]:
        """Those that are ready when `number` are, or when the time is over; Interrupted when the run should stop."""
        deadline = time.monotonic() + seconds
        while True:
            if self.stop.is_set():
                raise Interrupted
            ready, _ = ray.wait(list(refs), num_returns=number, timeout=POLL_INTERVAL)
            if len(ready) >= number or time.monotonic() > deadline:
                return ready

    def _wait_for_next(self, schedule: Schedule) -> None:
        """Wait until a job ends; meanwhile Ray brings here what jobs return."""
        if ready := self._wait(list(schedule.jobs), 1, START_SECONDS):
            for ref in ready:
                del schedule.jobs[ref]
        elif not slots(self.needs, list(alive().values())):
            raise self.lost(f"no machine has room for a client, which needs {in_words(self.needs)}")

    def _done(self, job: Job) -> JobResult:
        """What a job that is ready returns; its machine is noted, and whether it was lost before."""
        try:
            done: JobResult = _result(job.ref)
        except LOST as error:
            raise RunError(
                f"client {job.batches[0][0]} was lost {MAX_ATTEMPTS} times with the process that computed it; is "
                f"memory short there? ({one_line(str(error), 300)})"
            ) from error
        self._count_again(sum(map(len, job.batches)) if done.attempt else 0)
        self.machines.add(done.node)
        if done.cpu not in self._cpus:
            self._cpus.add(done.cpu)
            self.note(
                f"machines have different processors ({', '.join(sorted(self._cpus))}): the last bits of results may "
                f"depend on which of them computes a client"
            )
        return done

    def lost(self, why: str) -> RunError:
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


def _result(ref: Any) -> Any:
    try:
        done = ray.get(ref)
    except exceptions.RayTaskError as error:
        if isinstance(error.cause, RunError | exceptions.ObjectLostError):
            raise error.cause from None
        why = str(error).strip().rpartition("\n")[2]  # it could not be imported there
        raise UserError(
            f"a machine of the Ray cluster cannot compute clients: {why}; install there what is installed here"
        ) from error
    return done
