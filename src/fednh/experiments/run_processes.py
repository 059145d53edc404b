"""The processes of a sweep's runs: each is a fork of one process that has imported everything already.

Most of a short run's time goes into importing PyTorch. So one process (cli/run_server.py) does that once and forks for
every run: a run still has memory, a session and an exit code of its own, and takes with it nobody but itself when it
crashes. If the forking process is killed, its runs end with it, and the next run starts another one.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

SERVER = "fednh.cli.run_server"


@dataclass(frozen=True)
class RunOrder:
    """A run to start, as one line of JSON; without words, the run of this number is asked to end."""

    number: int
    words: Sequence[str] = ()  # of `fednh`
    log: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)

    def line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def read(cls, line: bytes) -> RunOrder:
        return cls(**json.loads(line))


class RunProcesses:
    """Starts runs and learns how they ended; to be closed."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._numbers = 0
        self._unread = b""
        self._active: set[int] = set()
        self._codes: dict[int, int] = {}

    def start(self, words: Sequence[str], log: Path, environment: Mapping[str, str]) -> int:
        """Start `fednh WORDS`, its output in a log; returns a number for it."""
        if self._server is None or self._server.poll() is not None:
            self._receive()
            self._server, self._unread = _start_server(), b""
        self._numbers += 1
        self._active.add(self._numbers)
        self._send(RunOrder(self._numbers, words, str(log), environment))
        return self._numbers

    def poll(self, number: int) -> int | None:
        """The exit code of a run that has ended, negative for a signal; None while it is at work."""
        self._receive()
        return self._codes.get(number)

    def terminate(self, number: int) -> None:
        """Ask a run to save what it has and end."""
        self._send(RunOrder(number))

    def close(self) -> None:
        """Runs still at work are asked to end; nobody waits for them."""
        if self._server is None or self._server.stdin is None or self._server.stdout is None:
            return
        self._server.stdin.close()
        if not self._active:
            self._server.wait()
        self._server.stdout.close()

    def _send(self, job: RunOrder) -> None:
        if self._server is None or self._server.stdin is None:
            return
        with suppress(BrokenPipeError):  # it was killed, and its runs with it: `poll` says so
            self._server.stdin.write(job.line())
            self._server.stdin.flush()

    def _receive(self) -> None:
        """Note what has ended; where the server has been killed, all of its runs have."""
        if self._server is None or self._server.stdout is None:
            return
        pipe = self._server.stdout.fileno()
        while select.select([pipe], [], [], 0)[0]:
            if not (more := os.read(pipe, 1 << 16)):
                code = self._server.wait()
                self._codes |= dict.fromkeys(self._active, code or 1)
                self._active.clear()
                self._server = None
                return
            *lines, self._unread = (self._unread + more).split(b"\n")
            for number, code in map(json.loads, lines):
                self._codes[number] = code
                self._active.discard(number)


def _start_server() -> subprocess.Popen[bytes]:
    """In a session of its own, so that Ctrl-C reaches it only through us."""
    return subprocess.Popen(
        [sys.executable, "-m", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=die_with_parent if sys.platform == "linux" else None,
    )


_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with_parent() -> None:
    """Whoever kills the sweep the hard way (SIGKILL) leaves no run behind that would hold its folder's lock."""
    pr_set_pdeathsig = 1
    if _LIBC is not None:
        _LIBC.prctl(pr_set_pdeathsig, signal.SIGKILL)
