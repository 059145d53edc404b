"""Mutations: faults put into copies of the source on purpose, each of which must make its tests fail.

    python tests/mutations/run.py [WORD ...]     all patches of patches.toml, or those whose name holds a word

A patch names definitions of the package and replaces code in them; patches.toml says how. Every core of the machine
has a temporary copy of the tree and tries one patch after another in it, with the tests that the patch names. A patch
that no longer applies, a mutation that its tests do not see, and tests that fail without any mutation are all failures
of this script.
"""

from __future__ import annotations

import ast
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TREE = (
    *("src", "tests", "docs", "benchmarks", "tools"),
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile", "pyproject.toml"),
)
PACKAGE = Path("src", "fednh")
SECONDS = 300  # for the tests of one patch
FAILED = 1  # pytest's exit code when tests ran and some failed; 0 is "all passed", above 1 nothing was tested


def patches() -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = tomllib.loads(Path(__file__).with_name("patches.toml").read_text())["patch"]
    return listed


def named_tests(chosen: Sequence[dict[str, Any]]) -> list[str]:
    return sorted({test for patch in chosen for test in patch["tests"]})


class Sources:
    """The files of a tree as they are without a mutation. Every module of the package is parsed once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._contents: dict[Path, bytes] = {}
        self._files: dict[str, Path] = {}
        self._defined: dict[str, dict[str, list[ast.stmt]]] = defaultdict(lambda: defaultdict(list))
        for file in sorted((root / PACKAGE).rglob("*.py")):
            path = file.relative_to(root)
            module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
            self._files[module] = path
            for name, node in definitions(ast.parse(self.content(path))):
                self._defined[name][module].append(node)

    def content(self, path: Path) -> bytes:
        if path not in self._contents:
            self._contents[path] = (self.root / path).read_bytes()
        return self._contents[path]

    def find(self, name: str) -> tuple[Path, list[ast.stmt]]:
        """The file that defines a name, and the statements there that do: a property's setter has its getter's name."""
        ending, _, qualified = name.rpartition(":")
        everywhere = self._defined.get(qualified, {})
        found = [module for module in everywhere if not ending or f".{module}".endswith(f".{ending}")]
        if len(found) != 1:
            raise ValueError(f"{name} is defined in {' and '.join(found) or 'no module'}")
        return self._files[found[0]], everywhere[found[0]]


def definitions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.stmt]]:
    """What a module defines, by qualified name: functions, classes, and the names that they and it assign."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + child.name, child
            yield from definitions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.Assign | ast.AnnAssign):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            nodes = (node for target in targets for node in ast.walk(target))
            names = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
            yield from ((prefix + name, child) for name in names)
        elif isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from definitions(child, prefix)


def parsed(code: str) -> list[ast.expr] | list[ast.stmt]:
    """An expression, or else statements."""
    try:
        return [ast.parse(code, mode="eval").body]
    except SyntaxError:
        return ast.parse(code).body


def is_expression(nodes: Sequence[ast.AST]) -> bool:
    return len(nodes) == 1 and isinstance(nodes[0], ast.expr)


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """A node and those in it, except those in an f-string: Python 3.11 does not know where in the file they are."""
    yield node
    if not isinstance(node, ast.JoinedStr):
        for child in ast.iter_child_nodes(node):
            yield from walk(child)


def occurrences(scope: Sequence[ast.stmt], wanted: Sequence[ast.AST]) -> Iterator[Sequence[Any]]:
    """The nodes in a definition that are the wanted ones, whatever their layout and comments are."""
    inside = [node for statement in scope for node in walk(statement)]
    if is_expression(wanted):
        rows: list[list[Any]] = [[node] for node in inside if isinstance(node, ast.expr)]
    else:
        blocks = (getattr(node, name, None) for node in inside for name in ("body", "orelse", "finalbody"))
        rows = [*([statement] for statement in scope), *(block for block in blocks if isinstance(block, list))]
    dumps = [ast.dump(node) for node in wanted]
    for row in rows if dumps else ():
        for first in range(len(row) - len(dumps) + 1):
            part = row[first : first + len(dumps)]
            if all(ast.dump(node) == dump for node, dump in zip(part, dumps, strict=True)):
                yield part


