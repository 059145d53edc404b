"""What every executor promises: the loop's bits, with dropouts, a refused upload, an error, and after an interrupt.

The loop is one thread of this machine. `threads` are four of them, `vmap` computes clients in blocks and may differ in
the last bits, `ray` is a cluster of two machines that are real processes, and `sites` obey signed orders over a Wire.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fednh.config import Config, dump
from fednh.errors import Interrupted
from fednh.io.files import read_tree
from fednh.metric_names import POOLED, best_of
from tests.helpers.callbacks import Recorder
from tests.helpers.compare import lines, same, same_runs
from tests.helpers.contract import CASES, STOPPED, VICTIM, config_of
from tests.helpers.federation import Wire, collect_models, divided, serve, server_identity
from tests.helpers.ray_nodes import Nodes, ended, nodes, rounds_of, start, until
from tests.helpers.simulator import simulate

Run = Callable[[Config, Path, bool], None]  # runs a config in a folder from where it stands; True: stop after a round
LONG = {("ray", case) for case in CASES if case not in ("bits", "interrupt")}
POOLED_BY_SIMULATIONS = [name for key in POOLED for name in (key, best_of(key))]
PAIRS = [
    pytest.param(executor, case, marks=[pytest.mark.soak] * ((executor, case) in LONG), id=f"{executor}-{case}")
    for executor in ("threads", "vmap", "ray", "sites")
    for case in CASES
    if (executor, case) != ("vmap", "norm")  # which the loop computes
]


class Stopping(Recorder):
    """Stops the run after its second round."""

    def on_round(self, record: dict[str, Any]) -> bool:
        super().on_round(record)
        return bool(record["round"] == 2)


def on_threads(config: Config, folder: Path, stop: bool) -> None:
    simulate(config.model_copy(update={"workers": 4}), folder, Stopping() if stop else None)


def on_vmap(config: Config, folder: Path, stop: bool) -> None:
    simulate(config.model_copy(update={"engine": "vmap"}), folder, Stopping() if stop else None)


def on_sites(config: Config, folder: Path, stop: bool) -> None:
    wire = Wire(divided(config, folder).nodes)
    serve(config, wire, folder, server_identity(folder / "fed"), recorder=Stopping() if stop else None)
    collect_models(folder)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    """Two machines of one CPU each."""
    with nodes({}, {}) as found:
        yield found


@pytest.fixture
def run(request: pytest.FixtureRequest, executor: str) -> Run:
    if executor != "ray":
        return {"threads": on_threads, "vmap": on_vmap, "sites": on_sites}[executor]
    cluster: Nodes = request.getfixturevalue("cluster")

    def on_ray(config: Config, folder: Path, stop: bool) -> None:
        (folder.parent / "config.toml").write_text(dump(config.model_copy(update={"workers": 2})))
        process = start(["run", "config.toml", "--quiet", "--out", folder.name], folder.parent, cluster)
        if stop:
            until(lambda: rounds_of(folder) >= 2 or process.poll() is not None)
            process.send_signal(signal.SIGINT)
        code, out, err = ended(process)
        if code == 130:
            raise Interrupted
        assert (code, out) == (0, f"{folder.name}\n"), err
        told = ("going on after round ", "not finite and was refused", "RuntimeError: no luck")
        assert err == "" or any(words in err for words in told)

    return on_ray


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a case's run in the loop, without an interrupt."""
    folder = tmp_path_factory.mktemp("loop")

    def of(case: str) -> Path:
        if not (folder / case).exists():
            simulate(config_of(case), folder / case)
        return folder / case

    return of


@pytest.mark.parametrize(("executor", "case"), PAIRS)
def test_an_executor_gives_what_the_loop_gives(
    executor: str, case: str, run: Run, expected: Callable[[str], Path], tmp_path: Path
) -> None:
    loop, config, folder = expected(case), config_of(case), tmp_path / "run"
    if case in STOPPED:
        with pytest.raises(Interrupted):
            run(config, folder, True)
        assert 2 <= rounds_of(folder) < config.rounds
        assert not (folder / "summary.json").exists()
    run(config, folder, False)
    if executor != "vmap":
        same_runs(loop, folder, *(POOLED_BY_SIMULATIONS if executor == "sites" else ()))
    if executor == "ray":
        assert lines(folder)[-1]["ray"] == {"machines": 2, "computed_again": 0}
        assert json.loads((folder / "environment.json").read_text())["backend"] == "ray"
    for left, right in zip(lines(loop)[:-1], lines(folder)[:-1], strict=True):
        for who in ("clients", "dropped", "refused", "failed"):
            assert left.get(who) == right.get(who), (who, left["round"])
    models = sorted(path.relative_to(loop) for path in loop.rglob("models/**/*.safetensors"))
    assert len(models) >= 6
    for path in models:
        same(read_tree(loop / path), read_tree(folder / path), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("case", "who"), [("dropouts", "dropped"), ("refused", "refused"), ("error", "failed")])
def test_the_loop_shows_what_is_tried(case: str, who: str, expected: Callable[[str], Path]) -> None:
    """Otherwise the comparison above would be of nothing."""
    found = [line[who] for line in lines(expected(case))[:-1]]
    assert any(found)
    if case != "dropouts":
        assert {client for some in found for client in some} == {VICTIM}
        assert all(VICTIM not in line["clients"] for line in lines(expected(case))[:-1])


def test_the_loop_goes_back_with_stop_when(expected: Callable[[str], Path]) -> None:
    summary = lines(expected("stop when"))[-1]
    assert 1 < summary["kept_round"] == summary["rounds"] - 5 < 5  # type: ignore[operator]
