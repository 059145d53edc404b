"""Flower's database where the path of its installation has a blank or a percent sign."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from alembic import command
from flwr.supercore.state.alembic import utils
from sqlalchemy import create_engine, inspect

from fednh.flower.deploy import commands, superlink


def test_the_database_has_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "a b%c" / "alembic"
    shutil.copytree(utils.ALEMBIC_DIR, place, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(utils, "ALEMBIC_DIR", place)
    engine = create_engine(f"sqlite:///{tmp_path / 'link.db'}")
    try:
        command.upgrade(superlink.mended(engine), "heads")
        assert {"node", "run", "message_ins", "alembic_version"} <= set(inspect(engine).get_table_names())
    finally:
        engine.dispose()


def test_the_program_that_is_started_depends_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert commands.superlink(None, 1, tmp_path / "x.db", None)[0] == "flower-superlink"
    (tmp_path / "a b/flwr").mkdir(parents=True)
    (tmp_path / "a b/flwr/__init__.py").write_text("")

    class Spec:
        origin = str(tmp_path / "a b/flwr/__init__.py")

    monkeypatch.setattr("importlib.util.find_spec", lambda _: Spec)
    assert "fednh.flower.deploy.superlink" in commands.superlink(None, 1, tmp_path / "x.db", None)
