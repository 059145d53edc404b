"""The real command line in a real process of its own, forked so that torch need not be imported again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code (minus the signal that killed it), and what it printed."""

    code: int
    stdout: str
    stderr: str


class Process:
    """`fednh ARGS` in a child process, its output in files below `folder`."""

    def __init__(self, args: list[str], folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self._status: int | None = None
        self._out, self._err = folder / "stdout.txt", folder / "stderr.txt"
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._child(args)

    def _child(self, args: list[str]) -> None:
        code = 70
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its background jobs ignore it
        try:
            for number, path in ((1, self._out), (2, self._err)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            sys.argv = ["fednh", *args]
            from fednh.cli import main

            main()
            code = 0
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def kill(self, number: int = signal.SIGKILL) -> None:
        if not self.ended():
            os.kill(self.pid, number)

    def ended(self) -> bool:
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = status if pid else None
        return self._status is not None

    def wait(self, seconds: float = 300) -> Ended:
        deadline = time.monotonic() + seconds
        while not self.ended():
            if time.monotonic() > deadline:
                self.kill()
                os.waitpid(self.pid, 0)
                raise TimeoutError(f"not finished after {seconds} s; stderr: {self._err.read_text()}")
            time.sleep(0.005)
        assert self._status is not None
        return Ended(os.waitstatus_to_exitcode(self._status), self._out.read_text(), self._err.read_text())


def fednh(args: list[str], folder: Path) -> Ended:
    """Run `fednh ARGS` to its end.

    A fork of a process in which torch has computed can crash inside torch's math library (seen once in some thousand).
    That says nothing about the program, so then the program itself answers, in a new process.
    """
    ended = Process(args, folder).wait()
    if ended.code != -signal.SIGSEGV:
        return ended
    new = subprocess.run([sys.executable, "-m", "fednh", *args], capture_output=True, text=True, timeout=300)
    return Ended(new.returncode, new.stdout, new.stderr)


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
