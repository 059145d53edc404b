"""`--backend ray` without Ray processes: what is refused and how, slots, packing, and a user's own modules."""

from __future__ import annotations

import importlib
import pickle
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from ray import cloudpickle

from fednh.backends import ray, run_maker
from fednh.backends.ray import job_size, needs, own_modules, pickled_by_value, slots
from fednh.config import load
from fednh.config.schema import RayConfig
from fednh.errors import UserError
from tests.helpers.process import fednh


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--backend", "flower"], "the backend 'flower' is not known"),
        (["--backend", "rai"], "the backend 'rai' is not known; did you mean 'ray'?"),
        (["--address", "10.0.0.1:6379"], "the address 10.0.0.1:6379 is a Ray cluster's; choose the backend ray"),
        (
            ["--backend", "ray", "--address", "ray://h:1"],
            "address = ray://h:1 is for Ray's client; run fednh on",
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
    with pytest.raises(UserError, match=r"the backend ray needs the extra `ray`: pip install 'fednh\[ray\]'"):
        run_maker("ray")


def test_which_cluster_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert [ray.cluster_address(asked) for asked in (None, "auto", "h:1")] == [None, "auto", "h:1"]
    monkeypatch.setenv("RAY_ADDRESS", "e:2")
    assert [ray.cluster_address(asked) for asked in (None, "auto", "h:1")] == ["e:2", "e:2", "h:1"]


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
    from fednh.runs.layout import run_name

    one, other = load("digits", {}), load("digits", {"ray.cpus_per_client": 2, "ray.resources": {"board": 1}})
    assert settings_changed(of_settings(one), of_settings(other), "{key}", NOT_COMPARED) is None
    assert run_name(one) == run_name(other)


def test_packing_follows_the_time_that_a_batch_takes() -> None:
    assert job_size(None, left=1000, slots=2, most=99) == 1, "nothing is known yet"
    assert job_size(0.01, left=1000, slots=2, most=99) == 10, "ten of them take a tenth of a second"
    assert job_size(0.01, left=16, slots=2, most=99) == 4, "two jobs for each of two slots"
    assert job_size(0.01, left=3, slots=2, most=99) == 1
    assert job_size(0.01, left=1000, slots=2, most=3) == 3, "large models"
    assert job_size(7.0, left=1000, slots=2, most=99) == 1


def test_a_message_is_printed_if_the_process_is_ended() -> None:
    program = "import os; from fednh.backends.ray import message_if_killed\nwith message_if_killed('it is saved'): "
    for body, told in (("os._exit(1)", "it is saved\n"), ("pass", "")):
        done = subprocess.run([sys.executable, "-c", program + body], capture_output=True, text=True, timeout=60)
        assert done.stderr == told


def test_own_modules_travel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with a helper, a folder without __init__.py, and a plain module: gone, but a class of them works."""
    files = {
        "mine_pack/__init__.py": "from mine_pack.helper import TWO\n",
        "mine_pack/helper.py": "TWO = 2\n",
        "mine_folder/part.py": "def three() -> int:\n    return 3\n",
        "mine_plain.py": """
import mine_pack
from mine_folder.part import three
FOUR = mine_pack.TWO * 2
class Base:
    factor = 2
class Mine(Base):
    def numbers(self):
        return three(), FOUR, mine_pack.TWO, super().factor, type(self).__name__
""",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    names = ("mine_pack", "mine_pack.helper", "mine_folder", "mine_folder.part", "mine_plain")
    for name in names:
        importlib.import_module(name)
    found = {module.__name__ for module in own_modules()}
    mine = {name for name in found if name.startswith("mine_")}
    assert mine == {"mine_pack", "mine_pack.helper", "mine_folder.part", "mine_plain"}
    assert not {name.partition(".")[0] for name in found} & {"fednh", "torch", "numpy", "json", "pytest"}
    packed = pickled_by_value(sys.modules["mine_plain"].Mine())
    assert not cloudpickle.list_registry_pickle_by_value(), "other pickles are as before"
    monkeypatch.undo()
    for name in names:
        del sys.modules[name]
    assert pickle.loads(packed).numbers() == (3, 4, 2, 2, "Mine")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("mine_plain")


def test_what_cannot_be_sent_is_refused_in_a_sentence() -> None:
    with pytest.raises(UserError, match=r"the method or the model cannot be sent to other machines: .*lock"):
        pickled_by_value(threading.Lock())
