"""CONTRIBUTING.md has the complete map: every folder and every file at the top of the package."""

from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_map_names_every_room() -> None:
    table = [line for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines() if line.startswith("| `")]
    named = {word.rstrip("/") for line in table for word in line.split("|")[1].replace("`", " ").split()}
    inside = (path for path in (ROOT / "src/fednh").iterdir() if path.is_dir() or path.suffix == ".py")
    there = {path.name for path in inside if not path.name.startswith("__")}
    assert named == there
