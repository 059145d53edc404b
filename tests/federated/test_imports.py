"""What an import path names is looked at before it is called, also in a config of one's own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fednh.errors import UserError
from fednh.extras import imported_function
from fednh.models import build_net
from tests.helpers.process import fednh

MODULE = """
import functools
from pathlib import Path
from torch import nn

def marked(*names):
    Path("called").touch()

class NoNetwork:
    def __init__(self, **more): marked()

def makes_a_network(num_classes):
    marked()
    return nn.Linear(4, num_classes)

class Needs(nn.Module):
    def __init__(self, num_classes, width):
        marked()
        super().__init__()

def load(): return 1
def needs(path): marked()
class Loader:
    def __init__(self): marked()
cached = functools.lru_cache(load)
given = functools.partial(needs, "a")
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "strange.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "strange", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("subprocess:Popen", "Popen does not derive from Module"),
        ("os:system", "builtin_function_or_method does not derive"),
        ("strange:NoNetwork", "NoNetwork does not derive"),
        ("strange:makes_a_network", "function does not derive"),
        ("strange:Needs", "missing a required argument: 'width'; set it in model.args"),
    ],
)
def test_no_model_is_called_that_is_no_network(name: str, words: str, here: Path) -> None:
    args = {"args": ["touch", "called"]} if name == "subprocess:Popen" else {}
    with pytest.raises(UserError, match=words):
        build_net(name, (4,), 3, args)
    assert not (here / "called").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("strange:Loader", "not a Python function but a class"),
        ("os:abort", "not a Python function but builtin_function_or_method"),
        ("strange:needs", "cannot be called without arguments: missing a required argument: 'path'"),
        ("strange:__name__", "not a Python function but str"),
    ],
)
def test_no_data_function_is_called_that_is_none(name: str, words: str, here: Path) -> None:
    with pytest.raises(UserError, match=words):
        imported_function(name, "data.name")
    assert not (here / "called").exists()


def test_functions_that_can_be_called(here: Path) -> None:
    for name in ("load", "cached", "given"):
        assert callable(imported_function(f"strange:{name}", "data.name"))
    assert not (here / "called").exists()


def test_the_command_line_calls_nothing_either(here: Path) -> None:
    attacks = [
        ["--set", "model.name=subprocess:Popen", "--set", 'model.args={args = ["touch", "called"]}'],
        ["--data", "py:strange:Loader"],
        ["--method", "subprocess:Popen"],
    ]
    for words in attacks:
        ended = fednh(["run", *words, "--rounds", "1", "--out", "out"], here / "io")
        assert ended.code == 2, ended.stdout + ended.stderr
        assert "Traceback" not in ended.stderr
        assert not (here / "called").exists()
        assert not (here / "out").exists()
