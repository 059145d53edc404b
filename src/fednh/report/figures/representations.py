"""What the body makes of a few classes on two clients: principal components, before training and by method."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from matplotlib.axes import Axes
from numpy.typing import NDArray

from fednh.data.batches import Samples, samples_of
from fednh.data.dataset import Dataset
from fednh.errors import UserError
from fednh.federated.architectures import initial_state
from fednh.federated.setup import divide, load_data, scaled
from fednh.methods import Method
from fednh.methods.losses import unit
from fednh.models import Net
from fednh.report.figures.base import Choice, Drawing, FigureUnavailable, Kind, client_noun, identified, identity
from fednh.report.figures.partition import chosen_clients
from fednh.report.figures.style import CYCLE, MARKERS, muted, panels, shortened, shortened_apart
from fednh.report.groups import by_variant
from fednh.report.load import Run
from fednh.report.sheet import percent
from fednh.runs.model_file import Card, architecture, read_model
from fednh.tree import Tree

Features = NDArray[np.float64]
PER_CLASS = 80  # test samples drawn of each class
ACROSS = 5  # methods side by side, before the next ones go below


@torch.no_grad()
def representations(net: Net, params: Tree, samples: Samples, rows: NDArray[np.int64]) -> Features:  # (n, D)
    """f(x) of test samples; unit vectors where the model has a `scale`, for it compares directions only."""
    h = net.features(params, samples.floats(samples.x[torch.from_numpy(rows)]))
    return np.asarray((unit(h) if "scale" in params else h).double().numpy())


def principal(*parts: Features) -> tuple[list[Features], float]:
    """Parts of one cloud on its first two principal components, and the share of variance that these hold."""
    cloud = np.concatenate(parts)
    centre = cloud.mean(0)
    _, singular, directions = np.linalg.svd(cloud - centre, full_matrices=False)
    axes = np.zeros((2, cloud.shape[1]))
    axes[: min(2, len(directions))] = directions[:2]
    held = float((singular[:2] ** 2).sum() / max((singular**2).sum(), 1e-30))
    return [(part - centre) @ axes.T for part in parts], held


def shared_classes(counts: NDArray[np.int64], pair: tuple[int, int], how_many: int = 3) -> list[int]:
    """The classes of which both clients hold most: by the smaller of the two counts."""
    both = np.minimum(counts[pair[0]], counts[pair[1]])
    return [int(c) for c in np.argsort(-both, kind="stable")[:how_many]]


def draw(runs: Sequence[Run], choice: Choice) -> Drawing:
    variants = {label: min(group, key=lambda r: r.config.seed) for label, group in by_variant(runs).items()}
    first = next(iter(variants.values()))
    pair = _chosen_pair(first, choice) if choice.clients else _saved_pair(list(variants.values()))
    names: list[str] = first.partition["classes"]
    chosen = _classes(choice, names, first.counts, pair)
    data = _load(first)
    rows = np.concatenate([np.flatnonzero(data.y_test == c)[:PER_CLASS] for c in chosen])
    labels = data.y_test[rows]
    columns = _projections(variants, pair, samples_of(data, "test"), rows)
    if len(columns) < 2:
        raise FigureUnavailable(
            f"no run has saved personal models of {first.client_name(pair[0])} and {first.client_name(pair[1])}"
        )
    width = min(ACROSS, len(columns))
    figure, axes = panels(2 * -(-len(columns) // width), width, 2.15, 2.0)
    for ax in axes.flat:
        ax.set_axis_off()
    table, legend = [], shortened_apart([names[c] for c in chosen], 16)
    for place, (label, (clouds, held)) in enumerate(columns.items()):
        above, column = 2 * (place // width), place % width
        panes = axes[above : above + len(clouds), column]
        panes[0].set_title(label)
        panes[-1].set_xlabel(f"{percent(held)} of variance")
        for row, (ax, cloud) in enumerate(zip(panes, clouds, strict=True)):
            _scatter(ax, [(name, cloud[labels == c]) for name, c in zip(legend, chosen, strict=True)])
            who = ["all"] * len(identity(first)) if len(clouds) == 1 else identified(first, pair[row])
            table += [[label, *who, names[c], *point] for c, point in zip(labels, cloud.tolist(), strict=True)]
            if len(clouds) == 2 and (column == 0 or place == 1):
                ax.set_ylabel(shortened(first.client_name(pair[row])))
    handles, texts = axes[0, 0].get_legend_handles_labels()
    axes[1, 0].legend(handles, texts, loc="upper left", title="class", labelcolor=muted())
    caption = (
        f"Test samples, up to {PER_CLASS} of each of {len(chosen)} classes, through the personal models of "
        f"{first.client_name(pair[0])} and {first.client_name(pair[1])} (n = one run a method, its lowest seed). Both "
        f"{client_noun(first)} of a method share one pair of axes; axes of different methods cannot be compared."
    )
    return Drawing(figure, caption, ["method", *identity(first), "class", "pc1", "pc2"], table)


def _projections(
    variants: dict[str, Run], pair: tuple[int, int], samples: Samples, rows: NDArray[np.int64]
) -> dict[str, tuple[list[Features], float]]:
    """What `principal` gives of the untrained model, then of each method whose models of both clients are saved."""
    columns: dict[str, tuple[list[Features], float]] = {}
    for label, run in variants.items():
        files = run.layout.clients_with_models()
        if not all(client in files for client in pair):
            continue
        clouds = []
        for client in pair:
            params, card = read_model(files[client])
            net, method = _rebuilt(card)
            clouds.append(representations(net, params, samples, rows))
        if "before training" not in columns:
            start = initial_state(method, net, run.config.seed)
            columns["before training"] = principal(representations(net, start, samples, rows))
        columns[label] = principal(*clouds)
    return columns


def _scatter(ax: Axes, classes: Sequence[tuple[str, Features]]) -> None:
    """One client's samples, a colour and a marker for each class."""
    ax.set_axis_on()
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set_visible(True)
    for i, (name, points) in enumerate(classes):
        x, y = points.T
        ax.scatter(x, y, s=9, color=CYCLE[i], marker=MARKERS[i], alpha=0.7, linewidths=0, label=name)


