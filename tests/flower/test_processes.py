"""The processes of a federation are found by what they carry in their environment, and ended."""

import os
import subprocess
from pathlib import Path

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
