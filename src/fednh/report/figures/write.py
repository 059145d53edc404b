"""Figures as files: one for each setting among the runs, with the numbers as CSV beside it."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from fednh.io.files import write_bytes
from fednh.report.figures import FIGURES, Choice, Drawing, FigureUnavailable, Kind, style
from fednh.report.groups import by_setting
from fednh.report.load import Run


def scopes(kind: Kind, runs: Sequence[Run]) -> dict[str, Sequence[Run]]:
    """What one drawing of this kind may show: runs of one setting, but a sweep may have swept any setting."""
    return {"all runs": runs} if kind.name == "sensitivity" else dict(by_setting(runs))


def to_csv(drawing: Drawing) -> str:
    """The numbers behind a drawing, to six digits."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(drawing.columns)
    writer.writerows([f"{v:.6g}" if isinstance(v, float) else v for v in row] for row in drawing.rows)
    return text.getvalue()


def write_figure(kind: Kind, runs: Sequence[Run], choice: Choice, path: Path) -> Iterator[tuple[Path, str]]:
    """Draw and save; yields each file and its caption. Raises NotAllowed when no setting has what it takes."""
    groups = scopes(kind, runs)
    reasons = []
    for label, group in groups.items():
        target = path if len(groups) == 1 else path.with_stem(f"{path.stem}-{_slug(label)}")
        try:
            with style.theme():
                drawing = kind.draw(group, choice)
                style.save(drawing.figure, target)
        except FigureUnavailable as error:
            reasons.append(str(error))
            continue
        write_bytes(target.with_suffix(".csv"), to_csv(drawing).encode())
        yield target, drawing.caption
    if len(reasons) == len(groups):
        raise FigureUnavailable(reasons[0])


def write_possible(
    runs: Sequence[Run], choice: Choice, into: Path | None
) -> Iterator[tuple[str, Path | None, str | None]]:
    """For every figure: its name, the file written (vector and PNG; None without `into`), or why it cannot be drawn."""
    for kind in FIGURES.values():
        try:
            if into is None:
                with style.theme():
                    _try(kind, runs, choice)
                yield kind.name, None, None
                continue
            files = [path for path, _ in write_figure(kind, runs, choice, into / f"{kind.name}.svg")]
            for _ in write_figure(kind, runs, choice, into / f"{kind.name}.png"):
                pass
            yield kind.name, files[0], None
        except FigureUnavailable as error:
            yield kind.name, None, str(error)


def _try(kind: Kind, runs: Sequence[Run], choice: Choice) -> None:
    """Raises NotAllowed unless at least one setting allows the figure."""
    reason: FigureUnavailable | None = None
    for group in scopes(kind, runs).values():
        try:
            kind.draw(group, choice)
            return
        except FigureUnavailable as error:
            reason = error
    assert reason is not None, "there is at least one run"
    raise reason


def _slug(label: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", label).strip("-").lower()[:80]
