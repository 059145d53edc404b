"""The processes of a federation are found by what they carry in their environment, and ended."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fednh.flower.deploy import commands, supernode
from fednh.flower.deploy.processes import MARK, end_marked, marked


def test_processes_are_found_by_their_folder_and_ended(tmp_path: Path) -> None:
    mine, other = tmp_path / "fed", tmp_path / "fed-2"
    started = [
        subprocess.Popen(["sleep", seconds], env={**os.environ, MARK: str(folder)}, start_new_session=True)
        for folder, seconds in ((mine, "61"), (mine, "62"), (other, "63"))
    ]
    try:
        assert {process.pid for process in marked(mine)} == {started[0].pid, started[1].pid}
        assert [process.pid for process in marked(mine, "62")] == [started[1].pid]
        end_marked(mine)
        assert marked(mine) == []
        assert [process.pid for process in marked(other)] == [started[2].pid]
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_a_supernode_waits_shorter_than_flowers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Soon after an order it looks often, later every 3 s as Flower does; a missing part is asked for soon."""
    now, slept = [100.0], list[float]()
    monkeypatch.setattr(supernode, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=slept.append))
    for name in ("time", "pull_objects"):
        monkeypatch.setattr(supernode.flower, name, getattr(supernode.flower, name))  # put back afterwards
    supernode.hasten()
    flower: Any = supernode.flower
    flower.time.sleep(0.5)
    for later in (0.0, 5.0, 60.0):
        now[0] = 100.0 + later
        flower.time.sleep(3)
    assert slept == [0.05, 0.25, 1.0, 3.0]
    assert flower.pull_objects.keywords == {"initial_backoff": 0.05}
    assert commands.supernode("s:1", Path("site.toml"), 1, None, None, None)[1:3] == ["-m", supernode.__name__]


def test_a_supernode_does_without_pytorch() -> None:
    """Twenty of them run on one machine in a trial."""
    code = "import sys, fednh.flower.deploy.supernode; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
