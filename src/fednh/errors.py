"""The exceptions that are meant for a person: each says in a sentence what was wrong, where, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(Exception):
    """What was wrong, where, and what to do about it. The command line prints it and exits with `exit_code`."""

    exit_code = 2


class ConfigError(UserError):
    """A setting, a method or a model is not what a run takes: which one, what it got, and what it takes."""


class DataError(UserError):
    """Data cannot be found, read or divided as asked: where, and what to do."""


class Refused(UserError):
    """A site refuses a request. The message holds nothing of its data, so it may be sent to the server."""


class Ignored(UserWarning):
    """A setting has no effect here; the user is warned."""


class Notice(UserWarning):
    """A choice was made for the user, who can override it."""


class RunError(UserError):
    """A run cannot continue: what happened, at which client and when. Earlier rounds are saved."""

    exit_code = 1


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """`"; did you mean 'fednh'?"` when something similar exists, else the list of choices."""
    known = sorted(choices)
    close = get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; choose from {', '.join(known)}"


def nearest(word: str, choices: Iterable[str], most: int = 10) -> str:
    """`" (did you mean 'photo'?); it has art, photo, sketch and 3 more"`: what is similar, and what there is."""
    known = list(dict.fromkeys(choices))
    folded = {name.casefold(): name for name in known}
    close = get_close_matches(word.strip().casefold(), list(folded), n=1)
    suggestion = f" (did you mean {folded[close[0]]!r}?)" if close else ""
    shown, more = known[:most], f" and {len(known) - most} more" if len(known) > most else ""
    return f"{suggestion}; it has {', '.join(shown)}{more}"


class Interrupted(Exception):
    """The run was asked to stop and has saved what it had."""
