"""A wish to stop, which a signal handler may state at any moment."""

from __future__ import annotations

import threading
import time

TURN = 0.05  # seconds: how long a wish may stay unseen by a thread that waits


class Stop(threading.Event):
    """An Event without a lock.

    A handler runs between two steps of the thread that it interrupts. If that thread is inside Event.wait() and holds
    the Event's lock, Event.set() in the handler waits for it for ever: Ctrl-C would hang the program.
    """

    def __init__(self) -> None:
        super().__init__()
        self._wished = False

    def is_set(self) -> bool:
        return self._wished

    def set(self) -> None:
        self._wished = True

    def clear(self) -> None:
        self._wished = False

    def wait(self, timeout: float | None = None) -> bool:
        end = None if timeout is None else time.monotonic() + timeout
        while not self._wished:
            left = TURN if end is None else min(TURN, end - time.monotonic())
            if left <= 0:
                break
            time.sleep(left)
        return self._wished
