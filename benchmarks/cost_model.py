"""Rounds per hour on more machines than we have: a simulation of the schedule of `backends/ray.py`, on paper.

`python -m benchmarks.cost_model` prints the table of docs/clusters.md from the costs in cluster.json, which
`python -m benchmarks.cluster` has measured; `--measure ADDRESS` measures them. The network is an assumption.

The model: the driver is one machine, whose link sends and receives at once. It sends what clients receive to every
machine once a round, one after another, then what each client kept, with its job; a client's result brings that back.
Clients of a group go to one machine while it has a free slot. Uploads are added up in groups of sixteen where most of
them are, the sums of groups likewise, and the last sum travels to the driver. Ray might send what clients receive from
machine to machine, and jobs wait for states before they are needed; the model has neither.
"""

from __future__ import annotations

import argparse
import heapq
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fednh.tree import FAN

RESULTS = Path(__file__).with_name("cluster.json")


@dataclass(frozen=True)
class Costs:
    """Seconds and bytes of one client and one machine."""

    client: float  # seconds to compute a client in one slot
    job: float  # seconds of the driver to hand out a job and to take its answer
    add: float  # seconds to read an upload from the object store, add it up, and write its share of the sum
    model: float  # bytes that travel down and up
    link: float  # bytes a second of a machine's network link, either way
    slots: int = 16  # of a machine
    state: float = 0.0  # bytes that a client keeps, which travel to its job and back


def round_seconds(costs: Costs, machines: int, clients: int) -> float:
    """How long a round takes: clients in their order, then the tree of sums."""
    several = machines > 1  # one machine: the driver is on it
    wire, state = (size / costs.link if several else 0.0 for size in (costs.model, costs.state))
    ready = [[(k + 1) * costs.model / costs.link] * costs.slots for k in range(machines)]  # of the slots, by machine
    driver, sent, received, at = 0.0, machines * wire, 0.0, 0
    ends, homes = list[float](), list[int]()
    for client in range(clients):
        first = min(range(machines), key=lambda k: ready[k][0])
        if client % FAN == 0 or ready[at][0] > ready[first][0]:
            at = first
        driver += costs.job
        sent = max(sent, driver) + state if state else sent
        begin = max(heapq.heappop(ready[at]), driver, sent if state else 0.0)
        heapq.heappush(ready[at], begin + costs.client + costs.add)
        received = max(received, begin + costs.client + costs.add) + state
        ends.append(received if state else begin + costs.client + costs.add)
        homes.append(at)
    return max(received, driver, tree_end(costs, wire, ends, homes))


def tree_end(costs: Costs, wire: float, ends: Sequence[float], homes: Sequence[int]) -> float:
    """When the sum of uploads is at the driver that are ready at these times on these machines."""
    while len(ends) > 1:  # a level of the tree
        groups = [slice(k, k + FAN) for k in range(0, len(ends), FAN)]
        ends = [max(ends[each]) + _sum(costs, wire, homes[each]) for each in groups]
        homes = [max(homes[each], key=homes[each].count) for each in groups]
    return ends[0] + wire


def _sum(costs: Costs, wire: float, homes: Sequence[int]) -> float:
    """Seconds to add up items of these machines on the one that has most of them."""
    away = len(homes) - max(homes.count(home) for home in homes)
    return away * wire + len(homes) * costs.add


def table(costs: Costs, clients: int, machines: tuple[int, ...] = (1, 10, 100)) -> list[tuple[int, float, float]]:
    """Machines, rounds an hour, and how much faster than on one machine."""
    alone = round_seconds(costs, 1, clients)
    return [(m, 3600 / (s := round_seconds(costs, m, clients)), alone / s) for m in machines]


def measured(address: str) -> dict[str, float]:
    """The costs on this machine: ResNet-18 on CIFAR-100-shaped samples, 5 a client, and jobs of the cluster there."""
    import numpy as np
    import torch

    from fednh.backends.ray import connected
    from fednh.backends.ray_worker import Sums, combine, pack
    from fednh.backends.tasks import SimulatedData, TrainTask
    from fednh.config import load
    from fednh.data.dataset import Dataset
    from fednh.federated.setup import build_federation
    from fednh.seeding import torch_rng
    from fednh.tree import size

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

        sums = [Sums(pack([(update.upload, 0, 0)])) for update in updates]
        refs = [ray.put(each) for each in (sums * FAN)[:FAN]]
        took = []
        for _ in range(5):
            began = time.perf_counter()
            ray.put(combine([0] * FAN, 0, 0, *map(ray.get, refs)))
            took.append((time.perf_counter() - began) / FAN)
        add = statistics.median(took)
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
    keeping = replace(costs, state=costs.model)
    wire = costs.model / costs.link
    lines = [
        "### Estimated scaling",
        "",
        f"CIFAR-100, ResNet-18, 10,000 clients, {clients:,} of them in a round, by a simulation of the schedule "
        f"(`benchmarks/cost_model.py`). Measured: a client of five samples takes {costs.client:.2f} s in one slot, a "
        f"job costs the driver {1000 * costs.job:.1f} ms, an upload of {costs.model / 1e6:.0f} MB "
        f"{1000 * costs.add:.0f} ms to add up. Assumed: {costs.slots} slots a machine, links of {gigabits:g} Gbit/s.",
        "",
        "| machines | rounds an hour, clients that keep little | against one machine | clients that keep a model |",
        "|---|---|---|---|",
    ]
    for (machines, rounds, faster), (_, kept, _) in zip(table(costs, clients), table(keeping, clients), strict=True):
        lines.append(f"| {machines} | {rounds:.0f} | {faster:.1f}x | {kept:.0f} |")
    sums = tree_end(costs, wire, [0.0] * clients, [k // costs.slots for k in range(clients)])
    ten = round_seconds(costs, 1000, 10 * clients)
    return [
        *lines,
        "",
        f"Sums are no limit: those of {clients:,} uploads are at the driver {sums:.1f} s after the last client. The "
        f"limit is then the driver's link, over which what clients receive goes to one machine after another: "
        f"{100 * wire:.1f} s for 100. More machines than {-(-clients // costs.slots)} gain nothing, as each client has "
        f"a slot; with {10 * clients:,} clients a round on 1,000 machines a round takes {ten:.0f} s. Where a client "
        f"keeps a model, as with FedAvg and FedNH, that travels from the driver's store and back: {clients * wire:.0f} "
        f"s a round over its link, whatever computes.",
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
