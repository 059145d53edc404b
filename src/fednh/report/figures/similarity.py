"""Which classes a method takes for kin: pairwise cosine of its prototypes, grouped by super-class."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from fednh.errors import UserError
from fednh.methods import METHODS
from fednh.report.figures.base import Choice, Drawing, FigureUnavailable, Kind, stated_n
from fednh.report.figures.style import ALARM, CYCLE, fading, muted, panels
from fednh.report.groups import by_variant, method_name
from fednh.report.load import Run
from fednh.runs.model_file import read_model

Matrix = NDArray[np.float64]
SHIPPED = ("cifar100",)  # data sets whose super-classes are in the package


def prototypes(run: Run) -> Matrix | None:  # (C, D)
    """One vector a class: the rows of the global head, or what FedProto's clients received; None without either."""
    shared, personal = run.layout.global_model, run.layout.clients_with_models()
    path = shared if shared.exists() else next(iter(personal.values()), None)
    if path is None:
        return None
    tree, _ = read_model(path)
    found = tree.get("head.weight") if path.stem == "global" else tree.get("prototypes")
    return None if found is None else found.double().numpy()


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
        text = resources.files("fednh").joinpath("report", "groups", f"{data}.json").read_text(encoding="utf-8")
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
    found: dict[str, list[Matrix]] = {}
    for label, group in by_variant(runs).items():
        matrices = [cosines(vectors) for run in group if (vectors := prototypes(run)) is not None]
        if matrices:
            found[label] = matrices
    if not found:
        raise FigureUnavailable("no run has a saved model with class prototypes")
    order = [c for members in groups.values() for c in members] if groups else list(range(len(classes)))
    columns = min(4, len(found))
    figure, axes = panels(-(-len(found) // columns), columns, 2.5, 2.65)
    image, rows, scores = None, [], {}
    for ax in axes.flat[len(found) :]:
        ax.set_axis_off()
    for ax, (label, matrices) in zip(axes.flat, found.items(), strict=False):
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
        ax.set_yticks(
            range(len(order)) if len(order) <= 12 else [], [classes[c] for c in order][:12] if len(order) <= 12 else []
        )
        ax.tick_params(length=0)
        ax.spines[:].set_visible(True)
        rows += [[label, classes[c], *(round(float(v), 4) for v in matrices[0][c])] for c in order]
    assert image is not None
    bar = figure.colorbar(image, ax=axes, shrink=0.7, aspect=30)
    bar.outline.set_visible(False)
    bar.set_label("cosine", color=muted())
    explanation = f"{_EXPLANATION} {_BOXES if groups else _NO_BOXES}"
    return Drawing(figure, _caption(found, runs, scores), ["method", "class", *classes], rows, explanation)


def _boxes(ax: Axes, groups: dict[str, list[int]]) -> None:
    start = 0
    for members in groups.values():
        ax.add_patch(
            Rectangle(
                (start - 0.5, start - 0.5), len(members), len(members), fill=False, edgecolor=ALARM, linewidth=0.9
            )
        )
        start += len(members)


def _caption(found: dict[str, list[Matrix]], runs: Sequence[Run], scores: dict[str, Matrix]) -> str:
    n = stated_n(map(len, found.values()))
    text = "The picture shows each method's lowest seed. "
    if scores:
        said = [
            f"{label} {v.mean():+.3f}" + (f" ± {v.std(ddof=1):.3f}" if len(v) > 1 else "")
            for label, v in scores.items()
        ]
        text += f"Semantics captured (mean ± standard deviation over {n} seeds): {'; '.join(said)}. "
    methods = dict.fromkeys(run.method for run in runs)
    headless = [method_name(name) for name in methods if name in METHODS and METHODS[name].headless]
    return text + (
        f"No head is uploaded by {', '.join(headless)}: it is the one they started from." if headless else ""
    )


_EXPLANATION = "Red is alike, blue is opposed, blank is unrelated."
_BOXES = (
    "Boxes hold the classes of one super-class: warm boxes on a blank ground mean that the method has found the "
    "kinship. The number is the mean cosine within boxes minus that outside."
)
_NO_BOXES = "With super-classes (--groups FILE) a number would say whether the method has found the kinship."
SIMILARITY = Kind(
    "similarity",
    "Which classes are taken for kin",
    _EXPLANATION,
    draw,
)
