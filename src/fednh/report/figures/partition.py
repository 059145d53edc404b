"""Who holds what: clients by classes, and the class distributions of a few clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fednh.data.partitions.kinds import LongTail
from fednh.report.figures.base import Choice, Drawing, FigureUnavailable, Kind, client_noun, identified, identity
from fednh.report.figures.style import CYCLE, fading, grid, legend_below, panels, shortened_apart, sparse
from fednh.report.load import Run
from fednh.report.sheet import span
from fednh.runs.run_folder import find_client

Counts = NDArray[np.int64]  # (K, C)
MOST_BUBBLES = 800  # above so many, or so many clients, a heat map is easier to read (and to draw)
MOST_COLUMNS = 60
MOST_CLIENTS = 2000  # of more, a column stands for many alike
BINS = 200  # such columns
MOST_NAMES = 24  # more names than this cannot be read below an axis
MOST_TOGETHER = 8  # so many clients' distributions can be told apart


def chosen_clients(run: Run, choice: Choice) -> tuple[int, ...]:
    """The chosen clients; without a choice all of them, or the first two of more than MOST_TOGETHER."""
    count = len(run.counts)
    if count == 0:
        raise FigureUnavailable("only the sites of a federation know what they hold")
    if count < 2:
        raise FigureUnavailable(f"there is only one {client_noun(run, several=False)}")
    asked = choice.clients or (range(count) if count <= MOST_TOGETHER else (0, 1))
    chosen = tuple(find_client(run.names, client, run.path) for client in asked)
    for client in chosen:
        if not 0 <= client < count:
            raise FigureUnavailable(f"there is no client {client}; they are numbered 0 to {count - 1}")
    if len(chosen) > MOST_TOGETHER:
        raise FigureUnavailable(f"{len(chosen)} clients are too many to tell apart; choose up to {MOST_TOGETHER}")
    return chosen


def shares(counts: Counts, client: int) -> NDArray[np.float64]:
    """A client's class distribution in percent."""
    return np.asarray(100 * counts[client] / counts[client].sum(), np.float64)


def draw(runs: Sequence[Run], choice: Choice) -> Drawing:
    run = min(runs, key=lambda r: r.config.seed)
    chosen = chosen_clients(run, choice)
    classes: list[str] = run.partition["classes"]
    counts, binned = run.counts, len(run.counts) > MOST_CLIENTS
    figure, axes = panels(1, 2, 4.4, 3.6)
    bins = alike(counts) if binned else []
    bubbles = _bins(axes[0, 0], run, counts, classes, bins) if binned else _overview(axes[0, 0], run, counts, classes)
    legend_below(figure, _together(axes[0, 1], run, counts, classes, chosen), 4)
    sizes = counts.sum(1)
    owned = (counts > 0).sum(1)
    caption = (
        f"Seed {run.config.seed}; all methods of that seed share it. {len(counts):,} {client_noun(run)} hold "
        f"{sizes.sum():,} training samples: {span(sizes)} each, of {span(owned)} "
        f"classes (median {np.median(owned):g})."
    )
    if isinstance(run.config.partition.kind, LongTail):
        caption += f" The partition, {run.config.partition.kind.words()}, leaves all other training samples out."
    if binned:
        caption += f" Those with the same main class stand together, in {len(bins)} columns of about as many."
        return Drawing(figure, caption, _BIN_COLUMNS, _bin_rows(counts, classes, bins), _BINS_EXPLAINED)
    if run.names and len(counts) > MOST_NAMES:
        caption += " Sites are in the order of their names; the CSV file has them."
    table = [
        [*identified(run, k), name, int(counts[k, c])] for k in range(len(counts)) for c, name in enumerate(classes)
    ]
    mark = "larger" if bubbles else "darker"
    right = f"all {len(chosen)}" if len(chosen) == len(counts) else f"{len(chosen)} of them"
    explanation = (
        f"Each column is a {client_noun(run, several=False)}, each row a class; the {mark} the mark, the more samples. "
        f"An even federation would be an even pattern. On the right, the same for {right}, as shares."
    )
    return Drawing(figure, caption, [*identity(run), "class", "samples"], table, explanation)


_BIN_COLUMNS = ["column", "clients", "class", "share"]
_BINS_EXPLAINED = (
    "Each column is many clients that are alike, each row a class; the darker the mark, the larger its share of their "
    "samples. An even federation would be an even pattern; clients of a single class make dark blocks. On the right, "
    "the shares of a few clients alone."
)


def alike(counts: Counts) -> list[NDArray[np.int64]]:
    """All clients in BINS parts of about the same size: by their main class, and in it by its share."""
    whole, main = counts.sum(1), counts.argmax(1)
    share = counts[np.arange(len(counts)), main] / np.maximum(whole, 1)
    return np.array_split(np.lexsort((-share, main)), BINS)


