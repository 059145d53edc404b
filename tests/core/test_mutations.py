"""Every mutation still applies and names tests that exist; `make soak` checks that these see it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("mutations", ROOT / "tests" / "mutations" / "run.py")
assert SPEC is not None
assert SPEC.loader is not None
mutations = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(mutations)


@pytest.mark.parametrize("patch", mutations.patches(), ids=lambda patch: patch["name"])
def test_it_applies(patch: dict) -> None:  # type: ignore[type-arg]
    changed = mutations.mutated(patch, ROOT)
    assert all(path.read_text(encoding="utf-8") != text for path, text in changed.items())
    assert changed
    for test in patch["tests"]:
        assert (ROOT / test.partition("::")[0]).is_file(), test


def test_a_patch_that_no_longer_applies_is_a_failure() -> None:
    gone = {"name": "gone", "tests": [], "edits": [{"file": "README.md", "old": "no such words here", "new": ""}]}
    assert mutations.problem(gone, ROOT) == "gone: README.md holds 'no such words here' 0 times; correct the patch"
