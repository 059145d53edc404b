"""The process that forks a sweep's runs (experiments/run_processes.py): `python -m fednh.cli.run_server`.

It reads jobs from standard input and writes a line [number, exit code] for every run that has ended. It computes
nothing itself, so a fork of it is as good as a new process. At the end of its input it asks the runs at work to end.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from fednh.experiments.run_processes import RunOrder, die_with_parent
from fednh.process import exit_at_once, fewer_collections

SECONDS = 0.02  # between two looks at the runs


class RunServer:
    """The runs at work, by process id."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}

    def serve(self) -> RunOrder | None:
        """Fork for every job until the input ends; in the fork, returns its job."""
        waiting, open_ = b"", True
        while open_ or self.numbers:
            if select.select([0] if open_ else [], [], [], SECONDS)[0]:
                more = os.read(0, 1 << 16)
                *lines, waiting = (waiting + more).split(b"\n")
                for job in map(RunOrder.read, lines):
                    if not job.words:
                        self._terminate([pid for pid, number in self.numbers.items() if number == job.number])
                    elif self._begin(job):
                        return job
                if not more:
                    open_ = False
                    self._terminate(list(self.numbers))
            self._report()
        return None

    def _begin(self, job: RunOrder) -> bool:
        """Start a run; True in the process that is to be it."""
        if sys.platform != "linux":  # elsewhere a fork of a process with PyTorch in it may crash
            command = [sys.executable, "-m", "fednh", *job.words]
            with Path(job.log).open("wb") as log:
                started = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **job.environment}
                )
            self.numbers[started.pid] = job.number
            return False
        parent = os.getpid()
        if pid := os.fork():
            self.numbers[pid] = job.number
            return False
        die_with_parent()
        if os.getppid() != parent:  # it was killed before that
            os._exit(1)
        return True

    def _terminate(self, pids: list[int]) -> None:
        for pid in pids:  # not yet waited for, so the number is still theirs
            os.kill(pid, signal.SIGTERM)

    def _report(self) -> None:
        """Tell the exit codes of runs that have ended."""
        while self.numbers:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            if pid in self.numbers:
                line = json.dumps([self.numbers.pop(pid), os.waitstatus_to_exitcode(status)])
                os.write(1, line.encode() + b"\n")


def become(job: RunOrder, command: Callable[[], None]) -> None:
    """Be `fednh WORDS` in a session of its own, with the log as output."""
    os.setsid()
    for number, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, job.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
    ):
        file = os.open(path, flags, 0o666)
        os.dup2(file, number)
        os.close(file)
    os.dup2(1, 2)
    os.environ.update(job.environment)
    sys.argv = ["fednh", *job.words]
    command()


def main() -> None:
    fewer_collections()
    with exit_at_once():
        import fednh.backends.threads  # what a run needs, imported before the fork
        import fednh.callbacks.screen
        import fednh.callbacks.trackers
        import fednh.federated.setup
        import fednh.report.load  # noqa: F401
        from fednh.cli import main as command

        gc.freeze()  # the collector of a fork leaves the memory that it shares alone
        if (job := RunServer().serve()) is not None:
            become(job, command)


if __name__ == "__main__":
    main()
