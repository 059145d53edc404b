"""Run folders with chosen figures, written by the library's own functions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fednh.config import load
from fednh.report.load import Run, load_run
from fednh.runs.run_folder import RunFolder


def fake_run(
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
            fake_run(folder / f"fednh-{seed}", "fednh", seed, [80.0, 82.0, 84.0][seed], seconds=12.0),
            fake_run(folder / f"fedavg-{seed}", "fedavg", seed, 78.0 + seed, [52.0, 54.0, 53.0][seed], (50.0, 90.0)),
            fake_run(folder / f"local-{seed}", "local", seed, None, [41.0, 40.0, 42.0][seed], (40.0, 100.0)),
        ]
    return runs
