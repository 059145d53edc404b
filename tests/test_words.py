"""How times and sizes are told, and that nobody has words or atomic writers of their own."""

import ast
from pathlib import Path

import pytest

import fednh
from fednh.text import duration, html_table, plural, size

SOURCE = Path(fednh.__file__).parent


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0m00s"), (59.6, "1m00s"), (125, "2m05s"), (3599, "59m59s"), (3720, "1h02m")]
)
def test_times(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(999, "999 B"), (999.99, "1.0 kB"), (1_260_000, "1.3 MB")])
def test_sizes(count: float, text: str) -> None:
    assert size(count) == text


def test_plurals() -> None:
    assert [plural(n, "run") for n in (0, 1, 2, 1200)] == ["0 runs", "1 run", "2 runs", "1,200 runs"]
    assert [plural(n, "class", "classes") for n in (1, 2)] == ["1 class", "2 classes"]


def test_a_small_table_takes_no_text_for_markup() -> None:
    assert html_table({"a": "<b>"}) == "<table><tr><th>a</th><td>&lt;b&gt;</td></tr></table>"


def test_nobody_leaves_the_plural_to_the_reader() -> None:
    for path in sorted(SOURCE.rglob("*.py")):
        texts = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        assert not [text for text in texts if isinstance(text, str) and "(s) " in f"{text} "], path


def called(path: Path) -> set[str]:
    found = (node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    return {ast.unparse(func).rpartition(".")[2] for func in found}


def test_nobody_else_formats_times_or_sizes_or_writes_files_for_good() -> None:
    """The audit log, which only grows, syncs its own lines."""
    owners = {"divmod": ["text.py"], "fsync": ["io/files.py", "runs/checkpoint.py", "io/chain.py"]}
    owners |= {"mkstemp": [], "NamedTemporaryFile": [], "os.replace": []}
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        for word in called(path) & owners.keys():
            assert name in owners[word], f"{name} calls {word}"
        assert name == "text.py" or not any(f' {unit}"' in path.read_text() for unit in ("kB", "MB", "GB"))
