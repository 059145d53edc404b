"""Who holds what: clients by classes, and the class distributions of two clients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fednh.report.figures.base import Choice, Drawing, Kind, NotAllowed
from fednh.report.figures.style import CYCLE, fading, grid, panels
from fednh.report.load import Run

BUBBLES = 800  # above so many, a heat map is easier to read (and to draw)


def two_clients(runs: Sequence[Run], choice: Choice) -> tuple[int, int]:
    """The chosen clients, or the first two; they must exist."""
    count = len(runs[0].partition["counts"])
    if count < 2:
        raise NotAllowed("there is only one client")
    pair = choice.clients or (0, 1)
    for client in pair:
        if not 0 <= client < count:
            raise NotAllowed(f"there is no client {client}; they are numbered 0 to {count - 1}")
    return pair


def shares(counts: NDArray[np.int64], client: int) -> NDArray[np.float64]:
    """A client's class distribution in percent."""
    return np.asarray(100 * counts[client] / counts[client].sum(), np.float64)


def draw(runs: Sequence[Run], choice: Choice) -> Drawing:
    run = min(runs, key=lambda r: r.config.seed)
    pair = two_clients([run], choice)
    classes: list[str] = run.partition["classes"]
    counts = np.array(run.partition["counts"], np.int64)  # (K, C)
    figure, axes = panels(1, 2, 4.4, 3.6)
    _overview(axes[0, 0], counts, classes)
    _pair(axes[0, 1], counts, classes, pair)
    sizes = counts.sum(1)
    owned = (counts > 0).sum(1)
    caption = (
        f"Seed {run.config.seed}; all methods of that seed share it. {len(counts)} clients hold {sizes.sum():,} "
        f"samples: {sizes.min():,} to {sizes.max():,} each, of {owned.min()} to {owned.max()} classes (median "
        f"{np.median(owned):g})."
    )
    rows = [[k, name, int(counts[k, c])] for k in range(len(counts)) for c, name in enumerate(classes)]
    return Drawing(figure, caption, ["client", "class", "samples"], rows)


def _overview(ax: Axes, counts: NDArray[np.int64], classes: list[str]) -> None:
    where = np.argwhere(counts.T > 0)  # rows of (class, client)
    if len(where) <= BUBBLES:
        size = counts.T[where[:, 0], where[:, 1]]
        largest = min(180.0, 24000 / max(counts.shape[0], 1) ** 1.35)
        ax.scatter(
            where[:, 1],
            where[:, 0],
            s=largest * size / size.max(),
            color=CYCLE[0],
            alpha=0.75,
            linewidths=0,
            clip_on=False,
        )
        ax.margins(0.04)
        ax.invert_yaxis()
    else:
        image = ax.imshow(counts.T, aspect="auto", cmap=fading(CYCLE[0]), interpolation="nearest", vmin=0)
        bar = ax.figure.colorbar(image, ax=ax, shrink=0.8)
        bar.outline.set_visible(False)
        bar.set_label("samples")
    ax.set(xlabel="client", ylabel="class", title="Samples of each class on every client")
    if len(classes) <= 20:
        ax.set_yticks(range(len(classes)), classes)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.tick_params(length=0)


def _pair(ax: Axes, counts: NDArray[np.int64], classes: list[str], pair: tuple[int, int]) -> None:
    place = np.arange(len(classes))
    for i, client in enumerate(pair):
        label = f"client {client} (n = {counts[client].sum():,})"
        ax.bar(place + (i - 0.5) * 0.42, shares(counts, client), 0.4, color=CYCLE[i], label=label)
    grid(ax)
    if len(classes) <= 20:
        ax.set_xticks(place, classes, rotation=0 if max(map(len, classes)) <= 3 else 60)
    ax.set(xlabel="class", ylabel="share of its samples, %", title="Two clients' class distributions")
    ax.legend()


PARTITION = Kind(
    "partition",
    "Who holds what",
    "Each column is a client, each row a class; the larger (or darker) the mark, the more samples. An even federation "
    "would be an even pattern. On the right, the same for two clients, as shares.",
    draw,
)
