"""A wish to stop: set by a signal handler in the very thread that waits for it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

from fednh.interrupt import POLL_INTERVAL, Stop

# A handler states the wish again and again, each time at another moment of the main thread's `wait`.
OFTEN = """
import signal, time
from fednh.interrupt import Stop
from threading import Event
stop, turn = {kind}(), 0
signal.signal(signal.SIGALRM, lambda *_: stop.set())
end = time.monotonic() + {seconds}
while time.monotonic() < end:
    turn += 1
    signal.setitimer(signal.ITIMER_REAL, 1e-6 * (turn % 50 + 1))
    for _ in range(10):
        stop.wait(0)
    stop.clear()
print("through")
"""


def test_a_handler_may_state_it_while_its_thread_waits() -> None:
    """An Event hangs here within a moment, which shows that the moment is met."""
    through = subprocess.run(
        [sys.executable, "-c", OFTEN.format(kind="Stop", seconds=1)], timeout=60, capture_output=True
    )
    assert through.stdout == b"through\n", through.stderr
    event = subprocess.Popen([sys.executable, "-c", OFTEN.format(kind="Event", seconds=1)], stdout=subprocess.PIPE)
    try:
        event.wait(4)
        hung = False
    except subprocess.TimeoutExpired:
        hung = True
    finally:
        event.kill()
    assert hung


def test_waiting() -> None:
    stop = Stop()
    began = time.monotonic()
    assert not stop.wait(0.12)
    assert 0.12 <= time.monotonic() - began < 5
    threading.Timer(0.1, stop.set).start()
    assert stop.wait(30)
    assert time.monotonic() - began < 20
    assert stop.is_set()
    assert stop.wait()
    stop.clear()
    assert not stop.wait(0)
    assert POLL_INTERVAL < 0.2, "Ctrl-C is felt at once"
