"""Stop, the request that a run stops, and Meter, which reports the progress of an evaluation and stops it there.

Both are free of torch, so that the command line can install its signal handlers before anything heavy is loaded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from fednh.errors import Interrupted

# --- Stop -----------------------------------------------------------------------------------------------------------


POLL_INTERVAL = 0.05  # seconds: how long a request may stay unseen by a thread that waits


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
            left = POLL_INTERVAL if end is None else min(POLL_INTERVAL, end - time.monotonic())
            if left <= 0:
                break
            time.sleep(left)
        return self._wished


class Deadline(Stop):
    """Set when the time (of time.monotonic) is over, or when somebody else asks to stop."""

    def __init__(self, end: float, asked: threading.Event):
        super().__init__()
        self.end, self.asked = end, asked

    def is_set(self) -> bool:
        return super().is_set() or self.asked.is_set() or time.monotonic() > self.end


# --- Meter ----------------------------------------------------------------------------------------------------------


class Meter:
    """Called with the number of samples before each batch, by any thread; raises Interrupted when asked to stop."""

    def __init__(self, stop: threading.Event, tell: Callable[[int, int], None]):
        self.stop, self.tell = stop, tell
        self.done, self.total = 0, 0
        self._lock = threading.Lock()

    def begin(self, total: int) -> None:
        """Start a new pass over `total` samples."""
        self.done, self.total = 0, total

    def __call__(self, samples: int) -> None:
        if self.stop.is_set():
            raise Interrupted
        with self._lock:
            self.done = min(self.done + samples, self.total)
            if samples:
                self.tell(self.done, self.total)


def no_progress(samples: int) -> None:
    """A meter for work that nobody watches: it counts nothing and never stops."""
