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


@pytest.mark.parametrize("patch", mutations.patches(), ids=lambda patch: patch["name"])
def test_it_applies(patch: dict[str, Any]) -> None:
    changed = mutations.mutated(patch, ROOT)
    assert changed
    for path, text in changed.items():
        assert path.read_text(encoding="utf-8") != text
        if path.suffix == ".py":
            compile(text, path, "exec")  # a mutation that is no Python would be seen by any test
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


def test_a_patch_that_no_longer_applies_is_a_failure() -> None:
    gone = {"name": "gone", "tests": [], "edits": [{"file": "README.md", "old": "no such words here", "new": ""}]}
    assert mutations.problem(gone, ROOT) == "README.md holds 'no such words here' 0 times; correct the patch"
