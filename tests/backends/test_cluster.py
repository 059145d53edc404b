"""`--backend ray`: the bits of this machine's thread pool, on several machines that are real Ray processes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import kept_or_received
from tests.helpers.compare import lines, same_runs
from tests.helpers.ray_nodes import SMALL, SOME, Nodes, ended, nodes, on_pool, start


@pytest.fixture(scope="module")
def two() -> Iterator[Nodes]:
    """Two machines of one CPU each."""
    with nodes({}, {}) as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("engine", "choice"),
    [("vmap", kept_or_received.FEW[0]), pytest.param("loop", kept_or_received.FEW[1], marks=pytest.mark.soak)],
)
def test_what_a_client_kept_reaches_its_method(engine: str, choice: dict[str, Any], two: Nodes, tmp_path: Path) -> None:
    """Also under names that are broadcast; see test_kept_and_received.py."""
    shutil.copy(kept_or_received.__file__, tmp_path)
    settings = {"engine": engine, **{f"method.{key}": value for key, value in choice.items()}}
    args = ["--method", "kept_or_received:KeptOrReceived", *SMALL, *SOME]
    args += [word for key, value in settings.items() for word in ("--set", f"{key}={str(value).lower()}")]
    process = start(["run", *args, "--out", "ray"], tmp_path, two)
    on_pool(args, tmp_path / "pool")
    code, _, err = ended(process)
    assert (code, err) == (0, "")
    same_runs(tmp_path / "pool", tmp_path / "ray")


def test_two_machines_give_the_pools_bits(two: Nodes, tmp_path: Path) -> None:
    """Ditto keeps a personal model at each client: it travels to the machine that computes, and back."""
    args = ["--method", "ditto", *SMALL, *SOME]
    process = start(["run", *args, "--out", "ray"], tmp_path, two)
    on_pool(args, tmp_path / "pool")
    code, out, err = ended(process)
    assert code == 0, err
    assert out == "ray\n"
    assert err == ""
    assert lines(tmp_path / "ray")[-1]["ray"] == {"machines": 2, "computed_again": 0}
    same_runs(tmp_path / "pool", tmp_path / "ray")
    assert json.loads((tmp_path / "ray" / "environment.json").read_text())["backend"] == "ray"
