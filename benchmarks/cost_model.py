"""Rounds per hour on more machines than we have: a simulation of the schedule of `backends/ray.py`, on paper.

`python -m benchmarks.cost_model` prints the table of docs/clusters.md from the costs in cluster.json, which
`python -m benchmarks.cluster` has measured; `--measure ADDRESS` measures them. The network is an assumption.

The model: a slot computes one client after another and has one more waiting. The driver is one machine with one link.
It sends what clients receive to every machine once a round, hands out jobs, receives each upload over its link, and
adds up uploads one by one, in the order of the clients.
"""

from __future__ import annotations

import argparse
import heapq
import json
import time
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).with_name("cluster.json")


@dataclass(frozen=True)
class Costs:
    """Seconds and bytes of one client and one machine."""

    client: float  # seconds to compute a client in one slot
    job: float  # seconds of the driver to hand out a job and to take its answer
    add: float  # seconds of the driver to copy an upload out of the object store and to add it up
    model: float  # bytes that travel down and up
    link: float  # bytes a second of a machine's network link
    slots: int = 16  # of a machine


def round_seconds(costs: Costs, machines: int, clients: int) -> float:
    """How long a round takes: events in the order in which they happen."""
    slots = machines * costs.slots
    wire = costs.model / costs.link
    ready = [
        (k // costs.slots + 1) * wire for k in range(slots)
    ]  # the driver's link sends to one machine after another
    heapq.heapify(ready)
    driver = link = 0.0
    finished: list[float] = []
    for client in range(clients):
        if client >= 2 * slots:  # its predecessor by two jobs a slot must have been read
            driver = max(driver, finished[client - 2 * slots])
        driver += costs.job
        free = heapq.heappop(ready)
        done = max(free, driver) + costs.client
        heapq.heappush(ready, done)
        link = max(link, done) + (wire if machines > 1 else 0.0)  # one machine: the driver is on it
        finished.append(max(link, finished[-1] if finished else 0.0) + costs.add)
    return finished[-1]


def table(costs: Costs, clients: int, machines: tuple[int, ...] = (1, 10, 100)) -> list[tuple[int, float, float]]:
    """Machines, rounds an hour, and how much faster than on one machine."""
    alone = round_seconds(costs, 1, clients)
    return [(m, 3600 / (s := round_seconds(costs, m, clients)), alone / s) for m in machines]


def tree(costs: Costs, machines: int, clients: int) -> float:
    """The next step: every machine adds up its own clients, and the driver adds up one sum a machine."""
    mine = round_seconds(costs, 1, -(-clients // machines))
    return mine + machines * (costs.model / costs.link + costs.add)


def measured(address: str) -> dict[str, float]:
    """The costs on this machine: ResNet-18 on CIFAR-100-shaped samples, 5 a client, and jobs of the cluster there."""
    import numpy as np
    import torch

    from fednh.backends.ray import connected
    from fednh.backends.ray_worker import pack, unpack
    from fednh.backends.tasks import SimulatedData, TrainTask
    from fednh.config import load
    from fednh.data.dataset import Dataset
    from fednh.federated.setup import build_federation
    from fednh.seeding import torch_rng
    from fednh.tree import mean, size

    torch.set_num_threads(1)
    rng, each, number = np.random.default_rng(0), 5, 6
    x, y = rng.integers(0, 256, (each * number, 32, 32, 3), np.uint8), np.arange(each * number) % 100
    names = tuple(map(str, range(100)))
    data = Dataset("noise", x, y, x[:100], y[:100], names, (0.0,) * 3, (1.0,) * 3, 255.0)
    settings = {"data.name": "npz:unused", "data.augment": "none", "model.name": "resnet18", "method.name": "fedavg"}
    fed = build_federation(
        load(None, {**settings, "partition.name": "iid", "partition.clients": number, "partition.min_samples": 1}), data
    )
    server = fed.method.init(fed.net, torch_rng(0, "init"))
    stage = TrainTask(fed.method.broadcast(server), load(None, {}).fit_settings(1), 0, 1)
    material, kept = SimulatedData.of(fed), fed.method.enroll(server)
    stage(material, [0], [kept])
    began = time.perf_counter()
    updates = [stage(material, [client], [kept])[0] for client in range(1, number)]
    client = (time.perf_counter() - began) / (number - 1)
    with connected(address, 1):
        import ray

        packed = [pack(update) for update in updates]
        refs = [ray.put(each) for each in packed]
        began = time.perf_counter()
        mean(unpack(ray.get(ref)).upload for ref in refs)
        add = (time.perf_counter() - began) / len(refs)
        job = _job_seconds()
    return {"client": client, "job": job, "add": add, "model": float(size(stage.down))}


def _job_seconds(jobs: int = 300) -> float:
    """What a job costs the driver: nothing is computed, and the worker has the next one already."""
    import ray

    @ray.remote(num_cpus=1, scheduling_strategy="SPREAD")
    def nothing(*job: object) -> object:
        return job

    ray.get(nothing.remote())
    began, waiting = time.perf_counter(), [nothing.remote([[0]], []) for _ in range(2)]
    for _ in range(jobs):
        ray.get(waiting.pop(0))
        waiting.append(nothing.remote([[0]], []))
    return (time.perf_counter() - began) / jobs


def page(measured: dict[str, float], gigabits: float = 10.0, clients: int = 1000) -> list[str]:
    """The cost model as a page shows it."""
    costs = Costs(**measured, link=gigabits * 1e9 / 8)
    wire, adds = clients * costs.model / costs.link, clients * (costs.add + costs.job)
    lines = [
        "### Estimated scaling",
        "",
        f"CIFAR-100, ResNet-18, 10,000 clients, {clients:,} of them in a round, by a simulation of the schedule "
        f"(`benchmarks/cost_model.py`). Measured: a client of five samples takes {costs.client:.2f} s in one slot, a "
        f"job costs the driver {1000 * costs.job:.1f} ms, an upload of {costs.model / 1e6:.0f} MB "
        f"{1000 * costs.add:.0f} ms to add up. Assumed: {costs.slots} slots a machine, links of {gigabits:g} Gbit/s.",
        "",
        "| machines | rounds an hour | against one machine | if every machine added up its own clients |",
        "|---|---|---|---|",
    ]
    for machines, rounds, faster in table(costs, clients):
        summed = 3600 / tree(costs, machines, clients)
        lines.append(f"| {machines} | {rounds:.0f} | {faster:.1f}x | {summed:.0f} |")
    limit = max(("the driver's link", wire), ("the driver's sum", adds), key=lambda part: part[1])
    return [
        *lines,
        "",
        f"{limit[0][0].upper()}{limit[0][1:]} is the limit: all uploads of a round take {wire:.0f} s over one link and "
        f"{adds:.0f} s to add up, however many machines compute. Sums on the machines (the last column) are not built: "
        "the last bits of a result would depend on the number of machines.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.cost_model", description=__doc__)
    parser.add_argument("--measure", metavar="ADDRESS", help="measure the costs on this cluster and print them")
    parser.add_argument("--gigabits", type=float, default=10.0, help="a second, of a machine's link")
    parser.add_argument("--clients", type=int, default=1000, help="that train in a round")
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measured(arguments.measure)))
        return
    costs = json.loads(RESULTS.read_text(encoding="utf-8"))["costs"]
    print("\n".join(page(costs, arguments.gigabits, arguments.clients)))


if __name__ == "__main__":
    main()
