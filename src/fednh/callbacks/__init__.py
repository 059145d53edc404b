"""Callback: what a run calls while it goes on. The screen and the trackers are callbacks; users write their own.

A search, which makes many runs, calls a SearchWatcher.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, Self

from fednh.metric_names import RoundRecord, RunSummary

Phase = Literal["training", "evaluating"]


class Callback:
    """Every method does nothing by default; override those that you need.

    A callback reads the run and never changes it: what it is given are copies of what the run folder holds.
    """

    def on_start(self, config: Mapping[str, Any], rounds_done: int) -> None:
        """The run begins, or goes on after `rounds_done` rounds; `config` has every setting."""

    def on_progress(self, phase: Phase, done: int, total: int) -> None:
        """Work within a round: clients trained, or samples evaluated. Called from any thread."""

    def on_round(self, record: RoundRecord) -> bool | None:
        """A round is complete; `record` is its line of metrics.jsonl. True stops the run, which is saved before."""

    def on_note(self, text: str) -> None:
        """Something that the user should know: a refused upload, a lost worker, a damaged checkpoint."""

    def on_end(self, summary: RunSummary) -> None:
        """All rounds are done; `summary` is what summary.json holds."""


class CallbackList(Callback):
    """Calls several callbacks in their order."""

    def __init__(self, callbacks: Iterable[Callback]):
        self.callbacks = tuple(callbacks)

    def on_start(self, config: Mapping[str, Any], rounds_done: int) -> None:
        for each in self.callbacks:
            each.on_start(config, rounds_done)

    def on_progress(self, phase: Phase, done: int, total: int) -> None:
        for each in self.callbacks:
            each.on_progress(phase, done, total)

    def on_round(self, record: RoundRecord) -> bool:
        answers = [each.on_round(record.copy()) for each in self.callbacks]
        return any(answers)

    def on_note(self, text: str) -> None:
        for each in self.callbacks:
            each.on_note(text)

    def on_end(self, summary: RunSummary) -> None:
        for each in self.callbacks:
            each.on_end(summary.copy())


class SearchWatcher:
    """Receives the progress of a search or a learning curve; every method does nothing by default."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def trying(self, what: str, leads: str, left: float) -> None:
        """A run begins; `leads` says what is best so far, `left` how many seconds there are."""

    def note(self, text: str) -> None:
        """Something that the user should know."""
