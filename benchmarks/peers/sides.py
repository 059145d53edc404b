"""The sides of the comparison: ours, the plain loop and the peers, each with its environment and its settings."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.peers.work import ONE, PROCESSES, THREADS, WORKERS, Answer, Job

ROOT = Path(__file__).parents[2]
PLACE = ROOT / ".peers"
STAND_IN = Path(__file__).with_name("stand_in")
BASE = ("torch==2.13.0", "numpy<2.5")
OFFLINE = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
EVEN = {"RAY_worker_niceness": "0"}  # Ray would give its actors a lower priority than every other side has
INSTALLING = 1200  # seconds at most


class Failed(Exception):
    """Why a side has no figure, in words."""


@dataclass(frozen=True)
class Side:
    """A library, or ours: the module that runs it, what to install, and in which settings it may run."""

    name: str
    module: str
    settings: tuple[str, ...]
    package: str = ""  # on PyPI, with its version; empty: the Python that runs this
    needs: tuple[str, ...] = ()  # its dependencies, where pip must not choose them
    stand_in: bool = False  # for torchvision
    any_python: bool = False  # its package declares a newer Python than it needs

    @property
    def folder(self) -> Path:
        return PLACE / self.module.removeprefix("with_")

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python") if self.package else sys.executable

    @property
    def steps(self) -> list[list[str]]:
        """What pip installs, one after another."""
        if not self.package:
            return []
        if self.needs:
            newer = ["--ignore-requires-python"] if self.any_python else []
            return [[*BASE], ["--no-deps", *newer, self.package], [*self.needs, *BASE]]
        return [[*BASE], [self.package, *BASE]]

    def command(self, job: Job) -> list[str]:
        launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
        start = launch if self.module == "with_pfl" and job.setting == PROCESSES else []
        return [self.python, *start, "-m", f"benchmarks.peers.{self.module}", json.dumps(asdict(job))]

    def environment(self, job: Job) -> dict[str, str]:
        paths = [ROOT, *([STAND_IN] if self.stand_in else []), *([] if self.package else [ROOT / "src"])]
        own = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": str(job.threads)}
        return {**os.environ, **OFFLINE, **EVEN, **own}


OURS = Side("fednh", "ours", (WORKERS,))
PEERS = (
    Side("plain loop", "loop", (THREADS, ONE)),
    Side("pfl", "with_pfl", (PROCESSES, THREADS), "pfl[pytorch]==0.6.0"),
    Side(
        "fluke",
        "with_fluke",
        (THREADS, ONE),
        "fluke-fl==0.8.1",
        (
            *("cerberus", "diskcache", "matplotlib", "omegaconf", "pandas", "psutil", "rich", "scikit-learn"),
            *("seaborn", "torchmetrics"),
        ),
    ),
    Side("BlazeFL", "with_blazefl", (PROCESSES, WORKERS), "blazefl==2.0.3", ("tqdm",), any_python=True),
    Side("Flower", "with_flower", (PROCESSES, THREADS), "flwr[simulation]==1.41.0"),
    Side(
        "FedLab",
        "with_fedlab",
        (PROCESSES, THREADS, ONE),
        "fedlab==1.3.0",
        ("munch", "pandas", "pillow", "pynvml", "scikit-learn", "tqdm"),
        stand_in=True,
    ),
)


def install(side: Side) -> None:
    """Make the side's virtual environment, unless it is there and has what is asked for."""
    ready, wanted = side.folder / "ready.json", json.dumps(side.steps)
    if not side.package or (ready.is_file() and ready.read_text(encoding="utf-8") == wanted):
        return
    shutil.rmtree(side.folder, ignore_errors=True)
    run([sys.executable, "-m", "venv", str(side.folder)], dict(os.environ), INSTALLING)
    for step in side.steps:
        run([side.python, "-m", "pip", "install", "-qq", *step], dict(os.environ), INSTALLING)
    ready.write_text(wanted, encoding="utf-8")


def measure(side: Side, job: Job, limit: float) -> Answer:
    """One job in a process of its own, which is ended when it takes longer than `limit` seconds."""
    output = run(side.command(job), side.environment(job), limit)
    lines = [line for line in output.splitlines() if line.startswith('{"versions"')]
    if not lines:
        raise Failed("it ended without an answer")
    answer = Answer(**json.loads(lines[-1]))
    if answer.samples != job.samples:
        raise Failed(f"it processed {answer.samples:,} samples instead of {job.samples:,}")
    if not answer.after < answer.before:
        raise Failed(f"its loss went from {answer.before:.3f} to {answer.after:.3f}")
    return answer


def run(command: list[str], environment: dict[str, str], limit: float) -> str:
    """What the command prints; it and what it started are ended after `limit` seconds."""
    try:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise Failed(f"could not run: {command[0]}: {error.strerror}") from error
    try:
        output, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired as error:
        raise Failed(f"it took longer than {limit / 60:g} minutes") from error
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.communicate(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
    if process.returncode:
        said = [line.strip() for line in errors.splitlines() if line.strip()]
        raise Failed(f"it failed: {said[-1][:200] if said else f'exit code {process.returncode}'}")
    return output
