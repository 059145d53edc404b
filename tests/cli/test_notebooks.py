"""The notebooks run from top to bottom, are kept without output, and can be had from the installed package."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from fednh.cli.about import NAMES
from tests.helpers.process import fednh

FOLDER = Path(__file__).parents[2] / "src/fednh/cli/notebooks"


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(FOLDER / name, as_version=4)


def code(notebook: nbformat.NotebookNode) -> list[str]:
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def test_none_is_forgotten() -> None:
    assert sorted(NAMES) == sorted(path.name for path in FOLDER.iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_they_are_valid_and_hold_no_output(name: str) -> None:
    notebook = read(name)
    nbformat.validate(notebook)
    assert notebook.cells[0].source.startswith("# ")
    assert notebook.metadata.keys() == {"kernelspec", "language_info"}
    for cell in notebook.cells:
        assert cell.metadata == {}
        if cell.cell_type == "code":
            assert (cell.outputs, cell.execution_count) == ([], None)


@pytest.mark.parametrize("name", NAMES)
def test_their_code_runs_from_top_to_bottom(name: str, tmp_path: Path) -> None:
    """In one process, as a script, with two rounds; `make soak` runs them as they are, in Jupyter's kernel."""
    text, changed = re.subn(r'"rounds": \d+', '"rounds": 2', "\n".join(code(read(name))))
    assert changed
    # A new process, not a fork: a fork of a process with torch's threads has crashed in a matrix product.
    environment = {**os.environ, "MPLBACKEND": "agg"}
    ended = subprocess.run([sys.executable, "-c", text], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_they_run_in_a_kernel_and_draw(name: str, tmp_path: Path) -> None:
    from nbclient import NotebookClient

    notebook = read(name)
    place = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, kernel_name="python3", timeout=300, startup_timeout=300, resources=place).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    drawn = [output for output in outputs if "image/png" in output.get("data", {})]
    shows = sum("plt.show()" in source for source in code(notebook))
    assert len(drawn) == shows > 0
    assert not [output for output in outputs if output.get("name") == "stderr"], "a reader would see warnings"


def test_they_can_be_had_and_are_not_overwritten(tmp_path: Path) -> None:
    ended = fednh(["notebooks", str(tmp_path / "learn")], tmp_path / "io")
    assert ended.code == 0, ended.stderr
    assert ended.stdout.split() == [str(tmp_path / "learn" / name) for name in NAMES]
    for name in NAMES:
        assert (tmp_path / "learn" / name).read_bytes() == (FOLDER / name).read_bytes()
    changed = tmp_path / "learn" / NAMES[0]
    changed.write_text("mine")
    again = fednh(["notebooks", str(tmp_path / "learn")], tmp_path / "io")
    assert (again.code, len(again.stderr.splitlines())) == (2, 1)
    assert changed.read_text() == "mine"
