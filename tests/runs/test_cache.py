"""One module decides where things lie that belong to no run, and everybody asks it."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import pytest

import fednh
from fednh.errors import UserError
from fednh.io import cache
from tests.helpers.process import fednh as command


def test_where_data_sets_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDNH_DATA", "~/elsewhere")
    assert cache.data_folder() == Path.home() / "elsewhere"
    assert cache.data_folder("~/chosen") == Path.home() / "chosen"
    assert cache.data_folder(Path("here")) == Path("here")
    for unset in ("", None):
        if unset is None:
            monkeypatch.delenv("FEDNH_DATA")
        else:
            monkeypatch.setenv("FEDNH_DATA", unset)
        assert cache.data_folder() == Path.home() / ".cache" / "fednh"


def test_where_results_lie_that_can_be_made_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FEDNH_CACHE", str(tmp_path))
    assert cache.folder("images") == tmp_path / "images"
    monkeypatch.setenv("FEDNH_CACHE", "~/elsewhere")
    assert cache.folder("prototypes") == Path.home() / "elsewhere" / "prototypes"
    monkeypatch.setenv("FEDNH_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.folder("images") == tmp_path / "xdg" / "fednh" / "images"


@pytest.mark.parametrize("variable", ["FEDNH_DATA", "FEDNH_CACHE"])
def test_a_home_that_nobody_has(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "~no-such-person/x")
    ask = cache.data_folder if variable == "FEDNH_DATA" else lambda: cache.folder("images")
    with pytest.raises(UserError, match="~no-such-person/x names a person that this computer does not know"):
        ask()


@pytest.mark.parametrize(
    "words",
    [
        ["datasets", "--data-dir", "~no-such-person/x"],
        ["inspect", "--data", "npz:~no-such-person/x.npz"],
        ["inspect", "--data", "hf:~no-such-person/x"],
        ["inspect", "--data", "digits", "--data-dir", "~no-such-person/x"],
    ],
)
def test_on_the_command_line_it_is_one_sentence(words: list[str], tmp_path: Path) -> None:
    said = command(words, tmp_path)
    assert (said.code, said.stderr.count("\n")) == (2, 1), said.stderr
    assert "names a person that this computer does not know; write the path in full" in said.stderr


def test_a_result_is_kept_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "new" / "a.bin"
    assert cache.keep(file, lambda draft: draft.write_bytes(b"whole"))
    assert file.read_bytes() == b"whole"

    def breaks_off(draft: Path) -> None:
        draft.write_bytes(b"ha")
        raise OSError(28, "No space left on device")

    assert not cache.keep(file, breaks_off)
    assert not cache.keep(file / "below a file", lambda draft: draft.write_bytes(b"x"))

    def is_stopped(draft: Path) -> None:
        draft.write_bytes(b"ha")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.keep(file, is_stopped)
    assert [path.name for path in file.parent.iterdir()] == ["a.bin"]
    assert file.read_bytes() == b"whole"


def test_two_that_write_the_same_result_do_not_meet(tmp_path: Path) -> None:
    file, both = tmp_path / "a.bin", threading.Barrier(2)

    def write(draft: Path, content: bytes) -> None:
        draft.write_bytes(content[:1])
        both.wait(10)  # both are half-way
        draft.write_bytes(content)

    contents = (b"x" * 9, b"y" * 9)
    threads = [threading.Thread(target=cache.keep, args=(file, lambda d, c=c: write(d, c))) for c in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert file.read_bytes() in contents
    assert os.listdir(tmp_path) == ["a.bin"]  # noqa: PTH208


def test_nobody_else_decides_where_things_lie() -> None:
    root = Path(fednh.__file__).parent
    spelled = re.compile(r"FEDNH_(CACHE|DATA)\b|platformdirs|\B[.]cache\b|Path[.]home\(\)|expanduser")
    code = {file: re.sub(r"#.*", "", file.read_text(encoding="utf-8")) for file in root.rglob("*.py")}
    found = {str(file.relative_to(root)) for file, text in code.items() if spelled.search(text)}
    assert found == {"io/cache.py", "io/files.py", "data/published/__init__.py"}  # the last in a message


def test_a_user_without_a_home_has_no_cache_and_runs_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A container may run as a number that no user has; then `~` means nothing."""
    monkeypatch.chdir(tmp_path)
    for name in ("HOME", "FEDNH_DATA", "FEDNH_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
    assert cache.data_folder() == Path("/nonexistent/fednh")
    assert cache.folder("images") == Path("/nonexistent/fednh/images")
    ended = command(["datasets"], tmp_path / "log", inherit=True)
    assert (ended.code, "digits" in ended.stdout) == (0, True), ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["log"], "no folder that is called ~"
