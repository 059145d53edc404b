"""Memory and time per round against the number of clients that exist.

Every run is a child process of its own: `python -m benchmarks.scale '{"clients": 1000, ...}'` trains and prints a line
of JSON with its peak memory and the seconds of each round. Clients have few samples and train one epoch, so that the
bookkeeping shows. Times are ratios of medians of runs that take turns.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.row import Row

GIB = 2**30
BUDGET = "256MiB"  # store.memory in all of these runs: small enough that client state lives on disk


@dataclass(frozen=True)
class Job:
    """One run: `clients` exist, `picked` of them train in each of `rounds`."""

    clients: int
    samples: int  # of the whole data set
    rounds: int
    picked: int = 100
    model: str = "conv2"  # on 32x32 colour images; or "mlp", on 64 features
    final: int = 20  # eval.final
    checkpoint: int = 5  # checkpoint.every
    classes: int = 10
    hidden: int = 128  # of the mlp's first layer; the second has half of it
    method: str = "fednh"
    epochs: int = 1
    workers: int = 0
    address: str | None = None  # of a Ray cluster, which then computes the clients


def measure(job: Job, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run a job in a process of its own: peak memory in bytes, seconds by round, seconds to build the federation."""
    command = [sys.executable, "-m", "benchmarks.scale", json.dumps(asdict(job))]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{job} failed: {done.stderr.strip()[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def run(job: Job, folder: Path) -> dict[str, Any]:
    """The job, in this process."""
    from rich.console import Console

    from fednh.backends import run_maker
    from fednh.callbacks.screen import Silent
    from fednh.config import load
    from fednh.federated.setup import build_federation
    from fednh.runs.run_folder import RunFolder

    config = load(
        None,
        {
            "data.name": "npz:unused",
            "data.augment": "none",
            "rounds": job.rounds,
            "partition.name": "iid",
            "partition.clients": job.clients,
            "partition.min_samples": 1,
            "participation.rate": job.picked / job.clients,
            "model.name": job.model,
            **({"model.args": {"hidden": [job.hidden, job.hidden // 2]}} if job.model == "mlp" else {}),
            "method.name": job.method,
            "workers": job.workers,
            "train.epochs": job.epochs,
            "eval.every": 0,
            "eval.clients": job.final,
            "eval.final": job.final,
            "checkpoint.every": job.checkpoint,
            "store.memory": BUDGET,
        },
    )
    started = time.perf_counter()
    federation = build_federation(config, synthetic(job))
    built = time.perf_counter() - started
    make = run_maker("simulator" if job.address is None else "ray", job.address)
    with RunFolder(folder) as place:
        simulation = make(config, federation, place, Silent(Console(stderr=True)))
        place.begin(config, federation.dataset.classes, federation.class_counts())
        begun = time.perf_counter() - started
        simulation.run()
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "peak": peak_memory(),
        "rounds": [record["seconds"] for record in records],
        "built": built,
        "begun": begun,
        "total": time.perf_counter() - started,
        "members": len(simulation.executor.store.members),
        "processor_seconds": time.process_time(),
        "folder": sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
    }


def peak_memory() -> int:
    """Bytes that this process had in memory at most; getrusage also counts those of the process that started it."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:  # not Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")))


def synthetic(job: Job) -> Any:
    """Noise with labels: what is learnt does not matter here."""
    import numpy as np

    from fednh.data.dataset import Dataset

    rng = np.random.default_rng(0)
    shape, scale, channels = ((32, 32, 3), 255.0, 3) if job.model == "conv2" else ((64,), 1.0, 64)

    def part(count: int) -> Any:
        if job.model == "conv2":
            x = rng.integers(0, 256, (count, *shape), np.uint8)
        else:
            x = rng.standard_normal((count, *shape), np.float32)
        return x, rng.integers(0, job.classes, count)

    classes = tuple(str(c) for c in range(job.classes))
    return Dataset("noise", *part(job.samples), *part(100), classes, (0.0,) * channels, (1.0,) * channels, scale)


def rows(quick: bool) -> list[Row]:
    """The goals of scale; `quick` runs fewer rounds of the large ones."""
    return [*memory_rows(quick), *time_rows(quick)]


def memory_rows(quick: bool) -> list[Row]:
    rounds = 5 if quick else 20
    many = measure(Job(clients=10_000, samples=20_000, rounds=rounds))
    few = measure(Job(clients=100, samples=200, rounds=5))  # the same clients: larger ones would train larger batches
    peak = f"{few['peak'] / GIB:.2f} GiB and {many['peak'] / GIB:.2f} GiB"
    setting = f"Conv2, 2 images of 32x32x3 a client, 100 clients a round, store.memory = {BUDGET}"
    return [
        Row(
            "peak memory, 10,000 clients of Conv2",
            round(many["peak"] / GIB, 3),
            "GiB",
            3.0,
            True,
            f"{setting}, {rounds} rounds, {many['members']} clients took part; the last evaluation is of 20 of them",
        ),
        Row(
            "peak memory, 10,000 clients / 100 clients",
            round(many["peak"] / few["peak"], 3),
            "x",
            1.3,
            True,
            f"{setting}: {peak}; {rounds} rounds, and 5 of the 100 clients, all of whom take part in each",
        ),
    ]


def time_rows(quick: bool) -> list[Row]:
    """The same clients (10 samples of 64 features each, MLP), of which there are more or fewer."""
    rounds, turns = (10, 2) if quick else (30, 3)
    seconds: dict[int, list[float]] = {1_000: [], 100_000: []}
    total = 0.0
    for _ in range(turns):
        for clients, found in seconds.items():
            # Checkpoints are written in the background, at a cost that depends on the disk: every 10 rounds.
            result = measure(Job(clients, 10 * clients, rounds, model="mlp", checkpoint=10))
            found += result["rounds"][2:]  # without the first ones, which warm up
            total = max(total, result["total"])
    few, many = (statistics.median(found) for found in seconds.values())
    return [
        Row(
            "time a round, 100,000 clients / 1,000 clients",
            round(many / few, 3),
            "x",
            1.2,
            True,
            f"MLP, 10 samples a client, 100 clients a round: medians {1000 * few:.1f} ms and {1000 * many:.1f} ms over "
            f"{turns} runs each of {rounds} rounds; the whole run of 100,000 clients took {total:.0f} s",
        )
    ]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        print(json.dumps(run(Job(**json.loads(sys.argv[1])), Path(temporary) / "run")))
