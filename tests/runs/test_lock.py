"""One process at a time in a folder: the others are told who it is, and a killed one does not stay."""

import fcntl
import os
import signal
import socket
from pathlib import Path

import pytest

from fednh.errors import UserError
from fednh.io.files import at_work, exclusive


def test_who_comes_second_is_told_who_is_there(tmp_path: Path) -> None:
    folder, file = tmp_path / "run", tmp_path / "run/.lock"
    with exclusive(folder, file):
        holder = file.read_text()
        assert holder.startswith(f"process {os.getpid()} on {socket.gethostname()} (")
        for movable, advice in ((True, "; wait for it or choose another folder"), (False, "; wait for it")):
            with pytest.raises(UserError) as told, exclusive(folder, file, movable):
                raise AssertionError("two at once")
            assert str(told.value) == f"{folder} is in use by {holder}{advice}"
        assert file.read_text() == holder
        assert at_work(file)
    assert list(folder.iterdir()) == []
    with exclusive(folder, file):
        pass


def test_who_opened_the_file_before_it_was_free_locks_the_same_file(tmp_path: Path) -> None:
    """Else two processes work in one folder: one holds the file that was removed, the other the one made after it."""
    folder, file = tmp_path / "run", tmp_path / "run/.lock"
    with exclusive(folder, file):
        (folder / "config.toml").touch()
        early = file.open("a")
    assert (file.read_bytes(), at_work(file)) == (b"", False)
    with early:
        fcntl.flock(early, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(UserError, match="is in use by another process"), exclusive(folder, file):
            raise AssertionError("two at once")
    with exclusive(folder, file):
        assert at_work(file)


def test_the_lock_of_a_killed_process_is_none(tmp_path: Path) -> None:
    folder, file = tmp_path / "run", tmp_path / "run/.lock"
    if (child := os.fork()) == 0:
        with exclusive(folder, file):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert file.read_text().startswith(f"process {child} on ")
    assert not at_work(file)
    with exclusive(folder, file):
        assert file.read_text().startswith(f"process {os.getpid()} on ")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(UserError, match=r"file cannot be written: .*; choose another folder$"),
        exclusive(tmp_path / "file", tmp_path / "file/.lock"),
    ):
        pass
