"""FIGURES: every figure by name. The command line, the report and the tests derive from it."""

from __future__ import annotations

from fednh.report.figures.base import Choice, Drawing, FigureUnavailable, Kind
from fednh.report.figures.convergence import CONVERGENCE
from fednh.report.figures.curves import CURVES
from fednh.report.figures.fairness import FAIRNESS
from fednh.report.figures.frequency import FREQUENCY
from fednh.report.figures.partition import PARTITION
from fednh.report.figures.representations import REPRESENTATIONS
from fednh.report.figures.sensitivity import SENSITIVITY
from fednh.report.figures.similarity import SIMILARITY

FIGURES: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        PARTITION,
        CURVES,
        FAIRNESS,
        FREQUENCY,
        SIMILARITY,
        REPRESENTATIONS,
        SENSITIVITY,
        CONVERGENCE,
    )
}

__all__ = ["FIGURES", "Choice", "Drawing", "FigureUnavailable", "Kind"]
