"""`flower-supernode` with shorter waits.

Flower 1.41 has no options for them. Its SuperNode looks for an order every 3 seconds, for the answer of its ClientApp
every 0.5, and asks again for a part that has not arrived after 1 second, then 2. Here it looks for the next order soon
after the last one, and ever less often, so that sites that wait for a slow one do not keep the server busy.
"""

from __future__ import annotations

import time
from functools import partial

from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.supernode import start_client_internal as flower
from flwr.supernode.cli.flower_supernode import flower_supernode

from fednh.flower.parcels import BACKOFF

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


def hasten() -> None:
    """Replace the waits of Flower's loop in this process."""
    setattr(flower, "time", Clock())  # noqa: B010
    setattr(flower, "pull_objects", partial(pull_objects, initial_backoff=BACKOFF))  # noqa: B010


if __name__ == "__main__":
    hasten()
    flower_supernode()
