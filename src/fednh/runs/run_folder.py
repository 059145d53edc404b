"""A run folder: everything that a run leaves behind, and all that tables and reports read. Its layout: layout.py.

`RunFolder` writes the config, the metrics of every round, the models and the summary; functions beside it read them.
The last section finds a client by its name. Natural sites and those of a real federation have names: a number always
means a client; text means the site that has exactly this name and otherwise, if it is a whole number, the client with
that number.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib import metadata
from operator import index
from pathlib import Path, PurePath
from types import TracebackType
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

import fednh
from fednh.config import Config, dump, validate
from fednh.data.sources.registry import SOURCES
from fednh.errors import Interrupted, RunError, UserError, nearest
from fednh.io.files import exclusive, sync_below, sync_path, write_bytes, write_json
from fednh.machine import cores
from fednh.methods import METHODS
from fednh.metric_names import PM_L, TEST_SET, std_of
from fednh.models import native
from fednh.runs import fingerprint
from fednh.runs.layout import RunLayout
from fednh.runs.model_file import Outcomes, write_model, write_outcomes
from fednh.text import one_line
from fednh.tree import Tree

# --- run folder -----------------------------------------------------------------------------------------------------


SIMULATED = ("simulator", "ray")  # backends whose clients are simulated; the bits are the same


class RunFolder(RunLayout):
    """One run's folder, locked while this process works in it."""

    def __init__(self, path: Path):
        super().__init__(path)
        self._made: list[Path] = []  # folders that locking it has made, the innermost first

    @contextmanager
    def opened(self, config: Config, backend: str = "simulator", extend: bool = False) -> Iterator[bool]:
        """Lock the folder for a run of `config`; yields whether anything is left to do.

        With `extend`, the run may have been planned with another number of rounds. What the folder holds is checked
        under the lock: two processes that start at the same time cannot both find it free. It is checked before, too:
        a folder that holds something else, or a finished run, is not even locked.
        """
        self.check(config, backend, extend)
        if self.ended(config):
            yield False
            return
        with self:
            self.check(config, backend, extend)
            yield not self.ended(config)

    def ended(self, config: Config) -> bool:
        """Whether the run is finished, and was planned with as many rounds as now."""
        return self.finished and read_config(self.path).rounds == config.rounds

    def check(self, config: Config, backend: str | None = None, extend: bool = False) -> None:
        """Refuse a folder that holds another run, one whose settings were edited, or something else."""
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"{self.path} is a file, not a folder; choose another folder")
        if self.started:
            other = read_config(self.path)
            old, new = fingerprint.of_settings(other), fingerprint.of_settings(config)
            words = "{key} is {was} there and {now} here"
            free = {"workers", "rounds", "ray"}
            if changes := fingerprint.settings_changed(old, new, words, free - (set() if extend else {"rounds"})):
                only_rounds = not fingerprint.settings_changed(old, new, words, free)
                longer = f"go on with it: fednh resume {self.path} --rounds {config.rounds}, or " if only_rounds else ""
                raise UserError(
                    f"{self.path} holds a run with other settings ({changes}); {longer}choose another folder, or "
                    f"delete it"
                )
            fingerprint.check_settings(self.path, other)
            if backend is not None:
                self._check_backend(backend)
        elif self.path.exists() and any(not _of_a_beginning(p) for p in self.path.iterdir()):
            raise UserError(f"{self.path} is not empty and holds no run; choose another folder")

    def _check_backend(self, backend: str) -> None:
        """A simulated run goes on wherever clients are simulated; what real sites keep is with them."""
        if (was_simulated := read_backend(self.path) in SIMULATED) and backend not in SIMULATED:
            raise UserError(f"{self.path} holds a simulated run; choose another federation.folder")
        if backend in SIMULATED and not was_simulated:
            raise UserError(
                f"{self.path} holds a run of sites on Flower, whose states are with the sites: it goes on with "
                f"`fednh federation run`"
            )

    def __enter__(self) -> RunFolder:
        """Create the folder if need be and lock it; another process that holds it is named."""
        self._made = [p for p in (self.path, *self.path.parents) if not p.exists()]
        self._held = exclusive(self.path, self.lock_file)
        self._held.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        refused = isinstance(value, UserError) and not isinstance(value, RunError)
        if isinstance(value, Exception) and not refused and not isinstance(value, Interrupted):
            self._write_failure(value)
        self._held.__exit__(None, None, None)
        if not any(self.path.iterdir()):  # nothing was begun: leave nothing behind
            for path in self._made or [self.path]:
                with suppress(OSError):  # somebody else uses it
                    path.rmdir()

    def _write_failure(self, error: Exception) -> None:
        """Record in the folder why the run ended, if it had begun; the next attempt removes the record."""
        if any(path != self.lock_file for path in self.path.iterdir()):
            words = str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"
            about = {"error": one_line(words), "time": datetime.now(UTC).isoformat(timespec="seconds")}
            with suppress(OSError):  # a full disk may be the reason
                write_json(self.failure_file, about)

    def begin(
        self,
        config: Config,
        classes: Sequence[str],
        counts: Sequence[Sequence[int]] | NDArray[np.int64],
        sites: Sequence[str] = (),
        backend: str = "simulator",
        data: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the run's description before it starts; if it has started, refuse whatever has changed since.

        `counts` is clients by classes, `sites` their names if any, `data` the fingerprint of what was read.
        """
        if self.started:
            fingerprint.check(self.path, config, data)
            self.failure_file.unlink(missing_ok=True)
            self._plan(config.rounds)
            return
        partition = {"classes": list(classes), "counts": np.asarray(counts).tolist()}
        partition |= {"sites": list(sites)} if sites else {}
        write_json(self.environment_file, {**environment(config), "backend": backend})
        write_bytes(self.partition_file, json.dumps(partition, separators=(",", ":")).encode())
        fingerprint.write(self.path, config, data)
        write_bytes(self.config_file, dump(config).encode())
        self.failure_file.unlink(missing_ok=True)

    def _plan(self, rounds: int) -> None:
        """Let the run have this many rounds; a finished one is then unfinished, and keeps its models until it ends."""
        config = read_config(self.path)
        if config.rounds != rounds:
            self.summary_file.unlink(missing_ok=True)  # first: whenever this is cut off, the folder can be resumed
            config = config.model_copy(update={"rounds": rounds})
            write_bytes(self.config_file, dump(config).encode())
            fingerprint.rewrite_settings(self.path, config)

    def write_metrics(self, records: list[dict[str, Any]]) -> None:
        write_bytes(self.metrics_file, b"".join(_line(record) for record in records))

    def append_metrics(self, record: dict[str, Any]) -> None:
        with self.metrics_file.open("ab") as file:
            file.write(_line(record))

    def rounds_written(self) -> int:
        """How many rounds metrics.jsonl has; those after the last checkpoint will be repeated."""
        return self.metrics_file.read_bytes().count(b"\n") if self.metrics_file.exists() else 0

    def write_summary(self, summary: dict[str, Any]) -> None:
        """The last thing that a run writes, when all else is safely on disk: a folder with a summary is finished."""
        for folder in (self.models, self.outcomes):
            sync_below(folder)
        for file in [path for path in self.path.iterdir() if path.is_file()]:  # what was appended to: metrics, logs
            sync_path(file)
        sync_path(self.path)
        write_json(self.summary_file, summary)

    def remove_kept_rounds(self, but: RunLayout) -> None:
        """Delete the copies of checkpoints to which the run will not go back."""
        for path in self.kept_rounds.iterdir():
            if path != but.path:
                shutil.rmtree(path, ignore_errors=True)

    def remove_others(self, clients: Iterable[int]) -> None:
        """Delete models and outcomes of clients other than these: an earlier end of the run may have saved more."""
        these = set(clients)
        for files in (self.clients_with_models(), self.clients_with_outcomes()):
            for client in files.keys() - these:
                files[client].unlink(missing_ok=True)

    def write_model(self, file: Path, tree: Tree, card: dict[str, Any]) -> None:
        """A model with what is needed to use it: `card` says its method, architecture, classes and preprocessing.

        It is on disk for good when the summary is: all models are synced together.
        """
        write_model(file, tree, card, sync=False)

    def write_outcomes(self, by_client: Mapping[int, Outcomes]) -> None:
        """What became of each client's held-out samples; on disk for good when the summary is."""
        for client, outcomes in by_client.items():
            write_outcomes(self.outcomes_of(client), outcomes, sync=False)


def _of_a_beginning(path: Path) -> bool:
    """Whether a file was left by a run that was killed before its config was written: such a run can start again."""
    run = RunLayout(path.parent)
    begun = (run.lock_file, run.environment_file, run.partition_file, run.fingerprint_file)
    logs = (run.log_file, run.audit_file, run.failure_file)
    return path in (*begun, run.weights_file, run.onnx_file, *logs) or path.suffix == ".tmp"


def _line(record: dict[str, Any]) -> bytes:
    return (json.dumps(record, allow_nan=False) + "\n").encode()


def read_config(path: Path, finished: bool = False) -> Config:
    """The config of a run folder; for a `finished` run, a user's own method need not be importable."""
    file = RunLayout(path).config_file
    try:
        return validate(tomllib.loads(file.read_text(encoding="utf-8")), f"{file}: ", written=finished)
    except OSError as error:
        raise UserError(f"{path} is not a run folder: its {file.name} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise UserError(f"{file} is not valid TOML: {error}") from error


def read_partition(path: Path) -> dict[str, Any] | None:
    """How the samples of a run were divided; None where that is not recorded."""
    try:
        partition: dict[str, Any] = json.loads(RunLayout(path).partition_file.read_text(encoding="utf-8"))
        return partition
    except (OSError, ValueError):
        return None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rounds of a run, as far as they are written."""
    return [json.loads(line) for line in RunLayout(path).metrics_file.read_text(encoding="utf-8").splitlines()]


def read_backend(path: Path) -> str:
    """The backend that a run was made on."""
    file = RunLayout(path).environment_file
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["backend"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} cannot be read ({error}); restore it from a copy, or start another run") from error


def read_summary(path: Path) -> dict[str, Any]:
    """The final metrics of a finished run."""
    file = RunLayout(path).summary_file
    try:
        summary: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if missing := {*TEST_SET, std_of(PM_L), "rounds", "data", "clients"} - set(summary):
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
    except FileNotFoundError:
        raise UserError(f"{path} holds no finished run (no {file.name})") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}") from error
    return summary


def environment(config: Config) -> dict[str, Any]:
    """Where and with what a run was made."""
    packages = ("torch", "numpy", "scipy", "scikit-learn", "pydantic", "safetensors")
    return {
        "fednh": fednh.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in packages},
        "platform": platform.platform(),
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "workers": worker_count(config),
        "threads_per_worker": 1,
        "device": config.device,
        "precision": config.precision,
        "kernels": native.described(),
    }


def worker_count(config: Config) -> int:
    """How many clients are trained at once."""
    return config.workers or cores()


def _commit() -> str | None:
    """The commit of the source tree that this package runs from, when it is one."""
    try:
        here = Path(__file__).parent
        out = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, timeout=5, check=True
        )
        return out.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def cpu() -> str:
    """The name of this machine's processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


# --- clients by name ------------------------------------------------------------------------------------------------


def display_name(name: str) -> str:
    """What people call a method, a model or a data set: its title, the class of an import path, the name of a file.

    For example FedNH for fednh, Moon for moon:Moon, hospitals for csv:/data/hospitals.csv.
    """
    if name in METHODS:
        return METHODS[name].title or METHODS[name].__name__
    path = PurePath(name.rpartition(":")[2])
    suffixes = {suffix for kind in SOURCES.values() for suffix in kind.suffixes}
    short = path.parent.name if "*" in path.name else path.stem if path.suffix.lower() in suffixes else path.name
    return short or name


def display_names(names: Iterable[str]) -> dict[str, str]:
    """The display name of each of these; whole names where two of them would be called the same."""
    shown = {name: display_name(name) for name in names}
    count = Counter(shown.values())
    return {name: short if count[short] == 1 else name for name, short in shown.items()}


def names_of(partition: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[int, str]:
    """The clients' names, where they have some; the sites of a real federation are in its summary alone."""
    names = dict(enumerate(partition.get("sites", ())))
    rows = (*([] if partition.get("counts") else summary.get("sites", ())), *summary.get("clients", ()))
    return names | {row["client"]: row["site"] for row in rows if "site" in row}


def read_names(run: Path) -> dict[int, str]:
    """The names in a run folder."""
    try:
        summary = json.loads(RunLayout(run).summary_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        summary = {}
    return names_of(read_partition(run) or {}, summary)


def find_client(names: Mapping[int, str], wanted: int | str, where: str | Path, clients: Iterable[int] = ()) -> int:
    """The client with this name or number; what is neither among the names nor a number is refused.

    `clients` are those that have what is looked for, and `where` says where: the error lists them.
    """
    if isinstance(wanted, SupportsIndex) and not isinstance(wanted, bool):
        return index(wanted)
    if not isinstance(wanted, str):
        raise UserError(f"{where}: a client is chosen by its whole number or its site's name, not by {wanted!r}")
    for client, name in names.items():
        if name == wanted:
            return client
    if wanted.isascii() and wanted.isdigit():
        return int(wanted)
    if not names:
        raise UserError(f"the clients of {where} have no names: choose one by its number instead of {wanted!r}")
    known = [names[client] for client in sorted(clients) if client in names] or list(names.values())
    raise UserError(f"{where} has no site {wanted!r}{nearest(wanted, known)}")
