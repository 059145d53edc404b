"""The same round on other libraries, side by side with ours: `make bench-peers`.

Every library has a virtual environment of its own in .peers/, made by the first call. Each is first tried in every
setting that it offers for two cores, on one epoch; the faster one is then measured in turn with the others and with
ours, each time in a process of its own. A figure is the best of the turns. The results go to peers.json.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.peers.sides import OURS, PEERS, ROOT, Failed, Side, install, measure
from benchmarks.peers.work import CORES, Answer, Job
from fednh.runs.run_folder import cpu

RESULTS = Path(__file__).parents[1] / "peers.json"
PAGE, SECTION = ROOT / "docs" / "performance.md", "## Comparison with other libraries\n"
GOALS = {"conv2": 1.5, "small": 5.0}
ROUNDS = {"conv2": 1, "small": 2}
TITLES = {
    "conv2": "Conv2, 10 clients of 500 images of 3x32x32",
    "small": "an MLP, 1,000 clients of 50 samples of 64 features",
}
Measure = Callable[[Side, Job], Answer]


@dataclass(frozen=True)
class Row:
    """One side on one work; `ratio` is our rate divided by its rate."""

    work: str
    side: str
    setting: str = ""
    rate: float | None = None  # samples a second
    ratio: float | None = None
    versions: dict[str, str] | None = None
    before: float | None = None  # loss
    after: float | None = None
    words: str = ""  # why there is no figure

    @property
    def reached(self) -> bool:
        return self.side == OURS.name or (self.ratio is not None and self.ratio >= GOALS[self.work])


def compare(work: str, sides: Sequence[Side], turns: int, measured: Measure) -> list[Row]:
    """Every side's best of `turns`, which they take one after another; the first side is the one to compare with."""
    words: dict[str, str] = {}
    settings: dict[str, str] = {}
    found: dict[str, Answer] = {}
    for side in sides:
        try:
            settings[side.name] = fastest(work, side, measured)
        except Failed as error:
            words[side.name] = str(error)
    for _ in range(turns):
        for side in sides:
            if side.name in words:
                continue
            try:
                answer = again_if_failed(measured, side, Job(work, settings[side.name], rounds=ROUNDS[work]))
            except Failed as error:
                words[side.name] = str(error)
                continue
            if side.name not in found or answer.seconds < found[side.name].seconds:
                found[side.name] = answer
    rows = []
    for side in sides:
        if side.name in words:
            rows.append(Row(work, side.name, settings.get(side.name, ""), words=words[side.name]))
            continue
        answer = found[side.name]
        first = found.get(sides[0].name)
        rate = answer.samples / answer.seconds
        ratio = first.samples / first.seconds / rate if first else None
        rows.append(
            Row(work, side.name, settings[side.name], rate, ratio, answer.versions, answer.before, answer.after)
        )
    return rows


def again_if_failed(measured: Measure, side: Side, job: Job) -> Answer:
    """A failure may be chance, a port that was taken for example; it should not cost a library its faster setting."""
    try:
        return measured(side, job)
    except Failed:
        return measured(side, job)


def fastest(work: str, side: Side, measured: Measure) -> str:
    """The setting that takes the least time for one epoch; one that fails is left out while another works."""
    if len(side.settings) == 1:
        return side.settings[0]
    seconds: dict[str, float] = {}
    for setting in side.settings:
        try:
            seconds[setting] = again_if_failed(measured, side, Job(work, setting, epochs=1)).seconds
        except Failed as error:
            failed = error
    if not seconds:
        raise failed
    return min(seconds, key=seconds.__getitem__)


def shown(rows: Sequence[Row]) -> Table:
    table = Table("work", "library", "samples a second", "ours is faster by", "goal", "", "setting")
    for row in rows:
        goal = "" if row.side == OURS.name else f"{GOALS[row.work]:g} x"
        mark = "" if row.side == OURS.name else ("pass" if row.reached else "[bold]short[/bold]")
        if row.rate is None:
            table.add_row(row.work, row.side, row.words, "", goal, "", row.setting)
        else:
            table.add_row(row.work, row.side, f"{row.rate:,.0f}", times(row), goal, mark, row.setting)
    return table


def times(row: Row) -> str:
    return "" if row.side == OURS.name or row.ratio is None else f"{row.ratio:.2f} x"


def page(result: dict[str, Any]) -> str:
    """The section of docs/performance.md."""
    busy = ", while it was busy with other work" if result["busy"] else ""
    rows = [Row(**row) for row in result["rows"]]
    lines = [
        "`make bench-peers` trains the same round on other libraries, each in a virtual environment of its own:",
        "FedAvg, 5 local epochs, batches of 64, SGD with learning rate 0.01 and momentum 0.9, the same layers and",
        f"samples, on {CORES} cores ({result['machine']}). Measured on {result['when'][:10]}{busy}; the best of "
        f"{result['turns']} turns that",
        "all took one after another, after a warm-up round.",
    ]
    for work, title in TITLES.items():
        lines += [
            "",
            f"{title[0].upper()}{title[1:]}:",
            "",
            "| | samples a second | ours is faster by | goal | setting |",
        ]
        lines += ["|---|---|---|---|---|"]
        for row in rows:
            if row.work == work:
                lines.append(line(row))
    versions = {name: text for row in rows for name, text in (row.versions or {}).items()}
    named = ", ".join(f"{name} {text}" for name, text in sorted(versions.items()))
    return "\n".join([*lines, "", f"Versions: {named}.", "", NOTES, ""])


