"""A chained log against those who would change it: edits, deletions, insertions, other orders, crashes, crowds."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from multiprocessing import get_context
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fednh.io import chain


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "audit.jsonl"
    chain.append(path, "joined", site="a\nb", classes=["x", "y"])
    for round_ in (1, 2, 3):
        chain.append(path, "left", round=round_, loss=float("nan"))
    chain.append(path, "refused", why='it says "no" \x1b[2J')
    return path


def test_the_form_of_a_line_by_hand(log: Path) -> None:
    """A line's hash is that of everything before it, and it names the hash of the one before."""
    before = "0" * 64
    for number, line in enumerate(log.read_bytes().splitlines(), 1):
        row = json.loads(line)
        body = line[: -len(', "hash": ""}') - 64]
        assert row["hash"] == hashlib.sha256(body).hexdigest()
        assert (row["line"], row["before"]) == (number, before)
        before = row["hash"]
    assert number == 5
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    found = chain.read(log)
    assert found.problem is None
    assert found.head == (5, before)
    assert [row["event"] for row in found.lines] == ["joined", "left", "left", "left", "refused"]


def edited(content: bytes, draw: st.DataObject) -> bytes:
    """One thing that somebody could do to the file."""
    lines = content.splitlines(keepends=True)
    at, other = (draw.draw(st.integers(0, len(lines) - 1)) for _ in range(2))
    place, word = draw.draw(st.integers(0, len(content))), draw.draw(st.binary(min_size=1, max_size=4) | st.just(b"\n"))
    length = draw.draw(st.integers(1, 400))
    match draw.draw(st.sampled_from(["edit", "cut", "insert", "drop", "twice", "move", "swap", "end"])):
        case "edit":
            return content[:place] + word + content[place + len(word) :]
        case "cut":
            return content[:place] + content[place + length :]
        case "insert":
            return content[:place] + word + content[place:]
        case "drop":
            del lines[at]
        case "twice":
            lines.insert(other, lines[at])
        case "move":
            lines.insert(other, lines.pop(at))
        case "swap":
            lines[at], lines[other] = lines[other], lines[at]
        case "end":
            return content[:place]
    return b"".join(lines)


@pytest.mark.parametrize("examples", [150, pytest.param(5000, marks=pytest.mark.soak)])
def test_whatever_is_done_to_a_log_is_found(examples: int, log: Path) -> None:
    settings(max_examples=examples, deadline=None)(given(draw=st.data())(found))(log=log)


def found(draw: st.DataObject, log: Path) -> None:
    """By the chain alone, unless whole lines were cut off the end; with the newest hash, that too."""
    content = log.read_bytes()
    changed = edited(content, draw)
    if changed == content:
        return
    path = log.with_name("changed.jsonl")
    path.write_bytes(changed)
    found, head = chain.read(path), chain.read(log).head
    assert head is not None
    assert found.problem or found.lacks([head])
    if not (content.startswith(changed) and changed[-1:] in (b"", b"\n")):
        assert found.problem
        assert found.problem.startswith("line ")


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
def test_the_line_is_named(number: int, log: Path, tmp_path: Path) -> None:
    lines = log.read_bytes().splitlines(keepends=True)
    lines[number - 1] = lines[number - 1].replace(b'"time": "2', b'"time": "3')
    (tmp_path / "x").write_bytes(b"".join(lines))
    found = chain.read(tmp_path / "x")
    assert found.problem == f"line {number} was changed: it does not match its own hash"
    assert [row["line"] for row in found.lines] == list(range(1, number))


def test_a_log_written_anew_is_another_log(log: Path, tmp_path: Path) -> None:
    """Somebody with the owner's rights can make a whole chain; only a hash that the other side knows tells."""
    for _ in range(5):
        chain.append(tmp_path / "new.jsonl", "left", round=1)
    new, head = chain.read(tmp_path / "new.jsonl"), chain.read(log).head
    assert head is not None
    assert new.problem is None
    assert new.lacks([head]) == "line 5 is not the one that the other side knows: the log was written anew"
    assert chain.read(log).lacks([head]) is None


