"""One line of the benchmark's table: a figure and the goal that it is held against."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    name: str
    value: float
    unit: str
    goal: float
    at_most: bool  # False: at least
    detail: str

    @property
    def reached(self) -> bool:
        return self.value <= self.goal if self.at_most else self.value >= self.goal
