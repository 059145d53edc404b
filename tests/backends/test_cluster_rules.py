"""`--backend ray` without Ray processes: what is refused and how, slots, packing, and a user's own modules."""

from __future__ import annotations

import importlib
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fednh.backends import ray, ray_worker
from fednh.backends.ray import Hand, Job, Pace, _problem, needs, slots
from fednh.backends.ray_worker import Done, facts
from fednh.config import load
from fednh.config.schema import RayConfig
from fednh.errors import UserError
from forked import fednh


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--backend", "flower"], "--backend 'flower' is not known"),
        (["--backend", "rai"], "--backend 'rai' is not known; did you mean 'ray'?"),
        (["--address", "10.0.0.1:6379"], "--address 10.0.0.1:6379 is a Ray cluster's; add --backend ray"),
        (
            ["--backend", "ray", "--address", "ray://h:1"],
            "--address ray://h:1 is for Ray's client; run fednh on",
        ),
        (["--backend", "ray", "--address", "PORT"], "cannot be joined: nothing answers there; `ray status` shows"),
        (["--set", "ray.cpus_per_client=0"], "a client must reserve something"),
        (["--set", "ray.gpus_per_client=-1"], "ray.gpus_per_client = -1 should be greater than or equal to 0"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(words: list[str], told: str, tmp_path: Path) -> None:
    words = [f"127.0.0.1:{free_port()}" if word == "PORT" else word for word in words]
    ended = fednh(["run", *words, "--rounds", "1", "--out", str(tmp_path / "x")], tmp_path / "log")
    assert ended.code == 2
    assert told in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_a_missing_extra_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fednh.extras.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"--backend ray needs the extra `ray`: pip install 'fednh\[ray\]'"):
        ray.check_ray(None)


def test_which_cluster_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert [ray.where(asked) for asked in (None, "auto", "h:1")] == [None, "auto", "h:1"]
    monkeypatch.setenv("RAY_ADDRESS", "e:2")
    assert [ray.where(asked) for asked in (None, "auto", "h:1")] == ["e:2", "e:2", "h:1"]


def test_what_a_client_reserves() -> None:
    assert needs(RayConfig(), "cpu") == {"CPU": 1.0}
    assert needs(RayConfig(), "cuda:0") == {"CPU": 1.0, "GPU": 1.0}
    assert needs(RayConfig(gpus_per_client=0.25, cpus_per_client=0), "cuda") == {"GPU": 0.25}
    assert needs(RayConfig(gpus_per_client=0, resources={"board": 2}), "cuda") == {"CPU": 1.0, "board": 2.0}


def test_slots_follow_from_the_machines() -> None:
    two = [{"CPU": 4.0, "GPU": 1.0}, {"CPU": 3.0}]
    assert slots({"CPU": 1.0}, two) == 7
    assert slots({"CPU": 2.0}, two) == 3, "a client does not span two machines"
    assert slots({"CPU": 1.0, "GPU": 0.25}, two) == 4
    assert slots({"CPU": 0.1}, [{"CPU": 1.0}]) == 10, "not 9: 1 / 0.1 in floating point"
    assert slots({"board": 1.0}, two) == 0


def test_the_settings_of_ray_are_not_part_of_what_a_run_is() -> None:
    from fednh.runs.fingerprint import NOT_COMPARED, of_settings, settings_changed
    from fednh.runs.names import run_name

    one, other = load("digits", {}), load("digits", {"ray.cpus_per_client": 2, "ray.resources": {"board": 1}})
    assert settings_changed(of_settings(one), of_settings(other), "{key}", NOT_COMPARED) is None
    assert run_name(one) == run_name(other)


def test_packing_follows_the_time_that_a_unit_takes() -> None:
    pace = Pace()
    assert pace.units(left=1000, slots=2, heaviest=99) == 1, "nothing is known yet"
    pace.learn(Job([[0], [1]], done=Done([], seconds=0.02)))  # 10 ms a unit: ten of them take a tenth of a second
    assert pace.units(left=1000, slots=2, heaviest=99) == 10
    assert pace.units(left=16, slots=2, heaviest=99) == 4, "two jobs for each of two actors"
    assert pace.units(left=3, slots=2, heaviest=99) == 1
    assert pace.units(left=1000, slots=2, heaviest=3) == 3, "large models"
    pace.learn(Job([[0]], done=Done([], seconds=7.0)))
    assert pace.units(left=1000, slots=2, heaviest=99) == 1


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({}, None),
        ({"cpu": "another"}, None),
        ({"torch": "2.0.0"}, "has torch 2.0.0, this one "),
        ({"fednh": "9"}, "has fednh 9, this one "),
        ({"source": "0123"}, "has another source of fednh "),
        ({"problem": "ModuleNotFoundError: No module named 'torch'"}, "cannot compute clients: ModuleNotFoundError"),
    ],
)
def test_a_machine_must_have_the_same_versions(other: dict[str, str], told: str | None) -> None:
    found = _problem(Hand(None, None, {**facts(), "node": "abcdef0123", "host": "far", **other}))
    assert (found is None) == (told is None)
    assert found is None or found.startswith(f"the machine far (node abcdef01) {told}")


def test_the_head_that_does_not_answer_is_noticed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        pulse = ray.Pulse(f"127.0.0.1:{server.getsockname()[1]}", patience=0.5)
        assert not pulse.lost.wait(1.2)
    assert pulse.lost.wait(10)


def test_the_last_words_of_a_process_that_is_ended(tmp_path: Path) -> None:
    program = "from fednh.backends.ray_worker import LastWords; import os, sys; words = LastWords('it is saved'); "
    for way, told in (("os._exit(1)", "it is saved\n"), ("words.not_needed()", "")):
        done = subprocess.run([sys.executable, "-c", program + way], capture_output=True, text=True, timeout=60)
        assert done.stderr == told


def test_own_modules_travel_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with a helper, a folder without __init__.py, and a plain module: they are gone, yet can be imported."""
    files = {
        "mine_pack/__init__.py": "from mine_pack.helper import TWO\n",
        "mine_pack/helper.py": "TWO = 2\n",
        "mine_folder/part.py": "def three() -> int:\n    return 3\n",
        "mine_plain.py": "import mine_pack\nFOUR = mine_pack.TWO * 2\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    names = ("mine_pack", "mine_pack.helper", "mine_folder", "mine_folder.part", "mine_plain")
    for name in names:
        importlib.import_module(name)
    sources = ray_worker.gather()
    mine = {name for name in sources if name.startswith("mine_")}
    assert mine == {"mine_pack", "mine_pack.helper", "mine_folder.part", "mine_plain"}
    assert not {name.partition(".")[0] for name in sources} & {"fednh", "torch", "numpy", "json", "pytest"}
    monkeypatch.undo()
    for name in names:
        del sys.modules[name]
    try:
        ray_worker.install({name: sources[name] for name in mine})
        plain = importlib.import_module("mine_plain")
        assert (plain.FOUR, importlib.import_module("mine_folder.part").three()) == (4, 3)
        assert plain.__file__ == str(tmp_path / "mine_plain.py")
    finally:
        ray_worker.install({})
        for name in names:
            sys.modules.pop(name, None)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("mine_plain")