def test_a_whole_line_of_another_log_is_found(log: Path, tmp_path: Path) -> None:
    """It has the right number and matches its own hash."""
    for _ in range(5):
        chain.append(tmp_path / "other.jsonl", "left", round=1)
    lines, others = ((tmp_path / "other.jsonl").read_bytes().splitlines(keepends=True), log.read_bytes())
    mixed = others.splitlines(keepends=True)[:2] + lines[2:]
    (tmp_path / "mixed.jsonl").write_bytes(b"".join(mixed))
    assert str(chain.read(tmp_path / "mixed.jsonl").problem).startswith("line 3 does not follow the one before")


@pytest.mark.parametrize("cut", [1, 2, 40, 10_000])
def test_a_kill_in_the_middle_of_a_line(cut: int, tmp_path: Path) -> None:
    """Whatever part of a line reached the disk: the next line goes on, nothing is lost, and it is told."""
    path = tmp_path / "audit.jsonl"
    chain.append(path, "joined", site="a")
    whole = path.read_bytes()
    chain.append(path, "left", words="x" * 9_000)
    path.write_bytes(path.read_bytes()[: max(-cut, len(whole) + 7 - len(path.read_bytes()))])
    assert "cut short" in str(chain.read(path).problem)
    chain.append(path, "left", round=2)
    found = chain.read(path)
    assert found.problem is None
    assert path.read_bytes().startswith(whole)
    middle = ["left"] if cut == 1 else ["torn"]  # without its end of line a line is still whole
    assert [row["event"] for row in found.lines] == ["joined", *middle, "left"]


def test_a_second_kill_while_the_first_is_told(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    chain.append(path, "joined", site="a")
    with path.open("ab") as file:
        file.write(b'{"line": 2, "time": "20')
    chain.append(path, "left", round=1)
    content = path.read_bytes()
    path.write_bytes(content[: content.index(b'"torn"')])  # of the line that tells of the first
    chain.append(path, "left", round=2)
    found = chain.read(path)
    assert found.problem is None
    assert [(row["line"], row["event"]) for row in found.lines] == [(1, "joined"), (4, "torn"), (5, "left")]


def test_a_changed_last_line_is_not_taken_for_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    chain.append(path, "left", round=1)
    path.write_bytes(path.read_bytes().replace(b'"round": 1', b'"round": 2'))
    chain.append(path, "left", round=3)
    assert chain.read(path).problem == "line 1 was changed: it does not match its own hash"
    path.write_bytes(b"junk\n")
    chain.append(path, "left", round=3)
    assert chain.read(path).problem == "line 1 is no line of a log"


def test_many_processes_write_at_once(tmp_path: Path) -> None:
    """As ClientApps do: every line is there, whole and in one chain."""
    path = tmp_path / "audit.jsonl"

    def write(who: str) -> None:
        for k in range(20):
            chain.append(path, "left", who=who, k=k, words="x" * 5000)

    running = [get_context("fork").Process(target=write, args=(who,)) for who in "012"]
    for process in running:
        process.start()
    for process in running:
        process.join(60)
    assert [process.exitcode for process in running] == [0, 0, 0]
    found = chain.read(path)
    assert found.problem is None
    for who in "012":
        assert [row["k"] for row in found.lines if row["who"] == who] == list(range(20))


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("mine")
    (tmp_path / "audit.jsonl").symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic links"):
        chain.append(tmp_path / "audit.jsonl", "left")
    assert (tmp_path / "other").read_text() == "mine"


def test_lines_are_only_ever_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the owner may set the append-only mark; and every line is synced before anything is sent."""
    done: list[str] = []
    truncate, sync = os.ftruncate, os.fsync
    monkeypatch.setattr(os, "ftruncate", lambda *a: (done.append("truncate"), truncate(*a)))
    monkeypatch.setattr(os, "fsync", lambda *a: (done.append("fsync"), sync(*a)))
    before = b""
    for k in range(3):
        chain.append(tmp_path / "audit.jsonl", "left", round=k)
        content = (tmp_path / "audit.jsonl").read_bytes()
        assert content.startswith(before)
        before = content
    assert done == ["fsync", "fsync", "fsync", "fsync"]  # a line each, and the new file's folder
