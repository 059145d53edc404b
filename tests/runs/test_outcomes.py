"""What became of held-out samples, as it is stored: whole or not there, and readable by nothing but numbers."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from fednh.errors import UserError
from fednh.runs.model_file import Outcomes, read_outcomes, write_outcomes
from fednh.runs.run_folder import RunFolder


@pytest.mark.parametrize("shared", [None, np.array([0, 0, 1])])
def test_what_is_written_is_read(tmp_path: Path, shared: np.ndarray | None) -> None:
    file = tmp_path / "new" / "a.safetensors"
    write_outcomes(file, Outcomes(np.array([0, 1, 2]), np.array([2, 1, 0]), shared))
    found = read_outcomes(file)
    assert (len(found), found.label.tolist(), found.personal.tolist()) == (3, [0, 1, 2], [2, 1, 0])
    assert (found.shared is None) == (shared is None)
    assert [path.name for path in file.parent.iterdir()] == ["a.safetensors"]


def test_what_is_damaged_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    file.write_bytes(b"\x08\x00\x00")
    with pytest.raises(UserError, match=r"a\.safetensors cannot be read"):
        read_outcomes(file)
    save_file({"label": np.zeros(3, np.int32), "personal": np.zeros(2, np.int32)}, file)
    with pytest.raises(UserError, match="differ in length"):
        read_outcomes(file)


def test_a_later_end_of_a_run_removes_outcomes_that_it_does_not_have(tmp_path: Path) -> None:
    folder, found = RunFolder(tmp_path), Outcomes(np.zeros(2, int), np.zeros(2, int))
    folder.write_outcomes({0: found, 3: found, 12: found})
    folder.remove_others([3, 5])
    assert list(folder.clients_with_outcomes()) == [3]