def line(row: Row) -> str:
    if row.rate is None:
        return f"| {row.side} | {row.words} | | at least {GOALS[row.work]:g} x | {row.setting} |"
    if row.side == OURS.name:
        return f"| **{row.side}** | {row.rate:,.0f} | | | {row.setting} |"
    goal = f"at least {GOALS[row.work]:g} x, {'reached' if row.reached else '**short**'}"
    return f"| {row.side} | {row.rate:,.0f} | {times(row)} | {goal} | {row.setting} |"


NOTES = """\
Every library is used as its documents advise, in the fastest of the settings that it offers for two cores, found by a
trial of one epoch: pfl in one process or, by `torchrun`, in two; Flower with one Ray actor of two threads or two of
one; FedLab standalone or as a server with two client processes; fluke and the plain loop (`benchmarks/plain.py`) one
client after another; BlazeFL on a pool of two processes or of two threads, which it wants on a Python 3.14 without the
GIL: on another one its processes are its best mode. It declares Python 3.12 and runs on 3.11; its trainers have no
momentum. pfl, fluke, FedLab and BlazeFL bring their training loop, Flower leaves it to its user. All get normalised
float tensors, Flower and FedLab batches cut from them, which is faster than the DataLoader of their examples. The
network is an ordinary module; ours runs the same layers channels-last with its own convolutions and torch's fused SGD,
and small clients in blocks. No side augments images, clips gradients or evaluates. The samples that each processes are
counted while it trains, and its loss must fall. FedLab imports torchvision, which has no CPU build for this torch, so
its environment sees an empty stand-in (`benchmarks/peers/stand_in`)."""


def with_section(text: str, section: str, body: str) -> str:
    """The document with this section's body; the section goes to its end if it is not there yet."""
    before, there, after = text.partition(section)
    rest = after.partition("\n## ")
    tail = f"\n## {rest[2]}" if there and rest[1] else ""
    return f"{before.rstrip()}\n\n{section}\n{body}{tail}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.peers", description=__doc__)
    parser.add_argument("--turns", type=int, default=2, help="how often each is measured")
    parser.add_argument("--only", default="", help="these libraries alone, by name, separated by commas")
    parser.add_argument("--work", choices=[*TITLES, "all"], default="all", help="one of the two works alone")
    parser.add_argument("--minutes", type=float, default=10, help="the most that one measurement may take")
    parser.add_argument("--docs", action="store_true", help="write the figures into docs/performance.md, too")
    parser.add_argument("--busy", action="store_true", help="say there that the machine was busy")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where to write the results")
    arguments = parser.parse_args()
    console = Console() if Console().is_terminal else Console(width=150)
    names = {name.strip().lower() for name in arguments.only.split(",") if name.strip()}
    peers = [side for side in PEERS if not names or side.name.lower() in names]
    began = time.perf_counter()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])  # all that is started here keeps to them
    missing: dict[str, str] = {}
    for side in peers:
        try:
            install(side)
        except Failed as error:
            missing[side.name] = f"its environment could not be made: {error}"

    def measured(side: Side, job: Job) -> Answer:
        if side.name in missing:
            raise Failed(missing[side.name])
        try:
            answer = measure(side, job, 60 * arguments.minutes)
        except Failed as error:
            console.print(f"{job.work}, {side.name}, {job.setting}: {error}", highlight=False, markup=False)
            raise
        rate = answer.samples / answer.seconds
        console.print(f"{job.work}, {side.name}, {job.setting}: {rate:,.0f} samples a second", highlight=False)
        return answer

    works = list(TITLES) if arguments.work == "all" else [arguments.work]
    rows = [row for work in works for row in compare(work, [OURS, *peers], arguments.turns, measured)]
    console.print(shown(rows))
    result: dict[str, Any] = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(time.perf_counter() - began, 1),
        "machine": f"{cpu()}, {torch.backends.cpu.get_cpu_capability()}",
        "busy": arguments.busy,
        "turns": arguments.turns,
        "rows": [asdict(row) for row in rows],
    }
    arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if arguments.docs:
        PAGE.write_text(with_section(PAGE.read_text(encoding="utf-8"), SECTION, page(result)), encoding="utf-8")
    console.print(f"{result['seconds']:.0f} s; see {arguments.out}", highlight=False)


if __name__ == "__main__":
    main()
