"""`--backend ray` on two machines of one CPU each, against a pool of two threads: `python -m benchmarks.cluster`.

The machines are Ray processes on the loopback. Pool and cluster take turns, each run in a process of its own; a figure
is a ratio of medians over the rounds after the first. The results, with what the cost model needs, go to cluster.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import cost_model
from benchmarks.__main__ import shown
from benchmarks.row import Row
from benchmarks.scale import GIB, Job, measure
from tests.helpers.ray_nodes import Nodes, nodes

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).with_name("cluster.json")
PAGE, SECTION = ROOT / "docs" / "clusters.md", "## Speed\n"


CONV = Job(clients=16, picked=16, samples=16 * 200, rounds=3, epochs=2, method="fedavg", final=2, workers=2)
PAPER = Job(clients=10, picked=10, samples=10 * 500, rounds=3, epochs=5, method="fedavg", final=2, workers=2)
SMALL = Job(clients=1000, picked=1000, samples=50_000, rounds=8, epochs=5, model="mlp", method="fedavg", workers=2)


def rows(two: Nodes, quick: bool) -> Iterator[Row]:
    yield against_pool(
        two,
        CONV,
        "Conv2 on CIFAR-shaped data, two machines / thread pool",
        0.9,
        1 if quick else 2,
        "200 images a client",
    )
    yield against_pool(
        two,
        PAPER,
        "the same with the paper's round, two machines / thread pool",
        0.95,
        1 if quick else 2,
        "10 clients of 500 images",
    )
    yield against_pool(
        two,
        SMALL,
        "1,000 small MLP clients a round, two machines / vmap pool",
        0.9,
        1 if quick else 2,
        "50 samples a client",
    )
    yield memory(two)
    yield traffic(two, "fedbabu", "the driver's bytes a round / model, clients that keep a head")
    yield traffic(two, "fedavg", "the driver's bytes a round / model, clients that keep a model")
    yield first_round(two)


def against_pool(two: Nodes, job: Job, name: str, goal: float, turns: int, each: str) -> Row:
    seconds: dict[str, list[float]] = {"pool": [], "ray": []}
    for _ in range(turns):
        for where, found in seconds.items():
            made = replace(job, address=two.address) if where == "ray" else job
            found += measure(made, two.environment)["rounds"][1:]
    pool, ray = (statistics.median(found) for found in seconds.values())
    detail = f"{each}, {job.epochs} epochs: medians of a round {pool:.3f} s and {ray:.3f} s over {turns} runs each"
    return Row(name, round(pool / ray, 3), "x", goal, False, detail)


def memory(two: Nodes) -> Row:
    """The driver's peak, with what it has mapped of the object store."""
    few, many = (
        measure(
            Job(clients=picked, picked=picked, samples=2 * picked, rounds=2, address=two.address, workers=2),
            two.environment,
        )["peak"]
        for picked in (100, 1000)
    )
    detail = f"FedNH, 2 images a client, all picked: {few / GIB:.2f} GiB and {many / GIB:.2f} GiB"
    return Row("driver's memory, 1,000 picked Conv2 clients / 100", round(many / few, 3), "x", 1.3, True, detail)


def traffic(two: Nodes, method: str, name: str) -> Row:
    """What comes from the driver and goes to it: what clients receive counts once a machine."""
    job = Job(100, 200, 4, method=method, final=2, workers=2, checkpoint=2, address=two.address)
    found = measure(job, two.environment)
    sent, received = (found[way] / job.rounds / found["model"] for way in ("sent", "received"))
    detail = f"Conv2, 100 clients a round, {job.rounds} rounds: {sent:.2f} sent and {received:.2f} received"
    return Row(name, round(sent + received, 3), "x", 3.0, True, detail)


def first_round(two: Nodes) -> Row:
    """From `fednh run` to the first line of metrics.jsonl, on a cluster that is there."""
    words = ["run", "digits", "--rounds", "1", "--clients", "10", "--epochs", "1", "--backend", "ray", "--quiet"]
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        command = [sys.executable, "-m", "fednh", *words, "--address", two.address, "--out", "run"]
        with subprocess.Popen(command, cwd=folder, env=two.environment, stdout=subprocess.DEVNULL) as process:
            metrics = Path(folder) / "run" / "metrics.jsonl"
            while not (metrics.exists() and metrics.stat().st_size) and process.poll() is None:
                time.sleep(0.01)
            took = time.perf_counter() - began
    return Row("time to the first round on a running cluster", round(took, 2), "s", 10.0, True, "digits, 10 clients")


def costs(two: Nodes) -> dict[str, float]:
    """What the cost model needs, measured in a process that joins the cluster."""
    command = [sys.executable, "-m", "benchmarks.cost_model", "--measure", two.address]
    done = subprocess.run(command, cwd=ROOT, env=two.environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-2000:])
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def page(result: dict[str, Any]) -> str:
    """The last section of docs/clusters.md."""
    busy = ", while it was busy with other work: the ratios are lower bounds at best" if result["busy"] else ""
    head = f"Measured by `python -m benchmarks.cluster` on a machine with two cores, {result['when'][:10]}{busy}:"
    figures = ["| figure | goal | measured | how |", "|---|---|---|---|"]
    for row in result["rows"]:
        goal = f"{'at most' if row['at_most'] else 'at least'} {row['goal']:g} {row['unit']}"
        figures.append(f"| {row['name']} | {goal} | {row['value']:.2f} {row['unit']} | {row['detail']} |")
    return "\n".join([head, "", *figures, "", *cost_model.page(result["costs"]), ""])


def write_page(result: dict[str, Any]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(f"{text.partition(SECTION)[0]}{SECTION}\n{page(result)}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.cluster", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one turn of each")
    parser.add_argument("--docs", action="store_true", help="write the figures into docs/clusters.md, too")
    parser.add_argument("--busy", action="store_true", help="say there that the machine was busy")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where to write the results")
    arguments = parser.parse_args()
    console = Console() if Console().is_terminal else Console(width=150)
    began, made = time.perf_counter(), list[Row]()
    with nodes({"object_store_memory": 1 << 30}, {"object_store_memory": 1 << 30}) as two:
        for row in rows(two, arguments.quick):
            made.append(row)
            console.print(f"{row.name}: {row.value:.2f} {row.unit}", highlight=False)
        measured = costs(two)
    console.print(shown(made))
    result: dict[str, Any] = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(time.perf_counter() - began, 1),
        "busy": arguments.busy,
        "rows": [{**asdict(row), "reached": row.reached} for row in made],
        "costs": measured,
    }
    arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if arguments.docs:
        write_page(result)
    console.print(f"see {arguments.out}")


if __name__ == "__main__":
    main()
