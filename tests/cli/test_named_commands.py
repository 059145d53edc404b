"""Every command that a message, a docstring or a template names is one that exists, and headings have room."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from fednh.cli import app
from tests.helpers.process import fednh

SOURCE = Path(__file__).parents[2] / "src" / "fednh"
FILES = [path for path in sorted(SOURCE.rglob("*")) if path.suffix in (".py", ".toml", ".md", ".tmpl", ".txt")]
NAMED = re.compile(r"(?:`|: |run |-m |^)fednh ([a-z][a-z-]*)(?: ([a-z][a-z-]*))?", re.MULTILINE)


def test_commands_named_in_the_source_exist() -> None:
    group = typer.main.get_command(app)
    assert hasattr(group, "commands")
    wrong, seen = [], 0
    for path in FILES:
        for match in NAMED.finditer(path.read_text(encoding="utf-8")):
            first, second = match.groups()
            if match[0][0] != "`" and first not in group.commands:
                continue  # a sentence about fednh
            seen += 1
            command = group.commands.get(first)
            below = getattr(command, "commands", None)
            if command is None or (below is not None and second is not None and second not in below):
                wrong.append(f"{path.relative_to(SOURCE)}: {match[0]}")
    assert wrong == []
    assert seen > 20


def test_the_heading_of_inspect_is_one_line(tmp_path: Path) -> None:
    shown = fednh(["inspect", "--data", "digits"], tmp_path)
    assert shown.code == 0
    lines = [line.strip() for line in shown.stdout.splitlines()]
    assert "digits: 1,442 training and 355 test images of 8x8x1" in lines
    assert any(line.startswith("Gini 0.0") and line.endswith("of 10.") for line in lines)


@pytest.mark.parametrize("width", [30, 200])
def test_titles_use_the_width_of_the_terminal(width: int) -> None:
    from io import StringIO

    from rich.console import Console

    from fednh.report.sheet import Sheet, to_rich, word

    console = Console(file=StringIO(), width=width)
    console.print(to_rich(Sheet("s", "a title of " + "many words " * 9, ["x"], [[word(1)]], "note " * 20), width))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= width
    assert (len([line for line in lines if "words" in line]) == 1) is (width == 200)
