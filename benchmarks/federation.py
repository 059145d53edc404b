"""Seconds a round, CPU time and peak memory of a real federation on this machine: `python -m benchmarks.federation`.

It runs `fednh federation init` and `fednh federation up --local` on the digits, over TLS, with the default settings.
The times of rounds are those of the server's audit log. Processes are sampled: a process that lives shorter than the
interval is missed, so the CPU time is a lower bound. Memory is the sum of the processes' proportional set sizes (PSS),
in which a page that forks share counts once; the sum of resident set sizes (RSS) counts it for each of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import psutil

INTERVAL = 0.25  # seconds between two samples of CPU time and RSS; PSS costs more and is taken every fourth time


@dataclass(frozen=True)
class Measured:
    """One federation from `up` to its end."""

    sites: int
    rounds: int
    first: float  # seconds until the first order to train
    round: float  # median seconds from one order to train to the next
    slowest: float
    cpu: float  # CPU seconds a round, of all processes, from the first order to train to the last
    pss: float  # GB, peak of the sum
    rss: float
    load: float  # 1-minute load average at the end


class Sampler(threading.Thread):
    """Samples all processes below this one."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.cpu: dict[tuple[int, float], float] = {}
        self.history: list[tuple[float, float]] = []  # (time, CPU seconds of all processes up to then)
        self.pss = self.rss = 0.0
        self.done = threading.Event()

    def run(self) -> None:
        turn = 0
        while not self.done.wait(INTERVAL):
            processes = psutil.Process().children(recursive=True)
            rss = pss = 0
            for process in processes:
                with suppress(psutil.Error, OSError):
                    times = process.cpu_times()
                    self.cpu[process.pid, process.create_time()] = times.user + times.system
                    rss += process.memory_info().rss
                    if turn % 4 == 0:
                        pss += _pss(process.pid)
            self.history.append((time.time(), sum(self.cpu.values())))
            self.rss, self.pss = max(self.rss, rss), max(self.pss, pss)
            turn += 1

    def until(self, moment: float) -> float:
        """CPU seconds up to a time."""
        return max((used for then, used in self.history if then <= moment), default=0.0)


def _pss(pid: int) -> int:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return 1024 * int(next(line for line in text.splitlines() if line.startswith("Pss:")).split()[1])


def measure(sites: int, rounds: int) -> Measured:
    fednh = [sys.executable, "-m", "fednh", "federation"]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "fed"
        init = ["init", str(folder), "--sites", str(sites), "--rounds", str(rounds)]
        subprocess.run([*fednh, *init], check=True, stdout=subprocess.DEVNULL)
        sampler, started = Sampler(), time.time()
        sampler.start()
        subprocess.run([*fednh, "up", str(folder), "--local", "--quiet"], check=True, stdout=subprocess.DEVNULL)
        sampler.done.set()
        sampler.join()
        log = (folder / "run/audit.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, log) if row["event"] == "asked" and row["kind"] == "train"]
    times = [datetime.fromisoformat(row["time"]).timestamp() for row in rows]
    lasted = [after - before for before, after in pairwise(times)]
    return Measured(
        sites,
        rounds,
        round(times[0] - started, 1),
        round(statistics.median(lasted), 2),
        round(max(lasted), 2),
        round((sampler.until(times[-1]) - sampler.until(times[0])) / len(lasted), 2),
        round(sampler.pss / 1e9, 2),
        round(sampler.rss / 1e9, 2),
        round(os.getloadavg()[0], 1),
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.federation", description=__doc__)
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=6)
    arguments = parser.parse_args()
    print(json.dumps(asdict(measure(arguments.sites, arguments.rounds))))


if __name__ == "__main__":
    main()
