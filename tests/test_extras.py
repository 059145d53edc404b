"""What an installation may lack: one table of extras, one sentence."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from fednh import extras
from fednh.errors import UserError

ROOT = Path(__file__).parents[1]
FOR_DEVELOPERS = {"dev", "docs"}  # nothing in the package needs them


def test_every_extra_of_the_package_is_known_by_its_modules() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras.MODULES) == set(declared) - FOR_DEVELOPERS


def test_the_documents_say_what_every_extra_is_for() -> None:
    table = (ROOT / "docs/stability.md").read_text(encoding="utf-8").partition("## Extras")[2]
    assert [extra for extra in extras.MODULES if f"`{extra}`" not in table] == []


def test_a_missing_extra_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(extras.MODULES, "hf", ("fednh", "a_module_that_nobody_has"))
    with pytest.raises(UserError) as caught:
        extras.need("hf", "hf:")
    assert str(caught.value) == "hf: needs the extra `hf`: pip install 'fednh[hf]'"


def test_a_folder_is_not_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`wandb` and `tensorboard` are also folders that runs leave behind, and Python would import them as they are."""
    (tmp_path / "left_behind").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(extras.MODULES, "wandb", ("left_behind",))
    assert not extras.installed("wandb")
    (tmp_path / "left_behind/__init__.py").touch()
    assert extras.installed("wandb")
