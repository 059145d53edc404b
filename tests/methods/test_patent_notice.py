"""The patent notice: the same facts in three documents, and a mark in `fednh methods` on what it may concern."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fednh.cli import app
from fednh.methods import METHODS, registry
from fednh.methods.feduh import FedUH

ROOT = Path(__file__).parents[2]
FACTS = ("US 2024/0054350 A1", "Salesforce", "2022-12-09", "2026-06-30", "no legal advice", "no opinion")
NUMBER = "12,670,409 B2"
TITLE = "Systems and methods for a distributed training framework using uniform class prototypes"


@dataclass(frozen=True)
class Derived(FedUH):
    """A method of one's own, made from one that is marked."""


@pytest.mark.parametrize("document", ["NOTICE", "README.md", "docs/methods.md"])
def test_documents_state_the_facts(document: str) -> None:
    text = " ".join((ROOT / document).read_text(encoding="utf-8").split())
    assert [fact for fact in (*FACTS, NUMBER, TITLE) if fact not in text] == []


def test_methods_marks_what_the_patent_may_concern_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "METHODS", {**METHODS, "derived": Derived})
    ended = CliRunner().invoke(app, ["methods"], catch_exceptions=False)
    blocks = re.split(r"^(?=\S)", ended.stdout, flags=re.MULTILINE)
    marked = {block.split()[0] for block in blocks if "patent notice: US 12,670,409 B2 may concern it" in block}
    assert marked == {"fednh", "feduh", "fedprior", "derived"}
