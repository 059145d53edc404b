"""An error in a method of one's own is told with method, hook, line, client and round, wherever it comes from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fednh.backends import threads
from fednh.config import load
from fednh.errors import RunError, UserError
from fednh.federated.rounds import RoundLoop
from fednh.federated.setup import build_federation
from fednh.methods.fedavg import FedAvg
from fednh.runs.run_folder import RunFolder
from tests.helpers.callbacks import Recorder
from tests.helpers.federation import federate
from tests.helpers.process import fednh as command

SMALL = {
    "method.name": f"{__name__}:Mine",
    "partition.clients": 3,
    "participation.rate": 1.0,
    "rounds": 1,
    "train.epochs": 1,
    "eval.every": 1,
    "model.args": {"hidden": [4]},
    "workers": 1,
}
CLIENT, SERVER = ("client_update", "personal_model"), ("broadcast", "aggregate", "problem", "global_model", "logits")


@dataclass(frozen=True)
class Mine(FedAvg):
    """FedAvg, until a test breaks one of its hooks."""

    def __post_init__(self) -> None: ...


def boom(hook: str) -> Any:
    def broken(self: Mine, *args: Any) -> Any:
        if hook == "client_update" and len(args[3]) == 10:
            return FedAvg.client_update(self, *args)  # on blank samples all is well
        return [][len(args)]

    broken.__code__ = broken.__code__.replace(co_name=hook)
    return broken


def simulation(folder: RunFolder, **settings: Any) -> RoundLoop:
    config = load("digits", {**SMALL, **settings})
    return threads.make_run(config, build_federation(config), folder, Recorder())


@pytest.mark.parametrize(
    ("engine", "hook"), [("vmap", "client_update"), *(("loop", hook) for hook in (*CLIENT, *SERVER))]
)
def test_in_the_simulator(engine: str, hook: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunFolder(tmp_path / "run") as folder:
        run = simulation(folder, engine=engine)

        def started(config: Any, rounds_done: int) -> None:
            assert run.executor.engine == engine
            monkeypatch.setattr(Mine, hook, boom(hook), raising=False)

        monkeypatch.setattr(run.callback, "on_start", started)
        with pytest.raises(RunError) as caught:
            run.run()
    told = str(caught.value)
    assert told.startswith("Mine: ")
    assert "round 1: IndexError: list index out of range" in told
    assert f"({hook}, test_failures.py line " in told
    assert ("client " in told) == (hook in CLIENT)


@pytest.mark.parametrize("hook", ["init", "enroll"])
def test_before_the_first_round(hook: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mine, hook, boom(hook), raising=False)
    words = rf"^Mine: the first try on blank samples failed, before any round: IndexError: .* \({hook}, test_failures"
    with pytest.raises(RunError, match=words), RunFolder(tmp_path / "run") as folder:
        simulation(folder).run()
    assert not (tmp_path / "run").exists(), "nothing was begun"
    with pytest.raises(RunError, match=words):
        federate(load("digits", SMALL), tmp_path / "flower")


@pytest.mark.parametrize("hook", ["client_update", "aggregate", "logits"])
def test_on_flower(
    hook: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error at a site stays in the site's log but for its kind; an error at the server is told in full."""
    monkeypatch.setattr(Mine, hook, boom(hook), raising=False)
    with pytest.raises(RunError) as caught:
        federate(load("digits", {**SMALL, "rounds": 2}), tmp_path / "run")
    log = tmp_path / "run/federation.log"
    notes = log.read_text(encoding="utf-8") if log.exists() else ""
    if hook in CLIENT:
        assert "round 1: site client-000000 (client 0) failed: IndexError; the site's own log says more" in notes
        assert "list index out of range" not in notes
        assert "IndexError: list index out of range" in caplog.text
    else:
        told = notes if hook == "aggregate" else str(caught.value)
        assert re.search(rf"Mine: .*round 1: IndexError: list index out of range \({hook}, test_failures.py line", told)
    assert ("2 of 2 rounds changed nothing" in str(caught.value)) == (hook != "logits")


def test_a_full_disk_is_not_the_methods_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state is stored while `aggregate` reads the uploads: that error stays what it is."""

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with RunFolder(tmp_path / "run") as folder:
        run = simulation(folder)
        monkeypatch.setattr(run.executor.store, "put", full)
        with pytest.raises(OSError, match="No space left"):
            run.run()


def test_a_method_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mine, "__post_init__", boom("__post_init__"))
    with pytest.raises(UserError, match=r"method\.name = 'tests\.federated\.test_failures:Mine' cannot be made: Index"):
        load("digits", SMALL)


def test_the_command_says_it_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mine, "aggregate", boom("aggregate"))
    given = [word for key, value in SMALL.items() if key != "model.args" for word in ("--set", f"{key}={value}")]
    ended = command(["run", "digits", *given, "--out", str(tmp_path / "run"), "--quiet"], tmp_path / "io", inherit=True)
    assert ended.code == 1
    assert ended.stderr.startswith(
        "fednh: Mine: the server failed in round 1: IndexError: list index out of range (aggr"
    )
    assert ended.stderr.count("\n") == 1
