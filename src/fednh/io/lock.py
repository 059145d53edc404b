"""Lock files: one process at a time works in a folder, and an error names the process that holds it.

The lock is the operating system's (flock, through filelock): it ends with its process, however that ends.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from fednh.errors import UserError
from fednh.io.files import make_folder


@contextmanager
def exclusive(folder: Path, file: Path, option: str = "--out") -> Iterator[None]:
    """Hold the lock `file` while working in `folder`; a UserError if another process has it, or none can be made.

    The file names the process that holds it, and is empty afterwards: a process that has opened it and one that comes
    later must lock the same file. It is removed only if its folder has nothing else. `option` chooses the folder.
    """
    lock, another = FileLock(file), f"choose another {option}"
    try:
        make_folder(file.parent)
        lock.acquire(blocking=False)
    except Timeout:
        wait = f"wait for it or {another}" if option else "wait for it"
        raise UserError(f"{folder} is in use by {holder(file) or 'another process'}; {wait}") from None
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written: {error.strerror}; {another if option else 'mend that'}"
        ) from error
    try:
        file.write_text(this_process(), encoding="utf-8")
        yield
    finally:
        with suppress(FileNotFoundError):  # the folder was deleted meanwhile
            if any(path != file for path in file.parent.iterdir()):
                os.truncate(file, 0)
            else:
                file.unlink()
        lock.release()


def this_process() -> str:
    """Process, machine and command."""
    program, *words = sys.argv or [""]
    name = "fednh" if Path(program).name == "__main__.py" else Path(program).name
    command = shlex.join([name, *words])
    command = command if len(command) <= 200 else f"{command[:197]}..."
    return f"process {os.getpid()} on {socket.gethostname()} ({command})"


def holder(file: Path) -> str:
    """What a lock file says of the process that holds it, or held it when it was killed; empty if there is none."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def at_work(file: Path) -> bool:
    """Whether the process that a lock file names still runs; one on another machine is assumed to run.

    It only reads: trying the lock would get in the way of a run that starts at this moment.
    """
    words = holder(file)
    named = re.match(r"process (\d+) on (\S+)", words)
    if named is None or named[2] != socket.gethostname():  # nobody's, or another machine's
        return bool(words)
    try:
        written, process = file.stat().st_mtime, psutil.Process(int(named[1]))
        ended = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        return not ended and process.create_time() <= written + 2  # a younger process has reused the number
    except (psutil.NoSuchProcess, FileNotFoundError):
        return False
    except psutil.Error:  # somebody else's
        return True
