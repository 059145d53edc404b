"""Finished runs, read from their folders: the only input of tables, figures and reports."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fednh.config import Config, flat
from fednh.data.partitions.kinds import uses
from fednh.data.splits import FEWEST_HELD
from fednh.errors import UserError
from fednh.metric_names import HELD
from fednh.runs.layout import RunLayout
from fednh.runs.model_file import Outcomes, read_outcomes
from fednh.runs.run_folder import names_of, read_config, read_metrics, read_summary
from fednh.text import some

# How a run was computed, stored and monitored: these change neither the meaning nor the value of a metric.
_NO_MATTER = (
    *("seed", "data.fold", "workers", "data.dir", "checkpoint", "store", "eval.every", "diagnostics"),
    *("federation.name", "federation.folder", "federation.timeout"),
)


@dataclass(frozen=True)
class Run:
    """One finished run."""

    path: Path
    config: Config
    summary: dict[str, Any]
    records: list[dict[str, Any]]  # the lines of metrics.jsonl
    partition: dict[str, Any]  # {"classes": [names], "counts": [[samples by class] by client], "sites": [names]}
    environment: dict[str, Any]

    @property
    def layout(self) -> RunLayout:
        """Where its files lie."""
        return RunLayout(self.path)

    @property
    def method(self) -> str:
        return str(self.config.method["name"])

    @property
    def body(self) -> str:
        """The frozen body that it was trained behind, or "none": runs behind the same one are compared."""
        model = self.config.model
        return model.network if model.frozen == "body" else "none"

    @property
    def repeat(self) -> tuple[int, int]:
        """Its seed and the fold that it holds out: what tells runs of one setting apart."""
        return self.config.seed, self.config.data.fold

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings that decide its metrics, by dotted name: without the seed and those that it does not use."""
        config = self.config
        kind, settings = config.partition.name, config.partition.model_dump()
        unused = {f"partition.{setting}" for setting in settings if not uses(kind, setting)}
        unused |= {"trim"} if config.aggregator != "trimmed_mean" else set()
        everything = flat(config.model_dump())
        return {k: v for k, v in everything.items() if k not in unused and not _below(k, _NO_MATTER)}

    @cached_property
    def setting(self) -> str:
        """A key of these settings: runs that share it differ in seed and fold alone."""
        return json.dumps({"data shown": self.summary["data"], **self.settings}, sort_keys=True, default=str)

    @cached_property
    def counts(self) -> NDArray[np.int64]:  # (K, C); no rows where only the sites know
        """Training samples of each class on every client."""
        return np.array(self.partition["counts"], np.int64).reshape(-1, max(len(self.partition["classes"]), 1))

    @property
    def clients(self) -> int:
        """The number of clients; of sites it is not in the config."""
        return len(self.partition["counts"]) or len(self.names) if self.natural else self.config.partition.clients

    @property
    def natural(self) -> bool:
        """Whether the clients are sites: those that the data names, or those of a real federation."""
        return self.config.partition.kind.natural or bool(self.names)

    @cached_property
    def names(self) -> dict[int, str]:
        """The clients' names, where they are natural sites or real ones."""
        return names_of(self.partition, self.summary)

    def client_name(self, client: int) -> str:
        return self.names.get(client, f"client {client}")

    def outcomes(self, client: int) -> Outcomes | None:
        """What became of a client's held-out samples, one by one; None where that is not recorded."""
        file = self.layout.outcomes_of(client)
        return read_outcomes(file) if file.exists() else None

    def has(self, *metrics: str) -> bool:
        return any(self.summary.get(metric) is not None for metric in metrics)

    def by_client(self, metric: str) -> dict[int, float]:
        """The clients that have a metric of the summary, each with its value."""
        if metric not in self._by_client:
            rows = self.summary["clients"]
            self._by_client[metric] = {row["client"]: row[metric] for row in rows if row.get(metric) is not None}
        return self._by_client[metric]

    @cached_property
    def _by_client(self) -> dict[str, dict[int, float]]:
        return {}

    @property
    def one_class(self) -> list[int]:
        """The sites with a single class, which the summary's held-out means leave out."""
        return list(self.summary.get("one_class", ()))

    @property
    def few_held(self) -> list[int]:
        """The sites with very few held-out samples, which the same means leave out."""
        return list(self.summary.get("few_held", ()))

    def counted(self, metric: str) -> dict[int, float]:
        """The clients that count in a metric's mean, each with its value."""
        left_out = {*self.one_class, *self.few_held} if metric in HELD else set()
        return {client: value for client, value in self.by_client(metric).items() if client not in left_out}


def _below(key: str, parts: Sequence[str]) -> bool:
    return any(key == part or key.startswith(part + ".") for part in parts)


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """The finished runs among `folders` and directly below them, in a stable order."""
    paths: list[Path] = []
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder")
        name = RunLayout.summary_file
        here = [folder] if RunLayout(folder).finished else sorted(p.parent for p in folder.glob(f"*/{name}"))
        if not here:
            raise UserError(f"{folder} holds no finished run (no {name} in it or directly below it)")
        paths += here
    return paths


def load_run(path: Path) -> Run:
    """Read a finished run."""
    run = RunLayout(path)
    try:
        records = read_metrics(path)
        partition = json.loads(run.partition_file.read_text(encoding="utf-8"))
        environment = json.loads(run.environment_file.read_text(encoding="utf-8"))
        if not {"classes", "counts"} <= set(partition):
            raise ValueError(f"{run.partition_file.name} lacks classes or counts")
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} is not a whole run folder: {error}") from error
    return Run(path, read_config(path, finished=True), read_summary(path), records, partition, environment)


def load_runs(folders: Sequence[Path]) -> list[Run]:
    return [load_run(path) for path in find_runs(folders)]


def left_out(runs: Sequence[Run]) -> str:
    """Who is left out of held-out means, and which are flattered, as sentences that may follow another one."""
    single, few = (
        list(dict.fromkeys(run.client_name(client) for run in runs for client in getattr(run, which)))
        for which in ("one_class", "few_held")
    )
    words = f" A site with one class, which any model can name, is left out: {some(single)}." if single else ""
    scarce = f" A site with fewer than {FEWEST_HELD} held-out samples is left out: {some(few)}." if few else ""
    chosen = any("kept_round" in run.summary for run in runs)
    biased = " With stop_when the round was chosen on these samples, which flatters the accuracy on them."
    return words + scarce + biased * chosen


def rounds_of(run: Run) -> int | str:
    """How many rounds a run had, and whose models it kept, if not the last one's."""
    kept, rounds = run.summary.get("kept_round"), run.summary["rounds"]
    return rounds if kept in (None, rounds) else f"{kept} of {rounds}"
