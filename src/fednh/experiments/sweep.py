"""A sweep: the product of lists of settings, each combination an ordinary run folder, run in a process of its own.

Nothing about a sweep is remembered but its run folders. So the same command skips what is finished, goes on with what
was interrupted, and tries again what failed.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Protocol

from fednh.config import Config, build_method, dump, load, parse_value
from fednh.data.dataset import Dataset
from fednh.data.partitions import kinds
from fednh.errors import UserError, did_you_mean
from fednh.experiments.run_processes import RunProcesses
from fednh.federated.setup import build_federation, load_data
from fednh.io.files import exclusive, write_bytes
from fednh.machine import cores
from fednh.methods.registry import hyper_parameters
from fednh.runs.layout import SweepLayout, run_name, unlike
from fednh.runs.run_folder import RunFolder

_IN_NAME = (  # a run's name has these anyway
    *("method.name", "data.name", "partition.name", "partition.beta", "partition.imbalance", "seed"),
)
Axes = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class Planned:
    """One combination."""

    name: str
    config: Config
    folder: RunFolder


@dataclass
class SweepOutcome:
    """The outcome of a sweep."""

    finished: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)  # they were finished before
    failed: dict[str, str] = field(default_factory=dict)  # name -> why
    warnings: dict[str, list[Path]] = field(default_factory=dict)  # what finished runs said -> the logs that have it
    interrupted: bool = False


class SweepWatcher(Protocol):
    """Receives the progress of a sweep."""

    def started(self, run: Planned) -> None: ...
    def ended(self, run: Planned, seconds: float, problem: str | None) -> None: ...
    def interrupted(self, run: Planned) -> None: ...
    def update(self, active: Sequence[Planned]) -> None: ...


class Unwatched:
    """Tells nobody."""

    def started(self, run: Planned) -> None:
        pass

    def ended(self, run: Planned, seconds: float, problem: str | None) -> None:
        pass

    def interrupted(self, run: Planned) -> None:
        pass

    def update(self, active: Sequence[Planned]) -> None:
        pass


# --- the plan --------------------------------------------------------------------------------------------------------


def values(text: str) -> list[Any]:
    """A comma-separated list of TOML values: `0.1,0.3`, `a,b`, `[16,8],[32]`. Commas in brackets and quotes stay."""
    parts, depth, quote = [""], 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in "[{":
            depth += 1
        elif char in "]}":
            depth -= 1
        if char == "," and not quote and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    if any(not part.strip() for part in parts):
        raise UserError(f"{text!r} has an empty value; write a list as a,b,c")
    return [parse_value(part.strip()) for part in parts]


def combine(source: str | None, axes: Axes, named: Collection[str], out: Path) -> list[Planned]:
    """Every combination, validated, in a stable order, each once; its name has the settings in `named` that vary.

    A hyper-parameter is given to the methods that have it, and a setting of a partition to the partitions that use it;
    one that nobody has is an error. A run folder whose name has all of them, as it used to, keeps its name.
    """
    base = load(source, {key: axes[key][0] for key in ("data.name", "method.name", "partition.name") if key in axes})
    methods = axes.get("method.name", [base.method["name"]])
    partitions = axes.get("partition.name", [base.partition.name])
    for method in methods:
        build_method({"name": method})
    _check_used(axes, methods, partitions)
    combinations: dict[str, tuple[Config, str]] = {}
    for method, partition in product(methods, partitions):
        mine = {key: options for key, options in axes.items() if _uses(key, method, partition)}
        mine |= {"method.name": [method], "partition.name": [partition]}
        order = sorted(mine, key=lambda key: key != "method.name")  # another method drops the settings of the first
        for chosen in product(*(mine[key] for key in order)):
            settings = dict(zip(order, chosen, strict=True))
            config = load(source, settings)
            shown = {key: settings[key] for key in named if key in settings and key not in _IN_NAME}
            if not (out / run_name(config, shown)).exists():
                shown = {key: value for key, value in shown.items() if len(axes[key]) > 1}
            combinations.setdefault(dump(config), (config, run_name(config, shown)))
    names = unlike([name for _, name in combinations.values()], list(combinations))
    return [Planned(name, c, RunFolder(out / name)) for name, (c, _) in zip(names, combinations.values(), strict=True)]


def check(plan: Sequence[Planned]) -> None:
    """Find what would stop a run before the first one starts: its folder, data, partition, model or device."""
    for run in plan:
        if run.folder.path.parent.is_file():
            raise UserError(f"{run.folder.path.parent} is a file, not a folder; choose another folder")
        run.folder.check(run.config)
    pending = [run.config for run in plan if not run.folder.finished]
    loaded: dict[str, Dataset] = {}
    seen = set()
    for config in pending:
        data = config.data.model_copy(update={"fold": 0, "limit": None}).model_dump_json()
        loaded = loaded if data in loaded else {data: load_data(config)}  # one data set in memory at a time
        what = (
            data,
            config.data.fold,
            config.data.limit,
            config.device,
            config.seed,
            config.partition.model_dump_json(),
            config.model.model_dump_json(),
        )
        if what not in seen:
            build_federation(config, loaded[data])
            seen.add(what)


def _check_used(axes: Axes, methods: Sequence[str], partitions: Sequence[str]) -> None:
    for key in axes:
        if not any(_uses(key, method, partition) for method, partition in product(methods, partitions)):
            if key.startswith("method."):
                known = {f"method.{name}" for method in methods for name in hyper_parameters(method)}
                takes = did_you_mean(key, known) if known else ""
                raise UserError(f"{key} is a hyper-parameter of none of {', '.join(methods)}{takes}")
            raise UserError(f"{key} is used by none of these partitions: {', '.join(partitions)}")


def _uses(key: str, method: str, partition: str) -> bool:
    section, _, name = key.partition(".")
    if section == "method" and name != "name":
        return name in hyper_parameters(method)
    return section != "partition" or kinds.uses(partition, name)


# --- the work --------------------------------------------------------------------------------------------------------


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Hold a sweep's folder: two sweeps in it would start the same runs twice. The lock of a dead process is none."""
    sweep, made = SweepLayout(out), not out.exists()
    if out.is_file():
        raise UserError(f"{out} is a file, not a folder; choose another folder")
    try:
        with exclusive(out, sweep.lock_file):
            yield
    finally:
        with suppress(OSError):  # nothing was begun: leave nothing behind
            sweep.notes.rmdir()
            if made:
                out.rmdir()


