"""The paper's motivating example, Figures 1 and 2: what imbalance does to prototypes and representations in the plane.

Six runs, each an ordinary run folder: one client with the free head (FedAvg) and the uniform head (FedUH) on
balanced and imbalanced arms, then 100 clients, Dirichlet(0.3), with both. Settings of the appendix: SGD, learning
rate 0.1 decayed by 0.99 each epoch (one client) or round (many), momentum 0.9, weight decay 1e-5, 5 local epochs,
10% a round. One client has the settings of the authors' notebook (examples/motivation_examples.ipynb of their
repository): 201 epochs, batches of 5000, a new optimiser in every epoch, no clipping, and cosines without a scale
in front of the uniform head. Deviation: there the uniform head on balanced arms is trained without unit
representations. The notebook has no run with 100 clients. Ours: 100 rounds, and batches of 64, clipping at 10 and
FedUH's own scale, as in the other experiments. docs/figures-and-report.md has the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.console import Console

from fednh.backends import threads
from fednh.callbacks.screen import Silent
from fednh.config import Config, load
from fednh.data.batches import samples_of
from fednh.data.sources.builtin import spiral
from fednh.federated.setup import build_federation
from fednh.report.figures.style import CYCLE, ink, muted, panels
from fednh.report.load import load_run
from fednh.runs.model_file import architecture, read_model
from fednh.runs.run_folder import RunFolder

Points = NDArray[np.float64]
THINNED = 12  # a client's model is evaluated on every twelfth test sample: 250 of each arm
MINORITY = (3, 4, 5)  # the classes of 375, 187 and 93 samples

CENTRAL = {
    "balanced-free": ("spiral", "fedavg"),
    "balanced-uniform": ("spiral", "feduh"),
    "imbalanced-free": ("spiral_imbalanced", "fedavg"),
    "imbalanced-uniform": ("spiral_imbalanced", "feduh"),
}
FEDERATED = {"clients-fedavg": "fedavg", "clients-feduh": "feduh"}
EPOCHS, ROUNDS = 201, 100  # of one client, and of 100


@dataclass(frozen=True)
class View:
    """The test set as one model sees it."""

    name: str
    features: Points  # (N, 2), as the body gives them; for a uniform head only their direction counts
    prototypes: Points  # (6, 2), the rows of the head
    per_class: list[float]  # accuracy in percent


@dataclass(frozen=True)
class Example:
    """Everything that the two figures show and the numbers are made from."""

    x_train: Points
    y_train: NDArray[np.int64]
    y_test: NDArray[np.int64]
    central: dict[str, View]
    clients: dict[str, dict[int, View]]  # run -> client -> view
    client_labels: NDArray[np.int64]  # of the test samples that the clients' views hold
    owned: NDArray[np.bool_]  # (clients, classes)

    @cached_property
    def means(self) -> dict[str, dict[int, Points]]:
        """run -> client -> the mean representation of every class, (6, 2)."""
        return {
            run: {client: class_means(view, self.client_labels) for client, view in views.items()}
            for run, views in self.clients.items()
        }


def plan(seed: int = 0, epochs: int = EPOCHS, rounds: int = ROUNDS) -> dict[str, Config]:
    """The six runs. Evaluation waits for the end, and nothing is checkpointed: a run takes seconds."""
    once = {"seed": seed, "eval.every": 0, "checkpoint.every": 0}
    alone = {"partition.name": "iid", "partition.clients": 1, "participation.rate": 1.0, "rounds": epochs}
    alone |= {"train.epochs": 1, "train.batch_size": 5000, "train.clip": 0.0}  # an epoch is a round: a new optimiser
    heads: dict[str, dict[str, Any]] = {"fedavg": {}, "feduh": {"method.scale": 1.0, "method.train_scale": False}}
    runs = {
        name: load("spiral", {"data.name": data, "method.name": method, **heads[method], **alone, **once})
        for name, (data, method) in CENTRAL.items()
    }
    return runs | {
        name: load("spiral", {"method.name": method, "rounds": rounds, **once}) for name, method in FEDERATED.items()
    }


def train(
    folder: Path,
    seed: int = 0,
    epochs: int = EPOCHS,
    rounds: int = ROUNDS,
    tell: Callable[[str], None] = lambda _: None,
) -> None:
    """Make the runs that are not there yet."""
    for name, config in plan(seed, epochs, rounds).items():
        run = RunFolder(folder / name)
        with run.opened(config) as unfinished:
            if unfinished:
                tell(name)
                threads.make_run(
                    config, build_federation(config, run=run.path), run, Silent(Console(stderr=True))
                ).run()


def load_example(folder: Path) -> Example:
    """Read the six run folders: figures and numbers come from saved models only."""
    data = spiral()
    test = samples_of(data, "test")
    runs = {name: load_run(folder / name) for name in (*CENTRAL, *FEDERATED)}

    def view(name: str, path: Path, every: int = 1) -> View:
        params, card = read_model(path)
        net, method = architecture(card)
        y = test.y[::every]
        with torch.no_grad():
            x = test.floats(test.x[::every])
            features, guess = net.features(params, x), method.logits(net, params, x).argmax(1)
        right = [float(100 * (guess[y == c] == c).double().mean()) for c in range(data.num_classes)]
        return View(name, features.double().numpy(), params["head.weight"].double().numpy(), right)

    central = {name: view(name, runs[name].layout.global_model) for name in CENTRAL}
    clients = {
        name: {
            client: view(f"{name} {client}", path, THINNED)
            for client, path in runs[name].layout.clients_with_models().items()
        }
        for name in FEDERATED
    }
    owned = np.array(runs["clients-fedavg"].partition["counts"]) > 0
    thinned = data.y_test[::THINNED]
    return Example(data.x_train.astype(np.float64), data.y_train, data.y_test, central, clients, thinned, owned)


def angle(a: Points, b: Points) -> float:
    """Degrees between two vectors, 0 to 180."""
    cosine = float(a @ b) / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-30)
    return float(np.degrees(np.arccos(np.clip(cosine, -1, 1))))


def class_means(view: View, y: NDArray[np.int64]) -> Points:  # (6, 2)
    return np.stack([view.features[y == c].mean(0) for c in range(len(view.prototypes))])


def smallest_gap(prototypes: Points) -> float:
    """Degrees between the two neighbouring prototypes that are closest; 60 when six are spread evenly."""
    turn = np.sort(np.degrees(np.arctan2(prototypes[:, 1], prototypes[:, 0])))
    return float(np.diff(turn, append=turn[0] + 360).min())


def disagreement(example: Example, run: str, pair: tuple[int, int]) -> list[float]:
    """For each class that both clients own: degrees between its mean representations on the two."""
    one, two = (example.means[run][client] for client in pair)
    both = np.flatnonzero(example.owned[pair[0]] & example.owned[pair[1]])
    return [angle(one[c], two[c]) for c in both]


def numbers(example: Example) -> dict[str, Any]:
    """What the figures show, as numbers."""
    central = {}
    for name, view in example.central.items():
        norms = np.linalg.norm(view.prototypes, axis=1)
        central[name] = {
            "accuracy": float(np.mean(view.per_class)),
            "minority_accuracy": float(np.mean([view.per_class[c] for c in MINORITY])),
            "per_class": view.per_class,
            "prototype_norms": norms.tolist(),
            "norm_ratio": float(norms.max() / norms.min()),
            "smallest_gap_degrees": smallest_gap(view.prototypes),
        }
    pair = shown_pair(example)
    clients: dict[str, Any] = {}
    for run, views in example.clients.items():
        here = disagreement(example, run, pair)
        means = [disagreement(example, run, two) for two in combinations(views, 2)]
        pooled = [degrees for angles in means for degrees in angles]
        clients[run] = {
            "clients": list(pair),
            "angle_on_these": float(np.mean(here)) if here else None,
            "angles_on_these": here,
            "angle_over_all_pairs": float(np.mean(pooled)),
            "pairs": len(means),
            "class_pairs": len(pooled),
        }
    return {"central": central, "clients": clients}


def shown_pair(example: Example) -> tuple[int, int]:
    """Clients 0 and 1 as in the paper, or the first two that took part in both runs."""
    both = sorted(set.intersection(*(set(views) for views in example.clients.values())))
    return both[0], both[1]


def claims(numbers: dict[str, Any]) -> list[dict[str, Any]]:
    """The paper's claims, each with the numbers that bear on it and whether they show it."""
    c, f = numbers["central"], numbers["clients"]
    even, odd = c["balanced-free"], c["imbalanced-free"]
    even_u, odd_u = c["balanced-uniform"], c["imbalanced-uniform"]
    angles = [f[run]["angle_over_all_pairs"] for run in FEDERATED]
    statements = [
        (
            "Balanced, free head: prototypes have about the same norm (largest at most 1.5 times the smallest)",
            even["norm_ratio"] <= 1.5,
            f"largest over smallest {even['norm_ratio']:.2f}",
        ),
        (
            "Balanced, free head: prototypes are spread about evenly (no two closer than 40 of the ideal 60 degrees)",
            even["smallest_gap_degrees"] >= 40,
            f"smallest gap {even['smallest_gap_degrees']:.0f} degrees",
        ),
        (
            "Imbalance makes the free head's prototype norms more unequal (by a tenth or more)",
            odd["norm_ratio"] >= 1.1 * even["norm_ratio"],
            f"largest over smallest {even['norm_ratio']:.2f} balanced, {odd['norm_ratio']:.2f} imbalanced",
        ),
        (
            "Imbalance pulls the free head's prototypes together (by 5 degrees or more)",
            odd["smallest_gap_degrees"] <= even["smallest_gap_degrees"] - 5,
            f"smallest gap {even['smallest_gap_degrees']:.0f} degrees balanced, "
            f"{odd['smallest_gap_degrees']:.0f} imbalanced",
        ),
        (
            "A uniform head does not hurt on balanced data (within one point)",
            even_u["accuracy"] >= even["accuracy"] - 1,
            f"accuracy {even['accuracy']:.1f} free, {even_u['accuracy']:.1f} uniform",
        ),
        (
            "A uniform head helps the minority classes on imbalanced data (by a point or more)",
            odd_u["minority_accuracy"] >= odd["minority_accuracy"] + 1,
            f"minority accuracy {odd['minority_accuracy']:.1f} free, {odd_u['minority_accuracy']:.1f} uniform",
        ),
        (
            "With 100 clients and FedAvg, a class lies in different places on different clients (15 degrees or more)",
            angles[0] >= 15,
            f"mean angle between two clients {angles[0]:.1f} degrees",
        ),
        (
            "With 100 clients, a uniform head brings these places together (the angle is smaller by a fifth or more)",
            angles[1] <= 0.8 * angles[0],
            f"mean angle between two clients {angles[0]:.1f} degrees with FedAvg, {angles[1]:.1f} with FedAvg+UH",
        ),
    ]
    return [{"claim": claim, "seen": bool(seen), "numbers": said} for claim, seen, said in statements]


def verdict(judged: Sequence[dict[str, Any]]) -> str:
    """In words: what the numbers show, and what they do not."""
    seen = sum(claim["seen"] for claim in judged)
    lines = [f"The numbers show {seen} of the {len(judged)} claims of the paper's motivating example (one seed)."]
    lines += [f"{'seen' if claim['seen'] else 'NOT seen'}: {claim['claim']}: {claim['numbers']}." for claim in judged]
    return "\n".join(lines)


# --- figures -------------------------------------------------------------------------------------------------------

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