def _bin_shares(counts: Counts, bins: Sequence[NDArray[np.int64]]) -> NDArray[np.float64]:  # (bins, C)
    """The mean class distribution of the clients of each bin, in percent."""
    whole = np.maximum(counts.sum(1, keepdims=True), 1)
    return np.stack([(100 * counts[part] / whole[part]).mean(0) for part in bins])


def _bin_rows(counts: Counts, classes: list[str], bins: Sequence[NDArray[np.int64]]) -> list[list[Any]]:
    by_bin = _bin_shares(counts, bins).tolist()
    return [[at, len(bins[at]), name, row[c]] for at, row in enumerate(by_bin) for c, name in enumerate(classes)]


def _bins(ax: Axes, run: Run, counts: Counts, classes: list[str], bins: Sequence[NDArray[np.int64]]) -> bool:
    """The mean class distribution of clients that are alike; False: they are not drawn as bubbles."""
    _heat_map(ax, _bin_shares(counts, bins), "mean share of samples, %")
    whom = client_noun(run)
    ax.set(xlabel=f"{whom}, by main class", ylabel="class", title=f"Classes of {len(counts):,} {whom}", xticks=[])
    ax.set_yticks(*sparse(classes, 20))
    ax.tick_params(length=0)
    return False


def _heat_map(ax: Axes, values: NDArray[Any], label: str) -> None:
    """Clients by classes, the darker the more."""
    image = ax.imshow(values.T, aspect="auto", cmap=fading(CYCLE[0]), interpolation="nearest", vmin=0)
    bar = ax.figure.colorbar(image, ax=ax, shrink=0.8)
    bar.outline.set_visible(False)
    bar.set_label(label)


def _overview(ax: Axes, run: Run, counts: Counts, classes: list[str]) -> bool:
    """Every client's samples by class; returns whether they are drawn as bubbles."""
    where = np.argwhere(counts.T > 0)  # rows of (class, client)
    bubbles = len(where) <= MOST_BUBBLES and len(counts) <= MOST_COLUMNS
    if bubbles:
        size = counts.T[where[:, 0], where[:, 1]]
        largest = min(180.0, 24000 / max(counts.shape[0], 1) ** 1.35)
        area = largest * size / size.max()
        ax.scatter(where[:, 1], where[:, 0], s=area, color=CYCLE[0], alpha=0.75, linewidths=0, clip_on=False)
        ax.set_xlim(-0.5, len(counts) - 0.5)
        ax.set_ylim(len(classes) - 0.5, -0.5)
    else:
        _heat_map(ax, counts, "samples")
    one = client_noun(run, several=False)
    ax.set(xlabel=one, ylabel="class", title=f"Samples of each class on every {one}")
    ax.set_yticks(*sparse(classes, 20))
    if run.names:
        _names(ax, [run.client_name(k) for k in range(len(counts))])
    else:
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.tick_params(length=0)
    return bubbles


def _together(ax: Axes, run: Run, counts: Counts, classes: list[str], chosen: Sequence[int]) -> list[str]:
    """The chosen clients' distributions; returns their labels."""
    place, width = np.arange(len(classes)), 0.84 / len(chosen)
    names = shortened_apart([run.client_name(client) for client in chosen])
    labels = [f"{name} (n = {counts[client].sum():,})" for name, client in zip(names, chosen, strict=True)]
    for i, client in enumerate(chosen):
        at = place + (i - (len(chosen) - 1) / 2) * width
        ax.bar(at, shares(counts, client), 0.95 * width, color=CYCLE[i], label=labels[i])
    grid(ax)
    _names(ax, classes)
    every = f"every {client_noun(run, several=False)}"
    owners = every if len(chosen) == len(counts) else f"{len(chosen)} {client_noun(run)}"
    ax.set(xlabel="class", ylabel="share of its samples, %", title=f"Class distribution of {owners}")
    return labels


def _names(ax: Axes, names: Sequence[str]) -> None:
    """Names below an axis, of many every n-th, slanted where they would touch."""
    places, shown = sparse(names, MOST_NAMES)
    ax.set_xticks(places, shown)
    longest = max(map(len, shown))
    if longest > 3 and len(shown) * (longest + 2) > 48:
        for text in ax.get_xticklabels():
            text.set(rotation=50, ha="right", rotation_mode="anchor")


PARTITION = Kind(
    "partition",
    "Who holds what",
    "Each column is a client, each row a class; the larger (or darker) the mark, the more samples. On the right, the "
    "same for a few clients, as shares.",
    draw,
)
