"""Classes against classes: which ones a method takes for kin, and which ones a single model takes for which.

Kinship is the pairwise cosine of prototypes, grouped by super-class. The picture of a single model's evaluation shows
its confusion matrix, and whether its confidence can be believed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from fednh.errors import UserError
from fednh.inference.metrics import Assessment
from fednh.methods import METHODS
from fednh.report.figures.base import Choice, Drawing, FigureUnavailable, Kind, stated_n
from fednh.report.figures.style import ALARM, CYCLE, fading, grid, ink, line, muted, panels, sparse
from fednh.report.groups import by_variant
from fednh.report.load import Run
from fednh.runs.model_file import read_model
from fednh.runs.run_folder import display_name

Matrix = NDArray[np.float64]
MOST_NAMES = 20  # beside a matrix; of more classes every n-th is named
LONGEST = 18  # letters of a name there
SHIPPED = ("cifar100",)  # data sets whose super-classes are in the package


def prototypes(run: Run) -> Matrix | None:  # (C, D)
    """One vector a class: the rows of the global head, or what FedProto's clients received; None without either."""
    models = [each.global_model for each in run.layout.shared_models()]  # networks that differ share prototypes
    shared = next(filter(Path.exists, models), None)
    path = shared or next(iter(run.layout.clients_with_models().values()), None)
    if path is None:
        return None
    tree, _ = read_model(path)
    vectors = tree.get("head.weight") if path.stem == "global" else tree.get("prototypes")
    return None if vectors is None else vectors.double().numpy()


def cosines(vectors: Matrix) -> Matrix:  # (C, D) -> (C, C)
    """Pairwise cosine; a zero vector (a class that was never seen) is like none."""
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = vectors / np.where(length > 0, length, 1)
    return np.asarray(unit @ unit.T, np.float64)


def semantics(cosine: Matrix, groups: dict[str, list[int]]) -> float:
    """Mean cosine of two classes of one group minus that of two classes of different groups; no class with itself."""
    group_of = np.empty(len(cosine), int)
    for number, members in enumerate(groups.values()):
        group_of[members] = number
    i, j = np.triu_indices(len(cosine), 1)
    kin = group_of[i] == group_of[j]
    if kin.all() or not kin.any():
        raise FigureUnavailable("the groups leave no two classes within one group, or none between two")
    return float(cosine[i, j][kin].mean() - cosine[i, j][~kin].mean())


def load_groups(data: str, classes: Sequence[str], file: Path | None = None) -> dict[str, list[int]] | None:
    """group -> indices of its classes, every class once; None if no groups are known for the data set."""
    if file is not None:
        named, where = _read_groups(file), str(file)
    elif data in SHIPPED:
        text = resources.files("fednh").joinpath("report", "superclasses", f"{data}.json").read_text(encoding="utf-8")
        named, where = json.loads(text), f"the groups of {data}"
    else:
        return None
    place = {name: i for i, name in enumerate(classes)}
    grouped = [name for members in named.values() for name in members]
    for name in grouped:
        if name not in place:
            raise UserError(f"{where}: {name!r} is not a class of {data}")
        if grouped.count(name) > 1:
            raise UserError(f"{where}: {name!r} stands in more than one group")
    missing = [name for name in classes if name not in grouped]
    if missing:
        raise UserError(f"{where}: class {missing[0]!r} stands in no group")
    return {group: [place[name] for name in members] for group, members in named.items()}


def _read_groups(file: Path) -> dict[str, list[str]]:
    try:
        named = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as JSON: {error}") from error
    lists = isinstance(named, dict) and all(isinstance(members, list) for members in named.values())
    if not lists or not all(isinstance(name, str) for members in named.values() for name in members):
        raise UserError(f'{file} must look like {{"group": ["class", "class"], ...}}')
    return dict(named)


