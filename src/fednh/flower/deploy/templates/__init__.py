"""Files that `fednh federation init` writes, with $words to fill in."""

from __future__ import annotations

from importlib import resources
from string import Template


def fill(template: str, /, **words: str) -> str:
    text = resources.files(__name__).joinpath(template).read_text(encoding="utf-8")
    return Template(text).substitute(words)
