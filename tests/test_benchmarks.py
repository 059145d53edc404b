"""What benchmarks measure with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks import cluster

ROOT = Path(__file__).parents[1]


def test_peak_memory_is_that_of_the_process_alone() -> None:
    """A process inherits `ru_maxrss` from the one that started it: a large benchmark would be measured instead."""
    held = bytearray(b"x") * 1_200_000_000
    command = [sys.executable, "-c", "from benchmarks.scale import peak_memory; print(peak_memory())"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    assert 5_000_000 < int(found.stdout) < len(held)


def test_the_page_about_clusters_says_what_was_measured() -> None:
    """`python -m benchmarks.cluster --docs` writes both."""
    result = json.loads((ROOT / "benchmarks/cluster.json").read_text(encoding="utf-8"))
    assert (ROOT / "docs/clusters.md").read_text(encoding="utf-8").endswith(f"## Speed\n\n{cluster.page(result)}")
