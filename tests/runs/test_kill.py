"""Whatever happens, nothing finished is lost: a run that is killed and resumed ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fednh.methods import METHODS
from tests.helpers.compare import assert_same, outcome
from tests.helpers.counts import count
from tests.helpers.process import Process, fednh

KILLS = 3  # for each method; at least two of them must find the process alive


def command(method: str, out: Path, rounds: int = 6, every: int = 1) -> list[str]:
    settings = {"eval.every": 3, "checkpoint.every": every, "partition.clients": 8, "method.name": method}
    if method == "creff":
        settings |= {"method.retrain_epochs": 20, "method.match_steps": 10}
    if method == "floco":
        settings |= {"method.tau": 2, "method.endpoints": 3}
    words = [w for key, value in settings.items() for w in ("--set", f"{key}={value}")]
    return [
        "run",
        "digits",
        "--rounds",
        str(rounds),
        "--epochs",
        "1",
        "--workers",
        "2",
        "--out",
        str(out),
        *words,
        "--quiet",
    ]


def rounds_written(out: Path) -> int:
    file = out / "metrics.jsonl"
    return len(file.read_bytes().splitlines()) if file.exists() else 0


def kill_at(process: Process, out: Path, round_: int, delay: float) -> bool:
    """SIGKILL somewhat after `round_` rounds have been written; whether it found the process alive."""
    while rounds_written(out) < round_ and not process.ended():
        time.sleep(0.002)
    time.sleep(delay)
    process.kill()
    ended = process.wait()
    assert ended.code in (0, -signal.SIGKILL), ended.stderr
    return ended.code == -signal.SIGKILL


def survive(method: str, tmp_path: Path, kills: int, seed: int) -> int:
    """Kill a run `kills` times at random moments, resume it each time; returns how many kills hit it alive."""
    ended = fednh(command(method, tmp_path / "whole"), tmp_path / "io")
    assert ended.code == 0, ended.stderr
    rng, hits, out = random.Random(seed), 0, tmp_path / "killed"
    for round_ in sorted(rng.randrange(5) for _ in range(kills)):  # of six rounds
        process = Process(command(method, out), tmp_path / "io")
        hits += kill_at(process, out, round_, rng.uniform(0, 0.05))
    # A run that was killed before it wrote its config has nothing to resume: the same command starts it.
    again = ["resume", str(out), "--quiet"] if (out / "config.toml").exists() else command(method, out)
    ended = fednh(again, tmp_path / "io")
    assert ended.code == 0, ended.stderr
    assert_same(out, outcome(tmp_path / "whole"))
    count("kills survived", hits)
    return hits


# They differ in what a checkpoint holds: prototypes, or a kept model. `make soak` has all methods.
@pytest.mark.parametrize("method", ["fednh", "ditto"])
def test_sigkill_at_random_moments(method: str, tmp_path: Path) -> None:
    assert survive(method, tmp_path, KILLS, seed=len(method)) >= 2


@pytest.mark.soak
@pytest.mark.parametrize("method", METHODS)
def test_sigkill_again_and_again(method: str, tmp_path: Path) -> None:
    hits = sum(survive(method, tmp_path / str(i), 5, seed=i) for i in range(3))
    assert hits >= 5


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.soak)])
def test_asked_to_stop_it_saves_and_says_how_to_go_on(number: int, tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "stopped"
    assert fednh(command("fednh", whole, rounds=30, every=100), tmp_path / "io").code == 0
    process = Process(command("fednh", out, rounds=30, every=100), tmp_path / "io")
    wait_for(lambda: (out / "metrics.jsonl").exists() and len((out / "metrics.jsonl").read_text().splitlines()) >= 3)
    process.kill(number)
    ended = process.wait()
    assert ended.code == 130, ended.stderr
    assert f"continue with: fednh resume {out}" in ended.stderr
    assert not (out / "summary.json").exists()
    assert list((out / "checkpoints").glob("round-*.json")), "saved, although the next checkpoint was far away"
    assert fednh(["resume", str(out), "--quiet"], tmp_path / "io").code == 0
    assert_same(out, outcome(whole))


def wait_for(condition: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def test_the_same_command_continues_and_recognises_the_end(tmp_path: Path) -> None:
    out = tmp_path / "r"
    process = Process(command("ditto", out), tmp_path / "io")
    wait_for(lambda: list((out / "checkpoints").glob("round-*.json")))
    process.kill()
    process.wait()
    ended = fednh(command("ditto", out), tmp_path / "io")
    assert ended.code == 0
    assert "going on after round" in ended.stderr
    before = outcome(out)
    ended = fednh(command("ditto", out), tmp_path / "io")
    assert ended.code == 0
    assert "is finished already" in ended.stderr
    assert ended.stdout.strip() == str(out)
    assert_same(out, before)


def test_another_run_does_not_get_into_the_same_folder(tmp_path: Path) -> None:
    out = tmp_path / "r"
    assert fednh(command("fedavg", out, rounds=1), tmp_path / "io").code == 0
    ended = fednh(command("fedper", out, rounds=1), tmp_path / "io")
    assert ended.code == 2
    assert "holds a run with other settings" in ended.stderr


def test_a_folder_in_use_is_refused_by_name(tmp_path: Path) -> None:
    out = tmp_path / "r"
    first = Process(command("fednh", out, rounds=2000), tmp_path / "one")
    wait_for(lambda: (out / "config.toml").exists())
    ended = fednh(command("fednh", out, rounds=2000), tmp_path / "two")
    first.kill()
    first.wait()
    assert ended.code == 2
    assert f"is in use by process {first.pid} on " in ended.stderr


def test_lost_checkpoints_are_never_a_silent_restart(tmp_path: Path) -> None:
    out = tmp_path / "r"
    process = Process(command("fedavg", out, rounds=2000), tmp_path / "io")
    wait_for(lambda: rounds_written(out) > 4)
    process.kill()
    process.wait()
    lines = (out / "metrics.jsonl").read_bytes()
    for manifest in (out / "checkpoints").glob("round-*.json"):
        manifest.unlink()
    ended = fednh(["resume", str(out), "--quiet"], tmp_path / "io")
    assert ended.code == 2
    assert "rounds are recorded but there is no checkpoint" in ended.stderr
    assert (out / "metrics.jsonl").read_bytes() == lines, "nothing was touched"
    (out / "metrics.jsonl").write_bytes(b"".join(lines.splitlines(keepends=True)[:1]))
    process = Process(["resume", str(out), "--quiet"], tmp_path / "io")
    wait_for(lambda: list((out / "checkpoints").glob("round-*.json")))
    process.kill()
    assert "starting again from the beginning" in process.wait().stderr


def test_asked_to_stop_during_an_evaluation(tmp_path: Path) -> None:
    """The round that is being evaluated is not lost: its evaluation is done again after the resume."""
    from fednh.backends import threads
    from fednh.callbacks import Phase
    from fednh.config import load
    from fednh.errors import Interrupted
    from fednh.federated.setup import build_federation
    from fednh.runs.run_folder import RunFolder
    from tests.helpers.callbacks import Recorder

    config = load("digits", {"rounds": 4, "train.epochs": 1, "partition.clients": 8, "eval.every": 2})
    federation = build_federation(config)

    class Stopping(Recorder):
        def on_progress(self, phase: Phase, done: int, total: int) -> None:
            if phase == "evaluating":
                stop.set()

    def go(path: Path, watcher: Recorder, stop: threading.Event) -> None:
        with RunFolder(path) as folder:
            if not folder.started:
                folder.begin(config, federation.dataset.classes, federation.class_counts())
            threads.make_run(config, federation, folder, watcher, stop).run()

    stop = threading.Event()
    go(tmp_path / "whole", Recorder(), threading.Event())
    with pytest.raises(Interrupted):
        go(tmp_path / "stopped", Stopping(), stop)
    assert rounds_written(tmp_path / "stopped") == 1, "round 2 is trained, not yet evaluated"
    go(tmp_path / "stopped", Recorder(), threading.Event())
    assert_same(tmp_path / "stopped", outcome(tmp_path / "whole"))


@pytest.mark.parametrize("at", [1, 4, 5, 13])  # a batch of the global model, of its card, of a client's card or figures
def test_asked_to_stop_between_two_batches_of_the_final_evaluation(at: int, tmp_path: Path) -> None:
    """FedNH on 8 clients and 355 test samples: batches of 128, 128 and 99 for every model, and those for its card."""
    from fednh.backends import threads
    from fednh.callbacks import Phase
    from fednh.config import load
    from fednh.errors import Interrupted
    from fednh.federated.setup import build_federation
    from fednh.runs.run_folder import RunFolder
    from tests.helpers.callbacks import Recorder

    config = load("digits", {"rounds": 2, "train.epochs": 1, "partition.clients": 8, "eval.every": 0, "workers": 1})
    federation, stop, seen = build_federation(config), threading.Event(), list[tuple[int, int]]()

    class Stopping(Recorder):
        def on_progress(self, phase: Phase, done: int, total: int) -> None:
            if phase == "training":
                return
            assert not stop.is_set(), "no batch after the wish to stop"
            seen.append((done, total))
            if len(seen) == at:
                stop.set()

    def go(path: Path, watcher: Recorder, stop: threading.Event) -> None:
        with RunFolder(path) as folder:
            threads.make_run(config, federation, folder, watcher, stop).run()

    go(tmp_path / "whole", Recorder(), threading.Event())
    with pytest.raises(Interrupted):
        go(tmp_path / "stopped", Stopping(), stop)
    assert len(seen) == at
    assert seen[:3] == [(128, 355), (256, 355), (355, 355)][:at], "the global model, a batch at a time"
    assert not (tmp_path / "stopped" / "summary.json").exists()
    go(tmp_path / "stopped", Recorder(), threading.Event())
    assert_same(tmp_path / "stopped", outcome(tmp_path / "whole"))


def test_ctrl_c_in_a_command_that_has_nothing_to_save_is_one_sentence(tmp_path: Path) -> None:
    process = Process(["prototypes", "--classes", "2000", "--dim", "41"], tmp_path / "io")
    wait_for(lambda: (tmp_path / "io" / "stderr.txt").exists())
    time.sleep(1)
    process.kill(signal.SIGINT)
    ended = process.wait(60)
    assert ended.code == 130
    assert ended.stderr == "fednh: interrupted; a file that was not complete was not written\n"


def test_a_bad_option_of_resume_leaves_the_run_alone(tmp_path: Path) -> None:
    out = tmp_path / "r"
    assert fednh(command("fedavg", out, rounds=1), tmp_path / "io").code == 0
    before = (out / "config.toml").read_bytes()
    assert fednh(["resume", str(out), "--workers", "-1"], tmp_path / "io").code == 2
    assert (out / "config.toml").read_bytes() == before


def test_stops_also_when_nobody_reports(tmp_path: Path) -> None:
    out = tmp_path / "r"
    nobody = ["--set", "participation.dropout=0.999999999999"]
    process = Process([*command("fedavg", out, rounds=100_000), *nobody], tmp_path / "io")
    wait_for(lambda: rounds_written(out) > 3)
    process.kill(signal.SIGTERM)
    assert process.wait(60).code == 130


@pytest.mark.parametrize("victim", ["server", "client", "manifest"])
def test_a_damaged_checkpoint_is_told_and_the_one_before_it_used(victim: str, tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "r"
    assert fednh(command("fedper", whole), tmp_path / "io").code == 0
    process = Process(command("fedper", out), tmp_path / "io")
    wait_for(lambda: len(list((out / "checkpoints").glob("round-*.json"))) >= 2)
    process.kill()
    process.wait()
    newest = sorted((out / "checkpoints").glob("round-*.json"))[-1]
    body = json.loads(newest.read_text())["body"]
    latest = max((out / "clients").glob(f"*.round-{body['round']:06d}.safetensors"))  # of that checkpoint alone
    files = {
        "server": out / "checkpoints" / body["server"]["file"],
        "client": latest,
        "manifest": newest,
    }
    content = bytearray(files[victim].read_bytes())
    content[len(content) // 2] ^= 4
    files[victim].write_bytes(bytes(content))
    ended = fednh(["resume", str(out), "--quiet"], tmp_path / "io")
    assert ended.code == 0, ended.stderr
    assert f"{newest.name} is damaged" in ended.stderr
    assert_same(out, outcome(whole))
    count("faults injected")


def mounted(folder: Path, options: str) -> Any:
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a file system of its own cannot be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture
def closed(tmp_path: Path) -> Any:
    """A folder in which nothing can be written, for root neither."""
    if os.geteuid() == 0:
        yield from mounted(tmp_path / "closed", "ro,size=1m")
    else:
        (tmp_path / "closed").mkdir(mode=0o555)
        yield tmp_path / "closed"


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_folder_that_cannot_be_written(below: str, closed: Path, tmp_path: Path) -> None:
    ended = fednh(command("fednh", closed / below / "r"), tmp_path / "io")
    assert ended.code == 2, ended.stderr
    assert "cannot be written: " in ended.stderr
    assert ended.stderr.strip().endswith("choose another folder")
    assert list(closed.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    yield from mounted(tmp_path / "disk", "size=6m")


def test_a_full_disk_stops_the_run_and_the_last_checkpoint_is_whole(small_disk: Path, tmp_path: Path) -> None:
    out = small_disk / "r"
    process = Process(command("fedavg", out, rounds=25), tmp_path / "io")
    wait_for(lambda: list((out / "checkpoints").glob("round-*.json")))
    ballast = small_disk / "ballast"
    with ballast.open("wb") as file:  # somebody else fills the disk
        try:
            while True:
                file.write(b"\0" * 65536)
                file.flush()
        except OSError:
            pass
    ended = process.wait()
    assert ended.code == 2, ended.stderr
    assert "No space left on device; what was saved before is intact" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not list(out.rglob("*.tmp")), "nothing half-written"
    ballast.unlink()
    ended = fednh(["resume", str(out), "--quiet"], tmp_path / "io")
    assert ended.code == 0, ended.stderr
    whole = tmp_path / "whole"
    assert fednh(command("fedavg", whole, rounds=25), tmp_path / "io").code == 0
    assert_same(out, outcome(whole))
    count("faults injected")
