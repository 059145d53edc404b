"""What a small run of every method costs, by which tests of all methods leave the slow ones to `make soak`.

`python -m tests.helpers.method_seconds` measures: seconds of processor time, which other work on the machine changes
little, of `small(method)` the second time. A method that is not in the table runs by default.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from fednh.methods import METHODS

BUDGET = 0.2  # seconds
SECONDS = {
    "fedbabu": 0.14,
    "fedetf": 0.15,
    "fedpac": 0.11,
    "fedrep": 0.23,
    "pfedfda": 0.42,
    "fedala": 0.56,
    "moon": 0.12,
    "feddyn": 0.11,
    "mrmtl": 0.13,
    "feduv": 0.15,
    "fedcp": 0.22,
    "gpfl": 0.23,
    "fedas": 0.27,
    "floco": 0.27,
}  # all others take 0.07 to 0.11
TRAINED = [name for name in METHODS if not METHODS[name].training_free]


def timed(names: Iterable[str]) -> list[Any]:
    """Parameters of a test; those of slow methods are for `make soak`."""
    return [pytest.param(name, marks=pytest.mark.soak) if SECONDS.get(name, 0.0) > BUDGET else name for name in names]


TIMED_METHODS, TIMED_TRAINED = timed(METHODS), timed(TRAINED)


def main() -> None:
    from tests.helpers.config import small
    from tests.helpers.simulator import simulate

    for name in (*METHODS, *METHODS):  # the first time something may have to be loaded
        with tempfile.TemporaryDirectory() as folder:
            began = time.process_time()
            simulate(small(name), Path(folder) / "run")
            print(f"{name}: {time.process_time() - began:.2f}")


if __name__ == "__main__":
    main()
