"""Mutations: faults put into a copy of the source on purpose, each of which must make its tests fail.

    python tests/mutations/run.py [WORD ...]     all patches of patches.toml, or those whose name holds a word

A patch replaces text in named files, in a temporary copy of the tree. A patch that no longer applies, a mutation that
its tests do not see, and tests that fail without any mutation are all failures of this script.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TREE = (
    "src",
    "tests",
    "docs",
    "benchmarks",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "Makefile",
    "pyproject.toml",
)
SECONDS = 600
FAILED = 1  # pytest's exit code when tests ran and some failed; 0 is "all passed", above 1 nothing was tested


def patches() -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = tomllib.loads(Path(__file__).with_name("patches.toml").read_text())["patch"]
    return listed


def mutated(patch: dict[str, Any], root: Path) -> dict[Path, str]:
    """The files that a patch changes, as they are afterwards."""
    texts: dict[Path, str] = {}
    for edit in patch["edits"]:
        path = root / edit["file"]
        text = texts.get(path) or path.read_text(encoding="utf-8")
        times = text.count(edit["old"])
        if times != edit.get("times", 1):
            raise ValueError(f"{patch['name']}: {edit['file']} holds {edit['old']!r} {times} times; correct the patch")
        texts[path] = text.replace(edit["old"], edit["new"])
    return texts


def pytest(root: Path, tests: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *tests]
    # No bytecode: a file that is changed and changed back within a second would keep the mutation's.
    environment = {**os.environ, "PYTHONPATH": str(root / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )


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
        done = pytest(root, patch["tests"])
    finally:
        for path, text in before.items():
            path.write_text(text, encoding="utf-8")
    if done.returncode == FAILED:
        return None
    seen = "its tests pass" if done.returncode == 0 else f"pytest ended with {done.returncode}: {done.stdout[-1500:]}"
    return f"{patch['name']}: {seen}"


def main(words: list[str]) -> int:
    chosen = [p for p in patches() if not words or any(word in p["name"] for word in words)]
    with tempfile.TemporaryDirectory(prefix="fednh-mutations-") as folder:
        root = Path(folder)
        for name in TREE:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
            else:
                shutil.copy(source, root / name)
        whole = pytest(root, sorted({test for patch in chosen for test in patch["tests"]}))
        if whole.returncode:
            print(f"without any mutation the tests end with {whole.returncode}:\n{whole.stdout[-3000:]}")
            return 1
        problems = []
        for patch in chosen:
            found = problem(patch, root)
            print(f"{'SURVIVED' if found else 'seen    '} {patch['name']}", flush=True)
            problems += [found] if found else []
    print("\n".join([*problems, f"{len(chosen) - len(problems)} of {len(chosen)} mutations were seen by their tests"]))
    return 1 if problems or not chosen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
