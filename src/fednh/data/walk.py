"""Every file below a folder, links followed; loops, dangling links and unreadable folders are reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from fednh.errors import UserError


def refuse(sentence: str) -> None:
    """For readers that need all of a folder."""
    raise UserError(sentence)


def walk(
    folder: Path, told: Callable[[str], None] = refuse, hidden: bool = False, above: tuple[tuple[int, int], ...] = ()
) -> Iterator[Path]:
    """Files in a stable order, a folder's own before those below; `told` gets a sentence on what is left out."""
    try:
        facts = folder.stat()
        entries = sorted(folder.iterdir())
    except OSError as error:
        told(f"{folder} cannot be read ({error.strerror}); check its permissions")
        return
    here = (facts.st_dev, facts.st_ino)
    if here in above:
        told(f"{folder} links to a folder that it lies in, which has no end; remove the link")
        return
    seen = [entry for entry in entries if hidden or not entry.name.startswith(".")]
    inner = {entry: None for entry in seen if entry.is_dir()}
    for entry in seen:
        if entry.is_symlink() and not entry.exists():
            told(f"{entry} links to {entry.readlink()}, which is not there; repair or remove the link")
        elif entry not in inner:
            yield entry
    for entry in inner:
        yield from walk(entry, told, hidden, (*above, here))
