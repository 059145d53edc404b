"""Run all benchmarks, print the table, write results.json."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import features, private_steps, scale, speed
from benchmarks.row import Row
from fednh.config import load
from fednh.runs.run_folder import environment

RESULTS = Path(__file__).with_name("results.json")


def all_rows(quick: bool) -> Iterator[Row]:
    yield from speed.rows()
    yield from private_steps.rows()
    yield from features.rows()
    yield from scale.rows(quick)


def shown(rows: list[Row]) -> Table:
    table = Table("figure", "value", "goal", "", "how", caption="ratios measured alternately in one run")
    for row in rows:
        sign = "at most" if row.at_most else "at least"
        mark = "pass" if row.reached else "[bold]short[/bold]"
        table.add_row(row.name, f"{row.value:.2f} {row.unit}", f"{sign} {row.goal:g} {row.unit}", mark, row.detail)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller measurements of memory and scale")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where to write the results")
    arguments = parser.parse_args()
    console = Console() if Console().is_terminal else Console(width=150)
    started, rows = time.perf_counter(), list[Row]()
    for row in all_rows(arguments.quick):
        rows.append(row)
        console.print(f"{row.name}: {row.value:.2f} {row.unit}", highlight=False)
    console.print(shown(rows))
    result = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(time.perf_counter() - started, 1),
        "environment": environment(load("digits", {})),
        "rows": [{**asdict(row), "reached": row.reached} for row in rows],
    }
    arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    short = sum(not row.reached for row in rows)
    console.print(f"{len(rows) - short} of {len(rows)} goals reached in {result['seconds']:.0f} s; see {arguments.out}")


if __name__ == "__main__":
    main()
