"""Run folders made by hand, with numbers that a test chooses; and small real ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fednh.backends import threads
from fednh.config import Config, dump, load
from fednh.federated.setup import build_federation
from fednh.report.load import Run, load_run
from fednh.runs.model_file import Outcomes, write_model, write_outcomes
from fednh.runs.run_folder import RunFolder, environment
from tests.helpers.callbacks import Recorder

DOMAINS = ("art", "cartoon", "photo", "sketch")


def record(round_: int, **figures: Any) -> dict[str, Any]:
    """A line of metrics.jsonl with plain defaults."""
    plain = {"train_loss": 1.0, "seconds": 2.0, "bytes_up": 1_000_000, "bytes_down": 3_000_000, "eval_seconds": 0.1}
    return {"round": round_, **plain, "clients": [0, 1], "dropped": [], "refused": [], **figures}


def fake_run(
    path: Path,
    overrides: dict[str, Any],
    records: Sequence[dict[str, Any]] = (),
    counts: Sequence[Sequence[int]] = ((5, 5), (2, 0)),
    classes: Sequence[str] = ("a", "b"),
    people: Sequence[dict[str, Any]] = (),
    sites: Sequence[str] = (),
    **summary: Any,
) -> Run:
    """A finished run folder that nobody computed."""
    config: Config = load("digits", overrides if sites else {"partition.clients": len(counts), **overrides})
    path.mkdir(parents=True)
    (path / "config.toml").write_text(dump(config))
    (path / "environment.json").write_text(json.dumps(environment(config)))
    partition = {"classes": list(classes), "counts": [list(row) for row in counts]}
    partition |= {"sites": list(sites)} if sites else {}
    (path / "partition.json").write_text(json.dumps(partition))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in records))
    full = {
        "method": config.method["name"],
        "data": config.data.name,
        "seed": config.seed,
        "rounds": config.rounds,
        "gm": 50.0,
        "pm_v": 60.0,
        "pm_l": 70.0,
        "pm_l_std": 5.0,
        "per_class": [50.0] * len(classes),
        "clients": list(people),
        "bytes_up": 1e6,
        "bytes_down": 3e6,
        "dropped": 0,
        "refused": 0,
        "samples": 100,
        "seconds": 10.0,
        "client_seconds": 8.0,
        "eval_seconds": 1.0,
        "samples_per_second": 12.5,
        **summary,
    }
    (path / "summary.json").write_text(json.dumps(full))
    return load_run(path)


def person(client: int, pm_l: float, per_class: Sequence[float], pm_v: float = 0.0) -> dict[str, Any]:
    return {"client": client, "pm_v": pm_v, "pm_l": pm_l, "per_class": list(per_class), "samples": 10}


def fake_sites(path: Path, method: str, held: Sequence[float], sites: Sequence[str] = DOMAINS, **summary: Any) -> Run:
    """A finished run of natural sites without a shared test set; `held` has each site's held-out accuracy."""
    people = [{"client": k, "pm_v": None, "pm_l": None, "per_class": None} for k in range(len(held))]
    people = [{**p, "held_share": v, "held_macro": v, "samples": 7} for p, v in zip(people, held, strict=True)]
    mean = float(np.mean(held))
    lacks: dict[str, Any] = dict.fromkeys(("gm", "pm_v", "pm_l", "pm_l_std", "per_class"))
    measured = {"held_share": mean, "held_macro": mean, "held_share_std": float(np.std(held))}
    records = [record(r, held_share=mean, held_macro=mean) for r in (1, 2)]
    overrides = {"partition.name": "site", "method.name": method}
    counts = [(3, 4)] * len(held)
    return fake_run(
        path, overrides, records, counts, people=people, sites=sites[: len(held)], **lacks, **measured, **summary
    )


def add_outcomes(run: Run, client: int, label: Sequence[int], personal: Sequence[int], shared: Sequence[int]) -> None:
    """What became of a client's held-out samples, one by one; no `shared` where the method has no global model."""
    columns = [np.array(column, np.int32) for column in (label, personal, *([shared] if shared else []))]
    write_outcomes(run.layout.outcomes_of(client), Outcomes(*columns))


def real_run(path: Path, overrides: dict[str, Any]) -> Run:
    """A short real run on digits, trained in this process."""
    quick = {"rounds": 3, "eval.every": 1, "checkpoint.every": 0, "train.epochs": 1, "partition.clients": 8}
    config = load("digits", {**quick, "participation.rate": 1.0, **overrides})
    federation = build_federation(config)
    with RunFolder(path) as folder:
        threads.make_run(config, federation, folder, Recorder()).run()
    return load_run(path)


