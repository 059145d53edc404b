"""The map is true: CONTRIBUTING.md names every place, and every module keeps to its layer in pyproject.toml."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/fednh"
LAYERS = [
    [name.strip(" \n()") for name in re.split("[|:]", line)]
    for line in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]["layers"]
]


def places() -> list[str]:
    """Folders and files of the map in CONTRIBUTING.md, in its order."""
    table = [line for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines() if line.startswith("| `")]
    return [word.rstrip("/") for line in table for word in line.split("|")[1].replace("`", " ").split()]


def test_the_map_names_every_room() -> None:
    inside = (path for path in SOURCE.iterdir() if path.is_dir() or path.suffix == ".py")
    there = {path.name for path in inside if not path.name.startswith("__")}
    assert sorted(places()) == sorted(there)


def test_the_files_that_answer_questions_are_there() -> None:
    rows = re.findall(r"^\| (?:what|where|how) .*\? \| (.*) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    named = [path for row in rows for path in re.findall(r"`([\w/.]+)`", row)]
    assert len(rows) == 5
    assert [path for path in named if not (SOURCE / path).exists()] == []


def test_the_map_shows_the_layers_from_top_to_bottom() -> None:
    shown = [place.removesuffix(".py") for place in places()]
    first = {name: number for number, line in reversed(list(enumerate(LAYERS))) for name in line}
    floors = {place: min(n for name, n in first.items() if name.split(".")[1] == place) for place in shown}
    assert shown == sorted(shown, key=lambda place: floors[place])


def test_every_module_lies_on_one_layer() -> None:
    listed = [name for line in LAYERS for name in line]
    for path in SOURCE.rglob("*.py"):
        module = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
        if path.name in ("__init__.py", "__main__.py") and path.parent.name == "fednh":
            continue  # the package itself, and what starts the command line
        found = [name for name in listed if f"{module}.".startswith(f"{name}.")]
        assert len(found) == 1, f"{module} lies on {len(found)} layers of pyproject.toml"


def test_an_import_that_points_upwards_is_seen_even_inside_a_function(tmp_path: Path) -> None:
    shutil.copytree(SOURCE, tmp_path / "fednh", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "fednh/data/batches.py").open("a") as file:
        file.write("\n\ndef lazy() -> None:\n    from fednh.federated import rounds  # noqa: F401\n")
    done = subprocess.run(
        [
            sys.executable,
            Path(sys.executable).with_name("lint-imports"),
            "--no-cache",
            "--config",
            ROOT / "pyproject.toml",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "fednh.data.batches -> fednh.federated.rounds" in done.stdout
    assert done.stdout.count(" -> ") == 1, done.stdout


def test_no_two_classes_have_one_name() -> None:
    names = [
        name
        for path in SOURCE.rglob("*.py")
        for name in re.findall(r"^class (\w+)", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    ]
    assert sorted(name for name in set(names) if names.count(name) > 1) == []
