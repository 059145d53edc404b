"""Where a run's saved models lie."""

from __future__ import annotations

from pathlib import Path

from fednh.report.load import Run


def global_model(run: Run) -> Path | None:
    """The file of a run's global model, if its method has one."""
    path = run.path / "models" / "global.safetensors"
    return path if path.exists() else None


def personal_models(run: Run) -> dict[int, Path]:
    """The files of a run's personal models, by client."""
    found = sorted((run.path / "models" / "personal").glob("client-*.safetensors"))
    return {int(path.stem.partition("-")[2]): path for path in found}
