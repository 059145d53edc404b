"""A single model's evaluation as a picture: what is taken for what, and whether confidence can be believed."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from fednh.inference.metrics import Assessment
from fednh.report.figures.style import CYCLE, fading, grid, ink, line, muted, panels

MOST_NAMES = 30  # more class names than this cannot be read
MOST_NUMBERS = 12  # nor more numbers in the cells


def draw(found: Assessment) -> Figure:
    """The confusion matrix by true class, and accuracy against confidence."""
    figure, axes = panels(1, 2, 4.4, 3.9)
    left, right = axes[0]
    names = [c.name for c in found.classes]
    counts = np.array(found.confusion, float)
    share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    left.imshow(share, cmap=fading(CYCLE[0]), vmin=0, vmax=1, interpolation="nearest")
    shown = names if len(names) <= MOST_NAMES else []
    left.set_xticks(range(len(shown)), shown, rotation=90 if max(map(len, shown), default=0) > 2 else 0)
    left.set_yticks(range(len(shown)), shown)
    left.tick_params(length=0)
    left.spines[:].set_visible(True)
    left.set_xlabel("predicted")
    left.set_ylabel("true")
    left.set_title("Confusion")
    if len(names) <= MOST_NUMBERS:
        for (i, j), n in np.ndenumerate(counts):
            if n:
                left.text(j, i, f"{n:.0f}", ha="center", va="center", fontsize=7, color=ink())
    right.plot([0, 1], [0, 1], color=line(), linewidth=1)
    for b in found.reliability:
        right.bar((b.low + b.high) / 2, b.accuracy, b.high - b.low, color=CYCLE[0], alpha=0.25, edgecolor="none")
    confidence = [b.confidence for b in found.reliability]
    accuracy = [b.accuracy for b in found.reliability]
    weight = np.array([b.samples for b in found.reliability]) / found.samples
    right.plot(confidence, accuracy, color=CYCLE[0], linewidth=1)
    right.scatter(confidence, accuracy, s=12 + 130 * weight, color=CYCLE[0], linewidths=0)
    right.set_xlim(0, 1)
    right.set_ylim(0, 1)
    right.set_xlabel("confidence")
    right.set_ylabel("accuracy")
    right.set_title("Calibration")
    note = f"ECE {100 * found.ece:.1f}%\naccuracy {100 * found.accuracy:.1f}%\nn = {found.samples:,}"
    right.text(0.03, 0.97, note, va="top", fontsize=8, color=muted())
    grid(right)
    return figure
