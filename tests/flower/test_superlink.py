"""Flower's database where the path of its installation has a blank or a percent sign."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from alembic import command as alembic
from federations import SMALL
from flwr.supercore.state.alembic import utils
from sqlalchemy import create_engine, inspect

import fednh
from fednh.flower.deploy import commands, scaffold, superlink


def test_the_database_has_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "a b%c" / "alembic"
    shutil.copytree(utils.ALEMBIC_DIR, place, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(utils, "ALEMBIC_DIR", place)
    engine = create_engine(f"sqlite:///{tmp_path / 'link.db'}")
    try:
        alembic.upgrade(superlink.mended(engine), "heads")
        assert {"node", "run", "message_ins", "alembic_version"} <= set(inspect(engine).get_table_names())
    finally:
        engine.dispose()


def test_the_program_that_is_started_depends_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def started(place: str) -> list[str]:
        class Spec:
            origin = str(tmp_path / place / "flwr/__init__.py")

        (tmp_path / place / "flwr").mkdir(parents=True)
        Path(Spec.origin).write_text("")
        monkeypatch.setattr("importlib.util.find_spec", lambda _: Spec)
        return commands.superlink(None, 1, tmp_path / "x.db", None)

    assert started("plain")[0] == "flower-superlink"
    assert "fednh.flower.deploy.superlink" in started("a b")


@pytest.mark.soak
def test_a_federation_from_an_installation_with_a_blank_in_its_path(tmp_path: Path) -> None:
    """Flower itself at such a path: its own SuperLink makes a database without tables, and every call fails."""
    import flwr

    place = tmp_path / "my python"
    shutil.copytree(Path(flwr.__file__).parent, place / "flwr", ignore=shutil.ignore_patterns("__pycache__"))
    ours = str(Path(fednh.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(place), ours])}
    folder = tmp_path / "my federation"
    scaffold.write(folder, 2, [], {**SMALL, "rounds": 1})
    command = [sys.executable, "-m", "fednh", "federation", "up", str(folder), "--local"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (folder / "run/summary.json").exists()