def draw(runs: Sequence[Run], choice: Choice) -> Drawing:
    classes: list[str] = runs[0].partition["classes"]
    groups = load_groups(runs[0].summary["data"], classes, choice.groups)
    kinship: dict[str, list[Matrix]] = {}
    for label, group in by_variant(runs).items():
        matrices = [cosines(vectors) for run in group if (vectors := prototypes(run)) is not None]
        if matrices:
            kinship[label] = matrices
    if not kinship:
        raise FigureUnavailable("no run has a saved model with class prototypes")
    order = [c for members in groups.values() for c in members] if groups else list(range(len(classes)))
    columns = min(4, len(kinship))
    places, names = _ticks([classes[c] for c in order], groups)
    beside = 0.07 * max(map(len, names))
    figure, axes = panels(-(-len(kinship) // columns), columns, 2.5, 2.65, beside)
    image, rows, scores = None, [], {}
    for ax in axes.flat[len(kinship) :]:
        ax.set_axis_off()
    for at, (ax, (label, matrices)) in enumerate(zip(axes.flat, kinship.items(), strict=False)):
        shown = matrices[0][np.ix_(order, order)]
        image = ax.imshow(shown, cmap=fading(CYCLE[0], CYCLE[5]), vmin=-1, vmax=1, interpolation="nearest")
        title = label
        if groups:
            values = np.array([semantics(matrix, groups) for matrix in matrices])
            scores[label] = values
            title += f"   {values.mean():+.3f}"
            _boxes(ax, groups)
        ax.set_title(title)
        ax.set_xticks([])
        if at % columns == 0:  # the panels of a row share their names
            ax.set_yticks(places, names, fontsize=6.5)
        else:
            ax.set_yticks([])
        ax.tick_params(length=0)
        ax.spines[:].set_visible(True)
        rows += [[label, classes[c], *(round(float(v), 4) for v in matrices[0][c])] for c in order]
    assert image is not None
    bar = figure.colorbar(image, ax=axes, shrink=0.7, aspect=30)
    bar.outline.set_visible(False)
    bar.set_label("cosine", color=muted())
    explanation = f"{_EXPLANATION} {_BOXES if groups else _NO_BOXES}"
    return Drawing(figure, _caption(kinship, runs, scores), ["method", "class", *classes], rows, explanation)


def _ticks(classes: Sequence[str], groups: dict[str, list[int]] | None) -> tuple[list[float], list[str]]:
    """Where names stand beside a matrix: each group at its middle, else the classes, as many as there is room for."""
    if not groups:
        places, names = sparse(classes, MOST_NAMES, LONGEST)
        return [float(place) for place in places], names
    sizes = np.array([len(members) for members in groups.values()])
    middles = np.cumsum(sizes) - sizes / 2 - 0.5
    shown, names = sparse(list(groups), MOST_NAMES, LONGEST)
    return [float(middles[at]) for at in shown], names


def _boxes(ax: Axes, groups: dict[str, list[int]]) -> None:
    start = 0
    for members in groups.values():
        ax.add_patch(
            Rectangle(
                (start - 0.5, start - 0.5), len(members), len(members), fill=False, edgecolor=ALARM, linewidth=0.9
            )
        )
        start += len(members)


def _caption(kinship: dict[str, list[Matrix]], runs: Sequence[Run], scores: dict[str, Matrix]) -> str:
    n = stated_n(map(len, kinship.values()))
    text = "The picture shows each method's lowest seed. "
    if scores:
        values = [
            f"{label} {v.mean():+.3f}" + (f" ± {v.std(ddof=1):.3f}" if len(v) > 1 else "")
            for label, v in scores.items()
        ]
        text += f"Semantics captured (mean ± standard deviation over {n}): {'; '.join(values)}. "
    methods = dict.fromkeys(run.method for run in runs)
    headless = [display_name(name) for name in methods if name in METHODS and METHODS[name].headless]
    return text + (
        f"No head is uploaded by {', '.join(headless)}: it is the one they started from." if headless else ""
    )


_EXPLANATION = "Red is alike, blue is opposed, blank is unrelated."
_BOXES = (
    "Boxes hold the classes of one super-class: warm boxes on a blank ground mean that the method has found the "
    "kinship. The number is the mean cosine within boxes minus that outside."
)
_NO_BOXES = "With super-classes (groups = a file) a number would say whether the method has found the kinship."
SIMILARITY = Kind(
    "similarity",
    "Which classes are taken for kin",
    _EXPLANATION,
    draw,
)


# --- one model's evaluation ------------------------------------------------------------------------------------------

MOST_NUMBERS = 12  # classes: the cells of more cannot hold readable numbers


def draw_assessment(result: Assessment) -> Figure:
    """The confusion matrix by true class, and accuracy against confidence."""
    figure, axes = panels(1, 2, 4.4, 3.9)
    left, right = axes[0]
    names = [c.name for c in result.classes]
    counts = np.array(result.confusion, float)
    share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    left.imshow(share, cmap=fading(CYCLE[0]), vmin=0, vmax=1, interpolation="nearest")
    places, shown = sparse(names, 30, LONGEST)
    left.set_xticks(places, shown, rotation=90 if max(map(len, shown)) > 2 else 0)
    left.set_yticks(places, shown)
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
    for b in result.reliability:
        right.bar((b.low + b.high) / 2, b.accuracy, b.high - b.low, color=CYCLE[0], alpha=0.25, edgecolor="none")
    confidence = [b.confidence for b in result.reliability]
    accuracy = [b.accuracy for b in result.reliability]
    weight = np.array([b.samples for b in result.reliability]) / result.samples
    right.plot(confidence, accuracy, color=CYCLE[0], linewidth=1)
    right.scatter(confidence, accuracy, s=12 + 130 * weight, color=CYCLE[0], linewidths=0)
    right.set_xlim(0, 1)
    right.set_ylim(0, 1)
    right.set_xlabel("confidence")
    right.set_ylabel("accuracy")
    right.set_title("Calibration")
    note = f"ECE {100 * result.ece:.1f}%\naccuracy {100 * result.accuracy:.1f}%\nn = {result.samples:,}"
    right.text(0.03, 0.97, note, va="top", fontsize=8, color=muted())
    grid(right)
    return figure
