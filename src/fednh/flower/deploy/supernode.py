"""`flower-supernode` with shorter waits.

Flower 1.41 has no options for them. Its SuperNode looks for an order every 3 seconds, for the answer of its ClientApp
every 0.5, and asks again for a part that has not arrived after 1 second, then 2. Here it looks for the next order soon
after the last one, and ever less often, so that sites that wait for a slow one do not keep the server busy.

A SuperNode alone is `python -m fednh.flower.deploy.supernode` with Flower's arguments. Without arguments the program
imports Flower once and forks the SuperNodes of all sites of this machine, which then share that memory: 90 of 100 MB.
"""

from __future__ import annotations

import gc
import json
import os
import select
import socket
import sys
import time
from contextlib import suppress
from functools import partial
from typing import NoReturn

from fednh.flower import compat
from fednh.flower.compat import flower_supernode

IDLE = 3.0  # seconds for which Flower sleeps when there is no order; also our longest wait
SOON = 0.25  # seconds between two looks for an order, at least
SHARE = 0.2  # of the time since the last order: the wait until the next look
ANSWER = 0.05  # seconds between two looks for an answer


class Clock:
    """Stands in for the module `time` in Flower's loop, which only sleeps."""

    def __init__(self) -> None:
        self.busy = time.monotonic()

    def sleep(self, seconds: float) -> None:
        if seconds < IDLE:  # an order is being worked on
            self.busy = time.monotonic()
            time.sleep(min(seconds, ANSWER))
        else:
            time.sleep(min(IDLE, max(SOON, SHARE * (time.monotonic() - self.busy))))


def shorten_waits() -> None:
    """Replace the waits of Flower's loop in this process."""
    compat.replace(compat.supernode_loop, "time", Clock())
    sooner = partial(compat.pull_objects, initial_backoff=compat.BACKOFF)
    compat.replace(compat.supernode_loop, "pull_objects", sooner)


def serve(requests: socket.socket) -> None:
    """Fork a SuperNode for each request, until the other side ends.

    A request is a packet of JSON: [working folder, log file, argument, ...]. It is answered by ["started", pid]. When a
    SuperNode has ended, ["ended", pid, code] follows, with the code of `Popen.returncode`.
    """
    gc.freeze()  # a collection would write to the shared memory
    children = set[int]()
    while True:
        if select.select([requests], [], [], 0.2)[0]:
            if not (request := requests.recv(1 << 16)):
                return
            folder, log, *arguments = json.loads(request)
            os.chdir(folder)
            if (pid := os.fork()) == 0:
                _become_supernode(requests, log, arguments)
            os.chdir("/")
            os.setpgid(pid, pid)  # a group of its own is ended as a whole
            children.add(pid)
            requests.send(json.dumps(["started", pid]).encode())
        for child in list(children):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                children.remove(pid)
                requests.send(json.dumps(["ended", pid, os.waitstatus_to_exitcode(status)]).encode())


def _become_supernode(requests: socket.socket, log: str, arguments: list[str]) -> NoReturn:
    code = 1
    try:
        requests.close()
        for target, path in ((0, os.devnull), (1, log), (2, log)):
            opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(opened, target)
            os.close(opened)
        sys.argv = ["flower-supernode", *arguments]
        flower_supernode()
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    shorten_waits()
    if sys.argv[1:]:
        flower_supernode()
    else:
        serve(socket.socket(fileno=os.dup(0)))