def _chosen_pair(run: Run, choice: Choice) -> tuple[int, int]:
    chosen = chosen_clients(run, choice)
    if len(chosen) != 2:
        raise UserError(f"representations compare two clients, and {len(chosen)} were chosen")
    return chosen[0], chosen[1]


def _saved_pair(runs: list[Run]) -> tuple[int, int]:
    """The first two clients whose personal models every run has."""
    saved = [set(run.layout.clients_with_models()) for run in runs]
    both = sorted(set.intersection(*saved))
    if len(both) < 2:
        raise FigureUnavailable("no two clients have saved personal models in all runs")
    return both[0], both[1]


def _classes(choice: Choice, names: list[str], counts: NDArray[np.int64], pair: tuple[int, int]) -> list[int]:
    if choice.classes is None:
        return shared_classes(counts, pair)
    unknown = [name for name in choice.classes if name not in names]
    if unknown:
        raise UserError(f"there is no class {unknown[0]!r}; the classes are {', '.join(names)}")
    if len(choice.classes) > len(CYCLE):
        raise UserError(f"{len(choice.classes)} classes are too many to tell apart; choose up to {len(CYCLE)}")
    return [names.index(name) for name in choice.classes]


def _load(run: Run) -> Dataset:
    try:
        data = load_data(run.config)
        if not len(data.y_test):
            raise FigureUnavailable("there is no test set that all clients share")
        return scaled(data, run.config, *divide(data, run.config))[0] if data.fitted else data
    except FigureUnavailable:
        raise
    except UserError as error:
        raise FigureUnavailable(f"the data set cannot be loaded here: {error}") from error


def _rebuilt(card: Card) -> tuple[Net, Method]:
    try:
        return architecture(card)
    except UserError as error:  # a model or method of somebody's own, whose code is not here
        raise FigureUnavailable(f"the model cannot be built here: {error}") from error


REPRESENTATIONS = Kind(
    "representations",
    "The same classes on two clients",
    "Dots are test samples of a few classes as two clients' own models see them. Where a class lies in the same "
    "place in the upper and the lower picture, the two clients have learnt the same thing.",
    draw,
)
