"""Whether probabilities can be believed: confidence and accuracy on held-out samples, in bins of confidence.

The bins are those of `fednh evaluate`: BINS of equal width over (0, 1], each with the samples whose predicted class has
a probability in it. A sample counts once for each run that held it out. Runs made before confidences were recorded in
outcomes/ cannot be drawn; `fednh evaluate RUN -o DIR` measures their models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from fednh.inference.metrics import BINS, Bin, calibration_error, reliability
from fednh.report.figures.base import Choice, Drawing, FigureUnavailable, Kind, client_noun, stated_n, variant_looks
from fednh.report.figures.style import ink, muted, panels
from fednh.report.groups import by_variant
from fednh.report.load import Run

ACROSS = 4  # panels in a row
Whose = Literal["personal", "global"]


def bins_of(runs: Sequence[Run], whose: Whose) -> list[Bin]:
    """The bins of all held-out samples of these runs; none if a run lacks confidences of such models."""
    confidences, rights = [], []
    for run in runs:
        for client in run.layout.clients_with_outcomes():
            outcomes = run.outcomes(client)
            assert outcomes is not None
            guessed = outcomes.personal if whose == "personal" else outcomes.shared
            confidence = outcomes.confidence if whose == "personal" else outcomes.shared_confidence
            if guessed is None or confidence is None:
                return []
            confidences.append(confidence)
            rights.append(guessed == outcomes.label)
    return reliability(np.concatenate(confidences), np.concatenate(rights)) if confidences else []


def draw(runs: Sequence[Run], choice: Choice) -> Drawing:
    measured = [run for run in runs if run.layout.clients_with_outcomes()]
    if not measured:
        raise FigureUnavailable("no client held out samples (data.holdout)")
    variants = by_variant(measured)
    by_label = {label: {"personal": bins_of(group, "personal")} for label, group in variants.items()}
    by_label = {label: bins for label, bins in by_label.items() if bins["personal"]}
    if not by_label:
        raise FigureUnavailable("these runs were made before confidences were recorded; `fednh evaluate` measures them")
    look = variant_looks({label: variants[label] for label in by_label})
    across = min(ACROSS, len(by_label))
    width, height = (5.2, 3.6) if len(by_label) == 1 else (2.6, 2.5)
    figure, axes = panels(-(-len(by_label) // across), across, width, height)
    for ax in axes.flat[len(by_label) :]:
        ax.set_axis_off()
    rows, samples = [], 0
    for ax, (label, series) in zip(axes.flat, by_label.items(), strict=False):
        samples += sum(b.samples for b in series["personal"])
        if shared := bins_of(variants[label], "global"):
            series["global"] = shared
        ax.plot([0, 100], [0, 100], color=muted(), linewidth=0.8)
        ax.set(xlim=(0, 100), ylim=(0, 100), title=label)
        ax.set_xlabel("confidence, %")
        for name, bins in series.items():
            x, y = [100 * b.confidence for b in bins], [100 * b.accuracy for b in bins]
            area = 60 * np.sqrt([b.samples / max(b.samples for b in bins) for b in bins])
            colour, marker = (look[label].colour, "o") if name == "personal" else (ink(), "D")
            words = f"{name}: ECE {100 * calibration_error(bins):.1f}"
            ax.plot(x, y, color=colour, linewidth=1, alpha=0.6)
            ax.scatter(x, y, s=area, color=colour, marker=marker, alpha=0.8, linewidths=0, label=words, clip_on=False)
            rows += [[label, name, b.low, b.high, b.samples, b.confidence, b.accuracy] for b in bins]
        ax.legend(loc="upper left", fontsize=7, labelcolor=muted())
    for ax in axes[:, 0]:
        ax.set_ylabel("accuracy, %")
    caption = (
        f"Held-out samples of all {client_noun(measured[0])} together, {samples:,} predictions of personal models "
        f"({stated_n(len(variants[label]) for label in by_label)} a method), in {BINS} bins of equal width by the "
        "probability of the predicted class; a larger mark has more samples. ECE, in points, is the mean distance from "
        "the diagonal, weighted by samples."
    )
    columns = ["method", "model", "low", "high", "samples", "confidence", "accuracy"]
    return Drawing(figure, caption, columns, rows)


RELIABILITY = Kind(
    "reliability",
    "Can the probabilities be believed?",
    "On the diagonal a model that is 80% sure is right in 80% of such cases. Below it the model is too sure of itself, "
    "above it too cautious.",
    draw,
)
