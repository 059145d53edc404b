"""Sweeps: the plan, equal conditions for all methods, and what kills, stops and failures leave behind."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from fednh.backends import threads
from fednh.callbacks import Callback
from fednh.cli import app
from fednh.cli.sweep import MOST_WARNINGS, _tell
from fednh.config import load
from fednh.errors import UserError
from fednh.experiments.sweep import SweepOutcome, combine, share, values
from fednh.federated.architectures import initial_state
from fednh.federated.setup import build_federation
from fednh.methods import METHODS
from fednh.report.load import load_runs
from fednh.report.tables import records
from fednh.runs.layout import run_name, unlike
from fednh.tree import select

SMALL = {"partition.clients": [8], "train.epochs": [1], "model.args.hidden": [[8]]}


# --- the plan ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.1,0.3", [0.1, 0.3]),
        ("fednh, fedavg", ["fednh", "fedavg"]),
        ("[16,8]", [[16, 8]]),
        ("[16,8],[32]", [[16, 8], [32]]),
        ("true,false", [True, False]),
        ("'a,b',c", ["a,b", "c"]),
    ],
)
def test_lists_of_values(text: str, expected: list[Any]) -> None:
    assert values(text) == expected


@given(st.lists(st.one_of(st.integers(-99, 99), st.lists(st.integers(0, 9), max_size=3)), min_size=1, max_size=5))
def test_any_list_of_numbers_and_lists_comes_back(expected: list[Any]) -> None:
    assert values(",".join(map(str, expected))) == expected


@pytest.mark.parametrize("text", ["", "a,,b", "0.1,"])
def test_an_empty_value_is_an_error(text: str) -> None:
    with pytest.raises(UserError, match="empty value"):
        values(text)


def test_the_plan_is_the_product_with_readable_names(tmp_path: Path) -> None:
    axes = {"method.name": ["fednh", "fedavg"], "partition.beta": [0.3, 1.0], "seed": [0, 1], "method.rho": [0.1, 0.9]}
    plan = combine("digits", axes, ["method.rho"], tmp_path)
    names = [run.name for run in plan]
    assert len(plan) == 2 * 2 * 2 + 2 * 2  # rho is FedNH's alone: FedAvg runs once for each beta and seed
    assert "digits-fednh-dirichlet0.3-rho0.1-seed0" in names
    assert "digits-fedavg-dirichlet1-seed1" in names
    assert len(set(names)) == len(names)
    for run in plan:
        assert run.folder.path == tmp_path / run.name
        if run.config.method["name"] == "fednh":
            assert f"rho{run.config.method['rho']:g}" in run.name


def test_names_have_only_what_varies_unless_a_folder_is_named_otherwise(tmp_path: Path) -> None:
    axes = {"method.rho": [0.1, 0.9], "train.lr": [0.05]}
    one, other = combine("digits", axes, list(axes), tmp_path)
    assert one.name == "digits-fednh-dirichlet0.3-rho0.1-seed0"
    assert other.name == "digits-fednh-dirichlet0.3-rho0.9-seed0"
    (tmp_path / "digits-fednh-dirichlet0.3-rho0.9-lr0.05-seed0").mkdir()
    assert combine("digits", axes, list(axes), tmp_path)[1].name == "digits-fednh-dirichlet0.3-rho0.9-lr0.05-seed0"
    assert combine("digits", axes, list(axes), tmp_path)[0].name == one.name


def test_a_warning_of_many_runs_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = [tmp_path / f"{number}.log" for number in range(72)]
    many = {f"other {number}": [logs[0]] for number in range(MOST_WARNINGS + 1)}
    _tell(SweepOutcome(warnings={"an upload was refused": logs, **many}), [], tmp_path, quiet=True)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"fednh: 72 finished runs said: an upload was refused (for example {logs[0]})"
    assert lines[1] == f"fednh: 1 finished run said: other 0 (for example {logs[0]})"
    assert lines[-1] == f"fednh: and 2 other sentences, in {tmp_path}/.sweep/*.log"
    assert len(lines) == MOST_WARNINGS + 1


def test_a_value_given_twice_runs_once(tmp_path: Path) -> None:
    assert len(combine("digits", {"seed": [0, 0, 1]}, [], tmp_path)) == 2


def test_list_valued_settings_have_names_of_their_own(tmp_path: Path) -> None:
    axes = {"model.args.hidden": [[16, 8], [32]]}
    plan = combine("digits", axes, ["model.args.hidden"], tmp_path)
    assert [run.config.model.args["hidden"] for run in plan] == [[16, 8], [32]]
    assert [run.name for run in plan] == [
        "digits-fednh-dirichlet0.3-hidden=_16_8_-seed0",
        "digits-fednh-dirichlet0.3-hidden=_32_-seed0",
    ]


def test_beta_goes_to_the_partitions_that_use_it(tmp_path: Path) -> None:
    axes = {"partition.name": ["dirichlet", "iid"], "partition.beta": [0.3, 1.0]}
    names = [run.name for run in combine("digits", axes, [], tmp_path)]
    assert names == ["digits-fednh-dirichlet0.3-seed0", "digits-fednh-dirichlet1-seed0", "digits-fednh-iid-seed0"]


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        (
            {"method.name": ["fedavg", "local"], "method.rho": [0.1]},
            "method.rho is a hyper-parameter of none of fedavg",
        ),
        ({"method.name": ["fednh"], "method.rh": [0.1]}, "did you mean 'method.rho'"),
        ({"method.name": ["fednh", "fedx"]}, "'fedx' is not known"),
        (
            {"partition.name": ["iid"], "partition.beta": [0.3]},
            "partition.beta is used by none of these partitions: iid",
        ),
        ({"seed": [0, -1]}, "seed = -1"),
        ({"method.name": ["fednh"], "method.rho": [0.5, 1.5]}, "rho = 1.5"),
    ],
)
def test_a_bad_plan_is_one_sentence(tmp_path: Path, axes: dict[str, list[Any]], words: str) -> None:
    with pytest.raises(UserError, match=words.replace(".", r"\.")):
        combine("digits", axes, [], tmp_path)


def test_names_are_safe_and_unlike() -> None:
    config = load("digits", {"data.name": "npz:/some/dir/my data.npz"})
    assert run_name(config, {"a.lr": 0.1, "b.lr": "x/y"}) == "my_data-fednh-dirichlet0.3-a.lr0.1-b.lr=x_y-seed0"
    long = run_name(config, {f"key{i}": "v" * 20 for i in range(20)})
    assert len(long) < 200
    one, two, three = unlike(["a", "a", "b"], ["1", "2", "3"])
    assert one != two
    assert three == "b"


def test_jobs_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert share(None, None, 10, None) == (1, 8)
    assert share(3, None, 10, None) == (3, 2)
    assert share(4, None, 2, None) == (2, 4)  # no more at once than there are
    assert share(16, None, 99, None) == (16, 1)
    assert share(2, 3, 10, None) == (2, 3)
    # On a cluster: the slots are shared, and no run is left without.
    assert share(None, None, 10, 40) == (8, 5)
    assert share(None, None, 3, 40) == (3, 13)
    assert share(20, None, 99, 40) == (20, 2)
    assert share(20, None, 99, 4) == (4, 1)
    assert share(20, 10, 99, 40) == (4, 10)
    assert share(None, 100, 99, 40) == (1, 40)


def test_what_is_wrong_is_found_before_the_first_run(tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    words = ["sweep", "digits", "--method", "fedavg", "--clients", "20,1700", "--out", str(out)]
    assert CliRunner().invoke(app, words).exit_code == 2  # --clients is one number; typer says so
    for bad in (
        ["--set", "partition.clients=20,1700"],  # there are not ten samples for each of 1700
        ["--set", "workers=2"],
        ["--seed", "0", "--set", "seed=1"],
        ["--set", "model.name=conv2,resnet19"],
        ["--data", "npz:not-there.npz"],
        ["--track", "tensorbord"],
    ):
        result = CliRunner().invoke(app, ["sweep", "digits", *bad, "--out", str(out)])
        assert isinstance(result.exception, UserError), (bad, result.output)
        assert not out.exists()


def test_the_folder_must_not_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "sweep").write_text("")
    result = CliRunner().invoke(app, ["sweep", "digits", "--out", str(tmp_path / "sweep")])
    assert "is a file, not a folder" in str(result.exception)


def test_a_folder_with_other_settings_is_refused(tmp_path: Path) -> None:
    run = combine("digits", {"rounds": [3]}, [], tmp_path)[0]
    run.folder.path.mkdir(parents=True)
    run.folder.begin(run.config, ["a"], [[1]])
    result = CliRunner().invoke(app, ["sweep", "digits", "--rounds", "4", "--out", str(tmp_path)])
    assert isinstance(result.exception, UserError)
    assert "holds a run with other settings" in str(result.exception)


def test_a_run_killed_before_its_config_was_written_can_start_again(tmp_path: Path) -> None:
    run = combine("digits", {}, [], tmp_path)[0]
    run.folder.path.mkdir()
    for name in (".lock", "environment.json", ".partition.json.123.tmp"):
        (run.folder.path / name).write_text("")
    run.folder.check(run.config)
    (run.folder.path / "thesis.tex").write_text("")
    with pytest.raises(UserError, match="not empty and holds no run"):
        run.folder.check(run.config)


def test_dry_run_shows_the_plan_and_writes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    words = ["--method", "fednh,fedrep", "--seed", "0,1", "--rounds", "3", "--dry-run", "--out", str(out)]
    result = CliRunner().invoke(app, ["sweep", "digits", *words], catch_exceptions=False)
    assert "4 runs, 4 to do" in result.stdout
    assert "digits-fedrep-dirichlet0.3-seed1" in result.stdout
    assert "Runs at a time: 1; workers in each: " in result.stdout
    assert not out.exists()


def test_folds_are_runs_of_one_division(tmp_path: Path) -> None:
    words = ["--method", "fednh,local", "--folds", "3", "--rounds", "3", "--dry-run", "--out", str(tmp_path / "sweep")]
    result = CliRunner().invoke(app, ["sweep", "digits", *words], catch_exceptions=False)
    assert "6 runs, 6 to do" in result.stdout
    assert all(f"digits-local-dirichlet0.3-fold{fold}-seed0" in result.stdout for fold in range(3))


# --- the same conditions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "methods",
    [("fednh", "fedavg", "local", "ditto", "fedncm", "scaffold"), pytest.param(tuple(METHODS), marks=pytest.mark.soak)],
    ids=["some", "all"],
)
def test_all_methods_see_the_same_clients_picks_and_weights(methods: tuple[str, ...], tmp_path: Path) -> None:
    axes = {"method.name": list(methods), "rounds": [2], "participation.rate": [0.5], **SMALL}
    seen: dict[str, list[Any]] = {"partition": [], "picks": [], "body": []}
    for run in combine("digits", axes, [], tmp_path):
        federation = build_federation(run.config)
        with run.folder:
            simulation = threads.make_run(run.config, federation, run.folder, Callback())
            server = initial_state(federation.method, federation.net, run.config.seed)
            initial = {**server, **federation.method.enroll(server)}
            seen["body"].append({name: value.clone() for name, value in select(initial, "body").items()})
            run.folder.begin(run.config, federation.dataset.classes, federation.class_counts())
            simulation.run()
        seen["partition"].append((run.folder.path / "partition.json").read_bytes())
        lines = run.folder.metrics_file.read_text().splitlines()
        seen["picks"].append([json.loads(line)["clients"] for line in lines])
    assert len(seen["body"]) == len(methods)
    assert all(partition == seen["partition"][0] for partition in seen["partition"])
    assert all(len(picks) == 2 and picks == seen["picks"][0] for picks in seen["picks"])
    for body in seen["body"]:
        assert body.keys() == seen["body"][0].keys() != set()
        assert all(torch.equal(body[name], seen["body"][0][name]) for name in body)


# --- real processes ----------------------------------------------------------------------------------------------

SETTINGS = {"rounds": [12], "train.epochs": [1], "checkpoint.every": [2], "eval.every": [5]}


def start(out: Path, methods: str, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "fednh", "sweep", "digits", "--method", methods, "--out", str(out)]
    for key, (value,) in SETTINGS.items():
        command += ["--set", f"{key}={value}"]
    return subprocess.Popen([*command, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(condition: Callable[[], bool], seconds: float = 180) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "this did not happen in time"
        time.sleep(0.02)


def rounds(out: Path) -> int:
    return max([len(file.read_bytes().splitlines()) for file in out.glob("*/metrics.jsonl")], default=0)


def free(run: Path) -> bool:
    """Whether no process holds the run folder's lock."""
    if not (run / ".lock").exists():
        return True
    with (run / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def figures(out: Path) -> list[dict[str, Any]]:
    """The table without the clock."""
    return [r for r in records(load_runs([out])) if "seconds" not in r["metric"]]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "sweep"
    for run in combine("digits", {"method.name": ["fednh", "fedavg"], **SETTINGS}, list(SETTINGS), out):
        federation = build_federation(run.config)
        with run.folder:
            run.folder.begin(run.config, federation.dataset.classes, federation.class_counts())
            threads.make_run(run.config, federation, run.folder, Callback()).run()
    return out


@pytest.mark.soak
def test_a_killed_sweep_goes_on_and_its_table_is_the_same(uninterrupted: Path, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    process = start(out, "fednh,fedavg", "--jobs", "2")
    wait_for(lambda: rounds(out) >= 3 and any(out.glob("*/checkpoints/round-*.json")))  # written in the background
    process.send_signal(signal.SIGKILL)
    process.communicate()
    runs = [path for path in out.iterdir() if path.name != ".sweep"]
    wait_for(lambda: all(free(run) for run in runs))  # the runs died with the sweep
    assert not all((run / "summary.json").exists() for run in runs)
    again = start(out, "fednh,fedavg", "--jobs", "2")
    told, errors = again.communicate(timeout=180)
    assert again.returncode == 0, errors
    assert "2 of 2 runs done" in told
    assert "said: going on after round" in errors
    assert any("going on after round" in log.read_text() for log in (out / ".sweep").glob("*.log"))
    assert figures(out) == figures(uninterrupted)


def test_ctrl_c_leaves_everything_resumable(tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    process = start(out, "fednh,fedavg")
    wait_for(lambda: rounds(out) >= 3)
    process.send_signal(signal.SIGINT)
    told, errors = process.communicate(timeout=180)
    assert process.returncode == 130, errors
    assert "interrupted; 0 of 2 runs finished, the same command goes on" in errors
    assert "failed" not in told + errors
    assert ": interrupted, " in told
    (run,) = [path for path in out.iterdir() if path.name != ".sweep"]  # the second was not begun
    assert free(run)
    assert list(run.glob("checkpoints/round-*.json"))


@pytest.mark.soak
def test_a_second_sweep_in_the_same_folder_is_refused_by_name_and_nothing_dies(tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    (out / ".sweep").mkdir(parents=True)
    (out / ".sweep" / "lock").write_text("process 1 on a machine that lost power")  # of a dead process: no obstacle
    first = start(out, "fednh", "--set", "rounds=2")
    wait_for(lambda: f"process {first.pid} on " in (out / ".sweep" / "lock").read_text())
    first.send_signal(signal.SIGSTOP)  # so that it is there still when the second one looks
    second = start(out, "fednh,fedavg")
    told, errors = second.communicate(timeout=180)
    first.send_signal(signal.SIGCONT)
    assert second.returncode == 2
    assert f"{out} is in use by process {first.pid} on {socket.gethostname()} (fednh sweep digits " in errors
    assert "Traceback" not in errors
    assert told == ""
    _, errors = first.communicate(timeout=180)
    assert first.returncode == 0, errors
    assert (out / ".sweep" / "lock").read_text() == "", "nobody holds it any more"
    assert len(list(out.glob("*/summary.json"))) == 1


def test_a_sweep_that_is_refused_leaves_no_folder(tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    words = ["sweep", "digits", "--clients", "1000", "--out", str(out)]
    assert CliRunner().invoke(app, words).exit_code != 0
    assert not out.exists()


@pytest.mark.soak
def test_a_failed_run_is_told_at_the_end_and_a_finished_one_skipped(uninterrupted: Path, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    fedavg, fednh = sorted(uninterrupted.iterdir())
    out.mkdir()
    (out / fednh.name).symlink_to(fednh)
    taken = out / fedavg.name
    taken.mkdir()
    with (taken / ".lock").open("w") as lock:
        lock.write("somebody else")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = start(out, "fednh,fedavg")
        told, errors = process.communicate(timeout=180)
    assert process.returncode == 1
    assert f"{fedavg.name} failed: {taken} is in use by somebody else" in errors
    assert "0 runs finished now, 1 before" in told
