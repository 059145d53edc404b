"""Callbacks for tests."""

from __future__ import annotations

from typing import Any

from fednh.callbacks import Callback, Phase


class Recorder(Callback):
    """A callback that remembers."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.trained: list[tuple[int, int]] = []

    def on_round(self, record: dict[str, Any]) -> None:
        self.records.append(record)

    def on_progress(self, phase: Phase, done: int, total: int) -> None:
        assert 1 <= done <= total
        if phase == "training":
            self.trained.append((done, total))

    def on_note(self, text: str) -> None:
        self.notes.append(text)
