"""How cost grows: seconds a round and peak memory against clients, samples, classes and parameters.

`python -m benchmarks.growth` measures every point in a process of its own and draws docs/images/cost-growth.png. One
thing grows at a time; the rest stays as in BASE. The clients are an MLP's, so that all of it takes minutes.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path

from benchmarks.scale import Job, measure

BASE = Job(clients=1_000, samples=50_000, rounds=8, model="mlp", checkpoint=0)
AXES: dict[str, tuple[str, list[int]]] = {
    "clients that exist": ("clients", [200, 1_000, 10_000, 50_000]),
    "samples a picked client": ("samples", [10_000, 50_000, 200_000, 800_000]),
    "classes": ("classes", [10, 100, 1_000]),
    "parameters": ("hidden", [32, 128, 512, 1024]),
}
HERE = Path(__file__).parent
FIGURE = HERE.parent / "docs" / "images" / "cost-growth.png"


def parameters(hidden: int, classes: int = 10) -> int:
    return 64 * hidden + hidden + hidden * (hidden // 2) + hidden // 2 + (hidden // 2) * classes


def points() -> dict[str, list[dict[str, float]]]:
    """For every axis: what grows, the seconds of a round (median) and the peak memory in MiB."""
    found: dict[str, list[dict[str, float]]] = {}
    for title, (field, values) in AXES.items():
        for value in values:
            job = replace(BASE, **{field: value})
            result = measure(job)
            x = {"samples": value / job.clients, "hidden": parameters(value)}.get(field, value)
            row = {"x": x, "seconds": statistics.median(result["rounds"][2:]), "mib": result["peak"] / 2**20}
            found.setdefault(title, []).append(row)
            print(f"{title} {x:g}: {row['seconds']:.3f} s a round, {row['mib']:.0f} MiB", flush=True)
    return found


def draw(found: dict[str, list[dict[str, float]]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(found), figsize=(3.2 * len(found), 5), sharey="row", layout="constrained")
    for column, (title, rows) in enumerate(found.items()):
        for row, (key, label) in enumerate((("seconds", "seconds a round"), ("mib", "peak memory, MiB"))):
            ax = axes[row][column]
            ax.plot([point["x"] for point in rows], [point[key] for point in rows], marker="o", color="#2a5d9f")
            ax.set_xscale("log")
            ax.set_ylim(bottom=0)
            ax.spines[["top", "right"]].set_visible(False)
            ax.grid(alpha=0.3)
            if column == 0:
                ax.set_ylabel(label)
            if row == 1:
                ax.set_xlabel(title)
    figure.savefig(FIGURE, dpi=120)


def main() -> None:
    found = points()
    HERE.joinpath("growth.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    draw(found)


if __name__ == "__main__":
    main()
