"""The real command line in a real process of its own, forked so that torch need not be imported again.

A fork has one thread, and every lock that another thread of its parent held stays locked in it or guards something half
done: forks of a process in which other threads compute with torch or speak gRPC hang or crash (one of twelve in a trial
with two threads that compute; none of 1,300 without). Tests leave such threads behind. So children are forked from a
server process (multiprocessing's) that has imported everything, has one thread and never computes.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SERVER: Any = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["fednh.cli.app", "fednh.api", "fednh.experiments.sweep", "fednh.flower.deploy.launch"])


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code (minus the signal that killed it), and what it printed."""

    code: int
    stdout: str
    stderr: str


class Process:
    """`fednh ARGS` in a child process, its output in files below `folder`.

    `inherit`: a fork of this process, for a test that has replaced something in it; no other thread may be at work.
    """

    def __init__(self, args: list[str], folder: Path, inherit: bool = False):
        folder.mkdir(parents=True, exist_ok=True)
        self._out, self._err = (folder / "stdout.txt").absolute(), (folder / "stderr.txt").absolute()
        for path in (self._out, self._err):  # a child that is killed at once has not opened them
            path.unlink(missing_ok=True)
            path.touch()
        context = multiprocessing.get_context("fork") if inherit else SERVER
        around = (args, self._out, self._err, Path.cwd(), dict(os.environ), sys.path)
        self._process = context.Process(target=_child, args=around)
        sys.stdout.flush()
        sys.stderr.flush()
        self._process.start()
        self.pid: int = self._process.pid

    def kill(self, number: int = signal.SIGKILL) -> None:
        if not self.ended():
            os.kill(self.pid, number)

    def ended(self) -> bool:
        return self._process.exitcode is not None

    def wait(self, seconds: float = 300) -> Ended:
        self._process.join(seconds)
        if not self.ended():
            self.kill()
            raise TimeoutError(f"not finished after {seconds} s; stderr: {self._err.read_text()}")
        return Ended(self._process.exitcode, self._out.read_text(), self._err.read_text())


def _child(args: list[str], out: Path, err: Path, folder: Path, environment: dict[str, str], paths: list[str]) -> None:
    code = 70
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its background jobs ignore it
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        for number, path in ((1, out), (2, err)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        sys.argv, sys.path[:] = ["fednh", *args], paths
        from fednh.cli import main

        main()
        code = 0
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def fednh(args: list[str], folder: Path, inherit: bool = False) -> Ended:
    """Run `fednh ARGS` to its end."""
    return Process(args, folder, inherit).wait()


def parse(args: list[str]) -> None:
    """What the command line does before it acts: unknown options, missing arguments and wrong types are errors."""
    import typer

    from fednh.cli.app import app

    group = typer.main.get_command(app)
    context = group.make_context("fednh", list(args))
    while hasattr(group, "resolve_command"):
        rest = [*context._protected_args, *context.args]
        name, group, left = group.resolve_command(context, rest)
        context = group.make_context(name, left, parent=context)
