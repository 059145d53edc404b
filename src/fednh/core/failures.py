"""Errors in a method or a model, reported with the method, the hook, the line and the client or server at work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import getfile
from pathlib import Path
from traceback import walk_tb
from types import FrameType

from fednh.errors import RunError
from fednh.methods.base import Method

SCORES = Method.scores.__code__  # no hook: it only calls `logits`


def sentence(method: Method, error: Exception, what: str) -> str:
    """One sentence: `what` failed, with which error, and where in the method it was raised."""
    place = _place(method, error)
    return f"{type(method).__name__}: {what}: {type(error).__name__}: {error}" + (f" ({place})" if place else "")


@contextmanager
def named(method: Method, what: str) -> Iterator[None]:
    """An error that comes out of the method becomes a RunError that says `what` failed; all others pass unchanged."""
    try:
        yield
    except Exception as error:
        ours = type(error).__module__.partition(".")[0] == "fednh"  # already a clear message, or a request to stop
        if ours or isinstance(error, MemoryError) or _place(method, error) is None:
            raise
        raise RunError(sentence(method, error, what)) from error


def _place(method: Method, error: Exception) -> str | None:
    """The hook that was called and the method's line at which it ended; None if the error is not the method's.

    A method reads uploads from a generator: a disk error while they are produced is not the method's fault.
    """
    frames = list(walk_tb(error.__traceback__))
    called = [i for i, (frame, _) in enumerate(frames) if frame.f_locals.get("self") is method]
    inside = [i for i in called if frames[i][0].f_code is not SCORES] or called
    if not inside or (isinstance(error, OSError) and any(_ours(frame) for frame, _ in frames[inside[-1] + 1 :])):
        return None
    own = [row for row in frames[inside[0] :] if row[0].f_code.co_filename == getfile(type(method))]
    frame, line = own[-1] if own else frames[inside[-1]]
    return f"{frames[inside[0]][0].f_code.co_name}, {Path(frame.f_code.co_filename).name} line {line}"


def _ours(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__"))
    return name.startswith("fednh.") and not name.startswith("fednh.methods.")