def many_runs(folder: Path, hostile: str = "") -> None:
    """Forty runs as large as the paper's: ten methods, two settings and seeds, 100 clients and classes, 200 rounds."""
    methods = ("fednh", "feduh", "fedavg", "local", "fedper", "fedrep", "fedbabu", "ditto", "fedrod", "creff")
    classes = [f"class {c}{hostile}" for c in range(100)]
    for beta in (0.3, 1.0):
        for seed in (0, 1):
            rng = np.random.default_rng([seed, int(beta * 10)])
            counts = np.round(rng.dirichlet(np.full(100, beta), 100) * 500).astype(int).tolist()
            for method in methods:
                records = []
                for r in range(1, 201):
                    looked = {"gm": r / 4, "pm_v": r / 5, "pm_l": r / 3} if r % 10 == 0 else {}
                    records.append(record(r, clients=list(range(10)), gradient_norm=100 / r, **looked))
                people = [person(k, float(rng.uniform(40, 90)), rng.uniform(0, 100, 100).round(4)) for k in range(100)]
                settings = {"method.name": method, "partition.beta": beta, "seed": seed, "rounds": 200}
                path = folder / f"{method}-{beta}-{seed}"
                per_class = rng.uniform(0, 100, 100).tolist()
                fake_run(path, settings, records, counts, classes, people, per_class=per_class)
                head = torch.randn(100, 32, generator=torch.Generator().manual_seed(seed))
                card = {"method": {"name": method}, "model": {"name": "mlp"}, "shape": [32], "classes": classes}
                card["preprocessing"] = {"scale": 1.0, "mean": [0.0], "std": [1.0]}
                write_model(path / "models" / "global.safetensors", {"head.weight": head}, card)


def site_table(sites: str = "abc", rows: int = 30) -> list[str]:
    rng = np.random.default_rng(5)
    lines = []
    for number, site in enumerate(sites):
        for _ in range(rows):
            label = int(rng.integers(2))
            x, y = rng.normal(size=2) + np.array([label, number])
            lines.append(f"{x:.6f},{y:.6f},{site},{'sick' if label else 'well'}")
    return ["x,y,site,label", *lines]


def fake_result(
    folder: Path,
    method: str,
    seed: int,
    gm: float | None,
    pm_v: float = 50.0,
    pm_l: Sequence[float] = (60.0, 80.0),
    seconds: float = 10.0,
    preset: str = "digits",
    per_class: Sequence[float | None] | None = None,
    counts: Sequence[Sequence[int]] | None = None,
    **settings: Any,
) -> Run:
    """A finished run; `pm_l` has one value a client, and a round sends 100 bytes up and 300 down."""
    overrides = {"method.name": method, "seed": seed, "workers": 2}
    config = load(preset, overrides | {key.replace("__", "."): value for key, value in settings.items()})
    mean = sum(pm_l) / len(pm_l)
    rounds = config.rounds
    run = RunFolder(folder)
    folder.mkdir(parents=True)
    table = [list(row) for row in counts] if counts is not None else [[3, 4] for _ in pm_l]
    run.begin(config, [chr(ord("a") + c) for c in range(len(table[0]))], table)
    record = {"train_loss": 0.5, "seconds": 0.1, "bytes_up": 100, "bytes_down": 300, "clients": [0]}
    run.write_metrics([{"round": r + 1, **record, "dropped": [], "refused": []} for r in range(rounds)])
    run.write_summary(
        {
            "method": method,
            "data": config.data.name,
            "seed": seed,
            "rounds": rounds,
            "gm": gm,
            "pm_v": pm_v,
            "pm_l": mean,
            "pm_l_std": (sum((v - mean) ** 2 for v in pm_l) / len(pm_l)) ** 0.5,
            "per_class": list(per_class) if per_class is not None else None if gm is None else [gm, gm],
            "clients": [{"client": k, "pm_v": pm_v, "pm_l": v, "samples": 7} for k, v in enumerate(pm_l)],
            "bytes_up": 100 * rounds,
            "bytes_down": 300 * rounds,
            "dropped": 0,
            "refused": 0,
            "failed": 0,
            "samples": 1000,
            "seconds": seconds,
            "client_seconds": seconds / 2,
            "eval_seconds": 1.0,
            "samples_per_second": 200.0,
        }
    )
    return load_run(folder)


def three_seeds(folder: Path) -> list[Run]:
    """FedNH, FedAvg and Local with three seeds each. By hand:

    GM      FedNH 80 82 84: 82 ± 2      FedAvg 78 79 80: 79 ± 1     Local has none
    PM(V)   FedNH 50 50 50: 50 ± 0      FedAvg 52 54 53: 53 ± 1     Local 41 40 42: 41 ± 1
    PM(L)   70 on each seed for all; its spread over clients is 10 for FedNH, 20 for FedAvg, 30 for Local
    """
    runs = []
    for seed in range(3):
        runs += [
            fake_result(folder / f"fednh-{seed}", "fednh", seed, [80.0, 82.0, 84.0][seed], seconds=12.0),
            fake_result(folder / f"fedavg-{seed}", "fedavg", seed, 78.0 + seed, [52.0, 54.0, 53.0][seed], (50.0, 90.0)),
            fake_result(folder / f"local-{seed}", "local", seed, None, [41.0, 40.0, 42.0][seed], (40.0, 100.0)),
        ]
    return runs
