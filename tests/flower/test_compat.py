"""What fednh uses of Flower's private packages is there: a newer Flower that lacks some of it fails here, by name."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "fednh"
COMPAT = PACKAGE / "flower" / "compat.py"
PUBLIC = {"flwr.app", "flwr.clientapp", "flwr.serverapp"}


def imported(file: Path) -> list[tuple[str, str]]:
    """Modules and names that a file imports from Flower."""
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    found = [
        (node.module or "", name.name) for node in nodes if isinstance(node, ast.ImportFrom) for name in node.names
    ]
    return [(module, name) for module, name in found if module.split(".")[0] == "flwr"]


@pytest.mark.parametrize(("module", "name"), imported(COMPAT), ids=lambda word: word)
def test_flower_has_what_is_imported(module: str, name: str) -> None:
    lacks = f"Flower {version('flwr')} has no {module}.{name}, which flower/compat.py uses"
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        pytest.fail(f"{lacks}: {error}")
    assert hasattr(found, name) or importlib.util.find_spec(f"{module}.{name}"), lacks


def replaced() -> list[tuple[str, str]]:
    from fednh.flower.compat import REPLACED

    return [(module.__name__, name) for module, names in REPLACED.items() for name in names]


@pytest.mark.parametrize(("module", "name"), replaced(), ids=lambda word: word)
def test_flower_looks_up_what_is_replaced_where_it_is_replaced(module: str, name: str) -> None:
    found = importlib.import_module(module)
    assert hasattr(found, name), f"Flower {version('flwr')} has no {module}.{name}, which fednh replaces"
    words = inspect.getsource(found)
    if not module.endswith("fleet_handlers"):  # the routes call those: test_superlink.py
        assert words.count(name) > 1, f"Flower {version('flwr')} does not use {name} in {module}"


def test_a_replacement_that_flower_does_not_know_is_an_error() -> None:
    from types import ModuleType

    from fednh.flower import compat

    with pytest.raises(RuntimeError, match=r"has no flwr\.supernode\.start_client_internal\.gone"):
        compat.replace(compat.supernode_loop, "gone", None)
    assert isinstance(compat.supernode_loop, ModuleType)
    assert not hasattr(compat.supernode_loop, "gone")


def test_attributes_that_flower_does_not_promise() -> None:
    from flwr.app import Message, RecordDict
    from flwr.supercore.task_identity import TaskIdentity

    from fednh.flower import compat

    assert isinstance(inspect.getattr_static(compat.HttpGrid, "_runtime_client"), property)
    assert compat.migrations.ALEMBIC_DIR.is_dir()
    assert isinstance(compat.migrations._version_locations, list)
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    message = Message(RecordDict(), 1, "train")
    compat.set_message_id(message, "m")
    assert message.metadata.message_id == "m"


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_private_packages_are_imported_in_one_file(file: Path) -> None:
    private = {module for module, _ in imported(file)} - PUBLIC
    assert file == COMPAT or not private, f"{file}: import {private} in flower/compat.py"


@pytest.mark.parametrize("module", ["compat", "deploy.superlink", "deploy.supernode"])
def test_superlink_and_supernode_do_without_pytorch(module: str) -> None:
    code = f"import sys, fednh.flower.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
