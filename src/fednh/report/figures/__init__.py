"""FIGURES: every figure by name, from which the command line, the report and the tests derive; and figures as files.

There is a file for each setting among the runs, with the numbers as CSV beside it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from fednh.io.files import write_bytes
from fednh.report.figures import style
from fednh.report.figures.base import Choice, Drawing, FigureUnavailable, Kind
from fednh.report.figures.curves import CONVERGENCE, CURVES
from fednh.report.figures.fairness import FAIRNESS
from fednh.report.figures.frequency import FREQUENCY
from fednh.report.figures.partition import PARTITION
from fednh.report.figures.privacy import PRIVACY
from fednh.report.figures.reliability import RELIABILITY
from fednh.report.figures.representations import REPRESENTATIONS
from fednh.report.figures.sensitivity import SENSITIVITY
from fednh.report.figures.similarity import SIMILARITY
from fednh.report.groups import by_setting
from fednh.report.load import Run
from fednh.text import csv_text

FIGURES: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        PARTITION,
        CURVES,
        FAIRNESS,
        RELIABILITY,
        FREQUENCY,
        SIMILARITY,
        REPRESENTATIONS,
        SENSITIVITY,
        PRIVACY,
        CONVERGENCE,
    )
}

__all__ = [
    "FIGURES",
    "Choice",
    "Drawing",
    "FigureUnavailable",
    "Kind",
    "scopes",
    "to_csv",
    "write_figure",
    "write_possible",
]


def scopes(kind: Kind, runs: Sequence[Run]) -> dict[str, Sequence[Run]]:
    """What one drawing of this kind may show: runs of one setting, but a sweep may have swept any setting."""
    return {"all runs": runs} if kind.whole else dict(by_setting(runs))


def to_csv(drawing: Drawing) -> str:
    """The numbers behind a drawing, to six digits."""
    rows = ([f"{v:.6g}" if isinstance(v, float) else v for v in row] for row in drawing.rows)
    return csv_text([drawing.columns, *rows])


def _drawings(kind: Kind, runs: Sequence[Run], choice: Choice) -> Iterator[tuple[str, Drawing]]:
    """A drawing for each setting that allows it, by the setting's label; raises FigureUnavailable if none does."""
    groups, reasons = scopes(kind, runs), []
    for label, group in groups.items():
        try:
            yield label, kind.draw(group, choice)
        except FigureUnavailable as error:
            reasons.append(error)
    if len(reasons) == len(groups):
        raise reasons[0]


def write_figure(kind: Kind, runs: Sequence[Run], choice: Choice, path: Path) -> list[tuple[Path, str]]:
    """Draw and save; returns each file and its caption. Raises FigureUnavailable if no setting has what it takes."""
    written, single = [], len(scopes(kind, runs)) == 1
    with style.theme():
        for label, drawing in _drawings(kind, runs, choice):
            target = path if single else path.with_stem(f"{path.stem}-{_slug(label)}")
            style.save(drawing.figure, target)
            write_bytes(target.with_suffix(".csv"), to_csv(drawing).encode())
            written.append((target, drawing.caption))
    return written


def write_possible(
    runs: Sequence[Run], choice: Choice, into: Path | None
) -> Iterator[tuple[str, Path | None, str | None]]:
    """For every figure: its name, the file written (vector and PNG; None without `into`), or why it cannot be drawn."""
    for kind in FIGURES.values():
        try:
            if into is None:
                with style.theme():
                    next(_drawings(kind, runs, choice))
                yield kind.name, None, None
            else:
                files = write_figure(kind, runs, choice, into / f"{kind.name}.svg")
                write_figure(kind, runs, choice, into / f"{kind.name}.png")
                yield kind.name, files[0][0], None
        except FigureUnavailable as error:
            yield kind.name, None, str(error)


def _slug(label: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", label).strip("-").lower()[:80]
