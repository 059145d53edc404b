"""A SuperExec that has imported everything already: it forks for every message instead of starting Python anew.

Flower starts a new process for every message that a site receives. Most of its time goes into importing PyTorch, and
sites that share a machine pay for it at once. `fednh federation up` therefore starts one of these for all its sites
(`flower-supernode --isolation process` leaves the starting to others). Flower's protocol is untouched.

A line of JSON on standard input for each SuperNode: {"address", "folder", "log", "pid"}. The end of the input ends it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any, NoReturn

from flwr.supercore.constant import TaskType
from flwr.supercore.superexec import run_superexec as superexec
from flwr.supercore.superexec.executor import SubprocessExecutor
from flwr.supercore.superexec.executor.types import ExecutionSpec, LaunchResult
from flwr.supernode.runtime.run_clientapp import run_clientapp

import fednh.flower.client_app  # noqa: F401  what a ClientApp needs, imported before the fork


class Forking(SubprocessExecutor):
    """Runs a ClientApp in a fork of this process; anything else as Flower does."""

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        if spec.task_type != TaskType.CLIENT_APP:
            return super().launch(spec)
        if os.fork() == 0:
            _leave(lambda: _client_app(spec))
        return LaunchResult.accepted()


def _client_app(spec: ExecutionSpec) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    run_clientapp(spec.runtime_api_address, spec.token, spec.insecure, parent_pid=spec.parent_pid)


def _serve(job: dict[str, Any]) -> None:
    """Be the SuperExec of one SuperNode, until that ends."""
    os.setsid()
    os.chdir(job["folder"])
    for number, path, flags in ((0, os.devnull, os.O_RDONLY), (1, job["log"], os.O_WRONLY | os.O_APPEND)):
        os.dup2(os.open(path, flags), number)
    os.dup2(1, 2)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children that have ended need nobody to wait for them
    setattr(superexec, "get_executor", lambda *_, **__: Forking())  # noqa: B010  Flower has no option for it
    superexec.run_superexec(job["address"], insecure=True, parent_pid=job["pid"])  # on the loopback of one machine


def _leave(work: Any) -> NoReturn:
    """Do the work of a forked child, and never return into what the parent was doing."""
    code = 1
    try:
        work()
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork() == 0:
            _leave(lambda line=line: _serve(json.loads(line)))


if __name__ == "__main__":
    main()
