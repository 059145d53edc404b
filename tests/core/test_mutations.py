"""Every mutation still applies and names tests that exist; `make soak` checks that these see it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("mutations", ROOT / "tests" / "mutations" / "run.py")
assert SPEC is not None
assert SPEC.loader is not None
mutations = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(mutations)


@pytest.fixture(scope="module")
def sources() -> Any:
    return mutations.Sources(ROOT)


@pytest.mark.parametrize("patch", mutations.patches(), ids=lambda patch: patch["name"])
def test_it_applies(patch: dict[str, Any], sources: Any) -> None:
    contents = mutations.mutated(patch, sources)
    assert contents
    for path, content in contents.items():
        assert sources.content(path) != content
        if path.suffix == ".py":
            compile(content, path, "exec")  # a mutation that is no Python would be seen by any test
    assert patch["tests"]


def test_every_named_test_exists_and_is_none_of_the_long_ones() -> None:
    named = mutations.named_tests(mutations.patches())
    code, printed = mutations.pytest(ROOT, ["--collect-only", *named], mutations.SECONDS)
    assert code == 0, printed[-3000:]
    found = set(printed.split("\n"))
    parts = {part for test in found for part in (test, test.partition("[")[0], test.partition("::")[0])}
    assert set(named) <= parts


def test_names_are_distinct() -> None:
    names = [patch["name"] for patch in mutations.patches()]
    assert len(set(names)) == len(names)


def test_python_is_never_changed_as_text() -> None:
    edits = [edit for patch in mutations.patches() for edit in patch["edits"]]
    assert not [edit for edit in edits if edit.get("file", "").endswith(".py")]


def test_a_patch_that_no_longer_applies_is_a_failure(sources: Any) -> None:
    gone = patch_of({"file": "README.md", "old": "no such words here", "new": ""})
    problem = mutations.problem(gone, sources, ROOT)
    assert problem == "tried: README.md holds 'no such words here' 0 times; correct the patch"


def patch_of(*edits: dict[str, Any]) -> dict[str, Any]:
    return {"name": "tried", "tests": ["none.py"], "edits": edits}
