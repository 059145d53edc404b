"""A federation small enough to compute by hand, and an environment that touches nothing of the user's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from fednh.data.batches import Samples, samples_of
from fednh.errors import UserError
from fednh.machine import check_bf16
from fednh.models import Net, build_net
from tests.helpers.counts import COUNTS, count
from tests.helpers.tiny import tiny_dataset

torch.set_num_threads(1)  # as in the workers of a run
# How fast this machine is says nothing about the code: no property fails because its inputs took long.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["FEDNH_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def bf16() -> None:
    """Skips where the machine cannot compute in bfloat16."""
    try:
        check_bf16()
    except UserError as error:
        pytest.skip(str(error))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # this is a process of pytest-xdist, which reports to the main one
        session.config.workeroutput["counts"] = COUNTS


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    for what, number in getattr(node, "workeroutput", {}).get("counts", {}).items():
        count(what, number)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if any(COUNTS.values()):
        lost = len(terminalreporter.stats.get("failed", []))
        terminalreporter.write_line(", ".join(f"{k}: {n}" for k, n in COUNTS.items()) + f", lost: {lost}")


@pytest.fixture
def tiny() -> Samples:
    return samples_of(tiny_dataset(), "train")


@pytest.fixture
def net() -> Net:
    return build_net("mlp", (4,), 4, {"hidden": [5]})


@pytest.fixture(scope="session")
def real_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short runs with two seeds of FedAvg and of FedNH with two values of rho; FedProto once. Gradients are logged."""
    from tests.helpers.synthetic import real_run

    folder = tmp_path_factory.mktemp("runs")
    look = {"diagnostics.gradient_norm": True}
    for seed in (0, 1):
        real_run(folder / f"fedavg-{seed}", {"method.name": "fedavg", "seed": seed, **look})
        for rho in (0.1, 0.9):
            real_run(folder / f"fednh-{rho}-{seed}", {"method.rho": rho, "seed": seed, **look})
    real_run(folder / "fedproto-0", {"method.name": "fedproto", **look})
    return folder


class _FinishedRuns(dict[str, Path]):
    """Runs by method, each trained when a test first asks for it."""

    def __init__(self, folder: Path):
        super().__init__()
        self.folder = folder

    def __missing__(self, method: str) -> Path:
        from tests.helpers.synthetic import real_run

        light = {"method.features_per_class": 5, "method.match_steps": 5, "method.retrain_epochs": 5}  # of creff
        quick = {
            "partition.clients": 4,
            "rounds": 8 if method == "fednh" else 2,
            **(light if method == "creff" else {}),
        }
        self[method] = self.folder / method
        real_run(self[method], {"method.name": method, **quick})
        return self[method]


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """method -> the folder of a short finished run on digits, for tests of what is done with models."""
    return _FinishedRuns(tmp_path_factory.mktemp("finished"))
