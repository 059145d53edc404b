"""How far every run below a folder is, read from run folders alone while others work in them.

A run is finished (it has a summary), running (its lock names a process that lives), failed (failure.json says why) or
stopped (anything else: it was interrupted or killed, and can go on).
"""

from __future__ import annotations

import json
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from fednh.errors import UserError
from fednh.io.files import at_work, holder
from fednh.runs.layout import RunLayout, SweepLayout
from fednh.text import one_line

STATES = ("running", "stopped", "failed", "finished")
Record = dict[str, Any]
T = TypeVar("T")
_DEEPEST = 4  # folders between the one that is watched and a run


@dataclass(frozen=True)
class RunState:
    """The state of a run folder at one moment."""

    path: Path
    state: str  # one of STATES
    rounds: int | None = None  # that the run will have; None while its config is not written
    records: list[Record] = field(default_factory=list)  # the lines of metrics.jsonl
    seconds_left: float | None = None  # of a running one, at the pace so far
    seconds_since: float | None = None  # since its last round
    seconds_taken: float | None = None  # of a finished one
    note: str = ""  # why it failed, or another remark

    @property
    def round(self) -> int:
        return int(self.records[-1]["round"]) if self.records else 0

    def latest(self, metric: str) -> float | None:
        """The newest value of a metric, of whichever round."""
        return next((r[metric] for r in reversed(self.records) if r.get(metric) is not None), None)


class RunStates:
    """The runs in and below some folders; files that have not changed since the last look are not read again."""

    def __init__(self, folders: Sequence[Path]):
        for folder in folders:
            if not folder.is_dir():
                raise UserError(f"{folder} is not a folder; give the folder of a run, a sweep or a federation")
        self.folders = folders
        self._read: dict[Path, tuple[tuple[int, int], Any]] = {}

    def look(self) -> list[RunState]:
        """All of them, in a stable order."""
        states = [state for folder in self.folders for state in self._below(folder, _DEEPEST)]
        return list({state.path.absolute(): state for state in states}.values())

    def name(self, path: Path) -> str:
        """The run's path below the folder that is watched, in characters that a terminal can show."""
        inside = [folder for folder in self.folders if path.is_relative_to(folder) and path != folder]
        return one_line(str(path.relative_to(inside[0])) if len(self.folders) == 1 and inside else str(path))

    def _below(self, folder: Path, depth: int) -> Iterator[RunState]:
        if _is_run(folder):
            yield self._state(RunLayout(folder))
            return
        yield from _without_folder(folder)
        try:
            inside = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
        except OSError:  # removed at this moment, or not ours to read
            return
        for path in inside if depth else []:
            yield from self._below(path, depth - 1)

    def _state(self, run: RunLayout) -> RunState:
        records, now = self._fresh(run.metrics_file, _records) or [], time.time()
        facts: dict[str, Any] = {"rounds": self._fresh(run.config_file, _rounds), "records": records}
        changed = max((moment for moment in map(_changed, (run.metrics_file, run.config_file)) if moment), default=None)
        if changed is not None:
            facts["seconds_since"] = max(now - changed, 0.0)
        failure = _json(run.failure_file).get("error")
        if run.finished:
            taken = self._fresh(run.summary_file, _seconds)
            return RunState(run.path, "finished", **facts, seconds_taken=taken, note=one_line(failure or ""))
        if at_work(run.lock_file):
            note = "" if run.started else "it has not begun its first round"
            left = _left(facts["rounds"], records, facts.get("seconds_since", 0.0))
            return RunState(run.path, "running", **facts, seconds_left=left, note=note)
        if failure:
            return RunState(run.path, "failed", **facts, note=one_line(failure))
        return RunState(run.path, "stopped", **facts, note="it was killed" if holder(run.lock_file) else "")

    def _fresh(self, file: Path, read: Callable[[Path], T]) -> T | None:
        """What `read` makes of a file, as of its last change; None where there is none."""
        try:
            about = file.stat()
            mark = (about.st_mtime_ns, about.st_size)
            if file not in self._read or self._read[file][0] != mark:
                self._read[file] = mark, read(file)
        except OSError:
            return None
        value: T = self._read[file][1]
        return value


def _is_run(folder: Path) -> bool:
    run = RunLayout(folder)
    begun = run.started and run.environment_file.exists()  # other programs have a config.toml, too
    return begun or holder(run.lock_file) != "" or run.failure_file.exists()


def _without_folder(folder: Path) -> Iterator[RunState]:
    """Runs that a sweep has started but that have no run folder: about to begin, or failed before they did."""
    sweep = SweepLayout(folder)
    for name in sweep.started():
        path = folder / name
        if not _is_run(path):
            said = ""
            with suppress(OSError):
                said = sweep.log_file(name).read_text(encoding="utf-8", errors="replace").strip()
            why = one_line(said.splitlines()[-1].removeprefix("fednh: ")) if said else "it has not begun"
            state = "failed" if said else ("running" if at_work(sweep.lock_file) else "stopped")
            yield RunState(path, state, note=why)


def _left(rounds: int | None, records: Sequence[Record], since: float) -> float | None:
    """Seconds to the end if the rounds to come take as long as those so far; the current one is under way."""
    if not records or rounds is None:
        return None
    mean = sum(float(r.get("seconds") or 0) + float(r.get("eval_seconds") or 0) for r in records) / len(records)
    return max(mean * (rounds - int(records[-1]["round"])) - min(since, mean), 0.0)


def _rounds(config: Path) -> int | None:
    with suppress(ValueError, KeyError, TypeError):
        return int(tomllib.loads(config.read_text(encoding="utf-8"))["rounds"])
    return None


def _seconds(summary: Path) -> float | None:
    return _json(summary).get("seconds")


def _records(metrics: Path) -> list[Record]:
    return [line for line in map(_record, metrics.read_bytes().splitlines()) if line]


def _record(line: bytes) -> Record | None:
    """A line of metrics.jsonl; None for one that is being written at this moment."""
    with suppress(ValueError, TypeError):
        record = json.loads(line)
        return record if isinstance(record, dict) and isinstance(record.get("round"), int) else None
    return None


def _json(file: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        value = json.loads(file.read_text(encoding="utf-8"))
        return value if isinstance(value, dict) else {}
    return {}


def _changed(file: Path) -> float | None:
    with suppress(OSError):
        return file.stat().st_mtime
    return None
