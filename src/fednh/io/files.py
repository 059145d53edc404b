"""Files that are either whole or not there: written under another name, then renamed; trees as safetensors.

What is synced survives a power cut, in the order of the calls: first the content of a file, then its name in the folder
and the names of new folders in those above them. Many files at once are written first and synced together at the end.
The last section locks folders. A lock is the operating system's (flock, through filelock): it ends with its process,
however that ends.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import safetensors.torch
from filelock import FileLock, Timeout

from fednh.errors import UserError
from fednh.tree import Tree, canonical


@contextmanager
def atomic_write(path: Path, sync: bool = True) -> Iterator[Path]:
    """A place to write a file that gets the name `path` in one step, when all went well: nobody sees half of it.

    A crash leaves the old file or the new one, and with `sync` that holds for a power cut, too.
    """
    make_folder(path.parent, sync)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        yield temporary
        if sync:
            commit_file(temporary, path)
        else:
            temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_bytes(path: Path, content: bytes, sync: bool = True) -> str:
    """Put `content` at `path` in one step and return its SHA-256."""
    with atomic_write(path, sync) as temporary:
        temporary.write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def write_private(path: Path, content: bytes) -> None:
    """A file that only its owner can read, whole or not there; one that exists is an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)  # unlike a rename, refuses to replace
        sync_path(path.parent)
    except FileExistsError:
        raise UserError(f"{path} exists; keys are never overwritten: move it away first") from None
    finally:
        temporary.unlink(missing_ok=True)


def private_folder(path: Path) -> None:
    """A folder that only its owner can enter, made if need be; one that belongs to somebody else stays as it is."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    with suppress(PermissionError):
        path.chmod(0o700)


def keep_private(folder: Path) -> None:
    """Let all that this process writes from now on be its user's alone, and this folder too."""
    os.umask(0o077)
    private_folder(folder)


def commit_file(draft: Path, path: Path) -> None:
    """Give a file that is complete its name; once it has the name, its content survives a power cut."""
    sync_path(draft)
    draft.replace(path)
    sync_path(path.parent)


def make_folder(path: Path, sync: bool = True) -> None:
    """Create a folder, and those above it that are missing."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in reversed(missing if sync else []):
        sync_path(folder.parent)


def sync_below(folder: Path) -> None:
    """Sync every file below a folder, then the folders, the deepest first; nothing if it does not exist."""
    for place, _, names in os.walk(folder, topdown=False):
        for path in (*(Path(place, name) for name in names), Path(place)):
            sync_path(path)


def sync_path(path: Path) -> None:
    """Make what is written at `path` (a file or a folder's entries) survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    write_bytes(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def write_tree(path: Path, tree: Tree, metadata: Mapping[str, str] | None = None, sync: bool = True) -> str:
    """A tree as a safetensors file; returns its SHA-256."""
    plain = {name: value.detach().cpu().contiguous().clone() for name, value in tree.items()}
    return write_bytes(path, safetensors.torch.save(plain, dict(metadata) if metadata else None), sync)


def read_tree(path: Path, device: str = "cpu") -> Tree:
    """A tree from a safetensors file, arranged for computing.

    Copied out of the memory-mapped file, where tensors lie at any address: a matrix product's last bits depend on
    alignment, and a resumed run must give the same ones.
    """
    mapped = safetensors.torch.load_file(path, device=device)
    return canonical({name: value.clone() for name, value in mapped.items()})


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def path_of(given: object, what: str) -> Path:
    """The path that a program gave; what is none is refused, and `what` says what is wanted."""
    if isinstance(given, str | os.PathLike):
        return Path(given)
    raise UserError(f"{given!r} is not a path; give {what}")


def expanded(path: str | Path) -> Path:
    """The path with ~ and ~name replaced by home folders."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(f"{path} names a person that this computer does not know; write the path in full") from error


# --- one process at a time in a folder -------------------------------------------------------------------------------


@contextmanager
def exclusive(folder: Path, file: Path, movable: bool = True) -> Iterator[None]:
    """Hold the lock `file` while working in `folder`; a UserError if another process has it, or none can be made.

    The file names the process that holds it, and is empty afterwards: a process that has opened it and one that comes
    later must lock the same file. It is removed only if its folder has nothing else. `movable`: another folder
    would do as well.
    """
    lock, another = FileLock(file), "choose another folder"
    try:
        make_folder(file.parent)
        lock.acquire(blocking=False)
    except Timeout:
        wait = f"wait for it or {another}" if movable else "wait for it"
        raise UserError(f"{folder} is in use by {holder(file) or 'another process'}; {wait}") from None
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written: {error.strerror}; {another if movable else 'fix its permissions'}"
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
