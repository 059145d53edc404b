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

BOX = """
LIMIT, ROOM = 3, 4  # ä


class Box:
    size = 2

    def put(self, thing, at = 1):
        if (thing != 'ß' and   # comment
                self.size>LIMIT): raise ValueError(f"{thing} > {LIMIT}")
        self.size += 1

        self.last = thing  # comment
        return -self.size ** 2, sum(n for n in range(at))

    said = f"at most {LIMIT}"
"""


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


@pytest.mark.soak  # `make soak` tries the mutations themselves
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


def sources_of(root: Path, files: dict[str, str]) -> Any:
    """The sources of a package with these files."""
    for name, text in files.items():
        path = root / mutations.PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return mutations.Sources(root)


def changed(sources: Any, *edits: dict[str, Any]) -> dict[str, str]:
    """The package's files that edits change, as they are afterwards."""
    contents = mutations.mutated(patch_of(*edits), sources)
    return {path.relative_to(mutations.PACKAGE).as_posix(): content.decode() for path, content in contents.items()}


@pytest.mark.parametrize(
    ("where", "old", "new", "text", "becomes"),
    [
        (
            *("Box.put", 'thing != "ß" and (self.size > LIMIT)', "False"),
            *("thing != 'ß' and   # comment\n                self.size>LIMIT", "(False)"),
        ),
        ("Box.put", "self.size ** 2", "a + b", "self.size ** 2", "(a + b)"),
        ("Box.put", "(n for n in range(at))", "at", "(n for n in range(at))", "(at)"),
        ("Box.put", "f'{thing} > {LIMIT}'", '""', 'f"{thing} > {LIMIT}"', '("")'),
        (
            *("Box.put", "self.size += 1\nself.last = thing", "\nif at:\n    a = 1\nb = 2\n"),
            *("self.size += 1\n\n        self.last = thing", "if at:\n            a = 1\n        b = 2"),
        ),
        ("Box.put", "self.last = thing", "", "self.last = thing", ""),
        ("Box.size", "size = 2", "size = 5", "size = 2", "size = 5"),
        ("ROOM", "4", "5", "4", "(5)"),
    ],
    ids=["layout", "power", "generator", "f-string", "statements", "removed", "attribute", "constant"],
)
def test_only_the_code_is_replaced(where: str, old: str, new: str, text: str, becomes: str, tmp_path: Path) -> None:
    assert BOX.count(text) == 1
    sources = sources_of(tmp_path, {"box.py": BOX})
    assert changed(sources, {"in": where, "old": old, "new": new}) == {"box.py": BOX.replace(text, becomes)}


def test_every_occurrence_is_replaced_by_every_edit(tmp_path: Path) -> None:
    before = BOX.replace("self.size += 1", "")
    first = {"in": "Box.put", "old": "self.size", "new": "0", "times": 2}
    second = {"in": "LIMIT", "old": "3", "new": "9"}
    after = before.replace("self.size", "(0)").replace("3,", "(9),")
    assert changed(sources_of(tmp_path, {"box.py": before}), first, second) == {"box.py": after}


@pytest.mark.parametrize("file", ["box.py", "shelf.py", "deep/box.py", "deep/__init__.py"])
def test_code_that_moved_is_found(file: str, tmp_path: Path) -> None:
    sources = sources_of(tmp_path, {"other.py": "def put():\n    self.size += 1\n", file: "import os\n" + BOX})
    after = "import os\n" + BOX.replace("self.size += 1", "pass")
    assert changed(sources, {"in": "Box.put", "old": "self.size += 1", "new": "pass"}) == {file: after}


def test_a_name_of_several_modules_needs_the_end_of_ones_path(tmp_path: Path) -> None:
    sources = sources_of(tmp_path, dict.fromkeys(("box.py", "deep/box.py", "deep/bigbox.py"), BOX))
    edit = {"old": "2", "new": "3"}
    for name, modules in {
        "Box.size": "fednh.box and fednh.deep.bigbox and fednh.deep.box",
        "box:Box.size": "fednh.box and fednh.deep.box",
    }.items():
        with pytest.raises(ValueError, match=f"tried: {name} is defined in {modules}; correct the patch"):
            changed(sources, {"in": name, **edit})
    assert list(changed(sources, {"in": "bigbox:Box.size", **edit})) == ["deep/bigbox.py"]
    assert list(changed(sources, {"in": "deep.box:Box.size", **edit})) == ["deep/box.py"]


def test_a_package_has_the_name_of_its_folder(tmp_path: Path) -> None:
    sources = sources_of(tmp_path, dict.fromkeys(("box.py", "deep/__init__.py"), BOX))
    assert list(changed(sources, {"in": "deep:Box.size", "old": "2", "new": "3"})) == ["deep/__init__.py"]


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        ({"in": "Box.take", "old": "1"}, "Box.take is defined in no module"),
        ({"in": "shelf:Box.put", "old": "1"}, "shelf:Box.put is defined in no module"),
        ({"in": "Box.put", "old": "LIMIT > self.size"}, "Box.put holds 'LIMIT > self.size' 0 times"),
        ({"in": "Box.put", "old": "self.last = thing\nself.size += 1"}, "Box.put holds .* 0 times"),
        ({"in": "Box.put", "old": ""}, "Box.put holds '' 0 times"),
        ({"in": "Box.put", "old": "self.size"}, "Box.put holds 'self.size' 2 times"),
        ({"in": "Box.put", "old": "self.size", "times": 3}, "Box.put holds 'self.size' 2 times"),
        ({"in": "Box.said", "old": "LIMIT"}, "Box.said holds 'LIMIT' 0 times"),
        ({"in": "Box.put", "old": "if"}, "invalid syntax"),
        ({"file": "box.c", "old": "1"}, "No such file"),
    ],
)
def test_an_edit_that_does_not_fit_is_refused(edit: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"tried: .*{why}.*; correct the patch"):
        changed(sources_of(tmp_path, {"box.py": BOX}), {"new": "0", **edit})


def test_two_edits_of_the_same_code_are_refused(tmp_path: Path) -> None:
    edits = [{"in": "Box.put", "old": old, "new": "0"} for old in ("-self.size ** 2", "self.size ** 2")]
    with pytest.raises(ValueError, match="tried: two edits change the same part"):
        changed(sources_of(tmp_path, {"box.py": BOX}), *edits)
