"""Figures 1 and 2 of the paper: the spiral, and what a free and a uniform head make of it in the plane."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fednh.experiments.spiral import CENTRAL, FEDERATED, MINORITY, Example, View, shown_pair
from fednh.report.figures.style import CYCLE, ink, muted, panels

SHOWN = 250  # points drawn of each class
TITLES = {
    "balanced-free": "Balanced, free head",
    "balanced-uniform": "Balanced, uniform head",
    "imbalanced-free": "Imbalanced, free head",
    "imbalanced-uniform": "Imbalanced, uniform head",
    "clients-fedavg": "FedAvg",
    "clients-feduh": "FedAvg+UH",
}


def figure1(example: Example) -> Figure:
    """(a) the balanced training data, (b)-(e) representations of the test set (dots) and prototypes (dashed)."""
    figure, axes = panels(1, 5, 2.3, 2.6)
    _dots(axes[0, 0], example.x_train, example.y_train)
    axes[0, 0].set_title("(a) Training data")
    for letter, ax, name in zip("bcde", axes[0, 1:], CENTRAL, strict=True):
        view = example.central[name]
        _view(ax, view, example.y_test)
        ax.set_title(f"({letter}) {TITLES[name]}")
        minority = np.mean([view.per_class[c] for c in MINORITY])
        ax.set_xlabel(f"accuracy {np.mean(view.per_class):.1f}, minority {minority:.1f}")
    return figure


def figure2(example: Example) -> Figure:
    """Two clients of FedAvg beside the same two of FedAvg+UH, each through its latest local model."""
    figure, axes = panels(1, 4, 2.4, 2.6)
    pair = shown_pair(example)
    panes = [(run, client) for run in FEDERATED for client in pair]
    for letter, ax, (run, client) in zip("abcd", axes[0], panes, strict=True):
        _view(ax, example.clients[run][client], example.client_labels)
        ax.set_title(f"({letter}) {TITLES[run]}, client {client}")
        ax.set_xlabel(f"owns arms {', '.join(map(str, np.flatnonzero(example.owned[client])))}")
    return figure


def _view(ax: Axes, view: View, labels: NDArray[np.int64]) -> None:
    far = float(np.quantile(np.linalg.norm(view.features, axis=1), 0.98)) or 1.0
    lengths = np.linalg.norm(view.prototypes, axis=1, keepdims=True)
    _dots(ax, view.features, labels)
    # Lengths are relative to the longest prototype, which reaches as far as the dots do.
    for c, tip in enumerate(view.prototypes / max(float(lengths.max()), 1e-30) * far):
        ax.plot([0, tip[0]], [0, tip[1]], color=ink(), linewidth=1.1, linestyle=(0, (3, 2)))
        ax.annotate(str(c), tip * 1.12, color=CYCLE[c], fontsize=8, fontweight="bold", ha="center", va="center")
    ax.set(xlim=(-1.35 * far, 1.35 * far), ylim=(-1.35 * far, 1.35 * far))


def _dots(ax: Axes, points: NDArray[np.float64], labels: NDArray[np.int64]) -> None:
    for c in range(int(labels.max()) + 1):
        mine = points[labels == c]
        mine = mine[:: max(1, len(mine) // SHOWN)]
        ax.scatter(mine[:, 0], mine[:, 1], s=4, color=CYCLE[c], alpha=0.55, linewidths=0, rasterized=True)
    ax.set_aspect("equal", adjustable="box")
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[:].set_visible(True)
    ax.xaxis.label.set_color(muted())
