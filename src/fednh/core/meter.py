"""The progress of an evaluation, reported with every batch, and the point at which it can be stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable

from fednh.errors import Interrupted


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


def unhurried(samples: int) -> None:
    """A meter for work that nobody watches: it counts nothing and never stops."""
