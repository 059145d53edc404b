"""Mutations: faults put into copies of the source on purpose, each of which must make its tests fail.

    python tests/mutations/run.py [WORD ...]     all patches of patches.toml, or those whose name holds a word

A patch replaces text in named files. Every core of the machine has a temporary copy of the tree and tries one patch
after another in it, with the tests that the patch names. A patch that no longer applies, a mutation that its tests do
not see, and tests that fail without any mutation are all failures of this script.
"""

from __future__ import annotations

import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TREE = (
    *("src", "tests", "docs", "benchmarks", "tools"),
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile", "pyproject.toml"),
)
SECONDS = 300  # for the tests of one patch
FAILED = 1  # pytest's exit code when tests ran and some failed; 0 is "all passed", above 1 nothing was tested


def patches() -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = tomllib.loads(Path(__file__).with_name("patches.toml").read_text())["patch"]
    return listed


def named_tests(chosen: Sequence[dict[str, Any]]) -> list[str]:
    return sorted({test for patch in chosen for test in patch["tests"]})


def mutated(patch: dict[str, Any], root: Path) -> dict[Path, str]:
    """The files that a patch changes, as they are afterwards."""
    texts: dict[Path, str] = {}
    for edit in patch["edits"]:
        path = root / edit["file"]
        text = texts.get(path) or path.read_text(encoding="utf-8")
        times = text.count(edit["old"])
        if times != edit.get("times", 1):
            raise ValueError(f"{edit['file']} holds {edit['old']!r} {times} times; correct the patch")
        texts[path] = text.replace(edit["old"], edit["new"])
    return texts


def pytest(root: Path, arguments: Sequence[str], seconds: float) -> tuple[int | None, str]:
    """Run pytest in a tree; its exit code, None if it takes longer than that, and what it printed."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    # No bytecode: a file that is changed and changed back within a second would keep the mutation's.
    environment = {**os.environ, "PYTHONPATH": str(root / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    started = subprocess.Popen(
        command,
        cwd=root,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed = started.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        os.killpg(started.pid, signal.SIGKILL)  # with the processes that its tests have started
        return None, started.communicate()[0]
    return started.returncode, printed


def problem(patch: dict[str, Any], root: Path) -> str | None:
    """What is wrong with a patch or its tests, if anything."""
    try:
        texts = mutated(patch, root)
    except (ValueError, OSError) as error:
        return str(error)
    before = {path: path.read_text(encoding="utf-8") for path in texts}
    try:
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
        code, printed = pytest(root, ["-x", *patch["tests"]], SECONDS)
    finally:
        for path, text in before.items():
            path.write_text(text, encoding="utf-8")
    if code == FAILED:
        return None
    if code is None:
        return f"its tests have not ended after {SECONDS} s"
    return "its tests pass" if code == 0 else f"pytest ended with {code}: {printed[-1500:]}"


def copy_tree(root: Path) -> None:
    for name in TREE:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(source, root / name)


def main(words: list[str]) -> int:
    started, problems = time.monotonic(), list[str]()
    chosen = [p for p in patches() if not words or any(word in p["name"] for word in words)]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with tempfile.TemporaryDirectory(prefix="fednh-mutations-") as folder, ThreadPoolExecutor(cores) as workers:
        trees: queue.Queue[Path] = queue.Queue()
        for number in range(cores):
            tree = Path(folder) / str(number)
            tree.mkdir()
            copy_tree(tree)
            trees.put(tree)
        every = ["-n", str(cores), "--dist", "worksteal", *named_tests(chosen)]
        code, printed = pytest(Path(folder) / "0", every, SECONDS + SECONDS * len(chosen) / 10)
        if code != 0:
            print(f"without any mutation the tests end with {code}:\n{printed[-3000:]}")
            return 1

        def tried(patch: dict[str, Any]) -> tuple[str | None, float]:
            tree, begun = trees.get(), time.monotonic()
            try:
                return problem(patch, tree), time.monotonic() - begun
            finally:
                trees.put(tree)

        pending = {workers.submit(tried, patch): patch["name"] for patch in chosen}
        for future in as_completed(pending):
            found, seconds = future.result()
            print(f"{'NOT SEEN' if found else 'seen    '} {seconds:5.1f} s  {pending[future]}", flush=True)
            problems += [f"{pending[future]}: {found}"] if found else []
    minutes = (time.monotonic() - started) / 60
    print("\n".join(problems))
    print(f"{len(chosen) - len(problems)} mutations seen, {len(problems)} not seen, {minutes:.1f} minutes")
    return 1 if problems or not chosen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
