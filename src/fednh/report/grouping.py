"""Which runs a figure may put together: one setting is the same task for everybody, one variant one method in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fednh.config import flat
from fednh.report.groups import method_name, method_order, show
from fednh.report.load import Run

# How a run was computed and watched, not what it computed.
ASIDE = ("seed", "workers", "device", "store", "checkpoint", "eval", "diagnostics", "data.dir", "on_error")
NAMED = ("data.name", "partition.name", "partition.beta", "partition.clients", "participation.rate")


def settings_of(run: Run) -> dict[str, Any]:
    """The settings that decide a run's numbers, by dotted name; `method.*` included, the seed not."""
    return {key: value for key, value in flat(run.config.model_dump()).items() if not _below(key, ASIDE)}


def by_setting(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs that differ in method and seed only, under a label that tells the settings apart."""
    tasks = [{k: v for k, v in settings_of(run).items() if not _below(k, ("method",))} for run in runs]
    keys = dict.fromkeys(key for task in tasks for key in task)
    varying = [key for key in keys if key not in NAMED and len({repr(task.get(key)) for task in tasks}) > 1]
    groups: dict[str, list[Run]] = {}
    for run, task in zip(runs, tasks, strict=True):
        shown = [f"{key}={show(task.get(key))}" for key in varying]
        groups.setdefault(", ".join([_task(run), *shown]), []).append(run)
    return groups


def by_variant(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs that differ in their seed only; hyper-parameters are named where the method's runs differ in them."""
    varying: dict[str, list[str]] = {}
    for method in {run.method for run in runs}:
        found = [run.config.method for run in runs if run.method == method]
        varying[method] = [key for key in found[0] if len({repr(s.get(key)) for s in found}) > 1]
    groups: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda r: (method_order(r.method), repr(r.config.method), r.config.seed)):
        words = [f"{key}={show(run.config.method[key])}" for key in varying[run.method]]
        groups.setdefault(" ".join([method_name(run.method), *words]), []).append(run)
    return groups


def seeds(runs: Iterable[Run]) -> list[int]:
    return sorted({run.config.seed for run in runs})


def _task(run: Run) -> str:
    """digits, Dirichlet(0.3), 20 clients, 50% a round."""
    how, rate = run.config.partition, run.config.participation.rate
    kind = {"dirichlet": "Dirichlet", "quantity": "Dirichlet sizes", "site": "natural sites"}.get(how.name, how.name)
    spread = f"{kind}({how.beta:g})" if how.name in ("dirichlet", "quantity") else kind
    return f"{run.summary['data']}, {spread}, {run.clients} clients, {rate:.0%} a round"


def _below(key: str, parts: Sequence[str]) -> bool:
    return any(key == part or key.startswith(part + ".") for part in parts)
