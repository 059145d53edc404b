"""A line between two network namespaces, with a rate, a delay, loss, and cuts: `tc netem` for kernels that lack it.

`python -m tests.helpers.line HERE DEVICE THERE DEVICE BITS_PER_SECOND DELAY LOSS CUT` makes the two devices and passes
frames between them, each later by DELAY seconds, until it is killed; none pass while a file CUT exists.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from pathlib import Path
from random import Random

TUNSETIFF, TAP, PLAIN, NEWNET = 0x400454CA, 0x0002, 0x1000, 0x40000000
WAITING = 200  # frames that wait for a free line; more are lost


def device(namespace: str, name: str) -> int:
    """A new device in a namespace, as a file from which its frames are read."""
    with Path(f"/var/run/netns/{namespace}").open() as place:
        if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", name.encode(), TAP | PLAIN))
    return file


class Direction:
    """Frames on their way from one device to the other."""

    def __init__(self, source: int, target: int, rate: float, delay: float, loss: float, rng: Random):
        self.source, self.target, self.rate, self.delay, self.loss, self.rng = source, target, rate, delay, loss, rng
        self.free, self.frames = 0.0, deque[tuple[float, bytes]]()

    def read(self, now: float, cut: bool) -> None:
        frame = os.read(self.source, 65536)
        if cut or self.rng.random() < self.loss or self.free - now > WAITING * 12000 / self.rate:
            return
        self.free = max(now, self.free) + 8 * len(frame) / self.rate
        self.frames.append((self.free + self.delay, frame))

    def write(self, now: float) -> None:
        while self.frames and self.frames[0][0] <= now:
            _, frame = self.frames.popleft()
            try:
                os.write(self.target, frame)
            except OSError:  # the device is down
                return


def main(here: str, one: str, there: str, other: str, rate: str, delay: str, loss: str, cut: str) -> None:
    ends = device(here, one), device(there, other)
    print("ready", flush=True)
    how = float(rate), float(delay), float(loss)
    ways = [Direction(*ends, *how, Random(1)), Direction(*reversed(ends), *how, Random(2))]  # type: ignore[misc]
    while True:
        next_ = min((way.frames[0][0] for way in ways if way.frames), default=time.monotonic() + 0.2)
        ready = select.select(ends, [], [], min(0.2, max(0.0, next_ - time.monotonic())))[0]
        now = time.monotonic()
        for way in ways:
            if way.source in ready:
                way.read(now, Path(cut).exists())
            way.write(now)


if __name__ == "__main__":
    main(*sys.argv[1:])
