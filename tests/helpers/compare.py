"""Comparing trees, and what two runs leave in their folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from fednh.io.files import read_tree

TIMES = {"seconds", "eval_seconds", "client_seconds", "samples_per_second"}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], **tolerance: Any) -> None:
    """The same names and, within float tolerance, the same values."""
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], msg=lambda m, n=name: f"{n}: {m}", **tolerance)


def identical(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """The same bits."""
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if k not in TIMES}
    return [timeless(v) for v in value] if isinstance(value, list) else value


def same_runs(one: Path, other: Path, *but: str) -> None:
    """All models to the bit, all figures `but` these; sites have names beside their numbers."""
    models = sorted(path.relative_to(one) for path in (one / "models").rglob("*.safetensors"))
    assert models == sorted(path.relative_to(other) for path in (other / "models").rglob("*.safetensors"))
    for path in models:
        identical(read_tree(one / path), read_tree(other / path))
    timing = {"seconds", "client_seconds", "eval_seconds", "samples_per_second", "sites", "ray", *but}
    for left, right in zip(lines(one), lines(other), strict=True):
        assert {k: v for k, v in left.items() if k not in timing} == {k: v for k, v in right.items() if k not in timing}


def lines(run: Path) -> list[dict[str, object]]:
    texts = [*(run / "metrics.jsonl").read_text().splitlines(), (run / "summary.json").read_text()]
    found = [json.loads(text) for text in texts]
    for row in found[-1]["clients"]:
        row.pop("site", None)
    return found


def outcome(folder: Path) -> dict[str, Any]:
    """Everything that a run leaves for others, times aside; models and config by their bytes."""
    files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in (folder / "models").rglob("*.safetensors")}
    files["config.toml"] = (folder / "config.toml").read_bytes()
    files["partition.json"] = (folder / "partition.json").read_bytes()
    return {
        "metrics": [timeless(json.loads(line)) for line in (folder / "metrics.jsonl").read_text().splitlines()],
        "summary": timeless(json.loads((folder / "summary.json").read_text())),
        "files": files,
    }


def assert_same(folder: Path, expected: dict[str, Any]) -> None:
    got = outcome(folder)
    assert got["metrics"] == expected["metrics"]
    assert got["summary"] == expected["summary"]
    assert got["files"].keys() == expected["files"].keys()
    for name, content in expected["files"].items():
        assert got["files"][name] == content, name