def replacement(content: bytes, nodes: Sequence[Any], new: str) -> tuple[int, int, bytes]:
    """Where in a file nodes begin and end, and what replaces them there."""
    lines = content.splitlines(keepends=True)

    def offset(line: int, column: int) -> int:
        return sum(map(len, lines[: line - 1])) + column

    first, last = nodes[0], nodes[-1]
    top = min(node.lineno for node in (first, *getattr(first, "decorator_list", ())))
    if is_expression(nodes) and is_expression(parsed(new)):
        new = f"({new})"  # whatever stands beside it binds no part of it
    else:
        new = new.replace("\n", "\n" + " " * first.col_offset)
    return offset(top, first.col_offset), offset(last.end_lineno, last.end_col_offset), new.encode()


def replacements(edit: dict[str, Any], sources: Sources) -> tuple[Path, list[tuple[int, int, bytes]]]:
    """The file that an edit changes, and the parts of it that are replaced: from, to, by what."""
    if "file" in edit:
        path = Path(edit["file"])
        places = re.finditer(re.escape(edit["old"].encode()), sources.content(path))
        found = [(*place.span(), edit["new"].encode()) for place in places]
    else:
        old, new = (textwrap.dedent(edit[key]).strip("\n") for key in ("old", "new"))
        path, scope = sources.find(edit["in"])
        found = [replacement(sources.content(path), nodes, new) for nodes in occurrences(scope, parsed(old))]
    if len(found) != edit.get("times", 1):
        raise ValueError(f"{edit.get('in', path)} holds {edit['old']!r} {len(found)} times")
    return path, found


def mutated(patch: dict[str, Any], sources: Sources) -> dict[Path, bytes]:
    """The files that a patch changes, as they are afterwards."""
    changes: dict[Path, list[tuple[int, int, bytes]]] = defaultdict(list)
    contents: dict[Path, bytes] = {}
    try:
        for edit in patch["edits"]:
            path, found = replacements(edit, sources)
            changes[path] += found
        for path, parts in changes.items():
            content, after = sources.content(path), len(sources.content(path))
            for start, end, new in sorted(parts, reverse=True):
                if end > after:
                    raise ValueError(f"two edits change the same part of {path}")
                content, after = content[:start] + new + content[end:], start
            contents[path] = content
    except (ValueError, SyntaxError, OSError) as error:
        raise ValueError(f"{patch['name']}: {error}; correct the patch") from error
    return contents


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


def problem(patch: dict[str, Any], sources: Sources, root: Path) -> str | None:
    """What is wrong with a patch or its tests in a tree, if anything."""
    try:
        contents = mutated(patch, sources)
    except ValueError as error:
        return str(error)
    try:
        for path, content in contents.items():
            (root / path).write_bytes(content)
        code, printed = pytest(root, ["-x", *patch["tests"]], SECONDS)
    finally:
        for path in contents:
            (root / path).write_bytes(sources.content(path))
    if code == FAILED:
        return None
    if code is None:
        return f"{patch['name']}: its tests have not ended after {SECONDS} s"
    what = "its tests pass" if code == 0 else f"pytest ended with {code}: {printed[-1500:]}"
    return f"{patch['name']}: {what}"


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
        unchanged, *changing = (Path(folder) / str(number) for number in range(cores + 1))
        for tree in (unchanged, *changing):
            tree.mkdir()
            copy_tree(tree)
        for tree in changing:
            trees.put(tree)
        sources = Sources(unchanged)
        every = ["-n", str(cores), "--dist", "worksteal", *named_tests(chosen)]
        code, printed = pytest(unchanged, every, SECONDS + SECONDS * len(chosen) / 10)
        if code != 0:
            print(f"without any mutation the tests end with {code}:\n{printed[-3000:]}")
            return 1

        def tried(patch: dict[str, Any]) -> tuple[str | None, float]:
            tree, begun = trees.get(), time.monotonic()
            try:
                return problem(patch, sources, tree), time.monotonic() - begun
            finally:
                trees.put(tree)

        pending = {workers.submit(tried, patch): patch["name"] for patch in chosen}
        for future in as_completed(pending):
            found, seconds = future.result()
            print(f"{'NOT SEEN' if found else 'seen    '} {seconds:5.1f} s  {pending[future]}", flush=True)
            problems += [found] if found else []
    minutes = (time.monotonic() - started) / 60
    print("\n".join(problems))
    print(f"{len(chosen) - len(problems)} mutations seen, {len(problems)} not seen, {minutes:.1f} minutes")
    return 1 if problems or not chosen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
