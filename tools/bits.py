"""The bits of small runs of every method, to show that a refactoring changes none.

    python tools/bits.py bits.json                 record: loop, vmap, Ray, and a deployment of three sites
    python tools/bits.py bits.json --compare       run again and name what differs; exit code 1 if anything does
    python tools/bits.py bits.json --only loop,vmap [--compare]

Bits depend on the processor and on torch's version, so a record is good on one machine only and is not committed.
Everything goes through the command line, which does not move when modules do. A hash is over the metrics of all rounds
and the summary, without seconds, and over the names, shapes and bytes of all saved models.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from fednh.methods import METHODS

DEPLOYED = ("fednh", "fedper", "scaffold", "feddbe")
TIMED = ("seconds", "per_second", "bytes_up", "bytes_down", "started", "finished", "ray", "folder")
COMMON = ["digits", "--rounds", "3", "--clients", "12", "--participation", "0.5", "--seed", "3", "--workers", "1"]
COMMON += ["--set", "eval.every=1", "--quiet"]


def fednh(*words: str) -> str:
    command = [sys.executable, "-m", "fednh", *words]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: exit code {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def without_times(found: Any) -> Any:
    if isinstance(found, dict):
        return {key: without_times(value) for key, value in found.items() if not any(word in key for word in TIMED)}
    return [without_times(each) for each in found] if isinstance(found, list) else found


def bits(run: Path) -> str:
    """The hash of a run folder."""
    digest = hashlib.sha256()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((run / "summary.json").read_text())
    digest.update(json.dumps(without_times([lines, summary]), sort_keys=True).encode())
    for file in sorted(run.rglob("models/**/*.safetensors")):
        for name, value in sorted(load_file(file).items()):
            digest.update(f"{file.relative_to(run)} {name} {value.shape} {value.dtype}".encode() + value.tobytes())
    return digest.hexdigest()[:16]


def simulated(name: str, *more: str) -> str:
    with tempfile.TemporaryDirectory() as place:
        fednh("run", *COMMON, "--method", name, "--out", f"{place}/run", *more)
        return bits(Path(place) / "run")


def deployed(name: str) -> str:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "fed"
        fednh("federation", "init", str(folder), "--sites", "3", "--rounds", "3", "--method", name)
        fednh("federation", "up", str(folder), "--local", "--quiet")
        return bits(folder / "run")


def record(kinds: list[str]) -> dict[str, str]:
    names = list(METHODS)
    jobs: dict[str, Any] = {}
    if "loop" in kinds:
        jobs |= {f"loop {name}": lambda name=name: simulated(name, "--engine", "loop") for name in names}
    if "vmap" in kinds:
        jobs |= {f"vmap {name}": lambda name=name: simulated(name, "--engine", "vmap") for name in names}
    found: dict[str, str] = {}
    with ThreadPoolExecutor(2) as pool:
        for key, digest in zip(jobs, pool.map(_or_refused, jobs.values()), strict=True):
            found[key] = digest
            print(key, digest, flush=True)
    alone = {f"ray {name}": (simulated, name, "--backend", "ray") for name in names if "ray" in kinds}
    alone |= {f"deployed {name}": (deployed, name) for name in DEPLOYED if "deployed" in kinds}
    for key, (job, *words) in alone.items():
        found[key] = job(*words)
        print(key, found[key], flush=True)
    return found


def _or_refused(job: Any) -> str:
    """The hash, or the last words of a refusal: those are part of the behaviour."""
    try:
        return str(job())
    except SystemExit as refused:
        return str(refused)[-160:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--only", default="loop,vmap,ray,deployed")
    asked = parser.parse_args()
    found = record(asked.only.split(","))
    if not asked.compare:
        asked.file.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    before = json.loads(asked.file.read_text())
    differs = [key for key in found if found[key] != before.get(key)]
    print(
        f"{len(found) - len(differs)} of {len(found)} are the same", *(f"differs: {key}" for key in differs), sep="\n"
    )
    return int(bool(differs))


if __name__ == "__main__":
    sys.exit(main())
