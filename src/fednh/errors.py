"""The exceptions that are meant for a person: each says in a sentence what was wrong, where, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(Exception):
    """What was wrong, where, and what to do about it. The command line prints it and exits with 2."""


class Refused(UserError):
    """A site does not do what it was asked. The words hold nothing of its data, so they may be sent to who asked."""


class Ignored(UserWarning):
    """A setting that has no effect here; told, not refused."""


class Notice(UserWarning):
    """What was decided on the user's behalf; told, so that it can be decided otherwise."""


class RunError(Exception):
    """A run that cannot go on: what happened, to whom and when. What was finished before is saved. Exit code 1."""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """`"; did you mean 'fednh'?"` when something similar exists, else the list of choices."""
    known = sorted(choices)
    close = get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; choose from {', '.join(known)}"


class Interrupted(Exception):
    """The run was asked to stop and has saved what it had."""
