"""What the long tests count, for the closing lines of `make soak`."""

from __future__ import annotations

COUNTS: dict[str, int] = {"kills survived": 0, "faults injected": 0, "bad inputs tried": 0}


def count(what: str, number: int = 1) -> None:
    """For the closing lines of `make soak`; every one of these was followed by a check that nothing was lost."""
    COUNTS[what] += number