@dataclass
class _Child:
    run: Planned
    number: int  # of its process
    log: Path
    began: float


@dataclass(frozen=True)
class Place:
    """Where the clients of all runs are computed: on this machine, or on one Ray cluster that they share."""

    slots: int | None = None  # clients that the cluster computes at once
    options: tuple[str, ...] = ()  # for `fednh run`
    environment: Mapping[str, str] = field(default_factory=dict)


@contextmanager
def place_of(backend: str, address: str | None, plan: Sequence[Planned]) -> Iterator[Place]:
    """The place of a sweep; a cluster that is started here ends with the sweep."""
    if backend != "ray":
        yield Place()
        return
    from fednh.backends.ray import LOCAL_ENV, cluster_address, connected, local_cpus, room

    cpus = max(local_cpus(run.config) for run in plan)
    with ExitStack() as stack:
        head, joined = stack.enter_context(connected(address, cpus)), cluster_address(address) is not None
        free, options = min(room(run.config) for run in plan), ("--backend", "ray", "--address", head)
        if joined:
            stack.close()  # it lives without us
        yield Place(free, options, {} if joined else LOCAL_ENV)


def share(jobs: int | None, workers: int | None, pending: int, slots: int | None) -> tuple[int, int]:
    """How many runs at once, and how many workers in each.

    On this machine: no more in all than there are cores, unless asked for. On a cluster: never more than its `slots`,
    since a run that finds no room gives up; and by default no more runs than this machine, which adds up their rounds,
    has cores.
    """
    if slots is None:
        jobs = max(1, min(jobs or 1, pending))
        return jobs, workers or max(1, cores() // jobs)
    jobs = max(1, min(jobs or cores(), pending, slots // min(workers or 1, slots)))
    return jobs, min(workers or slots, slots // jobs)


def execute(
    plan: Sequence[Planned],
    jobs: int,
    workers: int,
    track: Sequence[str],
    screen: SweepWatcher,
    stop: threading.Event,
    place: Place = Place(),  # noqa: B008
) -> SweepOutcome:
    """Run what is not finished, at most `jobs` at once, each with `workers`; a crash of one does not touch the others.

    When `stop` is set, the runs at work save what they have and end.
    """
    outcome = SweepOutcome(skipped=[run.name for run in plan if run.folder.finished])
    waiting = [run for run in plan if not run.folder.finished]
    active: list[_Child] = []
    processes, stopping = RunProcesses(), False
    try:
        while active or (waiting and not stop.is_set()):
            while waiting and len(active) < jobs and not stop.is_set():
                run = waiting.pop(0)
                screen.started(run)
                active.append(_start(processes, run, workers, track, place))
            if stop.is_set() and not stopping:
                stopping = True
                for child in active:
                    processes.terminate(child.number)
            stop.wait(0.1) if not stopping else time.sleep(0.1)
            screen.update([child.run for child in active])
            for child in list(active):
                if (code := processes.poll(child.number)) is None:
                    continue
                active.remove(child)
                problem = None if code == 0 else _problem(code, child.log)
                if code == 0:
                    outcome.finished.append(child.run.name)
                    said = set(_lines(child.log)) - {str(child.run.folder.path)}
                    for line in said:
                        outcome.warnings.setdefault(line.removeprefix("fednh: "), []).append(child.log)
                    if not said:
                        child.log.unlink(missing_ok=True)
                elif stopping and code in (130, -signal.SIGTERM):
                    screen.interrupted(child.run)
                    continue
                else:
                    outcome.failed[child.run.name] = str(problem)
                screen.ended(child.run, time.perf_counter() - child.began, problem)
    finally:  # after an exception, such as KeyboardInterrupt in a notebook, the runs at work save what they have
        processes.close()
    outcome.interrupted = stop.is_set() and len(outcome.finished) + len(outcome.skipped) < len(plan)
    return outcome


def _start(processes: RunProcesses, run: Planned, workers: int, track: Sequence[str], place: Place) -> _Child:
    """`fednh run` on the run's config."""
    sweep = SweepLayout(run.folder.path.parent)
    config, log = sweep.config_file(run.name), sweep.log_file(run.name)
    write_bytes(config, dump(run.config.model_copy(update={"workers": workers})).encode())
    words = ["run", str(config), "--out", str(run.folder.path), "--quiet", *place.options]
    words += [word for name in track for word in ("--track", name)]
    return _Child(run, processes.start(words, log, place.environment), log, time.perf_counter())


def _problem(code: int, log: Path) -> str:
    """Why a run failed: the last line that it wrote, or the signal that ended it."""
    if code < 0:
        name = signal.Signals(-code).name
        return f"ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    lines = _lines(log)
    return lines[-1].removeprefix("fednh: ") if lines else f"exit code {code}"


def _lines(log: Path) -> list[str]:
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:  # somebody tidied up
        return []
    return [line for line in text.splitlines() if line.strip()]
